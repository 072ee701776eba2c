package layer2

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Reason is a stable code for why an owned VIP is not announced.
type Reason string

// The reasons.
const (
	// NoInterface: no interface that is up may announce the VIP.
	NoInterface Reason = "NoInterface"
	// NoLinkLocalAddress: the interfaces that may announce the VIP, which is
	// IPv6, have no IPv6 link-local address that can be used; InterfaceStatus
	// tells more.
	NoLinkLocalAddress Reason = "NoLinkLocalAddress"
	// InterfaceFailed: the interfaces that may announce the VIP cannot be
	// used; InterfaceStatus has the error.
	InterfaceFailed Reason = "InterfaceFailed"
)

// Status is what the announcer does at one moment.
type Status struct {
	Interfaces []InterfaceStatus // by name and family
	VIPs       []VIPStatus       // by address
}

// InterfaceStatus tells about an interface that is in use or should be, for
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

// VIPStatus tells about a VIP that this node owns.
type VIPStatus struct {
	Addr  netip.Addr
	Since time.Time
	// Interfaces are the names of the interfaces that announce the VIP.
	Interfaces []string
	// Reason is why the VIP is not announced, if Interfaces is empty.
	Reason Reason
	// Leaving is set while the VIP moves to another node: it is answered for
	// on the Interfaces until that node is heard there.
	Leaving bool
}

// state is what Run publishes. It is immutable.
type state struct {
	vips     owned
	want     map[portKey]owned
	failures map[portKey]error // of ports that are wanted and not open
}

func (a *Announcer) publish() {
	s := &state{vips: a.vips, want: a.want, failures: maps.Clone(a.unfit)}
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
	var status Status
	for _, key := range s.keys() {
		i := InterfaceStatus{Name: key.name, Family: key.protocol.family(), HardwareAddr: key.mac.String(), VIPs: len(s.want[key])}
		if err := s.failures[key]; err != nil {
			i.VIPs, i.Error = 0, err.Error()
		}
		status.Interfaces = append(status.Interfaces, i)
	}
	for _, o := range s.vips.without(nil) {
		status.VIPs = append(status.VIPs, s.of(o))
	}
	return status
}

// keys returns the wanted ports by name and family.
func (s *state) keys() []portKey {
	return slices.SortedFunc(maps.Keys(s.want), func(a, b portKey) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.protocol.family(), b.protocol.family()))
	})
}

// of returns the status of one VIP.
func (s *state) of(o *ownership) VIPStatus {
	v := VIPStatus{Addr: o.vip, Since: o.since, Leaving: o.leaving.is()}
	for _, key := range s.keys() {
		switch {
		case s.want[key][o.vip] == nil:
		case errors.Is(s.failures[key], errNoLinkLocal):
			v.Reason = cmp.Or(v.Reason, NoLinkLocalAddress)
		case s.failures[key] != nil:
			v.Reason = InterfaceFailed
		default:
			v.Interfaces = append(v.Interfaces, key.name)
		}
	}
	if len(v.Interfaces) > 0 {
		v.Reason = ""
	} else {
		v.Reason = cmp.Or(v.Reason, NoInterface)
	}
	return v
}

// Leaving returns how many VIPs that move to other nodes are still answered
// for here: on some port the next owner was not heard yet.
func (a *Announcer) Leaving() int {
	now, waiting := a.published.Load(), map[*ownership]bool{}
	for key, vips := range now.want {
		if now.failures[key] != nil {
			continue
		}
		for _, o := range vips {
			if o.leaving.is() && !o.leaving.left(key) {
				waiting[o] = true
			}
		}
	}
	return len(waiting)
}
