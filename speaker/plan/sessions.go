package plan

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// NodeBGP has the annotations of a Node about its sessions; see package annotation. An error is set if
// an annotation is invalid; errors with the same text are equal.
type NodeBGP struct {
	ASN              uint32 // 0: there is no annotation
	RouterID         netip.Addr
	Source4, Source6 netip.Addr

	ASNErr, RouterIDErr, SourceErr error
}

// sessionsOf returns the node's sessions and their problems. A session that is impossible does not
// prevent the others.
func sessionsOf(node string, s Snapshot) (map[string]Session, map[string]Problem) {
	all, problems := s.sessionsAlone(node)
	for name, session := range all {
		if other, shared := s.sharesRouterID(node, session); shared {
			problems[name] = Problem{RouterIDShared, fmt.Sprintf("node %s has the router ID %s, too, so that routers may take the two for one: "+
				"give each its own by annotation %s, and remove routerID from peers of several nodes", other, session.RouterID, annotation.BGPRouterID)}
		}
	}
	return all, problems
}

// sessionsAlone is sessionsOf without a look at other nodes.
func (s Snapshot) sessionsAlone(node string) (map[string]Session, map[string]Problem) {
	all, problems := map[string]Session{}, map[string]Problem{}
	n, known := s.Nodes[node]
	if s.Config == nil || !known {
		return all, problems
	}
	at := map[string]string{} // the peers by where they are
	for i := range s.Config.Peers {
		p := &s.Config.Peers[i]
		if !p.NodeSelector.Matches(n.Labels) {
			continue
		}
		where := cmp.Or(p.Interface, p.Address.String())
		session, problem := n.session(node, p)
		switch first, taken := at[where]; {
		case taken:
			problems[p.Name] = Problem{AddressTaken,
				fmt.Sprintf("peer %q is at %s, too, and selects node %s as well: separate them by nodeSelector", first, where, node)}
			continue
		case problem != Problem{}:
			problems[p.Name] = problem
			continue
		}
		at[where], all[p.Name] = p.Name, session
	}
	return all, problems
}

// session returns the session of a node with a peer that selects it.
func (n Node) session(name string, p *config.Peer) (Session, Problem) {
	s := Session{Peer: p, LocalASN: cmp.Or(p.LocalASN, n.BGP.ASN), RouterID: n.routerID(p), Source: n.source(p)}
	invalid := func(err error) (Session, Problem) {
		return Session{}, Problem{AnnotationInvalid, fmt.Sprintf("node %s: annotation %v", name, err)}
	}
	switch {
	case p.LocalASN == 0 && n.BGP.ASNErr != nil:
		return invalid(n.BGP.ASNErr)
	case s.LocalASN == 0:
		return Session{}, Problem{NoLocalASN, fmt.Sprintf("peer %q has no localASN and node %s no annotation %s: set one of them", p.Name, name,
			annotation.BGPASN)}
	case !p.RouterID.IsValid() && n.BGP.RouterIDErr != nil:
		return invalid(n.BGP.RouterIDErr)
	case !s.RouterID.IsValid():
		return Session{}, Problem{NoRouterID, fmt.Sprintf("node %s has no IPv4 address to take its router ID from: set its annotation %s, "+
			"or routerID of peer %q", name, annotation.BGPRouterID, p.Name)}
	case !p.SourceAddress.IsValid() && n.BGP.SourceErr != nil && !unnumbered(p):
		return invalid(n.BGP.SourceErr)
	}
	return s, Problem{}
}

// unnumbered reports whether the ends of the connection are link-local.
func unnumbered(p *config.Peer) bool {
	return !p.Address.IsValid() || p.Address.Is6() && p.Address.IsLinkLocalUnicast()
}

// source returns the node's end of the connection, invalid if the kernel chooses it.
func (n Node) source(p *config.Peer) netip.Addr {
	switch {
	case p.SourceAddress.IsValid() || unnumbered(p):
		return p.SourceAddress
	case p.Address.Is4():
		return n.BGP.Source4
	}
	return n.BGP.Source6
}

// routerID returns the node's BGP identifier for a peer, invalid if there is none.
func (n Node) routerID(p *config.Peer) netip.Addr {
	return cmp.Or(p.RouterID, n.BGP.RouterID, n.address(true))
}

// sharesRouterID returns the first other node whose session with the peer has the same router ID.
func (s *Snapshot) sharesRouterID(node string, session Session) (other string, shared bool) {
	for name, n := range s.Nodes {
		if name != node && (!shared || name < other) && n.routerID(session.Peer) == session.RouterID &&
			session.Peer.NodeSelector.Matches(n.Labels) {
			other, shared = name, true
		}
	}
	return other, shared
}
