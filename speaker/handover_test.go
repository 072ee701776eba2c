package speaker

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// newPair is a story on n1 with a second ready speaker, on n2, and a VIP that
// the preferred one of them owns while both are able. Leaving has no end by
// itself.
func newPair(t *testing.T, preferred string, change ...func(*corev1.Service)) (s *story, vip string) {
	n2 := nodeObject("n2")
	n2.Labels = map[string]string{corev1.LabelHostname: "n2"}
	s = newStory(t, n2, endpoints("web", on("n1"), on("n2")))
	s.handOver = time.Hour
	s.members.speakers["n2"] = true
	vip = s.preferring(preferred)
	web := serviceObject("web", vip)
	for _, f := range change {
		f(web)
	}
	require.NoError(t, s.client.Tracker().Add(web))
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

// ready has the speaker of n2 say whether it is ready to own VIPs.
func (s *story) ready(ready bool) {
	s.members.change(func() { s.members.speakers["n2"] = ready })
}

func (s *story) deleteNode(name string) {
	s.t.Helper()
	require.NoError(s.t, s.client.CoreV1().Nodes().Delete(s.t.Context(), name, metav1.DeleteOptions{}))
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

func tainted(name, key string) *corev1.Node {
	n := nodeObject(name)
	n.Spec.Taints = []corev1.Taint{{Key: key, Effect: corev1.TaintEffectNoExecute}}
	return n
}

func networkUnavailable(name string) *corev1.Node {
	n := nodeObject(name)
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue}}
	return n
}

func localPolicy(svc *corev1.Service) {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// What moves by plan is answered for here until the next owner is heard.
func TestPlannedMovesMakeBeforeTheyBreak(t *testing.T) {
	for name, move := range map[string]func(s *story){
		"label":               func(s *story) { s.apply(excluded("n1")) },
		"out of service":      func(s *story) { s.apply(tainted("n1", corev1.TaintNodeOutOfService)) },
		"autoscaler":          func(s *story) { s.apply(tainted("n1", "ToBeDeletedByClusterAutoscaler")) },
		"Node deleted":        func(s *story) { s.deleteNode("n1") },
		"local endpoint ends": func(s *story) { s.apply(endpoints("web", endpoint("n1", "serving"), on("n2"))) },
		"configuration": func(s *story) {
			elsewhere := *s.config.config
			elsewhere.Advertisements = []config.Advertisement{{Name: "all", Layer2: &config.Layer2{
				NodeSelector: config.Selector{{Key: corev1.LabelHostname, Operator: config.In, Values: []string{"n2"}}}}}}
			s.config.change(func() { s.config.config = &elsewhere })
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := newPair(t, "n1", localPolicy)
			s.start()
			s.announced(vip)
			move(s)
			s.announced(vip + " leaving")
		})
	}
}

// A node that has a new endpoint leaves the VIP for a moment to the one that has
// it: kube-proxy may not yet know the endpoint.
func TestNewEndpointIsNotTrustedAtOnce(t *testing.T) {
	both := endpoints("web", on("n1"), on("n2"))
	for name, tt := range map[string]struct {
		then func(s *story)
		wait bool
	}{
		"the owner has endpoints":           {func(*story) {}, true},
		"the owner has one that terminates": {func(s *story) { s.apply(endpoints("web", on("n1"), endpoint("n2", "serving"))) }, false},
		"the owner dies":                    {func(s *story) { s.members.change(func() { delete(s.members.speakers, "n2") }) }, false},
		"nobody has it":                     {func(s *story) { s.apply(excluded("n2")) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := newPair(t, "n1", localPolicy)
			s.apply(endpoints("web", on("n2")))
			s.start()
			require.Eventually(t, func() bool {
				silent := s.speaker.Status().Silent
				return len(silent) == 1 && silent[0].Owner == "n2"
			}, testTimeout, time.Millisecond)
			began := time.Now()
			s.apply(both)
			tt.then(s)
			s.announced(vip)
			if waited := time.Since(began) >= kubeProxyLag; waited != tt.wait {
				t.Errorf("after %s", time.Since(began))
			}
		})
	}
}

// A cordon keeps new pods away, and says nothing about traffic.
func TestCordonMovesNothing(t *testing.T) {
	t.Parallel()
	cordoned := tainted("n1", corev1.TaintNodeUnschedulable)
	cordoned.Spec.Unschedulable = true
	require.Equal(t, plan.Node{}, keepNode(cordoned).Node)
}

func TestPreferredNodeBackMakesBeforeThisOneBreaks(t *testing.T) {
	s, vip := newPair(t, "n2")
	s.members.speakers["n2"] = false
	s.start()
	s.announced(vip)
	s.ready(true)
	s.announced(vip + " leaving")
}

// What is lost without a plan is given up at once: this node may not be able
// to carry the traffic, and nobody else is about to announce.
func TestUnplannedLossesBreakFirst(t *testing.T) {
	for name, lose := range map[string]func(s *story){
		"data plane":       func(s *story) { s.dataPlane.change(func() { s.dataPlane.sick = true }) },
		"network":          func(s *story) { s.apply(networkUnavailable("n1")) },
		"nobody else":      func(s *story) { s.deleteNode("n2"); s.apply(excluded("n1")) },
		"no endpoint":      func(s *story) { s.apply(endpoints("web")) },
		"out of the pool":  func(s *story) { s.apply(serviceObject("web", "")) },
		"no configuration": func(s *story) { s.config.change(func() { s.config.config = nil }) },
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := newPair(t, "n1")
			s.start()
			s.announced(vip)
			lose(s)
			s.announced()
			require.Zero(t, s.announcer.left())
		})
	}
}

// A speaker that is ready when it is heard of for the first time has owned the
// VIP all the time of a partition.
func TestEndOfAPartitionBreaksFirst(t *testing.T) {
	s, vip := newPair(t, "n2")
	delete(s.members.speakers, "n2")
	s.start()
	s.announced(vip)
	s.ready(true)
	s.announced()
	require.Zero(t, s.announcer.left())
}

func TestLeavingEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(s *story)
		then func(vip string) []string
	}{
		"comes back":          {func(s *story) { s.apply(nodeObject("n1")) }, func(vip string) []string { return []string{vip} }},
		"data plane fails":    {func(s *story) { s.dataPlane.change(func() { s.dataPlane.sick = true }) }, nil},
		"next owner is lost":  {func(s *story) { s.members.change(func() { delete(s.members.speakers, "n2") }) }, nil},
		"Service is deleted":  {func(s *story) { s.apply(serviceObject("web", "")) }, nil},
		"network unavailable": {func(s *story) { s.apply(networkUnavailable("n1")) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, vip := newPair(t, "n1")
			s.start()
			s.announced(vip)
			s.apply(excluded("n1"))
			s.announced(vip + " leaving")
			tt.end(s)
			if tt.then == nil {
				s.announced()
			} else {
				s.announced(tt.then(vip)...)
			}
		})
	}
}

func TestLeavingEndsInTime(t *testing.T) {
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
			require.Equal(t, []bool{true, false}, s.members.said)
			require.Empty(t, s.speaker.Status().Owned)
		})
	}
}

// With nobody to take over there is nothing to wait for.
func TestEndOfTheOnlySpeaker(t *testing.T) {
	s, vip := newPair(t, "n1")
	s.members.speakers["n2"] = false
	s.announcer.lost = true
	s.start()
	s.announced(vip)
	s.stop()
	s.announced()
	require.Zero(t, s.announcer.left())
}
