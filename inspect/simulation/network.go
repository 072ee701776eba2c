package simulation

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// Announcers are what a Network is made of.
type Announcers struct {
	// Scope selects the Services that are Lodestone's.
	Scope    kube.Scope
	Config   *config.Config
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
	Nodes    []*corev1.Node
	// Leases are those of the speakers; others are ignored.
	Leases []*coordinationv1.Lease
	// Ready are the nodes whose speaker is ready.
	Ready map[string]bool
}

// Network is what the speakers decide by, as the API describes it at one moment. Speakers learn from each other
// who is alive; here a speaker is alive if its pod is ready. A Network is not safe for concurrent use.
type Network struct {
	plan.Snapshot
	// Reports are the speakers', by node.
	Reports map[string]report.Report

	services  []plan.Service       // without endpoints
	sharers   map[netip.Addr][]int // of Services, by VIP
	endpoints map[string][]snapshot.Endpoints
	views     map[string]View
	who       map[netip.Addr]Audience
}

// View is the plan of one node, and its verdict on each VIP.
type View struct {
	plan.Plan
	// Verdicts have, whenever the node does not own the VIP, why not.
	Verdicts map[netip.Addr]plan.Verdict
}

// NewNetwork returns the Network of the objects.
func NewNetwork(a Announcers) *Network {
	n := &Network{
		Snapshot: plan.Snapshot{Config: a.Config, Nodes: map[string]plan.Node{}, Speakers: a.Ready},
		Reports:  map[string]report.Report{}, sharers: map[netip.Addr][]int{}, endpoints: map[string][]snapshot.Endpoints{},
		views: map[string]View{},
	}
	for _, l := range a.Leases {
		if node, ok := report.NodeOf(l.Name); ok {
			n.Reports[node] = report.Of(l.Annotations)
		}
	}
	for _, node := range a.Nodes {
		of := snapshot.Node(node)
		of.Network = n.Reports[node.Name].Network
		n.Nodes[node.Name] = of
	}
	for _, s := range a.Slices {
		if service, e := snapshot.EndpointsOf(s); service != "" {
			n.endpoints[service] = append(n.endpoints[service], e)
		}
	}
	for _, svc := range a.Services {
		n.take(snapshot.Service(svc, a.Scope))
	}
	n.Services = n.serve(noNode)
	return n
}

// take adds a Service without endpoints, if it has VIPs.
func (n *Network) take(s plan.Service) {
	if len(s.VIPs) == 0 {
		return
	}
	for _, vip := range s.VIPs {
		n.sharers[vip] = append(n.sharers[vip], len(n.services))
	}
	n.services = append(n.services, s)
}

func noNode(string) bool { return false }

// derive returns a Network of the same objects without cached answers.
func (n *Network) derive() *Network {
	d := *n
	d.views, d.who = map[string]View{}, nil
	return &d
}

// Of returns the Network with only the Services that have one of the VIPs. Its answers about these VIPs are the
// same and take less time. Its answers about other VIPs mean nothing.
func (n *Network) Of(vips ...netip.Addr) *Network {
	part := n.derive()
	part.Services, part.services, part.sharers = nil, nil, map[netip.Addr][]int{}
	taken := map[int]bool{}
	for _, vip := range vips {
		for _, i := range n.sharers[vip] {
			if !taken[i] {
				taken[i] = true
				part.take(n.services[i])
				part.Services = append(part.Services, n.Services[i])
			}
		}
	}
	return part
}

// Under returns the Network with another configuration, without the VIPs that
// its Services would lose.
func (n *Network) Under(c *config.Config, lost func(vip netip.Addr) bool) *Network {
	after := n.derive()
	after.Config, after.services, after.sharers = c, nil, map[netip.Addr][]int{}
	for _, s := range n.services {
		s.VIPs = slices.DeleteFunc(slices.Clone(s.VIPs), lost)
		after.take(s)
	}
	after.Services = after.serve(noNode)
	return after
}

// serve returns the Services with their endpoints, without those on nodes that are gone.
func (n *Network) serve(gone func(node string) bool) []plan.Service {
	all := make([]plan.Service, len(n.services))
	for i, s := range n.services {
		var left []snapshot.Endpoints
		for _, e := range n.endpoints[s.Name] {
			e.Ready, e.Serving = slices.DeleteFunc(slices.Clone(e.Ready), gone), slices.DeleteFunc(slices.Clone(e.Serving), gone)
			left = append(left, e)
		}
		all[i] = snapshot.With(s, left...)
	}
	return all
}

// View returns what the node decides.
func (n *Network) View(node string) View {
	if v, ok := n.views[node]; ok {
		return v
	}
	p := plan.NewPlanner(node)
	p.Set(n.Config, n.Nodes, n.Speakers)
	for _, s := range n.Services {
		p.Put(s)
	}
	v := View{Verdicts: make(map[netip.Addr]plan.Verdict, len(n.Services))}
	for _, c := range p.Update().VIPs {
		v.Verdicts[c.VIP] = c.After
	}
	v.Plan = p.Plan()
	n.views[node] = v
	return v
}

// Sessions returns the BGP sessions that the node shall have, and what is wrong
// with them, by peer.
func (n *Network) Sessions(node string) (map[string]plan.Session, map[string]plan.Problem) {
	bare := n.Snapshot
	bare.Services = nil // sessions do not depend on them
	p := plan.Make(node, bare)
	return p.BGP.Sessions, p.BGP.Problems
}

// SharersOf returns the Services that have the VIP.
func (n *Network) SharersOf(vip netip.Addr) []plan.Service {
	var all []plan.Service
	for _, i := range n.sharers[vip] {
		all = append(all, n.Services[i])
	}
	return all
}

// ServicesByVIP returns the names of the Services that have each VIP, sorted.
func (n *Network) ServicesByVIP() map[netip.Addr][]string {
	names := make(map[netip.Addr][]string, len(n.Services))
	for _, s := range n.Services {
		for _, vip := range s.VIPs {
			names[vip] = append(names[vip], s.Name)
		}
	}
	for _, sharers := range names {
		slices.Sort(sharers)
	}
	return names
}

// ForRouters reports whether an advertisement by BGP is for the VIP, by its pool
// and by the labels of its Services.
func (n *Network) ForRouters(vip netip.Addr) bool {
	if n.Config == nil {
		return false
	}
	sharers, pool := n.SharersOf(vip), n.PoolOf(vip)
	return slices.ContainsFunc(n.Config.Advertisements, func(a config.Advertisement) bool {
		return a.BGP != nil && (pool == nil || pool.AdvertisedBy(a.Name)) &&
			slices.ContainsFunc(sharers, func(s plan.Service) bool { return a.ServiceSelector.Matches(s.Labels) })
	})
}

// PoolOf returns the pool of the VIP, nil outside all pools.
func (n *Network) PoolOf(vip netip.Addr) *config.Pool {
	if n.Config == nil {
		return nil
	}
	if pool, ok := n.Config.PoolOf(vip); ok {
		return pool
	}
	for _, s := range n.SharersOf(vip) {
		if pool, ok := n.Config.PoolOn(s.Leases[vip]); ok {
			return pool
		}
	}
	return nil
}

// Who returns who announces each VIP. Callers do not change the answer.
func (n *Network) Who() map[netip.Addr]Audience {
	if n.who == nil {
		n.who = n.audiences()
	}
	return n.who
}

func (n *Network) audiences() map[netip.Addr]Audience {
	who := make(map[netip.Addr]Audience, len(n.Services))
	for vip, owner := range plan.Owners(n.Snapshot) {
		who[vip] = Audience{Owner: owner, Others: n.Config.AnnouncedByOthers()}
	}
	n.EachBGP(maps.Keys(n.Nodes), func(node string, p plan.BGP) {
		for vip := range p.VIPs {
			a := who[vip]
			a.Routers = append(a.Routers, node)
			who[vip] = a
		}
	})
	for _, a := range who {
		slices.Sort(a.Routers)
	}
	return who
}

// EachBGP calls look with what each of the nodes announces by BGP, one call at a time. The nodes' plans are made
// concurrently and are not kept: together they are large.
func (n *Network) EachBGP(nodes iter.Seq[string], look func(node string, p plan.BGP)) {
	s := n.Snapshot
	s.Config = routersOnly(n.Config)
	s.Services = slices.DeleteFunc(slices.Clone(s.Services), func(s plan.Service) bool { return !slices.ContainsFunc(s.VIPs, n.ForRouters) })
	var mu sync.Mutex
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for node := range nodes {
		group.Go(func() error {
			p := plan.Make(node, s).BGP
			mu.Lock()
			defer mu.Unlock()
			look(node, p)
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
}

// routersOnly returns the configuration without announcements by layer 2. Those by BGP do not depend on them,
// and its plans cost less.
func routersOnly(c *config.Config) *config.Config {
	if c == nil {
		return nil
	}
	only := *c
	only.Advertisements = slices.Clone(c.Advertisements)
	for i := range only.Advertisements {
		only.Advertisements[i].Layer2 = nil
	}
	return &only
}

// Audience is who announces a VIP.
type Audience struct {
	// Owner announces it by layer 2; empty: nobody does.
	Owner string `json:"layer2,omitempty"`
	// Routers are the nodes that announce it by BGP, sorted.
	Routers []string `json:"bgp,omitempty"`
	// Others: the configuration leaves it to something else.
	Others bool `json:"others,omitempty"`
}

// String names them for people.
func (a Audience) String() string {
	var by []string
	if a.Owner != "" {
		by = append(by, a.Owner)
	}
	if len(a.Routers) > 0 {
		by = append(by, output.List(a.Routers, 3)+" by BGP")
	}
	if a.Others {
		by = append(by, "others")
	}
	return cmp.Or(strings.Join(by, "; "), "nobody")
}

// Silent reports whether nobody announces the VIP.
func (a Audience) Silent() bool { return a.Owner == "" && len(a.Routers) == 0 && !a.Others }

// Silence returns why nobody announces the VIP: the reason of the node that is closest to announcing
// it. The node is named unless all nodes have that reason. Without nodes there is no reason.
func (n *Network) Silence(vip netip.Addr) plan.Silence {
	var node string
	var why plan.Silence
	for _, name := range slices.Sorted(maps.Keys(n.Nodes)) {
		silence := n.View(name).Verdicts[vip].Silence
		if why.Reason == "" || closeness(silence.Reason) > closeness(why.Reason) {
			node, why = name, silence
		}
	}
	switch {
	case why.Reason == "":
		why.Message = "there are no nodes"
	case closeness(why.Reason) >= 0:
		why.Message = "node " + node + ": " + why.Message
	}
	return why
}

// maxVerdicts bounds what Silences keeps at a time: VIPs times nodes.
const maxVerdicts = 200_000

// Silences returns Silence of each of the VIPs, in memory that does not grow with
// their number.
func (n *Network) Silences(vips []netip.Addr) map[netip.Addr]plan.Silence {
	all := make(map[netip.Addr]plan.Silence, len(vips))
	for batch := range slices.Chunk(vips, max(1, maxVerdicts/max(1, len(n.Nodes)))) {
		part := n.Of(batch...)
		for _, vip := range batch {
			all[vip] = part.Silence(vip)
		}
	}
	return all
}

// closeness orders the reasons that lie in a node: the larger, the less keeps the node from the VIP. It is
// negative for reasons that all nodes share.
func closeness(r plan.Reason) int {
	return slices.Index([]plan.Reason{
		plan.NodeUnknown, plan.NodeNotSelected, plan.NotOnSegment, plan.NoPeer, plan.NodeExcluded,
		plan.NoLocalEndpoint, plan.NetworkUnavailable, plan.NoSession, plan.SpeakerNotReady,
	}, r)
}
