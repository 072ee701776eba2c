package direct

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// drainTime is how long connections are still handed to their nodes after direct
	// forwarding was switched off.
	drainTime = time.Hour
	// maxDraining bounds the ports at VIPs that drain: users may create and delete any number of
	// Services.
	maxDraining = 16384
)

// draining is a Service that is no longer wanted, whose connections are still handed over.
type draining struct {
	plan.Direct
	until time.Time
}

// take takes over a plan and brings it into force.
func (d *Director) take(want plan.Forwarding) {
	d.set(want, time.Now())
	d.reconcile()
}

// set takes over a plan. Services that are no longer in it drain, if there are rules for them.
func (m *Machine) set(want plan.Forwarding, now time.Time) {
	for key, before := range m.want.Services {
		if _, ok := want.Services[key]; !ok && m.there != [2]bool{} {
			m.draining[key] = draining{before, now.Add(drainTime)}
		}
	}
	m.absences.follow(now, want, m.forwarded)
	for key := range want.Services {
		delete(m.draining, key)
	}
	m.boundDraining()
	m.want, m.stale = want, true
	maps.DeleteFunc(m.absences.came, func(key plan.LimitKey, _ map[string]time.Time) bool {
		_, still := m.forwarded(key)
		return !still
	})
}

// forwarded returns a Service that is wanted or drains.
func (m *Machine) forwarded(key plan.LimitKey) (of plan.Direct, known bool) {
	if of, known = m.want.Services[key]; !known {
		var drains draining
		drains, known = m.draining[key]
		of = drains.Direct
	}
	return of, known
}

// inherit lets Services drain that an earlier Director handed over and that are not wanted, as if they
// were switched off now. The kernel does not show how many endpoints a node had, which matters only with
// more than maxRing nodes. Nodes that a Service had lost before, and silent ones, are not found. Tables
// whose guard has expired are left out, because nothing was handed over since.
func (d *Director) inherit() {
	k, err := dial()
	if err != nil {
		return // reconcile will report it
	}
	defer k.Close()
	any := false
	for _, f := range families {
		if k.guarded(f) {
			any = true
			d.inheritFrom(f, k.services(f), func(s steer) map[netip.Addr]bool { return k.hops(f, s) }, time.Now())
		}
	}
	if !any {
		d.absences.forget()
	}
	d.boundDraining()
}

// inheritFrom is inherit for a family whose table has these services and hops.
func (m *Machine) inheritFrom(f *family, services map[string]served, hops func(steer) map[netip.Addr]bool, now time.Time) {
	wanted, nodes := map[string]bool{}, map[netip.Addr]string{}
	for key, s := range m.want.Services {
		for _, p := range s.Ports {
			wanted[serviceKey(key.VIP, p.Number)] = true
		}
	}
	for node, addrs := range m.want.Nodes {
		for _, a := range addrs {
			nodes[a] = node
		}
	}
	tables := map[string][]plan.Backend{}
	for element, s := range services {
		vip, port, ok := f.parseServiceKey(element)
		key := plan.LimitKey{VIP: vip, Service: s.service}
		if _, still := m.want.Services[key]; !ok || still || wanted[element] {
			delete(m.absences.came, key)
			continue
		}
		table := openName(s.table, s.buckets)
		if tables[table] == nil {
			tables[table] = keepers(m.node, hops(s.steer), nodes)
		}
		drains := m.draining[key]
		drains.Ports = append(drains.Ports, plan.Port{Protocol: unix.IPPROTO_TCP, Number: port})
		drains.ByClient, drains.Seed, drains.Local = s.byClient, s.seed-1, s.buckets == localSize
		drains.Backends, drains.until = tables[table], now.Add(drainTime)
		m.draining[key] = drains
	}
}

// keepers returns the node itself and the nodes to which it handed packets, sorted, as backends that
// take no new connections.
func keepers(self string, hops map[netip.Addr]bool, nodes map[netip.Addr]string) (all []plan.Backend) {
	names := map[string]bool{self: true}
	for a := range hops {
		if node, known := nodes[a]; known {
			names[node] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		all = append(all, plan.Backend{Node: name, Draining: 1})
	}
	return all
}

// boundDraining keeps the draining ports within maxDraining. It ends the Services that have drained for
// longest, each time in the namespace with the most ports.
func (m *Machine) boundDraining() {
	namespaces, ports := map[string][]plan.LimitKey{}, map[string]int{}
	all := 0
	for key, s := range m.draining {
		namespace, _, _ := strings.Cut(key.Service, "/")
		namespaces[namespace] = append(namespaces[namespace], key)
		ports[namespace] += len(s.Ports)
		all += len(s.Ports)
	}
	if all <= maxDraining {
		return
	}
	for _, keys := range namespaces {
		slices.SortFunc(keys, func(a, b plan.LimitKey) int { return m.draining[a].until.Compare(m.draining[b].until) })
	}
	for all > maxDraining {
		most := ""
		for namespace := range ports {
			if ports[namespace] > ports[most] {
				most = namespace
			}
		}
		key := namespaces[most][0]
		n := len(m.draining[key].Ports)
		namespaces[most], ports[most], all = namespaces[most][1:], ports[most]-n, all-n
		delete(m.draining, key)
	}
}

// expire ends Services that have drained for drainTime.
func (m *Machine) expire(now time.Time) {
	for key, drains := range m.draining {
		if now.After(drains.until) {
			delete(m.draining, key)
			m.stale = true
		}
	}
}
