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

// Objects name and select each other. What would be the product of their numbers took minutes, or
// more memory than a machine has, and no configuration holds it.
func TestCostOfObjectsThatNameEachOther(t *testing.T) {
	const of = "{apiVersion: metallb.io/v1beta1, kind: "
	times := func(n int, item string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(strings.ReplaceAll(item, "%d", strconv.Itoa(i)))
		}
		return b.String()
	}
	many := func(n int, object string) string { return times(n, object+"\n---\n") }
	const selector = "{matchLabels: {n%d: x}},"
	const pod = "{apiVersion: v1, kind: Pod, metadata: {name: k%d}, spec: {containers: [{image: kube-vip, env: ["
	for name, write := range map[string]func(n int) string{
		"selectors of nodes and of Services": func(n int) string {
			return many(1, of+"L2Advertisement, metadata: {name: a}, spec: {nodeSelectors: ["+times(n, selector)+
				"], serviceSelectors: ["+times(n, selector)+"]}}")
		},
		"a peer with many selectors": func(n int) string {
			return strings.Replace(peer, "peerAddress:", "nodeSelectors: ["+times(n, selector)+"], peerAddress:", 1) + "\n---\n" +
				many(n, of+"BGPAdvertisement, metadata: {name: a%d}, spec: {peers: [tor]}}")
		},
		"an advertisement with many selectors and interfaces": func(n int) string {
			return many(1, of+"L2Advertisement, metadata: {name: a}, spec: {interfaces: ["+times(n, "eth%d,")+
				"], nodeSelectors: ["+times(n, selector)+"]}}")
		},
		"settings of kube-vip": func(n int) string {
			return many(1, pod+times(n, "{name: e%d, value: x},")+"]}]}}") + many(n, pod+"{name: e%d, value: x}]}]}}")
		},
		"namespaces and nodes of kube-vip": func(n int) string {
			return many(1, "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {"+
				times(n, "range-n%d: '2001:db8::%d-2001:db8::%d',")+"}}") +
				"{apiVersion: v1, kind: Pod, metadata: {name: k}, spec: {containers: [{image: kube-vip}], affinity: {nodeAffinity: " +
				"{requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" +
				times(n, "{matchExpressions: [{key: n%d, operator: Exists}]},") + "]}}}}}"
		},
	} {
		t.Run(name, func(t *testing.T) {
			testcost.Grows(t, "the migration", write(1000), write(testcost.Growth*1000), both)
		})
	}
}

// What is too much for a configuration is an error with a hint.
func TestTooMuchForAConfiguration(t *testing.T) {
	t.Parallel()
	var pools, selectors strings.Builder
	for i := range 600 {
		fmt.Fprintf(&pools, "\n---\n{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p%d}, "+
			"spec: {addresses: [10.0.%d.%d]}}\n---\n", i, i/256, i%256)
		fmt.Fprintf(&pools, "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: l%d}}", i)
		fmt.Fprintf(&selectors, "{matchLabels: {n%d: '%060d'}},", i, 0)
	}
	for name, text := range map[string]string{
		"pools and advertisements": pools.String(),
		"selectors": "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a}, spec: {nodeSelectors: [" +
			selectors.String() + "], serviceSelectors: [" + selectors.String() + "]}}",
		"one long list": "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a}, spec: {interfaces: [" +
			strings.Repeat("eth0,", 1000) + "], nodeSelectors: [" + selectors.String() + "]}}",
	} {
		_, err := migrate.MetalLB(read(t, text))
		require.ErrorContains(t, err, "migrate them in parts", name)
	}
}

// The cost of a migration is linear in the length of its input, also if a part of the input is repeated many
// times.
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
