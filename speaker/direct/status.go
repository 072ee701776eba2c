package direct

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Status is the state after the Director's last change. It is immutable.
type Status struct {
	// InForce is set while the rules are there: others may hand this node connections.
	InForce bool `json:"inForce"`
	// Error is why the rules are not the wanted ones, Err the same. The Director tries again.
	Error string `json:"error,omitempty"`
	Err   error  `json:"-"`
	// Without counts the Services at VIPs that have no table, because there would be too many.
	Without int `json:"withoutTable"`
	Tables  int `json:"tables"`
	// Shortcuts counts the Services at VIPs and ports whose packets are handed over before conntrack.
	Shortcuts int `json:"beforeConntrack"`
	// ConntrackFull is set while conntrack is full or nearly full.
	ConntrackFull bool `json:"conntrackFull"`
	// Neighbours are the other nodes, by each of their addresses.
	Neighbours []Neighbour `json:"neighbours"`
	// Services are those whose connections are handed over, or would be with a table, by VIP and name. Only View
	// fills them in.
	Services []Forwarded `json:"services"`

	// Want is the plan.
	Want plan.Forwarding `json:"-"`
	// Peers counts the addresses of nodes to which packets can be handed, now or soon again.
	Peers int `json:"-"`
	// Gone are the nodes that have been silent for too long.
	Gone map[string]bool `json:"-"`

	noRules     report.NoRules
	without     [2]map[plan.LimitKey]bool // by family: those without a table
	switchedOff map[plan.LimitKey]switchedOff
	missed      map[plan.LimitKey]string // by which nodes
	known       bool
}

// Neighbour is another node at one of its addresses.
type Neighbour struct {
	Node    string         `json:"node"`
	Address netip.Addr     `json:"address"`
	State   NeighbourState `json:"state"`
}

// NeighbourState is whether connections can be handed to a node.
type NeighbourState string

// The states of a neighbour.
const (
	// Reachable nodes are handed connections.
	Reachable NeighbourState = "reachable"
	// Unknown nodes have not answered yet.
	Unknown NeighbourState = "unknown"
	// Silent nodes do not answer: their connections wait.
	Silent NeighbourState = "silent"
	// Gone nodes have been silent for too long: their connections are reset.
	Gone NeighbourState = "gone"
	// Elsewhere are nodes that are not on a segment of this one, or have a router's hardware
	// address.
	Elsewhere NeighbourState = "elsewhere"
)

// Forwarded is a Service at a VIP.
type Forwarded struct {
	VIP     netip.Addr `json:"vip"`
	Service string     `json:"service"`
	// Draining is set if the Service is switched off: new connections stay on the node that takes them in.
	Draining bool `json:"draining,omitempty"`
	// Open are the nodes that take new connections, Others those that only keep existing ones.
	Open   []string `json:"open"`
	Others []string `json:"others,omitempty"`
	// WithoutTable is set if it has no table, because there would be too many: then no node is named.
	WithoutTable bool `json:"withoutTable,omitempty"`
}

// Status returns what the Director did last.
func (d *Director) Status() *Status { return d.published.Load() }

// View is Status with the Services.
func (d *Director) View() Status {
	s := *d.Status()
	s.Services = []Forwarded{}
	add := func(key plan.LimitKey, of plan.Direct, off bool) {
		f := Forwarded{key.VIP, key.Service, off, []string{}, nil, s.without[0][key] || s.without[1][key]}
		for _, b := range of.Backends {
			if f.WithoutTable || missed(s.missed[key], b.Node) {
				continue
			}
			if b.Open > 0 {
				f.Open = append(f.Open, b.Node)
			} else {
				f.Others = append(f.Others, b.Node)
			}
		}
		s.Services = append(s.Services, f)
	}
	for key, of := range s.Want.Services {
		add(key, of, false)
	}
	for key, of := range s.switchedOff {
		add(key, of.Direct, true)
	}
	slices.SortFunc(s.Services, func(a, b Forwarded) int { return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Service, b.Service)) })
	return s
}

func (d *Director) publish() {
	s := &Status{Want: d.want, Err: d.err, Gone: map[string]bool{}, switchedOff: maps.Clone(d.switchedOff), Neighbours: []Neighbour{},
		ConntrackFull: d.full, Without: len(d.without[0]) + len(d.without[1]), Tables: countTables(d.have)}
	if d.err != nil {
		s.Error = d.err.Error()
	}
	if len(d.absences.away) > 0 {
		s.missed = make(map[plan.LimitKey]string, len(d.absences.came))
		for key := range d.absences.came {
			of, _ := d.forwarded(key)
			s.missed[key] = d.absences.missedBy(key, of.Ports)
		}
	}
	s.Peers = reachable(d.nodes)
	s.Shortcuts = d.shortcut.services()
	if len(d.want.Services)+len(d.switchedOff) > 0 {
		for _, node := range slices.Sorted(maps.Keys(d.want.Nodes)) {
			if node != d.Node {
				d.describe(s, node)
			}
		}
	}
	s.known, s.InForce = true, d.there != [2]bool{} && d.missing == [2]bool{}
	s.noRules, s.without = noRules(s.InForce, d.err), d.without
	if before := d.published.Swap(s); !before.known || before.InForce != s.InForce || before.noRules != s.noRules {
		d.changed.Notify()
	}
}

// noRules returns the reason that is reported to other nodes.
func noRules(inForce bool, err error) report.NoRules {
	switch {
	case inForce || err == nil:
		return ""
	case errors.Is(err, errIPVS):
		return report.RulesWithIPVS
	case errors.Is(err, errBond):
		return report.RulesOnBond
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return report.RulesForbidden
	}
	return report.RulesFailed
}

// NoRules returns why there are no rules although there should be. Empty: there are, or there
// should be none.
func (d *Director) NoRules() report.NoRules { return d.Status().noRules }

// describe adds a node to the neighbours of the status.
func (d *Director) describe(s *Status, node string) {
	for _, a := range d.want.Nodes[node] {
		state, h := Reachable, d.nodes[a]
		switch {
		case h == nil:
			state = Elsewhere
		case h.gone:
			state, s.Gone[node] = Gone, true
		case h.hardware == "":
			state = Unknown
		case h.silent:
			state = Silent
		}
		s.Neighbours = append(s.Neighbours, Neighbour{node, a, state})
	}
}
