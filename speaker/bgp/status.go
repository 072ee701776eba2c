package bgp

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// State is the state of a session (RFC 4271 section 8.2.2).
type State string

// The states.
const (
	// Idle: there is no attempt. LastError is why, or the next attempt follows soon.
	Idle State = "Idle"
	// Connect: the node opens the connection.
	Connect State = "Connect"
	// Active: the node waits for a passive peer to connect.
	Active State = "Active"
	// OpenSent: there is a connection, and the router has not sent its OPEN.
	OpenSent State = "OpenSent"
	// OpenConfirm: the router has not yet accepted our OPEN.
	OpenConfirm State = "OpenConfirm"
	// Established: routes are announced.
	Established State = "Established"
)

// Peer is what the announcer knows of a peer at one moment.
type Peer struct {
	Name string
	// Address is the router's, in every state; that of an unnumbered peer is known once it was
	// found. BFD may have to watch the router before there is a session.
	Address netip.Addr
	State   State
	// Since is when the session came up or went down last.
	Since time.Time
	// LastError is why there is no session, or why the last one ended.
	LastError   string
	LastErrorAt time.Time
	// Ended is why the last established session ended. Later attempts may fail for other
	// reasons, from which less follows.
	Ended string

	// What follows is of a session that is Established.

	// LocalAddress is the node's end.
	LocalAddress      netip.Addr
	LocalASN, PeerASN uint32
	// RouterID is the router's BGP identifier.
	RouterID netip.Addr
	// HoldTime is the agreed one; 0: there are no keepalives.
	HoldTime, Keepalive time.Duration
	// Families are IPv4, IPv6 or both.
	Families []string
	// Capabilities are what both sides can do besides.
	Capabilities []string
	// Advertised counts the prefixes that were announced to the router, Withheld those that
	// cannot be, by reason.
	Advertised int
	Withheld   map[Withholding]int

	// Dropped counts the prefixes that the router has announced, in all
	// sessions.
	Dropped uint64
}

// Peers returns what the announcer knows of all peers, by name.
func (a *Announcer) Peers() []Peer {
	var all []Peer
	for _, s := range *a.published.Load() {
		p := *s.state.Load()
		if p.State == Established {
			p.Advertised, p.Withheld = s.rib.count()
		}
		if t := s.latest.Load(); p.State != Established && t != nil && t.Peer.Interface != "" {
			p.Address = a.discovery.known(t.Peer.Interface)
		}
		p.Dropped = s.received.Load()
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b Peer) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
