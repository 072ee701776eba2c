package dashboard

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// State is how the installation was at one moment. It is immutable.
type State struct {
	// Status is what lodestone status shows.
	*status.Status
	// ClusterID is that of the configuration.
	ClusterID string
	// VIPs are those that Services show, sorted by address. Nodes are all nodes, sorted by name.
	VIPs  []VIP
	Nodes []Node
	// Sessions are the BGP sessions, by node and peer.
	Sessions []bgp.Session
	// records are the transitions before the first look, which the objects have the times of.
	records []Transition
}

// VIP is a VIP, and who announces it.
type VIP struct {
	Addr     netip.Addr `json:"vip"`
	Pool     string     `json:"pool,omitempty"`
	Services []string   `json:"services"`
	// Owner announces it by layer 2; empty: nobody does. Routers are the nodes that announce it by BGP.
	Owner   string   `json:"owner,omitempty"`
	Routers []string `json:"routers,omitempty"`
	// Others is set if the configuration leaves it to something else than Lodestone.
	Others bool `json:"others,omitempty"`
	// Reason and Message are why nobody announces it; empty: somebody does.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// Node is a node of the cluster, seen by its speaker.
type Node struct {
	Name string `json:"name"`
	// Ready is set if its speaker is ready; else Problem is why not. A node that is
	// not to have a speaker has neither.
	Ready   bool   `json:"ready"`
	Problem string `json:"problem,omitempty"`
	// Layer2 counts the VIPs that it owns, BGP those that it announces to routers.
	Layer2 int `json:"layer2"`
	BGP    int `json:"bgp"`
	// Sessions are its BGP sessions, by peer.
	Sessions []bgp.Session `json:"sessions,omitempty"`
}

// bad reports whether somebody should look at the node.
func (n Node) bad() bool {
	return n.Problem != "" || slices.ContainsFunc(n.Sessions, func(s bgp.Session) bool { return !s.Up() })
}

// NewState returns the State of the objects. It does what lodestone
// status does, and takes as long.
func NewState(o *cluster.Objects) *State {
	n := o.Network()
	s := &State{Status: status.OfNetwork(o, n)}
	if o.Config != nil {
		s.ClusterID = o.Config.ClusterID
	}
	if o.Has(cluster.ForSessions...) && o.Unclear() == nil {
		s.Sessions = bgp.Peers(n, o.Now, "", "").Sessions
	}
	if o.Has(cluster.ForVIPs...) && o.Unclear() == nil {
		s.vips(n)
	}
	s.nodes(o)
	s.records = recorded(s, o)
	return s
}

func (s *State) vips(n *simulation.Network) {
	services := n.ServicesByVIP()
	silent := map[netip.Addr]status.Silent{}
	for _, group := range s.Status.VIPs.Silent {
		for _, vip := range group.VIPs {
			silent[vip] = group
		}
	}
	for vip, who := range n.Who() {
		v := VIP{Addr: vip, Services: services[vip], Owner: who.Owner, Routers: who.Routers, Others: who.Others}
		if pool := n.PoolOf(vip); pool != nil {
			v.Pool = pool.Name
		}
		if why, ok := silent[vip]; ok {
			v.Reason, v.Message = string(why.Reason), s.Status.VIPs.Messages[vip]
		}
		s.VIPs = append(s.VIPs, v)
	}
	slices.SortFunc(s.VIPs, func(a, b VIP) int { return a.Addr.Compare(b.Addr) })
}

func (s *State) nodes(o *cluster.Objects) {
	nodes := map[string]*Node{}
	for _, n := range o.Nodes {
		nodes[n.Name] = &Node{Name: n.Name}
	}
	at := func(name string) *Node {
		if nodes[name] == nil {
			nodes[name] = &Node{Name: name}
		}
		return nodes[name]
	}
	for _, p := range o.Speakers {
		if cluster.IsReady(p) {
			at(p.Spec.NodeName).Ready = true
		}
	}
	if s.Speakers != nil {
		for _, m := range s.Speakers.Missing {
			at(m.Node).Problem = m.Message
		}
	}
	if s.Status.VIPs != nil {
		for _, a := range s.Status.VIPs.Nodes {
			at(a.Node).Layer2, at(a.Node).BGP = a.Layer2, a.BGP
		}
	}
	for _, session := range s.Sessions {
		at(session.Node).Sessions = append(at(session.Node).Sessions, session)
	}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		s.Nodes = append(s.Nodes, *nodes[name])
	}
}

// recorded returns what the objects show of the past: when sessions came and
// went, speakers became ready or not, the leader began to lead, and Services
// began to wait.
func recorded(s *State, o *cluster.Objects) []Transition {
	var all []Transition
	add := func(at time.Time, t Transition) {
		if !at.IsZero() && !at.After(o.Now) {
			t.Time = at.UTC().Truncate(time.Second)
			all = append(all, t)
		}
	}
	for _, session := range s.Sessions {
		if session.State == bgp.Established || session.State == bgp.Down {
			add(session.Since, sessionIs(session))
		}
	}
	for _, p := range o.Speakers {
		for _, c := range p.Status.Conditions {
			if c.Type == "Ready" {
				add(c.LastTransitionTime.Time, speakerIs(p.Spec.NodeName, c.Status == "True", "pod "+p.Name))
			}
		}
	}
	if s.Controller != nil && s.Controller.Leader != "" {
		add(s.Controller.LeaderSince, leaderIs(s.Controller.Leader))
	}
	for _, svc := range o.Services {
		if c := kube.Refused(svc); c != nil {
			add(c.LastTransitionTime.Time, waits(ledger.NameOf(svc), c.Reason, c.Message))
		}
	}
	slices.SortStableFunc(all, func(a, b Transition) int { return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Text, b.Text)) })
	return all[max(0, len(all)-maxTransitions):]
}

// waiting returns the reasons of the Services that wait, by name. The Services are known.
func (s *State) waiting() map[string]string {
	all := map[string]string{}
	for _, w := range s.Services.Waiting {
		for _, name := range w.Services {
			all[name] = w.Reason
		}
	}
	return all
}

// up counts the sessions that are established, and those that should be.
func (s *State) up() *tally {
	t := &tally{}
	for _, session := range s.Sessions {
		switch {
		case session.Up():
			t.Good++
		case session.State != bgp.Leftover:
			t.Bad++
		}
	}
	return t
}

// configuration describes the configuration.
func (s *State) configuration() string {
	if s.Configuration == nil {
		return "not read"
	}
	return s.Configuration.String()
}
