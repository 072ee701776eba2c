package migrate_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/migrate"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// both migrates a text as if it were of either load balancer.
func both(text string) {
	objects, err := migrate.Read("in.yaml", strings.NewReader(text))
	if err != nil {
		return
	}
	_, _ = migrate.MetalLB(objects)
	_, _ = migrate.KubeVIP(objects)
}

// Four times as many objects, or as much in one, cost about four times as much.
func TestCostGrowsWithTheObjects(t *testing.T) {
	const (
		pools = "{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p%d}, spec: {addresses: [%a]}}\n---\n"
		peers = "{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: r%d}, spec: {myASN: 64512, peerASN: 64513, " +
			"peerAddress: %a, bfdProfile: b%d}}\n---\n"
		profiles = "{apiVersion: metallb.io/v1beta1, kind: BFDProfile, metadata: {name: b%d}}\n---\n"
		l2       = "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: l%d}, spec: {ipAddressPools: [p%d]}}\n---\n"
		bgp      = "{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: l%d}, spec: {ipAddressPools: [p%d], " +
			"localPref: 1, peers: [r%d]}}\n---\n"
	)
	numbered := func(n int, item string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(strings.NewReplacer("%a", fmt.Sprintf("10.%d.%d.%d", 2*i>>16&255, 2*i>>8&255, 2*i&255), "%d",
				strconv.Itoa(i)).Replace(item))
		}
		return b.String()
	}
	for name, write := range map[string]func(n int) string{
		"pools nobody announces": func(n int) string { return numbered(n, pools) },
		"pools and advertisements": func(n int) string {
			return numbered(n/2, pools) + numbered(n/2, l2)
		},
		"peers and profiles": func(n int) string { return numbered(n/2, peers) + numbered(n/2, profiles) },
		"peers and advertisements": func(n int) string {
			return numbered(n/2, strings.ReplaceAll(peers, ", bfdProfile: b%d", "")) + numbered(n/2, bgp)
		},
		"pools of one advertisement": func(n int) string {
			return numbered(n, pools) + strings.ReplaceAll(l2, "[p%d]", "["+numbered(n, "p%d,")+"]")
		},
		"communities": func(n int) string {
			return poolOf("addresses: [192.0.2.0/24]") + peer + "\n---\n{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, " +
				"metadata: {name: a}, spec: {communities: [" + numbered(n, "'large:1:2:%d',") + "]}}"
		},
		"addresses of kube-vip": func(n int) string {
			return "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {range-global: '" + numbered(n, "%a-%a,") + "'}}"
		},
		"ranges of kube-vip": func(n int) string {
			return "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {" + numbered(n, "range-n%d: %a-%a,") + "}}"
		},
	} {
		t.Run(name, func(t *testing.T) {
			testcost.Grows(t, "the migration", write(500), write(testcost.Growth*500), both)
		})
	}
}

// What anybody writes costs what its length explains, also when a part of it is
// repeated until there is much of it.
func FuzzCost(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for i, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(text, i%2 == 0, uint16(i), uint16(i/10))
	}
	f.Fuzz(func(t *testing.T, text []byte, commas bool, from, to uint16) {
		const size = 4 << 10
		if len(text) > size {
			return
		}
		separator := byte('\n')
		if commas {
			separator = ','
		}
		small := testcost.Repeat(text, separator, int(from), int(to), size)
		large := testcost.Repeat(text, separator, int(from), int(to), testcost.Growth*len(small))
		testcost.Grows(t, fmt.Sprintf("the migration of %d bytes", len(small)), small, large, both)
	})
}
