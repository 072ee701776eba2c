package annotation_test

import (
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

func TestParseBGPASN(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]uint32{"1": 1, "64512": 64512, "4294967294": 4294967294} {
		got, err := annotation.ParseBGPASN(value)
		require.NoError(t, err, value)
		assert.Equal(t, want, got)
	}
	for value, reason := range map[string]string{
		"": "decimal digits", "-1": "decimal digits", "1.10": "decimal digits", "064512": "decimal digits", "AS64512": "decimal digits",
		" 1":         "decimal digits",
		"4294967296": "from 1 to 4294967294", "0": "RFC 7607", "23456": "AS_TRANS", "65535": "RFC 7300", "4294967295": "RFC 7300",
	} {
		_, err := annotation.ParseBGPASN(value)
		require.ErrorContains(t, err, "lodestone.io/bgp-asn is "+strconv.Quote(value)+", which ", value)
		assert.ErrorContains(t, err, reason)
	}
}

func TestParseBGPRouterID(t *testing.T) {
	t.Parallel()
	id, err := annotation.ParseBGPRouterID("192.0.2.1")
	require.NoError(t, err)
	assert.Equal(t, netip.MustParseAddr("192.0.2.1"), id)
	for _, value := range []string{"", "0.0.0.0", "1", "::1", "::ffff:192.0.2.1", "192.0.2.1/32", "192.0.2.1 "} {
		_, err := annotation.ParseBGPRouterID(value)
		require.ErrorContains(t, err, "lodestone.io/bgp-router-id is "+strconv.Quote(value))
	}
}

func TestParseBGPSourceAddress(t *testing.T) {
	t.Parallel()
	for value, want := range map[string][]string{
		"198.18.0.1": {"198.18.0.1"}, "fe80::1": {"fe80::1"},
		"198.18.0.1,2001:db8::1": {"198.18.0.1", "2001:db8::1"}, " 2001:db8::1 , 198.18.0.1 ": {"2001:db8::1", "198.18.0.1"},
	} {
		got, err := annotation.ParseBGPSourceAddress(value)
		require.NoError(t, err, value)
		var text []string
		for _, a := range got {
			text = append(text, a.String())
		}
		assert.Equal(t, want, text)
	}
	for _, value := range []string{
		"", ",", "198.18.0.1,", "198.18.0.1,198.18.0.2", "2001:db8::1,2001:db8::2", "198.18.0.1,2001:db8::1,198.18.0.2",
		"198.18.0.1/24", "fe80::1%eth0", "::ffff:198.18.0.1", "0.0.0.0", "::", "224.0.0.5", "eth0",
	} {
		_, err := annotation.ParseBGPSourceAddress(value)
		require.ErrorContains(t, err, "lodestone.io/bgp-source-address is "+strconv.Quote(value))
	}
}
