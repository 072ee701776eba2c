package bgp

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv6"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// Anybody on the link may send an advertisement, with any options.
func FuzzAdvertisement(f *testing.F) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	prefix := &ndp.PrefixInformation{PrefixLength: 64, OnLink: true, Prefix: netip.MustParseAddr("2001:db8::")}
	for _, m := range []ndp.Message{
		&ndp.RouterAdvertisement{},
		&ndp.RouterAdvertisement{RouterLifetime: time.Hour, Options: []ndp.Option{prefix, &ndp.MTU{MTU: 1500},
			&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac},
			&ndp.RecursiveDNSServer{Lifetime: time.Hour, Servers: []netip.Addr{netip.MustParseAddr("2001:db8::53")}},
			&ndp.DNSSearchList{Lifetime: time.Hour, DomainNames: []string{"example.com"}}}},
		&ndp.RouterSolicitation{},
	} {
		b, err := ndp.MarshalMessage(m)
		require.NoError(f, err)
		f.Add(b, ndp.HopLimit, []byte(netip.MustParseAddr("fe80::1").AsSlice()))
	}
	f.Fuzz(func(t *testing.T, b []byte, hops int, source []byte) {
		from, _ := netip.AddrFromSlice(source)
		ok := false
		testcost.Within(t, "an advertisement", len(b), func() { ok = advertises(b, &ipv6.ControlMessage{HopLimit: hops}, from) })
		if m, err := ndp.ParseMessage(b); err == nil {
			_, advertisement := m.(*ndp.RouterAdvertisement)
			require.Equal(t, advertisement && b[1] == 0 && hops == ndp.HopLimit && from.IsLinkLocalUnicast(), ok)
		}
		if !ok {
			return
		}
		require.Equal(t, byte(ipv6.ICMPTypeRouterAdvertisement), b[0])
		require.Equal(t, ndp.HopLimit, hops)
		require.True(t, from.Is6() && from.IsLinkLocalUnicast(), from)
	})
}
