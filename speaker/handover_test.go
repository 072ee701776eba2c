package speaker

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// newPair is a story on n1 with a second ready speaker, on n2, and a VIP that
// the preferred one of them owns while both are able. Leaving has no end by
// itself.
func newPair(t *testing.T, preferred string) (s *story, vip string) {
	n2 := nodeObject("n2")
	n2.Labels = map[string]string{corev1.LabelHostname: "n2"}
	s = newStory(t, n2, endpoints("web", on("n1"), on("n2")))
	s.handOver = time.Hour
	s.members.speakers["n2"] = true
	vip = s.preferring(preferred)
	require.NoError(t, s.client.Tracker().Add(serviceObject("web", vip)))
	return s, vip
}

// preferring returns an address that the node owns while n1 and n2 are able.
func (s *story) preferring(node string) string {
	s.t.Helper()
	both := plan.Snapshot{Config: s.config.config, Nodes: map[string]plan.Node{"n1": {}, "n2": {}},
		Speakers: map[string]bool{"n1": true, "n2": true}}
	for vip := netip.MustParseAddr("203.0.113.1"); vip.As4()[3] < 255; vip = vip.Next() {
		both.Services = []plan.Service{{Name: "default/web", Serving: true, VIPs: []netip.Addr{vip}}}
		if plan.Owners(both)[vip] == node {
			return vip.String()
		}
	}
	s.t.Fatalf("%s owns no address", node)
	return ""
}

// left counts the calls of the announcer with a VIP that leaves.
func (f *fakeAnnouncer) left() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, set := range f.sets {
		for _, l := range set {
			if l.Leaving {
				n++
			}
		}
	}
	return n
}

func excluded(name string) *corev1.Node {
	n := nodeObject(name)
	n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	return n
}

// A VIP that moves by plan is answered for here until its next owner is heard, or the time
// for that is over.
func TestAMoveIsMadeBeforeItBreaks(t *testing.T) {
	s, vip := newPair(t, "n1")
	s.handOver = 50 * time.Millisecond
	s.start()
	s.announced(vip)
	s.apply(excluded("n1"))
	s.announced()
	require.NotZero(t, s.announcer.left())
}

func TestEndOfTheSpeakerGivesAllUp(t *testing.T) {
	for name, tt := range map[string]struct {
		lost     bool
		handOver time.Duration
		log      string
	}{
		"heard":     {false, time.Hour, "handing over"},
		"not heard": {true, 50 * time.Millisecond, "next owners not heard"},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := newPair(t, "n1")
			s.announcer.lost, s.handOver = tt.lost, tt.handOver
			s.start()
			s.announced(vip)
			s.stop()
			s.announced()
			require.Equal(t, 1, s.announcer.left())
			require.Contains(t, s.log.String(), tt.log)
			require.Equal(t, []bool{true, false}, s.members.ready)
			require.Empty(t, s.speaker.Status().Owned)
		})
	}
}
