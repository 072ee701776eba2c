package explain

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func parse(t *testing.T, document string) *config.Config {
	t.Helper()
	c, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + document))
	require.NoError(t, err)
	return c
}

// The explanation of a pool has each restriction of who may draw from it.
func TestWhoMayDrawFromAPool(t *testing.T) {
	t.Parallel()
	for pool, want := range map[string][]string{
		"":                     {"Services of every namespace"},
		", state: draining":    {"nobody: it is draining and gives no new addresses"},
		", namespaces: [a, b]": {"Services of the namespaces a, b"},
		", namespaceSelector: {matchLabels: {team: web}}": {`Services of namespaces with labels team=web`},
		", namespaces: [a], namespaceSelector: {matchLabels: {team: web}}": {
			"Services of the namespaces a, and of those with labels team=web"},
		", serviceSelector: {matchLabels: {tier: front}}, autoAssign: false, namespaceQuota: 3, requesters: [ops]": {
			"Services of every namespace", "only Services with labels tier=front", "only Services that name it (autoAssign is false)",
			"at most 3 addresses of each family for a namespace", "particular addresses only for the namespaces ops"},
	} {
		c := parse(t, "pools: [{name: lan, addresses: [203.0.113.0/24]"+pool+"}]\n")
		assert.Equal(t, want, draws(&c.Pools[0]), pool)
	}
}

func TestPoolsThatComeBefore(t *testing.T) {
	t.Parallel()
	c := parse(t, `pools:
- {name: first, addresses: [203.0.113.0/28], priority: 10}
- {name: named, addresses: [203.0.113.16/28], priority: 1, autoAssign: false}
- {name: full, addresses: [203.0.113.32/28], priority: 1, state: draining}
- {name: lan, addresses: [203.0.113.48/28], priority: 10}
- {name: later, addresses: [203.0.113.64/28], priority: 10}
- {name: cheap, addresses: [203.0.113.80/28], priority: 5}
- {name: dear, addresses: [203.0.113.96/28], priority: 20}
`)
	assert.Equal(t, []string{
		"pool first, as long as it is open to the Service and has addresses: it has the same priority and is earlier in the document",
		"pool cheap, as long as it is open to the Service and has addresses: its priority is 5, this one's 10",
	}, shadows(c, &c.Pools[3]))
}

func TestWhatAnnouncesAPool(t *testing.T) {
	t.Parallel()
	c := parse(t, `pools: [{name: lan, addresses: [203.0.113.0/28, 203.0.113.32, 203.0.113.40-203.0.113.42], advertise: [both, all]}]
advertisements: [{name: both, layer2: {}, bgp: {peers: [tor]}}, {name: all, bgp: {}}, {name: other, layer2: {}}]
peers: [{name: tor, localASN: 64512, peerASN: 64513, address: 192.0.2.1}]
`)
	assert.Equal(t, []string{"both: layer 2 and BGP to tor", "all: BGP to all peers"}, advertisements(c, &c.Pools[0]))
	var ranges []string
	for _, r := range c.Pools[0].Free.Ranges() {
		ranges = append(ranges, config.RangeText(r))
	}
	assert.Equal(t, []string{"203.0.113.1-203.0.113.14", "203.0.113.32", "203.0.113.40-203.0.113.42"}, ranges)
	assert.True(t, Pool{Warnings: []string{"it has an address of a node"}, Advertisements: []string{"both"}}.Troubled())
	assert.True(t, Pool{}.Troubled(), "nobody announces it")
	assert.False(t, Pool{Advertisements: []string{"both"}}.Troubled())
}

// How soon a router that is gone is noticed: what an operator of BGP asks first.
func TestDetectionOfALostRouter(t *testing.T) {
	t.Parallel()
	for peer, want := range map[string]string{
		", holdTime: 90s": "after the hold time of 1m30s",
		", holdTime: 0s, bfd: {transmitInterval: 300ms, receiveInterval: 300ms}": "by BFD after about 900ms (3 packets at 300ms), else not by " +
			"BGP: there is no hold time",
		", holdTime: 9s, bfd: {transmitInterval: 100ms, receiveInterval: 100ms, detectMultiplier: 5}": "by BFD after about 500ms (5 packets at " +
			"100ms), else after the hold time of 9s",
		", holdTime: 90s, gracefulRestart: {restartTime: 2m}": "after the hold time of 1m30s; a router that agreed to graceful restart keeps " +
			"the routes of a node whose speaker ended for up to 2m0s",
	} {
		c := parse(t, "peers: [{name: tor, localASN: 64512, peerASN: 64513, address: 192.0.2.1"+peer+"}]\n")
		assert.Equal(t, want, Detection(&c.Peers[0]), peer)
	}
}

func TestWhereARouterIs(t *testing.T) {
	t.Parallel()
	for peer, want := range map[string]string{
		"localASN: 64512, peerASN: 64513, address: 192.0.2.1":      "192.0.2.1:179, in AS 64513; the nodes in AS 64512",
		"localASN: 64512, peerASN: internal, address: 2001:db8::1": "[2001:db8::1]:179, in the same AS as the nodes; the nodes in AS 64512",
		"peerASN: external, interface: eth1": "on interface eth1 (unnumbered), in another AS than the nodes; " +
			"the nodes in that of their annotation",
		"localASN: 1, peerASN: 2, address: 192.0.2.1, passive: true": "192.0.2.1:179, in AS 2; the nodes in AS 1; the router connects",
	} {
		c := parse(t, "peers: [{name: tor, "+peer+"}]\n")
		assert.Equal(t, want, router(&c.Peers[0]), peer)
	}
}

func TestAnnouncers(t *testing.T) {
	t.Parallel()
	for want, a := range map[string]simulation.Audience{
		"nobody": {}, "n1": {Owner: "n1"}, "n1, n2 by BGP": {Routers: []string{"n1", "n2"}},
		"n1; n2 by BGP": {Owner: "n1", Routers: []string{"n2"}},
	} {
		assert.Equal(t, want, a.String())
	}
}

// An address that one Service gives up and another one gets is not lost.
func TestAddressesThatAnEditLoses(t *testing.T) {
	t.Parallel()
	held := func(texts ...string) (h []ipam.Held) {
		for _, text := range texts {
			h = append(h, ipam.Held{Addr: netip.MustParseAddr(text)})
		}
		return h
	}
	var a, b simulation.Outcome
	a.Before.Held, a.After.Held = held("203.0.113.1", "203.0.113.2"), held("203.0.113.2")
	b.Before.Held, b.After.Held = held("203.0.113.3", "203.0.113.4"), held("203.0.113.1", "203.0.113.4")
	assert.Equal(t, map[netip.Addr]bool{netip.MustParseAddr("203.0.113.3"): true}, lostIn([]simulation.Outcome{a, b}))
}

// Nodes that are silent for the same reason share a sentence; a VIP without nodes has one, too.
func TestSilences(t *testing.T) {
	t.Parallel()
	v := VIP{VIP: netip.MustParseAddr("203.0.113.1"), Silence: "NoOwner: nobody can"}
	assert.Equal(t, []string{"203.0.113.1: NoOwner: nobody can"}, v.silences())
	v.Nodes = []VIPNode{{Node: "n1", Reason: plan.NodeExcluded, Message: "its label"}, {Node: "n2", Peers: []string{"tor"}},
		{Node: "n3", Reason: plan.NodeExcluded, Message: "its label"}}
	assert.Equal(t, []string{"203.0.113.1 not from n1, n3: NodeExcluded: its label"}, v.silences())
	assert.Equal(t, []string{"203.0.113.1 by BGP from n2 to tor"}, v.announcement())
	v.Silence = ""
	assert.Empty(t, v.silences())
}
