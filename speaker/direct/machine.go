package direct

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Machine decides which rules are wanted. It depends on the plan, on the kernel's neighbour table, and on the time, which
// its caller gives to it. It has no clock and no kernel: a Director has both, and Simulated has neither.
type Machine struct {
	node string
	hold time.Duration
	log  *slog.Logger

	want        plan.Forwarding
	nodes       map[netip.Addr]*host     // the other nodes that are or were on a segment of this one
	heard       map[segmentKey]time.Time // since when at least one other node is heard at any time
	switchedOff map[plan.LimitKey]switchedOff
	absences    absences
	have        [2]*ruleset               // by family: the rules that the kernel has
	there       [2]bool                   // the kernel has a table
	without     [2]map[plan.LimitKey]bool // Services without a table of buckets, because there are too many
	most        int                       // the largest number of buckets, see maxBuckets
	stale       bool                      // other rules may have to be written
	refused     error                     // why the node cannot have rules
}

// Tables are tables of buckets by the backends that they are made from. Each is made once.
type Tables map[string]*table

func newMachine(o Options) *Machine {
	return &Machine{node: o.Node, hold: o.Hold, log: o.Log, nodes: map[netip.Addr]*host{}, switchedOff: map[plan.LimitKey]switchedOff{},
		most: maxBuckets, absences: absences{came: map[plan.LimitKey]map[arrival]time.Time{}, away: map[string]absence{}}}
}

// begin takes over the first plan.
func (m *Machine) begin(want plan.Forwarding, now time.Time) {
	m.want = want
	m.absences.follow(now, want, func(plan.LimitKey) (none plan.Direct, known bool) { return })
}

// set takes over a plan. Services that are no longer in it, and ports of Services, are switched off, if there are rules for them.
func (m *Machine) set(want plan.Forwarding, now time.Time) {
	m.absences.follow(now, want, m.forwarded)
	for key, before := range m.want.Services {
		if gone := without(before.Ports, want.Services[key].Ports); len(gone) > 0 && m.there != [2]bool{} {
			before.Ports = slices.Concat(gone, without(m.switchedOff[key].Ports, before.Ports))
			m.switchedOff[key] = switchedOff{before, now.Add(switchedOffTime)}
		}
	}
	m.want, m.stale = want, true
	m.boundSwitchedOff()
	maps.DeleteFunc(m.absences.came, func(key plan.LimitKey, _ map[arrival]time.Time) bool {
		_, still := m.forwarded(key)
		return !still
	})
}

// forwarded returns a Service that is wanted or switched off.
func (m *Machine) forwarded(key plan.LimitKey) (of plan.Direct, known bool) {
	if of, known = m.want.Services[key]; !known {
		var off switchedOff
		off, known = m.switchedOff[key]
		of = off.Direct
	}
	return of, known
}

// busy reports whether there is anything to forward.
func (m *Machine) busy() bool { return len(m.want.Services)+len(m.switchedOff) > 0 }

// unheard reports whether some node has not answered yet.
func (m *Machine) unheard() bool {
	for _, h := range m.nodes {
		if h.hardware == "" {
			return true
		}
	}
	return false
}

// advance does what is due at this time.
func (m *Machine) advance(now time.Time) {
	m.expire(now)
	m.stale = m.absences.see(now, m.want.Lost, m.want.Heard) || m.stale
}

// took records the rules that the kernel has taken over.
func (m *Machine) took(i int, want *ruleset) { m.have[i], m.there[i] = want, want != nil }

// rules returns the wanted content of a family's table. Nil: there is nothing to forward. It takes tables of
// buckets from tables, and adds new ones to it.
func (m *Machine) rules(i int, f *family, tables Tables) *ruleset {
	peers := m.peers(f)
	wanted, off := m.services(f, peers)
	if len(wanted)+len(off) == 0 || m.refused != nil {
		m.setWithout(i, f, nil)
		return nil
	}
	services, without := m.share(wanted, off)
	m.setWithout(i, f, without)
	r, before := newRuleset(), cmp.Or(m.have[i], newRuleset())
	interfaces := r.connect(peers)
	r.madeOf = before.numbers(services)
	unchanged := maps.Equal(before.peers, peers)
	for _, id := range slices.Sorted(maps.Keys(r.madeOf)) {
		of := r.madeOf[id]
		if unchanged && before.madeOf[id] == of {
			r.tables[id] = before.tables[id]
		} else {
			if tables[of] == nil {
				tables[of] = newTable(services[of][0].Backends, sizeOf(services[of][0].Direct))
			}
			r.tables[id] = tables[of].at(m.node, peers)
		}
		for _, s := range services[of] {
			r.serve(s, id, interfaces)
		}
	}
	return r
}

// services returns the family's Services, those that are wanted and those that are switched off.
func (m *Machine) services(f *family, peers map[string]neighbour) (wanted, off []service) {
	// Most Services have the same backends.
	type backends struct {
		first  *plan.Backend
		local  bool
		missed string // by nodes
	}
	known := map[backends]service{}
	add := func(to []service, key plan.LimitKey, s plan.Direct, off bool) []service {
		if !f.has(key.VIP) {
			return to
		}
		for missed, ports := range m.absences.parts(key, s.Ports) {
			all := backends{first(s), s.Local, missed}
			same, ok := known[all]
			if !ok {
				same.Backends = present(s.Backends, peers, m.node, missed)
				same.of = fmt.Sprint(sizeOf(s), same.Backends)
				known[all] = same
			}
			part := s
			part.Ports, part.Backends = ports, same.Backends
			to = append(to, service{key.VIP, key.Service, part, off, same.of})
		}
		return to
	}
	for key, s := range m.want.Services {
		wanted = add(wanted, key, s, false)
	}
	for key, s := range m.switchedOff {
		off = add(off, key, s.Direct, true)
	}
	return wanted, off
}

// connect adds the peers' hardware addresses and the interfaces to them, and returns the name of the set of
// these interfaces.
func (r *ruleset) connect(peers map[string]neighbour) (interfaces string) {
	r.peers = peers
	devices := map[int]bool{}
	for _, p := range peers {
		r.interfaces[number(uint32(p.device))], devices[p.device] = true, true
		if p.hardware != "" {
			r.hardware[p.hardware] = true
		}
	}
	var names []string
	for _, index := range slices.Sorted(maps.Keys(devices)) {
		names = append(names, strconv.Itoa(index))
	}
	return strings.Join(names, "-")
}

// serve adds the ports of a Service that uses the table with that number.
func (r *ruleset) serve(s service, table int, interfaces string) {
	for _, p := range s.Ports {
		r.services[serviceKey(s.vip, p.Number)] = served{steer{table, len(r.tables[table].open), 1 + s.Seed%seeds, min(len(s.Backends), maxRing),
			s.ByClient, s.switchedOff, interfaces}, s.name}
	}
}

// service is a Service at a VIP.
type service struct {
	vip  netip.Addr
	name string
	plan.Direct
	switchedOff bool
	of          string // the backends that its table is made from
}

// setWithout records which Services have no table, because there would be too many.
func (m *Machine) setWithout(i int, f *family, without map[plan.LimitKey]bool) {
	if len(m.without[i]) == 0 && len(without) > 0 {
		m.log.Warn("too many tables of direct forwarding: some Services work without", "table", f.name(), "services", len(without),
			"buckets_at_most", m.most)
	}
	m.without[i] = without
}

// share returns the Services by the backends that their tables are made from, and those that have no table, because there is
// no room. Switched-off Services take what wanted ones leave. Of both, each namespace gets one table before any namespace
// gets another one, so that none can take the tables of others. Within a namespace the order is that of the names, after
// policy Cluster, whose tables all namespaces share. It does not depend on what a node had before: so all nodes leave out the
// same Services, and one that comes takes the place of one, in its own namespace or in one that has more tables.
func (m *Machine) share(wanted, off []service) (chosen map[string][]service, without map[plan.LimitKey]bool) {
	all, room := map[string][]service{}, m.most
	for _, s := range slices.Concat(wanted, off) {
		if all[s.of] == nil {
			room -= sizeOf(s.Direct)
		}
		all[s.of] = append(all[s.of], s)
	}
	if room >= 0 {
		return all, nil
	}
	chosen, without, room = map[string][]service{}, map[plan.LimitKey]bool{}, m.most
	for _, part := range [][]service{wanted, off} {
		for _, s := range turns(part) {
			if size := sizeOf(s.Direct); chosen[s.of] == nil && size <= room {
				chosen[s.of], room = all[s.of], room-size
			}
		}
		for _, s := range part {
			if chosen[s.of] == nil {
				without[plan.LimitKey{VIP: s.vip, Service: s.name}] = true
			}
		}
	}
	return chosen, without
}

// turns returns one Service for each namespace and table, in the order in which they get tables.
func turns(all []service) (claims []service) {
	slices.SortFunc(all, func(a, b service) int {
		return cmp.Or(cmp.Compare(sizeOf(b.Direct), sizeOf(a.Direct)), cmp.Compare(a.name, b.name), a.vip.Compare(b.vip))
	})
	type claim struct{ namespace, of string }
	has := map[claim]bool{}
	for _, s := range all {
		if c := (claim{namespaceOf(s.name), s.of}); !has[c] {
			has[c] = true
			claims = append(claims, s)
		}
	}
	fair(claims, func(s service) (string, int) { return s.name, 1 })
	return claims
}

// numbers numbers the tables that follow. A table that stays keeps its number, and a new table gets the number
// of one that goes, so that only differences are written.
func (r *ruleset) numbers(wanted map[string][]service) (madeOf map[int]string) {
	madeOf, missing := map[int]string{}, maps.Clone(wanted)
	var free []int
	for _, id := range slices.Sorted(maps.Keys(r.madeOf)) {
		if of := r.madeOf[id]; missing[of] != nil {
			madeOf[id] = of
			delete(missing, of)
		} else {
			free = append(free, id)
		}
	}
	next := 0
	for _, of := range slices.Sorted(maps.Keys(missing)) {
		if len(free) > 0 {
			madeOf[free[0]], free = of, free[1:]
			continue
		}
		for madeOf[next] != "" || r.madeOf[next] != "" {
			next++
		}
		madeOf[next] = of
	}
	return madeOf
}

// peers returns the other nodes that packets can be handed to, by name.
func (m *Machine) peers(f *family) map[string]neighbour {
	peers := map[string]neighbour{}
	for node, addrs := range m.want.Nodes {
		if at := slices.IndexFunc(addrs, f.has); at >= 0 {
			if h := m.nodes[addrs[at]]; h != nil && !h.gone {
				peers[node] = h.neighbour
			}
		}
	}
	return peers
}

// present returns the backends that are this node or a peer, without those that have missed the Service.
// Silent ones take no new connections, even if all others drain.
func present(all []plan.Backend, peers map[string]neighbour, self, missedBy string) (kept []plan.Backend) {
	for _, b := range all {
		peer, ok := peers[b.Node]
		if peer.silent {
			b.Open, b.Draining = 0, b.Open+b.Draining
		}
		if ok && !missed(missedBy, b.Node) || b.Node == self {
			kept = append(kept, b)
		}
	}
	if !slices.ContainsFunc(kept, func(b plan.Backend) bool { return b.Open > 0 }) {
		for i, b := range kept {
			if !peers[b.Node].silent {
				kept[i].Open, kept[i].Draining = b.Draining, 0
			}
		}
	}
	return kept
}

// at returns the table as one node uses it.
func (t *table) at(self string, peers map[string]neighbour) *buckets {
	n := max(1, len(t.buckets))
	r := &buckets{make([]hop, n), make([]hop, n), make([]bool, n), make([]bool, n)}
	to, silent, m := make([]hop, len(t.nodes)), make([]bool, len(t.nodes)), t.member(self)
	for i, name := range t.nodes {
		p := peers[name]
		if silent[i] = p.silent; name != self && !p.silent {
			to[i] = hop{p.addr, uint32(p.device)}
		}
	}
	for i, b := range t.buckets {
		r.open[i], r.held[i] = to[b.open], silent[b.open]
		r.waits[i] = slices.ContainsFunc(b.ring, func(n uint16) bool { return silent[n] })
		if next := t.after(i, &m, silent); next >= 0 {
			r.next[i] = to[next]
		}
	}
	return r
}
