package core

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// cut is a cluster of four honest nodes and one that was taken over, on two segments.
type cut struct {
	config   *config.Config
	nodes    map[string]plan.Node
	networks map[string]report.Network
	alive    map[string]bool
}

// vipsEach is how many VIPs each segment has.
const vipsEach = 60

var (
	itsSegment, otherSegment = netip.MustParsePrefix("198.18.1.0/24"), netip.MustParsePrefix("198.18.2.0/24")
	itsNeighbours            = []string{"a", "b"}
)

// claiming returns the network of a node that claims to own all VIPs.
func claiming(n report.Network) report.Network {
	for i := range n.Claims {
		n.Claims[i] = 0xff
	}
	return n
}

func claimsAll(c *cut) { c.networks["taken"] = claiming(c.networks["taken"]) }

// have lets the honest nodes claim what they own while nobody lies.
func (c *cut) have() {
	s := c.snapshot()
	for name := range c.nodes {
		n := c.networks[name]
		n.Claims = plan.Make(name, s).Claims
		c.networks[name] = n
	}
}

// snapshot is what every honest speaker knows.
func (c *cut) snapshot() plan.Snapshot {
	s := plan.Snapshot{Config: c.config, Speakers: c.alive, Nodes: locate(c.nodes, c.networks)}
	for _, p := range []netip.Prefix{itsSegment, otherSegment} {
		for vip, i := p.Addr().Next(), 0; i < vipsEach; vip, i = vip.Next(), i+1 {
			s.Services = append(s.Services, plan.Service{Name: "default/" + vip.String(), VIPs: []netip.Addr{vip}, Serving: true})
		}
	}
	return s
}

func onThese(segments ...netip.Prefix) (n report.Network) {
	for _, s := range segments {
		n.Segments = append(n.Segments, report.Segment{Subnet: s, Interface: "eth0"})
	}
	return n
}

// A node that was taken over has the key and its own token: it writes what it likes on its
// Lease, and says what it likes to the other speakers. This is which VIPs they leave to it,
// of 60 on each segment, and security.md says the same.
func TestWhatATakenNodeDraws(t *testing.T) {
	t.Parallel()
	const each, share, none = vipsEach, vipsEach/3 + 6, 0
	for _, tt := range []struct {
		lie              string
		keepOwner        bool
		tell             func(*cut)
		own, other       int // at most
		drawsAllOfItsOwn bool
	}{
		{"nothing", false, func(*cut) {}, share, none, false},
		{"that it is on the other segment, too", false, func(c *cut) { c.networks["taken"] = onThese(itsSegment, otherSegment) }, share,
			share, false},
		{"a thousand times that it is on the other segment", false, func(c *cut) {
			c.networks["taken"] = onThese(append(slices.Repeat([]netip.Prefix{otherSegment}, 1000), itsSegment)...)
		}, share, share, false},
		{"that it owns all", false, claimsAll, share, none, false},
		{"that it owns all, where owners are kept", true, claimsAll, each, none, true},
		{"that it owns all, and is on the other segment, where owners are kept", true, func(c *cut) {
			c.networks["taken"] = onThese(itsSegment, otherSegment)
			claimsAll(c)
		}, each, each, true},
		{"that it owns all, where owners are kept and have theirs", true, func(c *cut) {
			c.have()
			claimsAll(c)
		}, 2 * share, none, false},
		{"that speakers that it makes up own all, where owners are kept", true, func(c *cut) {
			for i := range 32 {
				name := fmt.Sprint("made-up-", i)
				c.alive[name], c.networks[name] = true, claiming(onThese(itsSegment, otherSegment))
			}
		}, share, none, false},
		{"that there are 32 more speakers", false, func(c *cut) {
			for i := range 32 {
				name := fmt.Sprint("made-up-", i)
				c.alive[name], c.networks[name] = true, onThese(itsSegment, otherSegment)
			}
		}, share, none, false},
		{"that its neighbours are lost", false, func(c *cut) {
			for _, n := range itsNeighbours {
				delete(c.alive, n)
			}
		}, each, none, true},
		{"that its neighbours are lost, and that it is on the other segment, too", false, func(c *cut) {
			for _, n := range itsNeighbours {
				delete(c.alive, n)
			}
			c.networks["taken"] = onThese(itsSegment, otherSegment)
		}, each, share, true},
	} {
		document := "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: lan, addresses: [198.18.1.0/24, 198.18.2.0/24]}]\n"
		if tt.keepOwner {
			document += "advertisements: [{name: l2, layer2: {keepOwner: true}}]\n"
		}
		parsed, err := config.Parse([]byte(document))
		require.NoError(t, err)
		c := &cut{parsed, map[string]plan.Node{}, map[string]report.Network{}, map[string]bool{}}
		for name, on := range map[string]netip.Prefix{"a": itsSegment, "b": itsSegment, "taken": itsSegment, "c": otherSegment,
			"d": otherSegment} {
			c.nodes[name], c.networks[name], c.alive[name] = plan.Node{}, onThese(on), true
		}
		tt.tell(c)
		own, other, owners := 0, 0, plan.Owners(c.snapshot())
		require.Len(t, owners, 2*each)
		for vip, owner := range owners {
			assert.Contains(t, c.nodes, owner, "%s is nobody's", vip)
			switch {
			case owner != "taken":
			case itsSegment.Contains(vip):
				own++
			default:
				other++
			}
		}
		t.Logf("it says %s: %d of its own segment, %d of the other one", tt.lie, own, other)
		assert.LessOrEqual(t, own, tt.own, tt.lie)
		assert.LessOrEqual(t, other, tt.other, tt.lie)
		assert.Equal(t, tt.drawsAllOfItsOwn, own == each, tt.lie)
	}
}
