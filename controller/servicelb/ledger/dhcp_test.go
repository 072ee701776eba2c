package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// A DHCP server can end thousands of leases at once. Then each Service is written, and what that costs does not grow
// with how many others wait for it.
func TestAServiceThatLostItsLeaseIsSettledByItself(t *testing.T) {
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) }
	crowd := func(n int) func() {
		c := newCluster("pools:\n  - {name: office, dhcp: {interface: eth1}}\n")
		var names []string
		for i := range n {
			names = append(names, fmt.Sprintf("default/web-%d", i))
			c.create(names[i], set("x", ""))
			c.look(names[i])
		}
		follow := func(state func(i int) LeaseState) (lost []Loss) {
			want, _, _ := c.FollowLeases(c.leases, c.now)
			require.Len(t, want["eth1"], n)
			c.leases["eth1"] = map[string]LeaseState{}
			for i, client := range want["eth1"] {
				c.leases["eth1"][client.ID] = state(i)
			}
			_, _, lost = c.FollowLeases(c.leases, c.now)
			return lost
		}
		follow(func(i int) LeaseState { return LeaseState{Addr: addr(i)} })
		for _, name := range names {
			c.look(name)
			c.write(name)
			require.Len(t, c.verdicts[name].Held, 1)
		}
		lost := follow(func(i int) LeaseState { return LeaseState{Lost: addr(i), Err: errors.New("refused")} })
		require.Len(t, lost, n)
		return func() {
			for _, name := range names {
				c.Settle(name, "", c.verdicts[name].Held, c.now) // the API server has refused the write
			}
		}
	}
	testcost.Grows(t, "Services that lost their leases", crowd(1000), crowd(testcost.Growth*1000), func(settle func()) { settle() })
}

// The objects of two Services that share an address may both name it as leased. Which of them the message for another one
// names depends on no order of a map.
func TestTheOldestOfThoseThatShareAnUnconfirmedAddressIsNamed(t *testing.T) {
	t.Parallel()
	for range 30 {
		c := newCluster("pools:\n  - {name: office, dhcp: {interface: eth1}}\n")
		for i := range 5 {
			name := fmt.Sprintf("default/web-%d", i)
			c.create(name, set(annotation.SharingKey, "k"), set(annotation.Assigned, "198.18.0.1"), set(annotation.Leases, "198.18.0.1=eth1"))
			c.services[name].Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.18.0.1"}}
		}
		c.create("default/new", set("x", ""))
		c.restart()
		c.look("default/new")
		want, _, _ := c.FollowLeases(nil, c.now)
		require.Len(t, want["eth1"], 6)
		c.FollowLeases(map[string]map[string]LeaseState{"eth1": {"kubernetes/default/new": {Addr: netip.MustParseAddr("198.18.0.1")}}}, c.now)
		c.look("default/new")
		require.Contains(t, c.verdicts["default/new"].Refusal.Message, "the DHCP server leases 198.18.0.1, which default/web-0 has")
	}
}
