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
	// maxDraining is how many ports at VIPs may be among those that were switched off or
	// deleted, as whoever may create Services can do again and again.
	maxDraining = 16384
)

// draining is a Service that is forwarded directly no more.
type draining struct {
	plan.Direct
	until time.Time
}

// take takes over what is wanted now. What is wanted no more drains, if there are rules by which
// it was handed over.
func (d *Director) take(want plan.Forwarding) {
	for key, before := range d.want.Services {
		if _, ok := want.Services[key]; !ok && d.there != [2]bool{} {
			d.draining[key] = draining{before, time.Now().Add(drainTime)}
		}
	}
	d.absences.follow(time.Now(), want, d.forwarded)
	for key := range want.Services {
		delete(d.draining, key)
	}
	d.boundDraining()
	d.want, d.stale = want, true
	maps.DeleteFunc(d.absences.came, func(key plan.LimitKey, _ map[string]time.Time) bool {
		_, still := d.forwarded(key)
		return !still
	})
	d.reconcile()
}

// forwarded returns what is wanted of a Service, or drains.
func (d *Director) forwarded(key plan.LimitKey) (of plan.Direct, known bool) {
	if of, known = d.want.Services[key]; !known {
		var drains draining
		drains, known = d.draining[key]
		of = drains.Direct
	}
	return of, known
}

// inherit has drain what an earlier Director handed over and is not wanted, as if it were switched
// off just now. The kernel does not say how many endpoints a node had, which matters to those of more
// than maxRing nodes alone; what a Service lost before stays lost, as is a node that is silent, and
// so is all whose guard has ended: nothing was handed over since.
func (d *Director) inherit() {
	k, err := dial()
	if err != nil {
		return // reconcile will say so
	}
	defer k.close()
	wanted, nodes := map[string]bool{}, map[netip.Addr]string{}
	for key, s := range d.want.Services {
		for _, p := range s.Ports {
			wanted[serviceKey(key.VIP, p.Number)] = true
		}
	}
	for node, addrs := range d.want.Nodes {
		for _, a := range addrs {
			nodes[a] = node
		}
	}
	until := time.Now().Add(drainTime)
	for _, f := range families {
		if !k.guarded(f) {
			continue
		}
		tables := map[string][]plan.Backend{}
		for element, s := range k.services(f) {
			vip, port, ok := f.parseServiceKey(element)
			key := plan.LimitKey{VIP: vip, Service: s.service}
			if _, still := d.want.Services[key]; !ok || still || wanted[element] {
				delete(d.absences.came, key)
				continue
			}
			table := openName(s.table, s.buckets)
			if tables[table] == nil {
				tables[table] = keepers(d.Node, k.hops(f, s.steer), nodes)
			}
			drains := d.draining[key]
			drains.Ports = append(drains.Ports, plan.Port{Protocol: unix.IPPROTO_TCP, Number: port})
			drains.ByClient, drains.Seed, drains.Local = s.byClient, s.seed-1, s.buckets == localSize
			drains.Backends, drains.until = tables[table], until
			d.draining[key] = drains
		}
	}
	d.boundDraining()
}

// keepers returns the node itself and those that it handed packets to, sorted, as backends that take
// no new connections.
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

// boundDraining ends what has drained for longest of the namespace that has most of it, until
// there is not too much.
func (d *Director) boundDraining() {
	namespaces, ports := map[string][]plan.LimitKey{}, map[string]int{}
	all := 0
	for key, s := range d.draining {
		namespace, _, _ := strings.Cut(key.Service, "/")
		namespaces[namespace] = append(namespaces[namespace], key)
		ports[namespace] += len(s.Ports)
		all += len(s.Ports)
	}
	if all <= maxDraining {
		return
	}
	for _, keys := range namespaces {
		slices.SortFunc(keys, func(a, b plan.LimitKey) int { return d.draining[a].until.Compare(d.draining[b].until) })
	}
	for all > maxDraining {
		most := ""
		for namespace := range ports {
			if ports[namespace] > ports[most] {
				most = namespace
			}
		}
		key := namespaces[most][0]
		n := len(d.draining[key].Ports)
		namespaces[most], ports[most], all = namespaces[most][1:], ports[most]-n, all-n
		delete(d.draining, key)
	}
}

// expire ends what has drained for long enough.
func (d *Director) expire(now time.Time) {
	for key, drains := range d.draining {
		if now.After(drains.until) {
			delete(d.draining, key)
			d.stale = true
		}
	}
}
