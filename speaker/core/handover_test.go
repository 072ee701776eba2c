package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// pair is a story with a VIP that the preferred one of two owns while both are able.
func pair(t *testing.T, preferred string) (s *story, vip string) {
	s = newStory(t)
	return s, s.preferring(preferred)
}

// What moves by plan is answered for here until the next owner is heard.
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
			s.announced()
			s.step(tt.then(s, vip))
			if tt.wait > 0 {
				s.after(tt.wait - 1)
				s.announced()
				s.after(1)
			}
			s.announced(vip)
		})
	}
}

// A speaker of v0.1.0 answers for 2 s at most for a VIP that it hands over: nobody waits for longer.
func TestHastyOwnerIsRelievedInTime(t *testing.T) {
	for hasty, wait := range map[bool]time.Duration{true: hastyLag, false: kubeProxyLag} {
		t.Run(fmt.Sprint(hasty), func(t *testing.T) {
			s, vip := pair(t, "n1")
			s.core.HandOver = 6 * time.Second
			s.networks = map[string]report.Network{"n2": {Hasty: hasty}}
			s.begin(local(vip, "n2"))
			s.after(time.Hour)
			s.step(Service{local(vip, "n1", "n2")})
			s.after(wait - 1)
			s.announced()
			s.after(1)
			s.announced(vip)
		})
	}
}

// A VIP that has not arrived is not announced here, so it does not leave when it is
// this node's no longer: its owner has it all the time.
func TestWhatHasNotArrivedDoesNotLeave(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(local(vip, "n2"))
	s.step(Service{local(vip, "n1", "n2")})
	s.after(time.Second)
	s.step(Service{local(vip, "n2")})
	s.after(time.Minute)
	s.announced()
	require.Zero(t, s.left)
}

// A VIP that was announced here is announced again as soon as it comes back, also if the endpoint here is new: the
// next owner had not taken it, and nobody would answer. Seed 22078 of make simulate found that.
func TestWhatComesBackAtOnceIsNotWaitedFor(t *testing.T) {
	s, vip := pair(t, "n1")
	s.begin(local(vip, "n1", "n2"))
	s.announced(vip)
	s.after(time.Second)
	s.step(s.excluded("n1", true))
	s.announced(vip + " leaving")
	s.step(s.excluded("n1", false))
	s.announced(vip)
}

func TestPreferredNodeBackMakesBeforeThisOneBreaks(t *testing.T) {
	s, vip := pair(t, "n2")
	s.speakers["n2"] = false
	s.begin(web(vip, true))
	s.announced(vip)
	s.step(s.speaker(true))
	s.announced(vip + " leaving")
}

// What is lost without a plan is given up at once: this node may not be able
// to carry the traffic, and nobody else is about to announce.
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

// A speaker that is ready when it is heard of for the first time has owned the
// VIP all the time of a partition.
func TestEndOfAPartitionBreaksFirst(t *testing.T) {
	s, vip := pair(t, "n2")
	delete(s.speakers, "n2")
	s.begin(web(vip, true))
	s.announced(vip)
	s.step(s.speaker(true))
	s.announced()
	require.Zero(t, s.left)
}

// A node that was lost and got its first endpoint meanwhile has not owned the VIP: it waits for its
// kube-proxy, and this node answers until then.
func TestEndpointGainedWhileLostMakesBeforeThisOneBreaks(t *testing.T) {
	for name, tt := range map[string]struct {
		then func(s *story, vip string) []Event
		want string
	}{
		"it is back": {func(s *story, _ string) []Event { return []Event{s.speaker(true)} }, " leaving"},
		"it had one before, too": {func(s *story, vip string) []Event {
			s.step(s.speaker(true), Service{local(vip, "n1")})
			s.step(Service{local(vip, "n1", "n2")})
			s.after(time.Minute)
			s.step(s.lost())
			return []Event{s.speaker(true)}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := pair(t, "n2")
			s.begin(local(vip, "n1"))
			s.step(s.lost())
			s.step(Service{local(vip, "n1", "n2")})
			s.announced(vip)
			s.step(tt.then(s, vip)...)
			if tt.want == "" {
				s.announced()
				require.Empty(t, s.core.gained)
				return
			}
			s.announced(vip + tt.want)
			s.after(handOver)
			s.announced()
			require.Empty(t, s.core.gained)
		})
	}
}

// Of nodes that never had a speaker nothing is noted, and of a lost one nothing that is over.
func TestGainedEndpointsAreForgotten(t *testing.T) {
	s, vip := pair(t, "n2")
	s.begin(local(vip, "n1"))
	s.step(Service{local(vip, "n1", "n3")})
	require.Empty(t, s.core.gained)
	s.step(s.lost())
	for _, end := range []Event{Service{local(vip, "n1")}, Service{web("", false)}} {
		s.step(Service{local(vip, "n1", "n2")})
		require.Len(t, s.core.gained["n2"], 1)
		s.step(end)
		require.Empty(t, s.core.gained["n2"])
	}
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
