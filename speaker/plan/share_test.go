package plan_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// sharedBy demands that these nodes share both VIPs and all nodes know it.
func (s *story) sharedBy(what string, want ...string) {
	s.t.Helper()
	for _, vip := range s.Services[0].VIPs {
		assert.Equal(s.t, want, plan.Sharers(s.Snapshot)[vip], what)
		for node := range s.Nodes {
			l, owned := plan.Make(node, s.Snapshot).Layer2[vip]
			require.Equal(s.t, slices.Contains(want, node), owned, "%s: %s on %s", what, vip, node)
			if owned {
				assert.Equal(s.t, plan.Layer2{Sharers: want}, l, what)
			}
		}
	}
}

// All nodes that could own a VIP share it, and what takes the one from a node
// takes the other.
func TestSharedVIP(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.Config.Advertisements[0].Layer2.ShareLoad = true
	s.sharedBy("all are well", "n1", "n2", "n3")
	s.Speakers["n2"] = false
	s.sharedBy("one is lost", "n1", "n3")
	assert.Equal(t, plan.SpeakerNotReady, plan.Make("n2", s.Snapshot).Silent[vip].Reason)
	assert.Contains(t, plan.Make("n2", s.Snapshot).Silent[vip].Message, "has a share in it")
	s.Speakers["n2"] = true
	s.node("n1", func(n *plan.Node) { n.Excluded = true })
	s.sharedBy("one is drained", "n2", "n3")
	s.node("n1", func(n *plan.Node) { n.Excluded = false })

	s.Services[0].Local = true
	s.sharedBy("policy Local: those with endpoints", "n1", "n2")
	s.Services[0].ServingNodes["n1"] = false
	s.sharedBy("the endpoint of one has gone", "n2")
	assert.Equal(t, plan.NoLocalEndpoint, plan.Make("n1", s.Snapshot).Silent[vip].Reason)
	s.Services[0].Local = false

	s.prefer(10, "n1", "n3")
	s.sharedBy("two are preferred", "n1", "n3")
	assert.Equal(t, plan.LessPreferred, plan.Make("n2", s.Snapshot).Silent[vip].Reason)
	s.Speakers["n1"], s.Speakers["n3"] = false, false
	s.sharedBy("they are lost", "n2")
	s.Services[0].Serving = false
	s.sharedBy("nothing serves", []string(nil)...)
}

// One advertisement that shares is enough, and then nothing is kept or repeated.
func TestSharingOverrules(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.Config.Advertisements = append(s.Config.Advertisements,
		config.Advertisement{Name: "shared", Layer2: &config.Layer2{ShareLoad: true, NodeSelector: labelled("n1", "n2")}},
		config.Advertisement{Name: "kept", Layer2: &config.Layer2{KeepOwner: true, Refresh: 1, NodeSelector: labelled("n3")}})
	s.sharedBy("all are selected", "n1", "n2", "n3")
	assert.Zero(t, plan.Make("n3", s.Snapshot).Claims)
	s.Config.Pools[0].Advertise = []string{"all"}
	s.Config = &config.Config{Pools: s.Config.Pools, Advertisements: s.Config.Advertisements}
	assert.Empty(t, plan.Sharers(s.Snapshot), "it applies to the pool no more")
	s.wantOwner(vip, "n1", "n2", "n3")
}
