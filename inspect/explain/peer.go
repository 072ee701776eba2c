package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Peer explains a BGP peer.
type Peer struct {
	Name string `json:"name"`
	// Router, Detection and Nodes are sentences about where the router is, how
	// its loss is noticed, and which nodes have a session with it.
	Router    string `json:"router"`
	Detection string `json:"detection"`
	Nodes     string `json:"nodes"`
	// NotSelected are the nodes that its nodeSelector leaves out.
	NotSelected []string `json:"notSelected,omitempty"`
	// Advertisements announce VIPs to it.
	Advertisements []string     `json:"advertisements"`
	Sessions       bgp.Sessions `json:"sessions"`
	// Keys are what the problems of sessions follow from.
	Keys   []string    `json:"keys,omitempty"`
	Routes []PeerRoute `json:"routes"`
}

// PeerRoute is a prefix with the nodes that announce it to a peer.
type PeerRoute struct {
	Prefix netip.Prefix `json:"prefix"`
	Nodes  []string     `json:"nodes"`
}

// OfPeer explains a peer of the configuration.
func OfPeer(o *cluster.Objects, of *config.Peer) Peer {
	n := o.Network()
	p := Peer{
		Name: of.Name, Router: router(of), Detection: Detection(of), Nodes: "all", Advertisements: []string{},
		Sessions: bgp.Peers(n, o.Now, "", of.Name), Routes: []PeerRoute{},
	}
	p.Keys = sessionKeys(p.Sessions)
	if len(of.NodeSelector) > 0 {
		p.Nodes = "with labels " + of.NodeSelector.String()
	}
	for _, name := range slices.Sorted(maps.Keys(n.Nodes)) {
		if !of.NodeSelector.Matches(n.Nodes[name].Labels) {
			p.NotSelected = append(p.NotSelected, name)
		}
	}
	for _, a := range o.Config.Advertisements {
		if a.BGP != nil && a.BGP.AdvertisesTo(of.Name) {
			p.Advertisements = append(p.Advertisements, a.Name)
		}
	}
	for _, r := range bgp.RoutesOf(n, bgp.Filter{Peer: of.Name}).Routes {
		if last := len(p.Routes) - 1; last >= 0 && p.Routes[last].Prefix == r.Prefix {
			p.Routes[last].Nodes = append(p.Routes[last].Nodes, r.Node)
		} else {
			p.Routes = append(p.Routes, PeerRoute{r.Prefix, []string{r.Node}})
		}
	}
	return p
}

// sessionKeys returns the keys that the problems of the sessions follow from.
func sessionKeys(s bgp.Sessions) (keys []string) {
	for _, session := range s.Sessions {
		keys = union(keys, plan.ProblemReasons()[session.Reason].Keys)
	}
	return keys
}

// router describes where the router is.
func router(p *config.Peer) string {
	at := "on interface " + p.Interface + " (unnumbered)"
	if p.Address.IsValid() {
		at = netip.AddrPortFrom(p.Address, p.Port).String()
	}
	as, nodes := fmt.Sprintf("AS %d", p.PeerASN.Number), "that of their annotation"
	if p.LocalASN != 0 {
		nodes = fmt.Sprintf("AS %d", p.LocalASN)
	}
	switch {
	case p.PeerASN.Internal:
		as = "the same AS as the nodes"
	case p.PeerASN.External:
		as = "another AS than the nodes"
	}
	as += "; the nodes in " + nodes
	if p.Passive {
		as += "; the router connects"
	}
	return at + ", in " + as
}

// Detection describes how, and how soon, each end notices that the other is gone.
func Detection(p *config.Peer) string {
	text := "not by BGP: there is no hold time"
	if p.HoldTime > 0 {
		text = fmt.Sprintf("after the hold time of %s", p.HoldTime)
	}
	if b := p.BFD; b != nil {
		text = fmt.Sprintf("by BFD after about %s (%d packets at %s), else %s", b.TransmitInterval*time.Duration(b.DetectMultiplier),
			b.DetectMultiplier, b.TransmitInterval, text)
	}
	if p.GracefulRestart > 0 {
		text += fmt.Sprintf("; a router that agreed to graceful restart keeps the routes of a node whose speaker ended for up to %s",
			p.GracefulRestart)
	}
	return text
}

// Troubled implements Story.
func (p Peer) Troubled() bool { return !p.Sessions.Healthy() || len(p.Sessions.Sessions) == 0 }

// Show implements output.Page.
func (p Peer) Show(c *output.Canvas) {
	var f facts
	f.add("Peer", p.Name)
	f.add("Router", p.Router)
	f.add("Its loss", "is noticed "+p.Detection)
	f.add("Nodes", p.Nodes)
	if len(p.NotSelected) > 0 {
		f.add("Left out", output.List(p.NotSelected, 5)+", by its nodeSelector")
	}
	f.add("Advertisements", cmp.Or(output.List(p.Advertisements, 5), "none names it: it is sent no VIP"))
	if len(p.Sessions.Sessions) == 0 {
		f.bad("Sessions", "none: it selects no node")
	}
	Help{Keys: p.Keys}.show(&f)
	c.Rows(nil, f)
	if len(p.Sessions.Sessions) > 0 {
		c.Blank()
		p.Sessions.Show(c)
	}
	var rows [][]any
	for _, r := range p.Routes {
		rows = append(rows, []any{r.Prefix, output.List(r.Nodes, 5)})
	}
	c.Table([]string{"PREFIX", "ANNOUNCED BY, BY THE PLAN"}, rows)
}
