package plan

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// A tenant that moves its Service through a large pool, and changes its labels all the time, fills no memory.
func TestRoutesOfTheTableAreBounded(t *testing.T) {
	t.Parallel()
	document := "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: six, addresses: [\"2001:db8::/64\"]}]\n" +
		"peers: [{name: tor, address: 192.0.2.1, localASN: 64512, peerASN: 64513}]\nadvertisements:\n"
	for i := range 13 {
		document += fmt.Sprintf("  - {name: a%d, bgp: {aggregationLengthV6: 120}, serviceSelector: {matchLabels: {l%d: on}}}\n", i, i)
	}
	c, err := config.Parse([]byte(document))
	require.NoError(t, err)
	p := NewPlanner("n1")
	p.Set(c, map[string]Node{"n1": {Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.2")}}}, map[string]bool{"n1": true})
	vip := netip.MustParseAddr("2001:db8::").As16()
	for i := range 2 * maxScopes {
		vip[13], vip[14] = byte(i>>8), byte(i)
		labels := map[string]string{}
		for bit := range 13 {
			if i>>bit&1 == 1 {
				labels[fmt.Sprint("l", bit)] = "on"
			}
		}
		p.Put(Service{Name: "shop/web", VIPs: []netip.Addr{netip.AddrFrom16(vip)}, Labels: labels, Serving: true})
		p.Update()
	}
	require.NotEmpty(t, p.Plan().BGP.Routes)
	require.LessOrEqual(t, len(p.router.table.inside), maxScopes)
	require.LessOrEqual(t, len(p.router.table.byOffers), maxScopes)
}
