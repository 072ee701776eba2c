package compat_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// with returns the dialects of a configuration that has the compatibility and
// two pools that lease their addresses.
func with(c ...config.Compatibility) compat.Dialects {
	return compat.For(&config.Config{Compatibility: c, Pools: []config.Pool{
		{Name: "lan"}, {Name: "office", DHCP: &config.DHCP{Interface: "eth1"}}, {Name: "lab", DHCP: &config.DHCP{Interface: "eth2"}},
	}})
}

func service(annotations ...string) *corev1.Service {
	svc := &corev1.Service{}
	svc.Annotations = map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		svc.Annotations[annotations[i]] = annotations[i+1]
	}
	return svc
}

func TestRead(t *testing.T) {
	t.Parallel()
	metalLB, kubeVIP, both := with(config.MetalLB), with(config.KubeVIP), with(config.MetalLB, config.KubeVIP)
	for name, c := range map[string]struct {
		dialects                compat.Dialects
		annotations             []string
		pools, addresses, share string
	}{
		"nothing is understood unasked": {with(),
			[]string{"metallb.io/address-pool", "lan", "metallb.io/allow-shared-ip", "k", "kube-vip.io/loadbalancerIPs", "192.0.2.7"},
			"", "", ""},
		"ours always": {with(),
			[]string{annotation.AddressPool, "lan, dmz", annotation.Addresses, "192.0.2.7", annotation.SharingKey, "k"}, "lan, dmz",
			"192.0.2.7", "k"},
		"metallb": {metalLB,
			[]string{"metallb.io/address-pool", "prod.v4", "metallb.io/loadBalancerIPs", "192.0.2.7,2001:db8::7",
				"metallb.io/allow-shared-ip", "k"}, "prod-v4", "192.0.2.7,2001:db8::7", "k"},
		"a name of old": {metalLB, []string{"metallb.universe.tf/address-pool", "Prod_1"}, "prod-1", "", ""},
		"a long name": {metalLB, []string{"metallb.io/address-pool", strings.Repeat("a", 64)},
			strings.Repeat("a", 54) + "-ffe054fe", "", ""},
		"metallb of old": {metalLB,
			[]string{"metallb.universe.tf/address-pool", "lan", "metallb.universe.tf/loadBalancerIPs", "192.0.2.7",
				"metallb.universe.tf/allow-shared-ip", "k"}, "lan", "192.0.2.7", "k"},
		"new before old": {metalLB,
			[]string{"metallb.io/address-pool", "new", "metallb.universe.tf/address-pool", "old", "metallb.io/allow-shared-ip", "",
				"metallb.universe.tf/allow-shared-ip", "k"}, "new", "", ""},
		"ours win one by one": {metalLB,
			[]string{annotation.AddressPool, "ours", "metallb.io/address-pool", "theirs", "metallb.io/loadBalancerIPs", "192.0.2.7"},
			"ours", "192.0.2.7", ""},
		"only what is asked for": {metalLB, []string{"kube-vip.io/loadbalancerIPs", "192.0.2.7"}, "", "", ""},
		"kube-vip shares by address": {kubeVIP, []string{"kube-vip.io/loadbalancerIPs", "2001:DB8::7, 192.0.2.7"}, "",
			"2001:DB8::7, 192.0.2.7", "kube-vip 192.0.2.7,2001:db8::7"},
		"our key is stronger": {kubeVIP, []string{"kube-vip.io/loadbalancerIPs", "192.0.2.7", annotation.SharingKey, "k"},
			"", "192.0.2.7", "k"},
		"our addresses are stronger": {kubeVIP,
			[]string{"kube-vip.io/loadbalancerIPs", "0.0.0.0", annotation.Addresses, "192.0.2.8"}, "", "192.0.2.8", ""},
		"a lease": {kubeVIP, []string{"kube-vip.io/loadbalancerIPs", "0.0.0.0"}, "office,lab", "", ""},
		"a lease of one pool": {kubeVIP, []string{"kube-vip.io/loadbalancerIPs", "0.0.0.0", annotation.AddressPool, "lab"},
			"lab", "", ""},
		"both ask for the same": {both,
			[]string{"metallb.io/loadBalancerIPs", "192.0.2.7,2001:db8::7", "kube-vip.io/loadbalancerIPs", "2001:db8:0::7,192.0.2.7"},
			"", "192.0.2.7,2001:db8::7", ""},
		"ours ends their quarrel": {both,
			[]string{annotation.Addresses, "192.0.2.9", "metallb.io/loadBalancerIPs", "192.0.2.7", "kube-vip.io/loadbalancerIPs",
				"192.0.2.8"}, "", "192.0.2.9", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, err := c.dialects.Read(service(c.annotations...))
			require.NoError(t, err)
			assert.Equal(t, []string{c.pools, c.addresses, c.share}, []string{w.Pools.Text, w.Addresses.Text, w.SharingKey.Text})
		})
	}
}

func TestContradictionsAreNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		annotations []string
		contains    []string
	}{
		"two addresses": {
			[]string{"metallb.io/loadBalancerIPs", "192.0.2.7", "kube-vip.io/loadbalancerIPs", "192.0.2.8"},
			[]string{"metallb.io/loadBalancerIPs", `"192.0.2.7"`, "kube-vip.io/loadbalancerIPs", `"192.0.2.8"`, annotation.Addresses},
		},
		"a lease and an address": {[]string{"kube-vip.io/loadbalancerIPs", "0.0.0.0,2001:db8::1"},
			[]string{"kube-vip.io/loadbalancerIPs", `"0.0.0.0,2001:db8::1"`, "DHCP"}},
		"a lease of an IPv6 address": {[]string{"kube-vip.io/loadbalancerIPs", "::"}, []string{"DHCP", "IPv4"}},
		"a long one is cut to length": {[]string{"kube-vip.io/loadbalancerIPs", "0.0.0.0," + strings.Repeat("1", 300_000)},
			[]string{"DHCP"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := with(config.MetalLB, config.KubeVIP).Read(service(c.annotations...))
			require.Error(t, err)
			for _, words := range c.contains {
				assert.Contains(t, err.Error(), words)
			}
			assert.Less(t, len(err.Error()), 600)
		})
	}
}

func TestALeaseNeedsAPoolThatLeases(t *testing.T) {
	t.Parallel()
	d := compat.For(&config.Config{Compatibility: []config.Compatibility{config.KubeVIP}, Pools: []config.Pool{{Name: "lan"}}})
	svc := service()
	svc.Spec.LoadBalancerIP = "0.0.0.0"
	_, err := d.Read(svc)
	require.ErrorContains(t, err, "spec.loadBalancerIP")
	require.ErrorContains(t, err, "no pool has dhcp")

	w, err := with(config.KubeVIP).Read(svc)
	require.NoError(t, err)
	require.Equal(t, compat.Wishes{Pools: compat.Wish{Annotation: "spec.loadBalancerIP", Text: "office,lab"}}, w)

	w, err = with(config.MetalLB).Read(svc)
	require.NoError(t, err)
	require.Equal(t, "0.0.0.0", w.LoadBalancerIP, "to MetalLB it is an address")
}

// Without a configuration nothing is given, and sharing is kept as it is.
func TestWithoutConfigurationEverythingIsUnderstood(t *testing.T) {
	t.Parallel()
	w, err := compat.For(nil).Read(service("metallb.universe.tf/allow-shared-ip", "k"))
	require.NoError(t, err)
	require.Equal(t, "k", w.SharingKey.Text)
}

func FuzzRead(f *testing.F) {
	f.Add("192.0.2.7", "0.0.0.0", "", "")
	f.Add("", "::,192.0.2.7", "0.0.0.0", "192.0.2.1")
	f.Add(",,", " ", "\x00", "fe80::1%eth0")
	f.Fuzz(func(t *testing.T, metalLB, kubeVIP, ip, ours string) {
		svc := service("metallb.io/loadBalancerIPs", metalLB, "kube-vip.io/loadbalancerIPs", kubeVIP, annotation.Addresses, ours)
		svc.Spec.LoadBalancerIP = ip
		var w compat.Wishes
		var err error
		testcost.Within(t, "annotations", len(metalLB)+len(kubeVIP)+len(ip)+len(ours), func() {
			w, err = with(config.MetalLB, config.KubeVIP).Read(svc)
		})
		if text := strings.TrimSpace(ours); text != "" && w.Addresses != (compat.Wish{Annotation: annotation.Addresses, Text: text}) {
			t.Fatalf("%q are ours, and %+v is read", ours, w.Addresses)
		}
		if err != nil && len(err.Error()) > 1200 {
			t.Fatalf("an error that no condition holds: %q", err)
		}
	})
}

// The cost of reading annotations of a tenant, up to 256 KiB, is linear in their length.
func TestCostOfLongAnnotations(t *testing.T) {
	for name, item := range map[string]string{"addresses": "192.0.2.1,", "commas": ",", "no addresses": "a,", "any": "0.0.0.0,"} {
		svc := func(size int) *corev1.Service {
			text := strings.Repeat(item, size/len(item))
			s := service("metallb.io/loadBalancerIPs", text, "kube-vip.io/loadbalancerIPs", text, "metallb.io/address-pool", text)
			s.Spec.LoadBalancerIP = text
			return s
		}
		d := with(config.MetalLB, config.KubeVIP)
		testcost.Grows(t, name, svc(16<<10), svc(testcost.Growth*16<<10), func(s *corev1.Service) { _, _ = d.Read(s) })
	}
}
