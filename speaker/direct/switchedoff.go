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
	// switchedOffTime is how long the connections of a switched-off Service are still handed over.
	switchedOffTime = time.Hour
	// maxSwitchedOff bounds the ports at VIPs of such Services: users may create and delete any number.
	maxSwitchedOff = 16384
)

// switchedOff is a Service that no longer asks for direct forwarding, or was deleted. New connections
// stay on the node that takes them in, and existing ones are still handed over. The metric, the status
// and the kernel's rules call it draining.
type switchedOff struct {
	plan.Direct
	until time.Time
}

// inherit takes over Services that an earlier Director handed over and that are not wanted, as if they
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
	d.boundSwitchedOff()
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
		off := m.switchedOff[key]
		off.Ports = append(off.Ports, plan.Port{Protocol: unix.IPPROTO_TCP, Number: port})
		off.ByClient, off.Seed, off.Local = s.byClient, s.seed-1, s.buckets == localSize
		off.Backends, off.until = tables[table], now.Add(switchedOffTime)
		m.switchedOff[key] = off
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

// boundSwitchedOff keeps the ports within maxSwitchedOff. It ends the Services that were switched off
// first, each time in the namespace with the most ports.
func (m *Machine) boundSwitchedOff() {
	namespaces, ports := map[string][]plan.LimitKey{}, map[string]int{}
	all := 0
	for key, s := range m.switchedOff {
		namespace, _, _ := strings.Cut(key.Service, "/")
		namespaces[namespace] = append(namespaces[namespace], key)
		ports[namespace] += len(s.Ports)
		all += len(s.Ports)
	}
	if all <= maxSwitchedOff {
		return
	}
	for _, keys := range namespaces {
		slices.SortFunc(keys, func(a, b plan.LimitKey) int { return m.switchedOff[a].until.Compare(m.switchedOff[b].until) })
	}
	for all > maxSwitchedOff {
		most := ""
		for namespace := range ports {
			if ports[namespace] > ports[most] {
				most = namespace
			}
		}
		key := namespaces[most][0]
		n := len(m.switchedOff[key].Ports)
		namespaces[most], ports[most], all = namespaces[most][1:], ports[most]-n, all-n
		delete(m.switchedOff, key)
	}
}

// expire ends Services that were switched off switchedOffTime ago.
func (m *Machine) expire(now time.Time) {
	for key, off := range m.switchedOff {
		if now.After(off.until) {
			delete(m.switchedOff, key)
			m.stale = true
		}
	}
}
