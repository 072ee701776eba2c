package report

import (
	"bytes"
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Network is what a speaker reports about its node's network.
type Network struct {
	// Segments are the subnets that the node can announce VIPs on. Nil: not
	// known.
	Segments []Segment `json:"segments,omitzero"`
	// Gateways are the node's default gateways. Nil: not known.
	Gateways []netip.Addr `json:"gateways,omitzero"`
	// Conflicts are the VIPs of the node that other hosts claim.
	Conflicts []Conflict `json:"conflicts,omitempty"`
	// KubeProxy is set if a kube-proxy answers on the node, or what replaces it.
	KubeProxy bool `json:"kubeProxy,omitempty"`
	// KubeProxyUnknown is set while that is not known. It is not in the Lease, which keeps what it had.
	KubeProxyUnknown bool `json:"-"`
	// Forwards is set while the node has the rules of direct forwarding, with or without a
	// speaker: others may hand it segments of connections that it does not know.
	Forwards bool `json:"forwards,omitempty"`
	// NoRules is why the node has no rules of direct forwarding although it should. Empty: it
	// has them, or should not.
	NoRules NoRules `json:"noRules,omitempty"`

	// What follows is not in the Lease. Speakers send it to each other.

	// Claims are what the speaker owns and keeps.
	Claims Claims `json:"-"`
	// Blind is set when the API server answers other nodes and not this one: a node that
	// is not blind is preferred as owner, because it knows the Services that there are.
	Blind bool `json:"-"`
	// Sick is set when kube-proxy on the node reports that it is not healthy. Its rules are in
	// the kernel and age: a healthy node is preferred, in routes, too.
	Sick bool `json:"-"`
	// Apart is set while the node's speaker has lost all others with its link to them, to
	// that interface, and until it has met them again. It knows that of itself alone.
	Apart string `json:"-"`
}

// NoRules is a reason that a node has no rules of direct forwarding.
type NoRules string

// The reasons.
const (
	// RulesForbidden: the speaker may not write rules.
	RulesForbidden NoRules = "Forbidden"
	// RulesWithIPVS: kube-proxy is in mode IPVS.
	RulesWithIPVS NoRules = "IPVS"
	// RulesOnBond: the node is on a bond that sends with other hardware addresses than its own.
	RulesOnBond NoRules = "Bond"
	// RulesFailed: the kernel refuses them, and the speaker's log has the reason.
	RulesFailed NoRules = "Failed"
)

// Conflict is a VIP that is claimed by a host which is no speaker of this cluster.
type Conflict struct {
	VIP netip.Addr
	// HardwareAddr is that of the host.
	HardwareAddr [6]byte
	// Announced is set if the VIP had been announced before, and still is.
	// Otherwise the host had it before, and the VIP is not announced.
	Announced bool
}

// MarshalText returns the conflict as String does.
func (c Conflict) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// String returns what UnmarshalText reads: "203.0.113.7 02:00:00:00:00:0c withheld".
func (c Conflict) String() string {
	state := withheld
	if c.Announced {
		state = announced
	}
	return fmt.Sprintf("%s %s %s", c.VIP, net.HardwareAddr(c.HardwareAddr[:]), state)
}

// Withheld returns the conflicts over VIPs that are not announced because of them. Nil: there are none.
func (n Network) Withheld() []Conflict {
	var kept []Conflict
	for _, c := range n.Conflicts {
		if !c.Announced {
			kept = append(kept, c)
		}
	}
	return kept
}

const withheld, announced = "withheld", "announced"

// UnmarshalText reads what MarshalText returned.
func (c *Conflict) UnmarshalText(text []byte) error {
	f := strings.Fields(string(text))
	if len(f) != 3 || f[2] != withheld && f[2] != announced {
		return fmt.Errorf("%.60q is not an address, a hardware address, and %q or %q", text, withheld, announced)
	}
	vip, err := netip.ParseAddr(f[0])
	if err != nil {
		return fmt.Errorf("read a conflict: %w", err)
	}
	hardware, err := net.ParseMAC(f[1])
	if err != nil || len(hardware) != len(c.HardwareAddr) {
		return fmt.Errorf("%.40q is not a hardware address of 6 bytes", f[1])
	}
	*c = Conflict{VIP: vip, HardwareAddr: [6]byte(hardware), Announced: f[2] == announced}
	return nil
}

// Compare orders conflicts by VIP and hardware address.
func (c Conflict) Compare(d Conflict) int {
	return cmp.Or(c.VIP.Compare(d.VIP), bytes.Compare(c.HardwareAddr[:], d.HardwareAddr[:]))
}

func isConflict(c Conflict) bool { return isGateway(c.VIP) }

// Segment is a subnet of an interface that VIPs can be announced on.
type Segment struct {
	Subnet    netip.Prefix
	Interface string
	// IfNamed is set when only an advertisement that names the interface
	// announces there.
	IfNamed bool
	// Down is set while the node's speaker reports that the interface cannot carry packets.
	// The node belongs to the segment all the same. It is not in the Lease.
	Down bool
}

// ifNamed is the text of Segment.IfNamed in a Lease.
const ifNamed = "if-named"

// String returns the segment as a Lease has it.
func (s Segment) String() string {
	text := s.Subnet.String() + " " + s.Interface
	if s.IfNamed {
		text += " " + ifNamed
	}
	return text
}

// MarshalText returns the segment as String does.
func (s Segment) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText returned.
func (s *Segment) UnmarshalText(text []byte) error {
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return fmt.Errorf("%.60q is not a prefix and an interface, and possibly %q", text, ifNamed)
	}
	subnet, err := netip.ParsePrefix(fields[0])
	if err != nil {
		return fmt.Errorf("read a segment: %w", err)
	}
	*s = Segment{Subnet: subnet, Interface: fields[1], IfNamed: slices.Contains(fields[2:], ifNamed)}
	return nil
}

func (s Segment) compare(t Segment) int {
	return cmp.Or(s.Subnet.Compare(t.Subnet), cmp.Compare(s.String(), t.String()))
}

// Equal reports whether both have the same text on a Lease.
func (n Network) Equal(other Network) bool {
	return Report{Network: n}.String() == Report{Network: other}.String()
}

// tidy leaves out addresses that no pool can contain: link-local gateways, and single
// addresses that are no subnet.
func (n Network) tidy() Network {
	if n.Segments != nil {
		n.Segments = tidy(n.Segments, MaxSegments, isSegment, Segment.compare)
	}
	if n.Gateways != nil {
		n.Gateways = tidy(n.Gateways, MaxGateways, isGateway, netip.Addr.Compare)
	}
	if n.Conflicts = tidy(n.Conflicts, MaxConflicts, isConflict, Conflict.Compare); len(n.Conflicts) == 0 {
		n.Conflicts = nil
	}
	if !isName(string(n.NoRules), maxLabel) {
		n.NoRules = ""
	}
	return n
}

// maxInterface is IFNAMSIZ without the terminating zero.
const maxInterface = 15

// isSegment reports whether the subnet can have other hosts and VIPs, and whether the
// interface has a valid name.
func isSegment(s Segment) bool {
	p := s.Subnet
	return isName(s.Interface, maxInterface) && p == p.Masked() && !p.IsSingleIP() && p.Bits() > 0 && p.Addr().IsGlobalUnicast() &&
		!p.Addr().Is4In6()
}

func isGateway(a netip.Addr) bool {
	return a.IsGlobalUnicast() && a.Zone() == "" && !a.Is4In6()
}
