package direct

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
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

// switchedOff is a Service that no longer asks for direct forwarding, or was deleted, or has ports that are no longer its own.
// New connections to these stay on the node that takes them in, and existing ones are still handed over. The metric, the status
// and the kernel's rules call it draining.
type switchedOff struct {
	plan.Direct
	until time.Time
}

// inherit takes over Services that an earlier Director handed over and that are not wanted, as if they
// were switched off now. The kernel does not show how many endpoints a node had, which matters only with
// more than maxRing nodes. Nodes that a Service had lost before, and silent ones, are not found. Tables
// whose guard has expired are left out, because nothing was handed over since. If the kernel does not answer, nothing
// is taken over, and inherit can be tried again.
func (d *Director) inherit() error {
	k, err := dial()
	if err != nil {
		return err
	}
	defer k.Close()
	var guarded [2]bool
	for i, f := range families {
		var unknown error
		guarded[i], unknown = k.guarded(f)
		err = errors.Join(err, unknown)
		if guarded[i] {
			services, unknown := k.services(f)
			err = errors.Join(err, unknown)
			d.inheritFrom(f, services, func(s steer) map[netip.Addr]bool { return k.hops(f, s) }, time.Now())
		}
	}
	if err != nil {
		clear(d.switchedOff)
		return fmt.Errorf("find out what an earlier speaker forwarded: %w", err)
	}
	d.there = guarded
	if guarded == [2]bool{} {
		d.absences.forget()
	}
	d.boundSwitchedOff()
	return nil
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
		if !ok || wanted[element] {
			delete(m.absences.came[key], arrival{port: port})
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

// boundSwitchedOff ends what a later Service has taken, at a VIP and port, and keeps the rest within maxSwitchedOff: namespaces
// share it, and in each the Services that were switched off last come first.
func (m *Machine) boundSwitchedOff() {
	if len(m.switchedOff) == 0 {
		return
	}
	taken := map[netip.AddrPort]bool{}
	take := func(vip netip.Addr, port uint16) (had bool) {
		at := netip.AddrPortFrom(vip, port)
		had, taken[at] = taken[at], true
		return had
	}
	for key, s := range m.want.Services {
		for _, p := range s.Ports {
			take(key.VIP, p.Number)
		}
	}
	type entry struct {
		plan.LimitKey
		switchedOff
	}
	all := make([]entry, 0, len(m.switchedOff))
	for key, off := range m.switchedOff {
		all = append(all, entry{key, off})
	}
	slices.SortFunc(all, func(a, b entry) int {
		return cmp.Or(b.until.Compare(a.until), cmp.Compare(a.Service, b.Service), a.VIP.Compare(b.VIP))
	})
	for i, e := range all {
		all[i].Ports = slices.DeleteFunc(slices.Clone(e.Ports), func(p plan.Port) bool { return take(e.VIP, p.Number) })
	}
	fair(all, func(e entry) (string, int) { return e.Service, len(e.Ports) })
	clear(m.switchedOff)
	room := maxSwitchedOff
	for _, e := range all {
		if n := len(e.Ports); n > 0 && n <= room {
			m.switchedOff[e.LimitKey], room = e.switchedOff, room-n
		}
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
