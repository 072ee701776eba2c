package layer2

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
)

// Conflict is a VIP of this node that another machine claims, which does not prove that it is a speaker
// of this cluster.
type Conflict struct {
	VIP          netip.Addr
	Interface    string
	HardwareAddr string
	// OtherCluster is set if the other machine is a speaker with another key.
	OtherCluster bool
	// Silent is set if the claim has the seal of a speaker of this cluster which does not answer a
	// question: somebody repeats a recorded packet, or that speaker receives nothing.
	Silent bool
	// Announced is set if this node announced the VIP before the conflict. Then it continues to.
	Announced bool
	// Seen is when the hardware address claimed the VIP last.
	Seen time.Time
}

const (
	// conflictMemory is how long after the last claim a conflict is reported.
	conflictMemory = 10 * time.Minute
	// maxConflicts bounds the number of reported conflicts, so that a machine that answers for all
	// addresses fills neither the memory nor the log. Those that withhold a VIP come before the others.
	maxConflicts = 64
)

// conflicts has the conflicts of each VIP, and the VIPs for which it is unknown whether another machine has them.
type conflicts struct {
	mu sync.Mutex
	// of are the conflicts of each VIP, never none, in the order in which they were noted. Each interface has one with a foreign host
	// and one with a silent speaker, at most: what one interface finds does not show that a host on another one is gone.
	of map[netip.Addr][]Conflict
	// unprobed are the VIPs that no segment has found to be free.
	unprobed map[netip.Addr]bool
	changed  notify.Signal
}

func newConflicts() *conflicts {
	return &conflicts{of: map[netip.Addr][]Conflict{}, unprobed: map[netip.Addr]bool{}}
}

// begin is called when a VIP is assigned. The VIP has to be probed if it is new, or if another machine
// had it last.
func (c *conflicts) begin(vip netip.Addr, fresh bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if fresh || slices.ContainsFunc(c.of[vip], Conflict.withholds) {
		c.unprobed[vip] = true
	} else {
		delete(c.unprobed, vip)
	}
}

// toProbe reports whether a segment that is new to the VIP has to probe it.
func (c *conflicts) toProbe(vip netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unprobed[vip]
}

// toProbeOn is toProbe for the segment of an interface. It also has to probe the VIP if another machine had it there last.
func (c *conflicts) toProbeOn(name string, vip netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unprobed[vip] || slices.ContainsFunc(c.of[vip], func(k Conflict) bool { return k.Interface == name && k.withholds() })
}

// withholds reports whether the VIP is not announced on the interface because of the conflict.
func (c Conflict) withholds() bool { return !c.Announced }

// note records a conflict, and reports whether there is room for it. An interface has one of each cause at a time (see of),
// because a host may claim it from any number of hardware addresses by turns, and each change is written to the Lease. The first
// claim is kept until its hardware address is silent for conflictMemory, or until the VIP is announced and was not before, or the
// other way round.
func (c *conflicts) note(now Conflict) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now.Seen = time.Now()
	known := slices.Clone(c.of[now.VIP])
	at := slices.IndexFunc(known, func(k Conflict) bool { return k.Interface == now.Interface && k.Silent == now.Silent })
	switch {
	case len(known) == 0 && len(c.of) >= maxConflicts && !(now.withholds() && c.displace()):
		return false
	case at < 0:
		known = append(known, now)
	case known[at].Announced != now.Announced:
		known[at] = now
	case known[at].HardwareAddr == now.HardwareAddr:
		known[at].Seen = now.Seen
	}
	c.replace(now.VIP, known)
	return true
}

// displace forgets the conflicts of a VIP that is announced all the same, and reports whether there is one. The caller has to hold c.mu.
func (c *conflicts) displace() bool {
	for vip, known := range c.of {
		if !reported(known).withholds() {
			c.replace(vip, nil)
			return true
		}
	}
	return false
}

// replace replaces the conflicts of a VIP. The caller has to hold c.mu.
func (c *conflicts) replace(vip netip.Addr, now []Conflict) {
	before, after := reported(c.of[vip]), reported(now)
	if c.of[vip] = now; len(now) == 0 {
		delete(c.of, vip)
	}
	if after.Seen = before.Seen; after != before {
		c.changed.Notify()
	}
}

// reported returns the conflict that is reported of a VIP: the first that withholds it from an interface, or else the first.
func reported(all []Conflict) (c Conflict) {
	if at := slices.IndexFunc(all, Conflict.withholds); at >= 0 {
		return all[at]
	}
	if len(all) > 0 {
		return all[0]
	}
	return c
}

// forget forgets conflicts of a VIP. The caller has to hold c.mu.
func (c *conflicts) forget(vip netip.Addr, which func(Conflict) bool) {
	c.replace(vip, slices.DeleteFunc(slices.Clone(c.of[vip]), which))
}

// free is called when a segment has found that nobody else has the VIP. Those that are new to the VIP do not probe it then. The
// conflicts on other interfaces stay.
func (c *conflicts) free(name string, vip netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.unprobed, vip)
	c.forget(vip, func(k Conflict) bool { return k.Interface == name })
}

// clear forgets all about an address that is no VIP any more.
func (c *conflicts) clear(vip netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.unprobed, vip)
	c.replace(vip, nil)
}

// end is called when the VIP leaves this node. A conflict with a silent speaker of this cluster is forgotten: that speaker
// may be the next owner.
func (c *conflicts) end(vip netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(vip, func(k Conflict) bool { return k.Silent })
}

// Forget removes the conflicts of VIPs that no Service has any more: another machine may have such an
// address.
func (a *Announcer) Forget(vips []netip.Addr) {
	for _, vip := range vips {
		a.conflicts.clear(vip)
	}
}

// expire forgets old conflicts. It has to be called again when the returned channel fires, or when there
// is another conflict.
func (c *conflicts) expire() <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := time.Duration(0)
	for vip := range c.of {
		c.forget(vip, func(k Conflict) bool {
			left := conflictMemory - time.Since(k.Seen)
			if left > 0 && (next == 0 || left < next) {
				next = left
			}
			return left <= 0
		})
	}
	if next == 0 {
		return nil
	}
	return time.After(next)
}

// Conflicts returns the conflicts of the last ten minutes, one of each VIP, ordered by VIP.
func (a *Announcer) Conflicts() []Conflict {
	a.conflicts.mu.Lock()
	defer a.conflicts.mu.Unlock()
	var all []Conflict
	for _, vip := range slices.SortedFunc(maps.Keys(a.conflicts.of), netip.Addr.Compare) {
		all = append(all, reported(a.conflicts.of[vip]))
	}
	return all
}

// ConflictsChanged returns a channel that is closed when Conflicts returns something else; changes of Seen
// do not count. Take the channel first, then ask, and no change is missed.
func (a *Announcer) ConflictsChanged() <-chan struct{} { return a.conflicts.changed.Next() }

// note logs a note of a segment.
func (a *Announcer) note(on socketKey, n segment.Note) {
	if n.Kind == segment.Conflict {
		noted := a.conflicts.note(Conflict{VIP: n.VIP, Interface: on.name, HardwareAddr: n.Other.String(), OtherCluster: n.OtherCluster,
			Silent: n.Silent, Announced: n.Announced})
		if !n.First || n.Announced && !noted {
			return // a machine may claim all VIPs, each a thousand times a second
		}
	}
	log := a.bounded.With("vip", n.VIP, "interface", on.name)
	switch n.Kind {
	case segment.Conflict:
		log.Warn(conflictMessage(n), "hardware_addr", n.Other)
	case segment.Free:
		a.conflicts.free(on.name, n.VIP)
		a.log.Info("announcing", "vip", n.VIP, "interface", on.name, "message", "nobody else has it")
	case segment.Arrived:
		a.log.Info("announcing", "vip", n.VIP, "interface", on.name, "message", "no other speaker answers for it")
	case segment.Yields:
		log.Warn("another speaker with the same membership key has the VIP and ranks above this one: not announced here", "hardware_addr",
			n.Other, "help", "if it is of this cluster, the nodes do not reach each other at the membership port, TCP or UDP; if it is of "+
				"another cluster, that one has a copy of the Secret lodestone-membership and the same clusterID: give each its own clusterID")
	case segment.Resumes:
		log.Info("announcing again: the other speaker is silent", "hardware_addr", n.Other)
	case segment.Deaf:
		a.bounded.Warn("other speakers are lost, and nothing comes in on the interface: VIPs are not announced again there, "+
			"only answered for, until a neighbour is heard", "interface", on.name, "family", on.protocol.Family(),
			"help", "a cable, a transceiver or a switch port may carry one way only; ip -s link show dev "+on.name)
	case segment.Hears:
		a.bounded.Info("a neighbour is heard on the interface again: VIPs are announced there", "interface", on.name, "family",
			on.protocol.Family())
	case segment.AllBack:
		a.bounded.Info("no other speaker is lost any more: VIPs are announced on the interface, whether anything comes in or not",
			"interface", on.name, "family", on.protocol.Family())
	}
}

// conflictMessage explains what a conflict is, and what to do about it.
func conflictMessage(n segment.Note) string {
	who := "foreign host"
	if n.OtherCluster {
		who = "speaker of another cluster"
	}
	switch {
	case n.Silent:
		return "somebody claims a VIP in the name of another speaker, which does not answer for it: a recorded packet is repeated on " +
			"the segment, or nothing reaches that speaker"
	case !n.Announced:
		return who + " has the address of a VIP: not announced; find the host by its hardware address, or exclude the address from the pool"
	}
	return who + " claims a VIP: find the host by its hardware address, or exclude the address from the pool"
}
