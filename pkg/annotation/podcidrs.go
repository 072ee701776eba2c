package annotation

import (
	"net/netip"
	"strings"
)

// maxPodCIDRs is the most that a Lease tells; a node has one of each family.
const maxPodCIDRs = 8

// FormatRoutedPodCIDRs returns the value of RoutedPodCIDRs.
func FormatRoutedPodCIDRs(cidrs []netip.Prefix) string {
	var texts []string
	for _, c := range cidrs[:min(len(cidrs), maxPodCIDRs)] {
		texts = append(texts, c.String())
	}
	return strings.Join(texts, ",")
}

// ParseRoutedPodCIDRs reads what FormatRoutedPodCIDRs wrote. Whoever may write
// Leases may write anything: what is malformed or too much is ignored.
func ParseRoutedPodCIDRs(value string) []netip.Prefix {
	var cidrs []netip.Prefix
	for part := range strings.SplitSeq(value, ",") {
		if c, err := netip.ParsePrefix(part); err == nil && len(cidrs) < maxPodCIDRs {
			cidrs = append(cidrs, c.Masked())
		}
	}
	return cidrs
}
