package clusterfacts

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// The most that a Lease tells of a node: what is beyond is not written, and
// not read from a Lease that somebody else wrote.
const (
	MaxSegments = 32
	MaxGateways = 16
)

// Network is what a speaker tells of its node's network.
type Network struct {
	// Segments are the subnets that the node can announce VIPs on. Nil: not
	// known.
	Segments []netip.Prefix
	// Gateways are the node's default gateways. Nil: not known.
	Gateways []netip.Addr
}

// Annotations returns what the speaker's Lease says: what is not known is
// left out, what no pool can contain (link-local gateways, single addresses
// that are no subnet) too.
func (n Network) Annotations() map[string]string {
	a := map[string]string{}
	if n.Segments != nil {
		a[annotation.Segments] = format(tidy(n.Segments, isSegment, netip.Prefix.Compare), MaxSegments)
	}
	if n.Gateways != nil {
		a[annotation.Gateways] = format(tidy(n.Gateways, isGateway, netip.Addr.Compare), MaxGateways)
	}
	return a
}

// ParseNetwork reads what Annotations wrote. Whoever may write Leases may
// write anything: what is malformed or out of bounds is ignored.
func ParseNetwork(annotations map[string]string) Network {
	var n Network
	if text, ok := annotations[annotation.Segments]; ok {
		n.Segments = tidy(parse(text, MaxSegments, netip.ParsePrefix), isSegment, netip.Prefix.Compare)
	}
	if text, ok := annotations[annotation.Gateways]; ok {
		n.Gateways = tidy(parse(text, MaxGateways, netip.ParseAddr), isGateway, netip.Addr.Compare)
	}
	return n
}

// isSegment reports whether other hosts can be on the subnet, and VIPs.
func isSegment(p netip.Prefix) bool {
	return p == p.Masked() && !p.IsSingleIP() && p.Bits() > 0 && p.Addr().IsGlobalUnicast() && !p.Addr().Is4In6()
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
