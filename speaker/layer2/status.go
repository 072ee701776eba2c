package layer2

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Reason is a stable code for why an owned VIP is not announced.
type Reason string

// The reasons.
const (
	// IPv6NotSupported: IPv6 by layer 2 is not there yet.
	IPv6NotSupported Reason = "IPv6NotSupported"
	// NoInterface: no interface that is up may announce the VIP.
	NoInterface Reason = "NoInterface"
	// InterfaceFailed: the interfaces that may announce the VIP cannot be
	// used; InterfaceStatus has the error.
	InterfaceFailed Reason = "InterfaceFailed"
)

// Status is what the announcer does at one moment.
type Status struct {
	Interfaces []InterfaceStatus // by name
	VIPs       []VIPStatus       // by address
}

// InterfaceStatus tells about an interface that is in use or should be.
type InterfaceStatus struct {
	Name         string
	HardwareAddr string
	// VIPs is the number of VIPs announced on the interface.
	VIPs int
	// Error is why the interface cannot be used. It is tried again.
	Error string
}

// VIPStatus tells about a VIP that this node owns.
type VIPStatus struct {
	Addr  netip.Addr
	Since time.Time
	// Interfaces are the names of the interfaces that announce the VIP.
	Interfaces []string
	// Reason is why the VIP is not announced, if Interfaces is empty.
	Reason Reason
}

// state is what Run publishes. It is immutable.
type state struct {
	vips     owned
	want     map[portKey]owned
	failures map[portKey]*failure // of ports that are wanted and not open
}

func (a *Announcer) publish() {
	s := &state{vips: a.vips, want: a.want, failures: map[portKey]*failure{}}
	for key, f := range a.failures {
		if a.ports[key] == nil {
			s.failures[key] = f
		}
	}
	a.published.Store(s)
}

// Status returns what the announcer does now.
func (a *Announcer) Status() Status {
	s := a.published.Load()
	var status Status
	for _, key := range s.keys() {
		i := InterfaceStatus{Name: key.name, HardwareAddr: key.mac.String(), VIPs: len(s.want[key])}
		if f := s.failures[key]; f != nil {
			i.VIPs, i.Error = 0, f.err.Error()
		}
		status.Interfaces = append(status.Interfaces, i)
	}
	for _, o := range s.vips.without(nil) {
		status.VIPs = append(status.VIPs, s.of(o))
	}
	return status
}

// keys returns the wanted ports by name.
func (s *state) keys() []portKey {
	return slices.SortedFunc(maps.Keys(s.want), func(a, b portKey) int { return cmp.Compare(a.name, b.name) })
}

// of returns the status of one VIP.
func (s *state) of(o *ownership) VIPStatus {
	v := VIPStatus{Addr: o.vip, Since: o.since}
	failed := false
	for _, key := range s.keys() {
		switch {
		case s.want[key][o.vip] == nil:
		case s.failures[key] != nil:
			failed = true
		default:
			v.Interfaces = append(v.Interfaces, key.name)
		}
	}
	switch {
	case len(v.Interfaces) > 0:
	case protocolOf(o.vip) == nil:
		v.Reason = IPv6NotSupported
	case failed:
		v.Reason = InterfaceFailed
	default:
		v.Reason = NoInterface
	}
	return v
}
