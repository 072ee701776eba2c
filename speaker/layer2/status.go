package layer2

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/reason"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// Reason is a stable code for why an owned VIP is not announced.
type Reason = segment.Reason

// The reasons.
const (
	// NoInterface: no interface that is up may announce the VIP.
	NoInterface segment.Reason = "NoInterface"
	// NoLinkLocalAddress: the interfaces that may announce the VIP, which is
	// IPv6, have no IPv6 link-local address that can be used; InterfaceStatus
	// tells more.
	NoLinkLocalAddress segment.Reason = "NoLinkLocalAddress"
	// InterfaceFailed: the interfaces that may announce the VIP cannot be
	// used; InterfaceStatus has the error.
	InterfaceFailed segment.Reason = "InterfaceFailed"
	// The others are what a segment says.
	Probing         = segment.Probing
	AddressConflict = segment.AddressConflict
	Yielded         = segment.Yielded
)

// Reasons explains each Reason.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		NoInterface: {Cause: "No interface that is up may announce the VIP.",
			Cure: "Compare interfaces of its advertisements with ip link on the node.",
			Keys: []string{"advertisements[].layer2.interfaces"}},
		NoLinkLocalAddress: {Cause: "No interface that may announce the VIP has an IPv6 link-local address that can be used.",
			Cure: "See ip -6 addr on the node: IPv6 is switched off, or another host has the same link-local address."},
		InterfaceFailed: {Cause: "The interfaces cannot be used, and are tried again.",
			Cure: "The speaker's log has the error, and so has its /status."},
		Probing: {Cause: "The address is new, and whether another machine has it is being asked.",
			Cure: "Nothing to do: it takes 0.6 s."},
		AddressConflict: {Cause: "Another host has the address.",
			Cure: "Find it by its hardware address, and take the address away from it or exclude it from the pool."},
		Yielded: {Cause: "Another speaker of this cluster announces the VIP, too, and ranks above this one: the two do not see each other.",
			Cure: "Open port 9744, TCP and UDP, between the nodes, in both directions."},
	}
}

// Status is what the announcer does at one moment.
type Status struct {
	Interfaces []InterfaceStatus // by name and family
	VIPs       []VIPStatus       // by address
	// Conflicts are the VIPs that others have claimed lately, by address.
	Conflicts []Conflict
}

// InterfaceStatus is the state of an interface that is in use or should be, for
// VIPs of one family.
type InterfaceStatus struct {
	Name string
	// Family is IPv4 or IPv6.
	Family       string
	HardwareAddr string
	// VIPs is the number of VIPs announced on the interface.
	VIPs int
	// Error is why the interface cannot be used. It is tried again, or when it
	// changes.
	Error string
}

// VIPStatus is the state of a VIP that this node owns.
type VIPStatus struct {
	Addr  netip.Addr
	Since time.Time
	// Interfaces are the names of the interfaces that announce the VIP.
	Interfaces []string
	// Reason is why the VIP is not announced, if Interfaces is empty.
	Reason Reason
	// Holder is the hardware address of who has it, if the Reason is
	// AddressConflict or Yielded.
	Holder string
	// Leaving is set while the VIP moves to another node: it is answered for
	// on the Interfaces until that node is heard there.
	Leaving bool
}

// state is what Run publishes. It is immutable.
type state struct {
	vips     map[netip.Addr]*assignment
	want     map[portKey]map[netip.Addr]segment.VIP
	failures map[portKey]error // of ports that are wanted and not open
	ports    map[portKey]*port
}

func (a *Announcer) publish() {
	s := &state{vips: a.vips, want: a.want, failures: maps.Clone(a.unfit), ports: maps.Clone(a.ports)}
	for key, f := range a.failures {
		if a.ports[key] == nil {
			s.failures[key] = f.err
		}
	}
	a.published.Store(s)
}

// Status returns what the announcer does now.
func (a *Announcer) Status() Status {
	s := a.published.Load()
	status := Status{Conflicts: a.Conflicts()}
	for _, key := range s.keys() {
		i := InterfaceStatus{Name: key.name, Family: key.protocol.Family(), HardwareAddr: key.mac.String(), VIPs: len(s.want[key])}
		if err := s.failures[key]; err != nil {
			i.VIPs, i.Error = 0, err.Error()
		}
		status.Interfaces = append(status.Interfaces, i)
	}
	for _, vip := range slices.SortedFunc(maps.Keys(s.vips), netip.Addr.Compare) {
		status.VIPs = append(status.VIPs, s.of(vip))
	}
	return status
}

// keys returns the wanted ports by name and family.
func (s *state) keys() []portKey {
	return slices.SortedFunc(maps.Keys(s.want), func(a, b portKey) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.protocol.Family(), b.protocol.Family()))
	})
}

// of returns the status of one VIP.
func (s *state) of(vip netip.Addr) VIPStatus {
	v := VIPStatus{Addr: vip, Since: s.vips[vip].since, Leaving: s.vips[vip].Leaving}
	for _, key := range s.keys() {
		if _, wanted := s.want[key][vip]; !wanted {
			continue
		}
		var on segment.State
		if p := s.ports[key]; p != nil {
			on = p.state(vip)
		}
		switch {
		case errors.Is(s.failures[key], errNoLinkLocal):
			v.Reason = cmp.Or(v.Reason, NoLinkLocalAddress)
		case s.failures[key] != nil:
			v.Reason = InterfaceFailed
		case on.Reason != "":
			v.Reason = on.Reason
			if on.Other != (wire.MAC{}) {
				v.Holder = on.Other.String()
			}
		default:
			v.Interfaces = append(v.Interfaces, key.name)
		}
	}
	if len(v.Interfaces) > 0 {
		v.Reason, v.Holder = "", ""
	} else {
		v.Reason = cmp.Or(v.Reason, NoInterface)
	}
	return v
}

// Conflict says that a host claims a VIP that this node owns, and does not prove
// that it is a speaker of this cluster.
type Conflict struct {
	VIP          netip.Addr
	Interface    string
	HardwareAddr string
	// OtherCluster is set if it is a speaker, which has another key.
	OtherCluster bool
	// Silent is set if the claim has the seal of a speaker of this cluster, which
	// does not answer for it: somebody repeats what was recorded, or nothing that is
	// sent to that speaker arrives.
	Silent bool
	// Announced is set if the VIP was announced here already, and so goes on
	// being announced.
	Announced bool
	// Seen is when the last claim was heard.
	Seen time.Time
}

const (
	// conflictMemory is how long after the last claim a conflict is reported.
	conflictMemory = 10 * time.Minute
	// maxConflicts is how many are, at most: a host that answers for all
	// addresses must not fill memory.
	maxConflicts = 64
)

// conflicts remembers who claimed VIPs of ours, one conflict for each, and of which it is
// not known yet whether somebody has them.
type conflicts struct {
	mu sync.Mutex
	of map[netip.Addr]Conflict
	// unprobed are the VIPs that no segment has found to be free.
	unprobed map[netip.Addr]bool
	changed  notify.Signal
}

// begin is called when a VIP is assigned. It has to be probed if it is new, or was last
// found to be somebody else's.
func (c *conflicts) begin(vip netip.Addr, fresh bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known, ok := c.of[vip]; fresh || ok && !known.Announced {
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

func (c *conflicts) note(now Conflict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, known := c.of[now.VIP]
	if !known && len(c.of) >= maxConflicts {
		return
	}
	before.Seen, now.Seen = time.Time{}, time.Now()
	c.of[now.VIP] = now
	now.Seen = time.Time{}
	if before != now {
		c.changed.Notify()
	}
}

// clear forgets the conflict: the VIP is free, or no VIP.
func (c *conflicts) clear(vip netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.unprobed, vip)
	if _, known := c.of[vip]; known {
		delete(c.of, vip)
		c.changed.Notify()
	}
}

// Forget takes back what was reported about VIPs that no Service has any more:
// whoever else has such an address is in nobody's way.
func (a *Announcer) Forget(vips []netip.Addr) {
	for _, vip := range vips {
		a.conflicts.clear(vip)
	}
}

// expire forgets conflicts of long ago, and returns a channel that fires when
// it is to be called again. Nil: when there is another conflict.
func (c *conflicts) expire() <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := time.Duration(0)
	for vip, known := range c.of {
		left := conflictMemory - time.Since(known.Seen)
		if left <= 0 {
			delete(c.of, vip)
			c.changed.Notify()
		} else if next == 0 || left < next {
			next = left
		}
	}
	if next == 0 {
		return nil
	}
	return time.After(next)
}

// Conflicts returns the VIPs that others have claimed within the last ten
// minutes, with the last one who did, by address.
func (a *Announcer) Conflicts() []Conflict {
	a.conflicts.mu.Lock()
	defer a.conflicts.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.conflicts.of), func(b, c Conflict) int { return b.VIP.Compare(c.VIP) })
}

// ConflictsChanged returns a channel that is closed when Conflicts returns
// something new, other than when claims were heard. Ask for it before
// Conflicts and nothing is missed.
func (a *Announcer) ConflictsChanged() <-chan struct{} { return a.conflicts.changed.Next() }

// Leaving returns how many VIPs that move to other nodes are still answered
// for here: on some segment the next owner was not heard yet.
func (a *Announcer) Leaving() int {
	waiting := map[netip.Addr]bool{}
	for _, p := range a.published.Load().ports {
		for _, vip := range p.leaving() {
			waiting[vip] = true
		}
	}
	return len(waiting)
}
