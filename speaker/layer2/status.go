package layer2

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// Status is what the announcer does at one moment.
type Status struct {
	Interfaces []InterfaceStatus // by name and family
	VIPs       []VIPStatus       // by address
	// Conflicts are the conflicts of the last ten minutes, by VIP.
	Conflicts []Conflict
}

// InterfaceStatus is the state of an interface that is in use or should be, for VIPs of one family.
type InterfaceStatus struct {
	Name string
	// Family is IPv4 or IPv6.
	Family       string
	HardwareAddr string
	// VIPs is the number of VIPs that belong on the interface, announced there or not.
	VIPs int
	// Error is why the interface cannot be used. The announcer tries again.
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
	// Holder is the hardware address of the machine that has the VIP, if the Reason is AddressConflict or
	// Yielded.
	Holder string
	// Leaving is set while the VIP moves to another node: this node answers for it on the Interfaces
	// until that node is heard there.
	Leaving bool
}

// state is what Run publishes. It is immutable.
type state struct {
	vips     map[netip.Addr]*assignment
	want     map[socketKey]map[netip.Addr]segment.VIP
	failures map[socketKey]error // of wanted sockets that are not open
	sockets  map[socketKey]*socket
}

func (a *Announcer) publish() {
	s := &state{vips: a.vips, want: a.want, failures: maps.Clone(a.unfit), sockets: maps.Clone(a.sockets)}
	for key, f := range a.failures {
		if a.sockets[key] == nil {
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
		if v := s.of(vip); v.Reason != Yielded || !s.vips[vip].Arriving {
			status.VIPs = append(status.VIPs, v)
		}
	}
	return status
}

// keys returns the wanted sockets by name and family.
func (s *state) keys() []socketKey {
	return slices.SortedFunc(maps.Keys(s.want), func(a, b socketKey) int {
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
		if open := s.sockets[key]; open != nil {
			on = open.state(vip)
		}
		switch {
		case errors.Is(s.failures[key], errNoLinkLocal):
			v.Reason = cmp.Or(v.Reason, NoLinkLocalAddress)
		case s.failures[key] != nil:
			if v.Reason == "" || v.Reason == NoLinkLocalAddress {
				v.Reason = InterfaceFailed
			}
		case on.Reason != "":
			v.Reason, v.Holder = on.Reason, ""
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

// Leaving returns for how many leaving VIPs this node still answers, because the next owner was not heard
// on some segment.
func (a *Announcer) Leaving() int {
	waiting := map[netip.Addr]bool{}
	for _, s := range a.published.Load().sockets {
		for _, vip := range s.leaving() {
			waiting[vip] = true
		}
	}
	return len(waiting)
}
