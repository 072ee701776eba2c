package annotation

import (
	"net/netip"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// ParseBGPASN reads the value of BGPASN, an AS number as config.ParseASN reads
// it. The error is an InvalidError.
func ParseBGPASN(value string) (uint32, error) {
	asn, err := config.ParseASN(value)
	if err != nil {
		return 0, invalid(BGPASN, value, "which "+err.Error())
	}
	return asn, nil
}

// ParseBGPRouterID reads the value of BGPRouterID, in the form of an IPv4
// address other than 0.0.0.0. The error is an InvalidError.
func ParseBGPRouterID(value string) (netip.Addr, error) {
	id, err := netip.ParseAddr(value)
	if err != nil || !id.Is4() || id.IsUnspecified() {
		return netip.Addr{}, invalid(BGPRouterID, value, "not a router ID in the form of an IPv4 address other than 0.0.0.0")
	}
	return id, nil
}

// ParseBGPSourceAddress reads the value of BGPSourceAddress: one address, or
// one of each family, separated by a comma. The error is an InvalidError.
func ParseBGPSourceAddress(value string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for part := range strings.SplitSeq(value, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() ||
			len(addrs) == 2 || len(addrs) == 1 && a.Is4() == addrs[0].Is4() {
			return nil, invalid(BGPSourceAddress, value, "not an address of the node, or one IPv4 and one IPv6 address with a comma between")
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}
