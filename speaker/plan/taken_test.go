package plan_test

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

// cut is a cluster of four honest nodes and one that was taken over, on two segments. Nobody is
// on a third one.
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
	routedSegment            = netip.MustParsePrefix("198.18.3.0/24")
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
	s := plan.Snapshot{Config: c.config, Speakers: c.alive, Nodes: map[string]plan.Node{}}
	for name, n := range c.nodes {
		n.Network = c.networks[name]
		s.Nodes[name] = n
	}
	for _, p := range []netip.Prefix{itsSegment, otherSegment, routedSegment} {
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

// drawn is how many VIPs are left to the node, of 60 each: on its own segment, on the other one,
// and of a pool whose subnet no honest node is on, so that a router has to bring its packets.
type drawn struct{ own, other, routed int }

// A node that was taken over has the key and its own token: it writes what it likes on its
// Lease, and sends what it likes to the other speakers. This is which VIPs they leave to it,
// as security.md states it.
func TestWhatATakenNodeDraws(t *testing.T) {
	t.Parallel()
	const each, third, fifth = vipsEach, vipsEach/3 + 6, vipsEach/5 + 6
	lose := func(names ...string) func(*cut) {
		return func(c *cut) {
			for _, n := range names {
				delete(c.alive, n)
			}
		}
	}
	back := func(c *cut) { c.alive["a"] = true }
	name := func(segments ...netip.Prefix) func(*cut) {
		return func(c *cut) { c.networks["taken"] = onThese(segments...) }
	}
	makeUp := func(n report.Network) func(*cut) {
		return func(c *cut) {
			for i := range 32 {
				name := fmt.Sprint("made-up-", i)
				c.alive[name], c.networks[name] = true, n
			}
		}
	}
	conflicts := func(c *cut) {
		n := c.networks["taken"]
		for _, s := range c.snapshot().Services {
			n.Conflicts = append(n.Conflicts, report.Conflict{VIP: s.VIPs[0], HardwareAddr: [6]byte{2}})
		}
		c.networks["taken"] = n
	}
	kept := "keepOwner: true"
	for _, tt := range []struct {
		lie    string
		layer2 string // of the advertisement
		acts   []func(*cut)
		most   drawn // if that is all of them: exactly
	}{
		{"nothing", "", nil, drawn{third, 0, fifth}},
		{"that it is on the other segment, too", "", []func(*cut){name(itsSegment, otherSegment)}, drawn{third, third, fifth}},
		{"a thousand times that it is on the other segment", "",
			[]func(*cut){name(append(slices.Repeat([]netip.Prefix{otherSegment}, 1000), itsSegment)...)}, drawn{third, third, fifth}},
		{"that it is on every segment", "", []func(*cut){name(netip.MustParsePrefix("0.0.0.0/0"))}, drawn{third, third, each}},
		{"that it is on the segment that no other node is on, too", "", []func(*cut){name(itsSegment, routedSegment)},
			drawn{third, 0, each}},
		{"that it is on every segment, and is not among the nodes that are selected",
			"nodeSelector: {matchLabels: {node-restriction.kubernetes.io/edge: 'yes'}}",
			[]func(*cut){name(netip.MustParsePrefix("0.0.0.0/0"))}, drawn{0, 0, 0}},
		{"that it is on every segment, where that does not count", "anySegment: true",
			[]func(*cut){name(netip.MustParsePrefix("0.0.0.0/0"))}, drawn{fifth, fifth, fifth}},
		{"that other hosts have all VIPs", "", []func(*cut){conflicts}, drawn{third, 0, fifth}},
		{"that other hosts have all VIPs, where owners are kept", kept, []func(*cut){(*cut).have, conflicts}, drawn{third, 0, fifth}},
		{"that it owns all", "", []func(*cut){claimsAll}, drawn{third, 0, fifth}},
		{"that it owns all, where owners are kept", kept, []func(*cut){claimsAll}, drawn{each, 0, each}},
		{"that it owns all, and is on the other segment, where owners are kept", kept,
			[]func(*cut){name(itsSegment, otherSegment), claimsAll}, drawn{each, each, each}},
		{"that it owns all, where owners are kept and have theirs", kept, []func(*cut){(*cut).have, claimsAll},
			drawn{2 * third, 0, 3 * fifth}},
		{"that speakers that it makes up own all, where owners are kept", kept, []func(*cut){
			makeUp(claiming(onThese(itsSegment, otherSegment, routedSegment)))}, drawn{third, 0, fifth}},
		{"that there are 32 more speakers", "", []func(*cut){makeUp(onThese(itsSegment, otherSegment, routedSegment))},
			drawn{third, 0, fifth}},
		{"that its neighbours are lost", "", []func(*cut){lose("a", "b")}, drawn{each, 0, third}},
		{"that its neighbours are lost, and that it is on the other segment, too", "",
			[]func(*cut){lose("a", "b"), name(itsSegment, otherSegment)}, drawn{each, third, third}},
		{"that its neighbours are lost, where owners are kept and have theirs", kept, []func(*cut){(*cut).have, lose("a", "b")},
			drawn{each, 0, third}},
		{"that its neighbours are lost, and that it owns all, where owners are kept and have theirs", kept,
			[]func(*cut){(*cut).have, lose("a", "b"), claimsAll}, drawn{each, 0, 3 * fifth}},
		{"that it owns all, while a neighbour is back that was away, where owners are kept", kept,
			[]func(*cut){lose("a"), (*cut).have, back, claimsAll}, drawn{2 * third, 0, 3 * fifth}},
	} {
		parsed, err := config.Parse(fmt.Appendf(nil, "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"+
			"pools: [{name: lan, addresses: [198.18.1.0/24, 198.18.2.0/24, 198.18.3.0/24]}]\n"+
			"advertisements: [{name: l2, layer2: {%s}}]\n", tt.layer2))
		require.NoError(t, err)
		c := &cut{parsed, map[string]plan.Node{}, map[string]report.Network{}, map[string]bool{}}
		for name, on := range map[string]netip.Prefix{"a": itsSegment, "b": itsSegment, "taken": itsSegment, "c": otherSegment,
			"d": otherSegment} {
			c.nodes[name], c.networks[name], c.alive[name] = plan.Node{}, onThese(on), true
			if name != "taken" {
				c.nodes[name] = plan.Node{Labels: map[string]string{"node-restriction.kubernetes.io/edge": "yes"}}
			}
		}
		for _, act := range tt.acts {
			act(c)
		}
		var got drawn
		owners := plan.Owners(c.snapshot())
		require.Len(t, owners, 3*each)
		for vip, owner := range owners {
			assert.Contains(t, c.nodes, owner, "%s is nobody's", vip)
			switch {
			case owner != "taken":
			case itsSegment.Contains(vip):
				got.own++
			case otherSegment.Contains(vip):
				got.other++
			default:
				got.routed++
			}
		}
		t.Logf("it claims %s: it draws %+v", tt.lie, got)
		for _, of := range []struct {
			segment   string
			got, most int
		}{{"its own", got.own, tt.most.own}, {"the other one", got.other, tt.most.other}, {"nobody's", got.routed, tt.most.routed}} {
			assert.LessOrEqual(t, of.got, of.most, "it claims %s: VIPs of %s", tt.lie, of.segment)
			assert.Equal(t, of.most >= each, of.got == each, "it claims %s: VIPs of %s", tt.lie, of.segment)
		}
	}
}
