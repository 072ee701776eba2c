package clusterfacts

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// The most that a Lease tells of a node: what is beyond is not written, and
// not read from a Lease that somebody else wrote.
const (
	MaxSegments  = 128
	MaxGateways  = 16
	MaxConflicts = 32
)

// Network is what a speaker tells of its node's network.
type Network struct {
	// Segments are the subnets that the node can announce VIPs on. Nil: not
	// known.
	Segments []Segment
	// Gateways are the node's default gateways. Nil: not known.
	Gateways []netip.Addr
	// Conflicts are the VIPs of the node that other hosts claim. Nil: not
	// known.
	Conflicts []Conflict
	// KubeProxy tells that one answers on the node, or what replaces it.
	KubeProxy bool
	// Claims are what plan.Claims says. They are not in the Lease.
	Claims [128]byte
	// Blind, Sick and Apart are what plan.Node says of them. They are not in the Lease.
	Blind, Sick bool
	Apart       string
}

// Conflict is a VIP that a host claims that is no speaker of this cluster.
type Conflict struct {
	VIP netip.Addr
	// HardwareAddr is who has it or claims it.
	HardwareAddr [6]byte
	// Announced is set if the VIP had been announced before, and still is.
	// Otherwise the host had it before, and the VIP is not announced.
	Announced bool
}

// String returns what ParseConflict reads: "203.0.113.7 02:00:00:00:00:0c withheld".
func (c Conflict) String() string {
	state := withheld
	if c.Announced {
		state = announced
	}
	return fmt.Sprintf("%s %s %s", c.VIP, net.HardwareAddr(c.HardwareAddr[:]), state)
}

const withheld, announced = "withheld", "announced"

// ParseConflict reads what Conflict.String returns.
func ParseConflict(text string) (c Conflict, err error) {
	f := strings.Fields(text)
	if len(f) != 3 || f[2] != withheld && f[2] != announced {
		return Conflict{}, fmt.Errorf("%.60q is not an address, a hardware address, and %q or %q", text, withheld, announced)
	}
	if c.VIP, err = netip.ParseAddr(f[0]); err != nil {
		return Conflict{}, fmt.Errorf("read a conflict: %w", err)
	}
	hardware, err := net.ParseMAC(f[1])
	if err != nil || len(hardware) != len(c.HardwareAddr) {
		return Conflict{}, fmt.Errorf("%.40q is not a hardware address of 6 bytes", f[1])
	}
	c.HardwareAddr, c.Announced = [6]byte(hardware), f[2] == announced
	return c, nil
}

func compareConflicts(a, b Conflict) int {
	return cmp.Or(a.VIP.Compare(b.VIP), bytes.Compare(a.HardwareAddr[:], b.HardwareAddr[:]))
}

func isConflict(c Conflict) bool { return isGateway(c.VIP) }

// Segment is a subnet of an interface that VIPs can be announced on.
type Segment struct {
	Subnet    netip.Prefix
	Interface string
	// IfNamed is set when only an advertisement that names the interface
	// announces there.
	IfNamed bool
	// Down is set while the node's speaker says that the interface is down. It
	// is not in the Lease.
	Down bool
}

// ifNamed is how a Lease says Segment.IfNamed.
const ifNamed = "if-named"

// String returns the segment as a Lease has it.
func (s Segment) String() string {
	text := s.Subnet.String() + " " + s.Interface
	if s.IfNamed {
		text += " " + ifNamed
	}
	return text
}

func parseSegment(text string) (Segment, error) {
	fields := strings.Fields(text)
	if len(fields) < 2 || len(fields) > 3 || len(fields) == 3 && fields[2] != ifNamed {
		return Segment{}, errors.New("not a prefix and an interface")
	}
	subnet, err := netip.ParsePrefix(fields[0])
	return Segment{Subnet: subnet, Interface: fields[1], IfNamed: len(fields) == 3}, err
}

func (s Segment) compare(t Segment) int {
	return cmp.Or(s.Subnet.Compare(t.Subnet), cmp.Compare(s.String(), t.String()))
}

// Annotations returns what the speaker's Lease says: what is not known is
// left out, what no pool can contain (link-local gateways, single addresses
// that are no subnet) too.
func (n Network) Annotations() map[string]string {
	a := map[string]string{}
	if n.KubeProxy {
		a[annotation.KubeProxy] = annotation.KubeProxyAnswers
	}
	if n.Segments != nil {
		a[annotation.Segments] = format(tidy(n.Segments, isSegment, Segment.compare), MaxSegments)
	}
	if n.Gateways != nil {
		a[annotation.Gateways] = format(tidy(n.Gateways, isGateway, netip.Addr.Compare), MaxGateways)
	}
	if n.Conflicts != nil {
		a[annotation.Conflicts] = format(tidy(n.Conflicts, isConflict, compareConflicts), MaxConflicts)
	}
	return a
}

// ParseNetwork reads what Annotations wrote. Whoever may write Leases may
// write anything: what is malformed or out of bounds is ignored.
func ParseNetwork(annotations map[string]string) Network {
	n := Network{KubeProxy: annotations[annotation.KubeProxy] == annotation.KubeProxyAnswers}
	if text, ok := annotations[annotation.Segments]; ok {
		n.Segments = tidy(parse(text, MaxSegments, parseSegment), isSegment, Segment.compare)
	}
	if text, ok := annotations[annotation.Gateways]; ok {
		n.Gateways = tidy(parse(text, MaxGateways, netip.ParseAddr), isGateway, netip.Addr.Compare)
	}
	if text, ok := annotations[annotation.Conflicts]; ok {
		n.Conflicts = tidy(parse(text, MaxConflicts, ParseConflict), isConflict, compareConflicts)
	}
	return n
}

// maxInterface is IFNAMSIZ without the terminating zero.
const maxInterface = 15

// isSegment reports whether other hosts can be on the subnet, and VIPs, and
// whether the interface's name can be written in a list.
func isSegment(s Segment) bool {
	p := s.Subnet
	return s.Interface != "" && len(s.Interface) <= maxInterface && !strings.Contains(s.Interface, ",") &&
		p == p.Masked() && !p.IsSingleIP() && p.Bits() > 0 && p.Addr().IsGlobalUnicast() && !p.Addr().Is4In6()
}

func isGateway(a netip.Addr) bool {
	return a.IsGlobalUnicast() && a.Zone() == "" && !a.Is4In6()
}

// tidy returns those that are good, sorted, each once; never nil.
func tidy[T comparable](all []T, good func(T) bool, compare func(T, T) int) []T {
	kept := make([]T, 0, len(all))
	for _, v := range all {
		if good(v) {
			kept = append(kept, v)
		}
	}
	slices.SortFunc(kept, compare)
	return slices.Compact(kept)
}

// format joins at most limit of them.
func format[T fmt.Stringer](all []T, limit int) string {
	var texts []string
	for _, v := range all[:min(len(all), limit)] {
		texts = append(texts, v.String())
	}
	return strings.Join(texts, ",")
}

// parse returns what the first limit items of the text spell.
func parse[T any](text string, limit int, read func(string) (T, error)) []T {
	var all []T
	for item := range strings.SplitSeq(text, ",") {
		if limit--; limit < 0 {
			break
		}
		if v, err := read(strings.TrimSpace(item)); err == nil {
			all = append(all, v)
		}
	}
	return all
}
