package annotation

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// InvalidError is about an annotation whose value is not understood. Two of the same text are equal.
type InvalidError struct{ text string }

// Error names the annotation, its value and what it may be.
func (e InvalidError) Error() string { return e.text }

// invalid returns the InvalidError of a value, which is cut if it is long.
func invalid(name, value, what string) error {
	return InvalidError{fmt.Sprintf("%s is %.40q, %s", name, value, what)}
}

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

// MaxConnectionRateLimit is the highest ConnectionRateLimit: above it the
// kernel's arithmetic in whole nanoseconds per connection gets coarse.
const MaxConnectionRateLimit = 1_000_000

// ParseConnectionRateLimit reads the value of ConnectionRateLimit, in new connections per second:
// a whole number in decimal digits from 1 to MaxConnectionRateLimit. The error is an InvalidError.
func ParseConnectionRateLimit(value string) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n < 1 || n > MaxConnectionRateLimit {
		return 0, invalid(ConnectionRateLimit, value,
			fmt.Sprintf("not a whole number of connections per second from 1 to %d", MaxConnectionRateLimit))
	}
	return uint32(n), nil
}

// ParseAddressCount reads the value of AddressCount: a whole number in decimal digits from 1 to
// config.MaxServiceAddresses. The error is an InvalidError.
func ParseAddressCount(value string) (int, error) {
	n, err := strconv.ParseUint(value, 10, 8)
	if err != nil || n < 1 || n > config.MaxServiceAddresses {
		return 0, invalid(AddressCount, value, fmt.Sprintf("not a whole number from 1 to %d", config.MaxServiceAddresses))
	}
	return int(n), nil
}
