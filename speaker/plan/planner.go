package plan

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// Planner keeps the plan of one node up to date. The plan is always the one that Make returns for the
// current snapshot, but an update costs in proportion to what changed: a change of a Service costs its
// VIPs, a change of a speaker one look at every VIP, but no election among all nodes. A Planner is not
// safe for concurrent use.
type Planner struct {
	node        string
	services    map[string]*Service
	view        *view
	router      *router
	plan        Plan
	connections connections
	// fresh are the VIPs that came after the first plan and had no owner but this node.
	fresh   map[netip.Addr]bool
	started bool
	kept    map[uint16]int // how many VIPs are kept, by bucket
	// owners are the owners by layer 2, "" for nobody, of the VIPs that this node announces by BGP and
	// does not own. The plan does not have them.
	owners map[netip.Addr]string
	// stale are the VIPs whose verdict may have changed; allStale is set if all may have.
	stale    map[netip.Addr]bool
	allStale bool
}

// Verdict is what a plan has about a VIP. If no Service has the VIP, it is neither Owned nor Silent and
// has no Peers.
type Verdict struct {
	Owned, Silent bool
	Layer2        Layer2 // if Owned
	// Peers are the BGP peers to which the VIP is announced, sorted.
	Peers []string
	// Silence is why the VIP is announced neither by layer 2 nor by BGP. In Change.After it is set
	// whenever the VIP is not Owned, and is then at least why not. In Change.Before at least its Owner is.
	Silence Silence
}

// Change is a VIP whose verdict has changed.
type Change struct {
	VIP           netip.Addr
	Before, After Verdict
}

// Changes are the changes of a plan, in no order.
type Changes struct {
	VIPs []Change
	// Prefixes are those whose BGP route has changed or is gone.
	Prefixes []netip.Prefix
	// Moves are the VIPs that have a Service now, and either had one before and have another owner by layer
	// 2, or are new.
	Moves []Move
	// Sessions is set if BGP sessions or their problems have changed.
	Sessions bool
	// Limits is set if limits or their errors have changed.
	Limits bool
}

// Move is a VIP whose owner was From and is To. Empty: nobody.
type Move struct {
	VIP      netip.Addr
	From, To string
	// New is set if no Service had the VIP before. Those of the first plan are not new: other speakers
	// may have known them for long.
	New bool
}

// Gone returns the VIPs that no Service has any more, in no order.
func (c Changes) Gone() (vips []netip.Addr) {
	for _, change := range c.VIPs {
		if !change.After.exists() {
			vips = append(vips, change.VIP)
		}
	}
	return vips
}

// NewPlanner returns a Planner for the node that knows nothing yet.
func NewPlanner(node string) *Planner {
	p := &Planner{
		node: node, services: map[string]*Service{}, view: newView(Snapshot{}), router: newRouter(node), connections: newConnections(),
		plan: Plan{Layer2: map[netip.Addr]Layer2{}, Silent: map[netip.Addr]Silence{}, Limits: map[LimitKey]Limit{},
			LimitErrs:  map[string]error{},
			Forwarding: &Forwarding{Nodes: map[string][]netip.Addr{}, Lost: map[string]bool{}, Heard: map[string]bool{}}},
		stale: map[netip.Addr]bool{}, fresh: map[netip.Addr]bool{},
		kept: map[uint16]int{}, owners: map[netip.Addr]string{},
	}
	p.plan.BGP = BGP{Sessions: p.router.sessions, Problems: p.router.problems, Routes: p.router.table.routes, VIPs: map[netip.Addr][]string{}}
	return p
}

// Set replaces everything but the Services; see Snapshot. The maps belong to the Planner from now on.
func (p *Planner) Set(c *config.Config, nodes map[string]Node, speakers map[string]bool) {
	p.view = p.view.in(Snapshot{Config: c, Nodes: nodes, Speakers: speakers})
	p.allStale = true
}

// Put replaces the Service of that name, if there is one. A Service without VIPs is removed.
func (p *Planner) Put(s Service) {
	before := p.services[s.Name]
	if before != nil && before.equal(&s) || before == nil && len(s.VIPs) == 0 {
		return
	}
	for _, vip := range s.VIPs {
		if p.started && len(p.view.sharers[vip]) == 0 {
			p.fresh[vip] = true
		}
	}
	if before != nil {
		p.view.remove(before)
		p.markStale(before.VIPs)
		p.connections.lose(before)
		delete(p.services, s.Name)
	}
	if len(s.VIPs) > 0 {
		p.view.add(&s)
		p.markStale(s.VIPs)
		p.connections.take(&s)
		p.services[s.Name] = &s
	}
}

func (p *Planner) markStale(vips []netip.Addr) {
	for _, vip := range vips {
		p.stale[vip] = true
	}
}

// Stale reports whether the plan is out of date.
func (p *Planner) Stale() bool { return p.allStale || len(p.stale) > 0 }

// Plan returns the plan. Nobody may modify its maps. Update modifies Layer2, Silent and BGP's Routes and
// VIPs, and replaces the other maps if they change.
func (p *Planner) Plan() Plan { return p.plan }

// Update brings the plan up to date and returns what changed.
func (p *Planner) Update() Changes {
	var changes Changes
	if p.allStale {
		changes.Sessions = p.router.set(p.view.snapshot)
		p.plan.BGP.Sessions, p.plan.BGP.Problems, p.plan.BGP.Permit = p.router.sessions, p.router.problems, p.router.permit()
		added := len(p.view.sharers) - len(p.plan.Layer2) - len(p.plan.Silent) - len(p.plan.BGP.VIPs)
		changes.VIPs = make([]Change, 0, max(0, added))
		for vip := range p.view.sharers {
			delete(p.stale, vip)
			p.look(vip, &changes)
		}
	}
	for vip := range p.stale {
		p.look(vip, &changes)
	}
	changes.Prefixes = p.router.table.settle()
	p.publish(&changes)
	p.started = true
	p.stale, p.allStale = map[netip.Addr]bool{}, false // clear costs as much as the map was ever large
	return changes
}

// look brings the plan up to date about one VIP.
func (p *Planner) look(vip netip.Addr, changes *Changes) {
	before := p.plan.verdict(vip)
	from, announced := p.owners[vip]
	if announced {
		before.Silence.Owner = from // the plan keeps no Silence of a VIP that is announced by BGP
	} else {
		from = before.owner(p.node)
	}
	// The owner before has found another machine at the address, or this node's speaker has before it was restarted.
	if p.view.withheld[withheld{from, vip}] || p.view.withheld[withheld{p.node, vip}] {
		p.fresh[vip] = true
	}
	sharers := p.view.sharers[vip]
	after, scope := p.decide(vip, sharers)
	to, isNew := after.owner(p.node), !before.exists()
	if after.exists() && (isNew && p.started || !isNew && from != to) {
		changes.Moves = append(changes.Moves, Move{vip, from, to, isNew})
	}
	if before.Owned && !after.Owned || after.Silence.Owner != "" || !after.exists() {
		delete(p.fresh, vip)
	}
	if delete(p.owners, vip); !after.Owned && after.Peers != nil {
		p.owners[vip] = to
	}
	if !before.equal(after) {
		changes.VIPs = append(changes.VIPs, Change{vip, before, after})
		p.plan.set(vip, after)
		p.claim(vip, before.Layer2.Keep, after.Layer2.Keep)
	}
	if scope != nil {
		p.connect(vip, sharers, scope, after)
	}
}

// claim updates the claims when a VIP begins or ceases to be kept.
func (p *Planner) claim(vip netip.Addr, before, after bool) {
	b := report.Bucket(vip)
	switch {
	case before == after:
	case after:
		p.kept[b]++
		p.plan.Claims.Set(b)
	default:
		if p.kept[b]--; p.kept[b] == 0 {
			p.plan.Claims.Clear(b)
		}
	}
}

// decide returns the verdict about a VIP of these Services and its scope, nil if there are none.
func (p *Planner) decide(vip netip.Addr, sharers []*Service) (Verdict, *scope) {
	if len(sharers) == 0 {
		p.router.move(vip, place{})
		return Verdict{}, nil
	}
	demand := demandOf(sharers, vip)
	pool := p.view.poolOf(vip)
	scope := p.view.scopeOf(vip, pool)
	owner := scope.owner(vip, demand)
	peers, unheard := p.router.look(vip, pool, sharers, demand)
	if owner == p.node && owner != "" {
		layer2 := scope.layer2(p.node)
		layer2.Hurry = p.view.migrates()
		layer2.Home = scope.home(p.node, vip, demand)
		layer2.Apart = p.view.snapshot.Nodes[p.node].Apart != ""
		layer2.New = p.fresh[vip] || layer2.Apart
		return Verdict{Owned: true, Peers: peers, Layer2: layer2}, scope
	}
	silence := p.router.unite(scope.silence(p.node, owner, demand), unheard)
	silence.Unowned = owner == "" && unheard == Silence{} && silence.Reason != AnnouncedByOthers
	return Verdict{Silent: peers == nil, Peers: peers, Silence: silence}, scope
}

// Why returns why a node does not own the VIP, as of the last Update. It is for VIPs that have a Service
// and that the node does not own.
func (p *Planner) Why(vip netip.Addr, node string) Reason {
	demand, ok := p.view.demand(vip)
	if !ok {
		return ""
	}
	scope := p.view.scopeOf(vip, p.view.poolOf(vip))
	return scope.reason(node, scope.owner(vip, demand), demand)
}

// Serves reports whether the node forwards the VIP: it has endpoints of all Services with policy Local there.
func (p *Planner) Serves(vip netip.Addr, node string) bool {
	demand, _ := p.view.demand(vip)
	return demand.serving && demand.acceptedBy(node)
}

// exists reports whether a Service has the VIP.
func (v *Verdict) exists() bool { return v.Owned || v.Silent || v.Peers != nil }

// owner returns the owner by layer 2, "" for nobody. The Silence has to be set if the VIP is not Owned.
func (v *Verdict) owner(node string) string {
	if v.Owned {
		return node
	}
	return v.Silence.Owner
}

// equal reports whether the two are the same for the plan.
func (v *Verdict) equal(w Verdict) bool {
	return v.Owned == w.Owned && v.Silent == w.Silent && (!v.Silent || v.Silence == w.Silence) && v.Layer2.equal(w.Layer2) &&
		slices.Equal(v.Peers, w.Peers)
}

func (l Layer2) equal(m Layer2) bool {
	return l.Home == m.Home && l.Apart == m.Apart && l.New == m.New && l.Keep == m.Keep && l.Hurry == m.Hurry && l.Refresh == m.Refresh &&
		l.AnySegment == m.AnySegment && slices.Equal(l.Interfaces, m.Interfaces)
}

func (p Plan) verdict(vip netip.Addr) (v Verdict) {
	v.Layer2, v.Owned = p.Layer2[vip]
	v.Silence, v.Silent = p.Silent[vip]
	v.Peers = p.BGP.VIPs[vip]
	return v
}

func (p Plan) set(vip netip.Addr, v Verdict) {
	delete(p.Layer2, vip)
	delete(p.Silent, vip)
	delete(p.BGP.VIPs, vip)
	if v.Owned {
		p.Layer2[vip] = v.Layer2
	}
	if v.Silent {
		p.Silent[vip] = v.Silence
	}
	if v.Peers != nil {
		p.BGP.VIPs[vip] = v.Peers
	}
}

// equal reports whether the two are the same for the plan.
func (s *Service) equal(t *Service) bool {
	return s.Local == t.Local && s.Serving == t.Serving && slices.Equal(s.VIPs, t.VIPs) && maps.Equal(s.Labels, t.Labels) &&
		maps.Equal(s.Leases, t.Leases) && reflect.DeepEqual(s.IPv6, t.IPv6) &&
		slices.Equal(s.Backends, t.Backends) && slices.Equal(s.Ports, t.Ports) && s.ByClient == t.ByClient && s.Seed == t.Seed &&
		s.Limit.Equal(t.Limit) && s.LimitErr == t.LimitErr
}
