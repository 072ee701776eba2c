package annotation_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// Each value is valid and within its bounds, or its error is short and on one line.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", ",", "0", "1", "8", "9", "100", "1000000", "1000001", "-1", "\x00", "9\n", "64512", "1.10", "4294967295",
		"198.18.0.1", "198.18.0.1,2001:db8::1", "fe80::1%eth0", "::ffff:198.18.0.1", strings.Repeat("0", 64<<10), strings.Repeat(",", 64<<10),
		strings.Repeat("198.18.0.1,", 6<<10), strings.Repeat(" ", 64<<10)} {
		f.Add(seed)
	}
	parsers := map[string]func(*testing.T, string) error{
		annotation.BGPASN: func(t *testing.T, value string) error {
			n, err := annotation.ParseBGPASN(value)
			require.Equal(t, err == nil, n > 0)
			return err
		},
		annotation.BGPRouterID: func(t *testing.T, value string) error {
			id, err := annotation.ParseBGPRouterID(value)
			require.Equal(t, err == nil, id.Is4() && !id.IsUnspecified())
			return err
		},
		annotation.BGPSourceAddress: func(t *testing.T, value string) error {
			addrs, err := annotation.ParseBGPSourceAddress(value)
			require.Equal(t, err == nil, len(addrs) > 0)
			require.False(t, len(addrs) > 2 || len(addrs) == 2 && addrs[0].Is4() == addrs[1].Is4(), addrs)
			return err
		},
		annotation.ConnectionRateLimit: func(t *testing.T, value string) error {
			n, err := annotation.ParseConnectionRateLimit(value)
			require.Equal(t, err == nil, n >= 1 && n <= annotation.MaxConnectionRateLimit)
			return err
		},
		annotation.AddressCount: func(t *testing.T, value string) error {
			n, err := annotation.ParseAddressCount(value)
			require.Equal(t, err == nil, n >= 1 && n <= config.MaxServiceAddresses)
			return err
		},
	}
	f.Fuzz(func(t *testing.T, value string) {
		for name, parse := range parsers {
			var err error
			testcost.Within(t, name, len(value), func() { err = parse(t, value) })
			if err != nil && (!strings.HasPrefix(err.Error(), name+" is ") || len(err.Error()) > 600 || strings.ContainsRune(err.Error(), '\n')) {
				t.Fatalf("%q gives an error that no log line holds: %q", value, err)
			}
		}
	})
}
