package world

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// book records which Services show which addresses, by the API server's objects alone, without the ledger.
type book struct {
	holders  map[netip.Addr][]string // Services that are not being deleted
	showing  map[netip.Addr][]string // those, too
	services map[string]*corev1.Service
	edited   map[string]time.Duration // the last write of the Service by a user
	earlier  map[string]time.Duration // the one before that
	agreed   map[string]time.Duration // when a user last changed with whom it would share an address
	asked    map[string]bool          // the user has written since the Service got what it asks for
	freed    map[netip.Addr]release
	// quarantined is for how long an address that was freed is given to no other Service, at least.
	quarantined time.Duration
	// clocksOff is set once the clock of a controller was set. Then the replicas end quarantines at different times.
	clocksOff bool
	dhcp      *dhcpServer // nil: there is none
	// lies is set when a node has reported that other machines have VIPs.
	lies bool
}

// release is when the last Service ceased to show an address.
type release struct {
	by string
	at time.Duration
}

// unquarantined is what is missing of the configuration's quarantine: the second to which it is rounded, that by which the clocks of
// controllers differ, and what it takes to write the record and the Service, as a new leader counts from when that was decided.
const unquarantined = 2*time.Second + 2*servicelb.PatchTimeout

// staleness is how long after an edit the controller may still decide by the objects from before it.
const staleness = 10 * time.Second

func newBook(w *World) book {
	return book{dhcp: w.dhcp, quarantined: w.Quarantine - unquarantined, holders: map[netip.Addr][]string{},
		showing: map[netip.Addr][]string{}, services: map[string]*corev1.Service{},
		edited: map[string]time.Duration{}, earlier: map[string]time.Duration{}, agreed: map[string]time.Duration{},
		asked: map[string]bool{}, freed: map[netip.Addr]release{}}
}

// enter records a write, and returns what is wrong with it.
func (b *book) enter(name string, before, after *corev1.Service, by writer, now time.Duration) (fault string) {
	if by == user {
		b.earlier[name] = b.edited[name]
		b.edited[name], b.asked[name] = now, after == nil || !answered(after)
		if before != nil && after != nil && shares(before) != shares(after) {
			b.agreed[name] = now
		}
	} else if after != nil {
		fault = b.verify(name, before, after, now)
		if c := kube.Allocated(after); c != nil && (c.Status == "True" || unreadable(after)) {
			b.asked[name] = false
		}
	}
	for _, addr := range shown(before) {
		b.remove(b.showing, addr, name)
		b.remove(b.holders, addr, name)
		// A user who overwrites the annotation gives the address up without a quarantine.
		if !slices.Contains(shown(after), addr) && len(b.showing[addr]) == 0 && by == ofController {
			b.freed[addr] = release{name, now}
		}
	}
	delete(b.services, name)
	if after == nil {
		return fault
	}
	b.services[name] = after
	for _, addr := range shown(after) {
		b.showing[addr] = append(b.showing[addr], name)
		if after.DeletionTimestamp == nil && scope.Announces(after) {
			b.holders[addr] = append(b.holders[addr], name)
		}
	}
	return fault
}

func (b *book) remove(from map[netip.Addr][]string, addr netip.Addr, name string) {
	if from[addr] = slices.DeleteFunc(slices.Clone(from[addr]), func(s string) bool { return s == name }); len(from[addr]) == 0 {
		delete(from, addr)
	}
}

// verify returns what is wrong with a write of the controller.
func (b *book) verify(name string, before, after *corev1.Service, now time.Duration) string {
	wanted := b.asked[name] && (!unreadable(after) || now-b.earlier[name] < staleness)
	for _, addr := range shown(before) {
		if !slices.Contains(shown(after), addr) && before.DeletionTimestamp == nil && !wanted && !b.mayLeave(before, now) &&
			!b.dhcp.mayLose(name, addr) {
			return fmt.Sprintf("loses %s, and nobody asked for that", addr)
		}
	}
	for _, addr := range shown(after) {
		if slices.Contains(shown(before), addr) {
			continue
		}
		if !b.dhcp.mayGet(name, addr) {
			return fmt.Sprintf("is given %s, which is not for it", addr)
		}
		for _, other := range b.showing[addr] {
			at, changed := b.agreed[other]
			if o := b.services[other]; other != name && (!changed || now-at > staleness) && (shares(o) == "" || shares(o) != shares(after)) {
				return fmt.Sprintf("is given %s, which %s has", addr, other)
			}
		}
		r, ok := b.freed[addr]
		if ok && !b.dhcp.leases(addr) && !b.clocksOff && len(b.showing[addr]) == 0 && r.by != name && now-r.at < b.quarantined {
			return fmt.Sprintf("is given %s, which %s had %s ago", addr, r.by, now-r.at)
		}
	}
	return ""
}

// waitsForLease reports whether the Service waits for a lease. A new leader first writes that it waits, and later the reason.
func waitsForLease(svc *corev1.Service) bool {
	return svc.Annotations[annotation.AddressPool] == "office" && !answered(svc)
}

// answered reports whether the Service has got what it asks for.
func answered(svc *corev1.Service) bool {
	c := kube.Allocated(svc)
	return c != nil && c.Status == "True" && c.ObservedGeneration == svc.Generation
}

// unreadable reports whether the controller could not read what the Service asks for: it asks for nothing then.
func unreadable(svc *corev1.Service) bool {
	c := kube.Allocated(svc)
	return c != nil && c.Reason == string(ipam.InvalidRequest)
}

// ofOthers are the addresses that no Service of the world's namespace is given: those of a pool for another namespace,
// and those outside all pools.
func ofOthers(addr netip.Addr) bool {
	return !slices.ContainsFunc(given, func(r netipx.IPRange) bool { return r.Contains(addr) })
}

// given are the addresses of the pools for that namespace.
var given = []netipx.IPRange{netipx.MustParseIPRange("203.0.113.100-203.0.113.119"), netipx.MustParseIPRange("2001:db8::100-2001:db8::113"),
	netipx.MustParseIPRange("198.51.100.100-198.51.100.119"), netipx.MustParseIPRange("2001:db8:1::100-2001:db8:1::113")}

// settling is how long after its allocation a Service gives an address up again if a node reports that another machine has
// it. It includes the time to write that.
const settling = 2*time.Minute + 30*time.Second

// mayLeave reports whether the Service may give its address up because of a false report of a node.
func (b *book) mayLeave(svc *corev1.Service, now time.Duration) bool {
	c := kube.Allocated(svc)
	return b.lies && c != nil && (b.clocksOff || epoch.Add(now).Sub(c.LastTransitionTime.Time) < settling)
}

// apart returns which Services have one address that did not agree to share.
func (b *book) apart(a *api) string {
	for _, addr := range slices.SortedFunc(maps.Keys(b.showing), netip.Addr.Compare) {
		for _, name := range b.showing[addr] {
			first := b.showing[addr][0]
			if b.dhcp.leases(addr) {
				// A Service keeps an address from before a controller's start, which the server does not have any more, if it gets no other.
				if _, ok := b.dhcp.leasedTo(name, addr); !ok && !b.dhcp.replacesNone(addr) {
					return fmt.Sprintf("%s has %s, which is not leased to it", name, addr)
				}
			}
			if key := shares(a.service(name)); name != first && (key == "" || key != shares(a.service(first))) {
				return fmt.Sprintf("%s and %s have %s", first, name, addr)
			}
		}
	}
	return ""
}
