package core

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// pair is a story with a VIP that the preferred one of two owns while both are able.
func pair(t *testing.T, preferred string) (s *story, vip string) {
	s = newStory(t)
	return s, s.preferring(preferred)
}

// This node answers for a VIP that moves by plan until it hears the next owner.
func TestPlannedMovesMakeBeforeTheyBreak(t *testing.T) {
	for name, move := range map[string]func(s *story, vip string) Event{
		"excluded":     func(s *story, _ string) Event { return s.excluded("n1", true) },
		"Node deleted": func(s *story, _ string) Event { return s.gone("n1") },
		"network plugin restarts": func(s *story, _ string) Event {
			return s.node("n1", func(n *plan.Node) { n.NetworkUnavailable = true })
		},
		"local endpoint ends": func(_ *story, vip string) Event { return Service{local(vip, "n2")} },
		"configuration": func(s *story, _ string) Event {
			s.nodes["n2"] = plan.Node{Labels: map[string]string{"name": "n2"}}
			s.core.Step(s.noded(), s.now)
			s.config.Advertisements = []config.Advertisement{{Name: "all", Layer2: &config.Layer2{NodeSelector: labelled("name", "n2")}}}
			return s.configured()
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.begin(local(vip, "n1", "n2"))
			s.announced(vip)
			s.step(move(s, vip))
			s.announced(vip + " leaving")
			require.Equal(t, s.now.Add(handOver), s.last.Next)
			s.after(handOver - 1)
			s.announced(vip + " leaving")
			s.after(1)
			s.announced()
			require.NotEqual(t, s.now, s.last.Next)
		})
	}
}

func labelled(key, value string) config.Selector {
	return config.Selector{{Key: key, Operator: config.In, Values: []string{value}}}
}

// A node that has a new endpoint leaves the VIP for a moment to the one that has
// it: kube-proxy may not yet know the endpoint.
func TestNewEndpointIsNotTrustedAtOnce(t *testing.T) {
	for name, tt := range map[string]struct {
		then func(s *story, vip string) Event
		wait time.Duration
	}{
		"the owner has endpoints": {func(s *story, _ string) Event { return s.members() }, handOver / 4 * 3},
		"this node is preferred": {func(s *story, _ string) Event {
			s.nodes["n1"] = plan.Node{Labels: map[string]string{"name": "n1"}}
			here := []config.Preference{{Weight: 1, NodeSelector: labelled("name", "n1")}}
			s.config.Advertisements[0].Layer2 = &config.Layer2{PreferredNodes: here}
			s.core.Step(s.configured(), s.now)
			return s.noded()
		}, handOver / 4 * 3},
		"the owner has one that terminates": {func(_ *story, vip string) Event { return Service{local(vip, "n1")} }, 0},
		"the owner dies":                    {func(s *story, _ string) Event { return s.lost() }, 0},
		"nobody has it":                     {func(s *story, _ string) Event { return s.excluded("n2", true) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.begin(local(vip, "n2"))
			s.silent(plan.NoLocalEndpoint, "n2")
			s.after(time.Hour)
			s.step(Service{local(vip, "n1", "n2")})
			s.announced(vip + " arriving")
			s.step(tt.then(s, vip))
			if tt.wait > 0 {
				s.after(tt.wait - 1)
				s.announced(vip + " arriving")
				s.after(1)
			}
			s.announced(vip)
		})
	}
}

// An owner hands a VIP over although the next one waits for its kube-proxy: the segment finds out who answers. So it does
// where a VIP comes back to a node with a new endpoint.
func TestWhatArrivesMayLeave(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(local(vip, "n2"))
	s.step(Service{local(vip, "n1", "n2")})
	s.announced(vip + " arriving")
	s.step(s.excluded("n1", true))
	s.announced(vip + " leaving")
	s.step(s.excluded("n1", false))
	s.announced(vip + " arriving")
	s.step(Service{local(vip, "n2")})
	s.announced(vip + " leaving")
	s.after(time.Minute)
	s.announced()
	require.Empty(t, s.core.gained)
}

// A VIP moves twice within moments. The second owner waits for its kube-proxy, too, so that the first one still answers.
func TestNewEndpointWaitsForTheOwnerBefore(t *testing.T) {
	const vip = "203.0.113.1"
	for wait, want := range map[time.Duration]string{time.Second: vip + " arriving", time.Minute: vip} {
		t.Run(wait.String(), func(t *testing.T) {
			s, preferred := newStory(t), []config.Preference{}
			for i, node := range []string{"n3", "n2", "n1"} {
				s.nodes[node], s.speakers[node] = plan.Node{Labels: map[string]string{"name": node}}, true
				preferred = append(preferred, config.Preference{Weight: i + 1, NodeSelector: labelled("name", node)})
			}
			s.config.Advertisements[0].Layer2 = &config.Layer2{PreferredNodes: preferred}
			s.begin(local(vip, "n3"))
			s.after(time.Minute)
			s.step(Service{local(vip, "n2", "n3")})
			s.silent(plan.NoLocalEndpoint, "n2")
			s.after(wait)
			s.step(Service{local(vip, "n1", "n3")})
			s.announced(want)
		})
	}
}

// So it is if the second owner, which has been excluded since, never had it, and this node announces the VIP by BGP as well.
func TestNewEndpointWaitsForTheOwnerBeforeTheExcludedOne(t *testing.T) {
	for name, begin := range map[string]func(*testing.T) *story{"by layer 2": newStory, "by BGP, too": routed} {
		t.Run(name, func(t *testing.T) {
			s := begin(t)
			var preferred []config.Preference
			for i, node := range []string{"n3", "n1", "n2"} {
				s.nodes[node], s.speakers[node] = plan.Node{Labels: map[string]string{"name": node}}, true
				preferred = append(preferred, config.Preference{Weight: i + 1, NodeSelector: labelled("name", node)})
			}
			s.config.Advertisements = append(slices.DeleteFunc(s.config.Advertisements, func(a config.Advertisement) bool { return a.BGP == nil }),
				config.Advertisement{Name: "preferred", Layer2: &config.Layer2{PreferredNodes: preferred}})
			s.begin(local(routedVIP, "n3"))
			s.after(time.Minute)
			s.step(Service{local(routedVIP, "n1", "n2", "n3")})
			s.announced()
			s.after(time.Second)
			s.step(s.excluded("n2", true))
			s.announced(routedVIP + " arriving")
		})
	}
}

// kube-proxy forwards a VIP with policy Cluster to pods of other nodes, so nobody waits for it when the policy changes.
func TestPolicyThatBecomesLocalIsNotWaitedFor(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(web(vip, true))
	s.step(s.excluded("n1", true))
	s.after(time.Minute)
	s.announced()
	s.step(Service{local(vip, "n1", "n2")}, s.excluded("n1", false))
	s.announced(vip)
	s.step(Service{web("", false)})
	require.Empty(t, s.core.gained)
	s.step(Service{local(vip, "n1", "n2")})
	require.Len(t, s.core.gained, 1, "it is another Service")
	s.step(Service{web("", false)})
	require.Empty(t, s.core.gained)
}

func TestPreferredNodeBackMakesBeforeThisOneBreaks(t *testing.T) {
	s, vip := pair(t, "n2")
	s.speakers["n2"] = false
	s.begin(web(vip, true))
	s.announced(vip)
	s.step(s.speaker(true))
	s.announced(vip + " leaving")
}

// The next owner is another one meanwhile, which has as much time to take the VIP.
func TestNextOwnerIsReplaced(t *testing.T) {
	s, vip := pair(t, "n1")
	s.nodes["n3"], s.speakers["n3"] = plan.Node{}, true
	s.begin(local(vip, "n1"))
	s.step(Service{local(vip, "n2")})
	s.after(handOver - 1)
	s.step(Service{local(vip, "n3")})
	s.after(handOver - 1)
	s.announced(vip + " leaving")
	s.after(1)
	s.announced()
}

// A VIP that is lost without a plan is given up at once: this node may not be able
// to carry the traffic, and no other node is about to announce the VIP.
func TestUnplannedLossesBreakFirst(t *testing.T) {
	for name, lose := range map[string]func(s *story, vip string) Event{
		"data plane": func(*story, string) Event { return Health{Synced: true, Joined: true} },
		"nobody else": func(s *story, _ string) Event {
			s.core.Step(s.gone("n2"), s.now)
			return s.excluded("n1", true)
		},
		"no endpoint":      func(_ *story, vip string) Event { return Service{web(vip, false)} },
		"out of the pool":  func(*story, string) Event { return Service{web("", false)} },
		"no configuration": func(*story, string) Event { return Config{} },
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.begin(web(vip, true))
			s.announced(vip)
			s.step(lose(s, vip))
			s.announced()
			require.Zero(t, s.left)
		})
	}
}

// A speaker that is ready when it is heard of for the first time has owned the VIP all the time of a partition, or has got
// an endpoint meanwhile. The segment knows.
func TestEndOfAPartitionMakesBeforeItBreaks(t *testing.T) {
	s, vip := pair(t, "n2")
	delete(s.speakers, "n2")
	s.begin(web(vip, true))
	s.announced(vip)
	s.step(s.speaker(true))
	s.announced(vip + " leaving")
}

func TestLeavingEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(s *story) Event
		back bool
	}{
		"comes back":         {func(s *story) Event { return s.excluded("n1", false) }, true},
		"data plane fails":   {func(*story) Event { return Health{Synced: true, Joined: true} }, false},
		"next owner is lost": {func(s *story) Event { return s.lost() }, false},
		"Service is deleted": {func(*story) Event { return Service{web("", false)} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.begin(web(vip, true))
			s.step(s.excluded("n1", true))
			s.announced(vip + " leaving")
			s.step(tt.end(s))
			if tt.back {
				s.announced(vip)
			} else {
				s.announced()
			}
		})
	}
}

// stop ends the speaker: so many VIPs that leave are not heard from their next owners.
func (s *story) stop(unheard int) (waited time.Duration) {
	began := s.now
	for s.note(s.core.Step(Stop{}, s.now)); !s.last.Done; s.note(s.core.Step(StillLeaving(unheard), s.now)) {
		require.False(s.t, s.last.Ready)
		require.False(s.t, s.last.Next.IsZero())
		s.now = s.last.Next
	}
	return s.now.Sub(began)
}

func (s *story) logged(text string) bool {
	for _, l := range s.last.Log {
		if l.Text == text {
			return true
		}
	}
	return false
}

func TestEndOfTheSpeakerGivesAllUp(t *testing.T) {
	for name, tt := range map[string]struct {
		unheard int
		health  Health
		waited  time.Duration
		left    int
	}{
		"heard":                       {0, well, 0, 1},
		"not heard":                   {1, well, handOver, 1},
		"the data plane is sick":      {0, Health{Synced: true, Joined: true, Sick: true, Forwards: true}, 0, 1},
		"the data plane is not there": {0, Health{Synced: true, Joined: true}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.health = tt.health
			s.begin(web(vip, true))
			s.routers = nil
			require.Equal(t, tt.waited, s.stop(tt.unheard))
			s.announced()
			require.Equal(t, tt.left, s.left)
			require.Equal(t, tt.unheard > 0, s.logged("next owners not heard, stopping all the same"))
			require.Empty(t, s.core.State().Plan.Layer2)
			s.sent("stop")
		})
	}
}

// With nobody to take over there is nothing to wait for.
func TestEndOfTheOnlySpeaker(t *testing.T) {
	s, vip := pair(t, "n1")
	s.speakers["n2"] = false
	s.begin(web(vip, true))
	s.announced(vip)
	require.Zero(t, s.stop(0))
	s.announced()
	require.Zero(t, s.left)
}
