package membership

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

const testTimeout = 20 * time.Second

// quick has memberlist find out soon who is lost, since many speakers of the tests take no part in failure detection.
// Those that do are given time: the machine may be busy.
func quick() config.Membership {
	m := config.FailoverNormal.Membership()
	m.Heartbeat, m.Missed = 100*time.Millisecond, 20
	m.ProbeInterval, m.ProbeTimeout = 50*time.Millisecond, 25*time.Millisecond
	m.GossipInterval = 20 * time.Millisecond
	return m
}

// cluster is an API server and speakers that are connected by loopback.
type cluster struct {
	t      testing.TB
	client kubernetes.Interface
	secret keys.Secret
	deaths int // how many speakers noticed has killed
}

func newCluster(t *testing.T, nodes ...string) *cluster {
	t.Parallel()
	return makeCluster(t, nodes...)
}

func makeCluster(t testing.TB, nodes ...string) *cluster {
	client := testapi.New()
	for _, n := range nodes {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n, UID: types.UID("uid-of-" + n)}}
		if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return &cluster{t: t, client: client, secret: secretOf(t, firstKey)}
}

func secretOf(t testing.TB, text string) keys.Secret {
	s, err := keys.Parse([]byte(text))
	require.NoError(t, err)
	return s
}

// keyOf returns the Secret's key of the cluster that the tests are about.
func keyOf(t testing.TB, text string) keys.Key { return keyIn(t, text, ourCluster) }

func keyIn(t testing.TB, text, clusterID string) keys.Key {
	k, err := secretOf(t, text).Of(clusterID)
	require.NoError(t, err)
	return k
}

// speaker is a running Task.
type speaker struct {
	*Task
	t    testing.TB
	stop context.CancelFunc
	done chan struct{}
}

func (c *cluster) options(node string) Options {
	return Options{
		Node: node, Address: netip.MustParseAddrPort("127.0.0.1:0"), Secret: c.secret, Config: with(quick()),
		Namespace: "lodestone-system",
		Client:    c.client, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewPedanticRegistry(), SettleTime: time.Millisecond,
		tcpTimeout: testTimeout,
	}
}

// start runs a speaker on an address of its own; others find it by its Lease.
func (c *cluster) start(node string, change ...func(*Options)) *speaker {
	c.t.Helper()
	o := c.options(node)
	for _, f := range change {
		f(&o)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &speaker{New(o), c.t, cancel, make(chan struct{})}
	go func() {
		defer close(s.done)
		if err := s.Run(ctx); err != nil {
			c.t.Error(err)
		}
	}()
	c.t.Cleanup(s.leave)
	return s
}

// address is where a speaker that has joined listens.
func (s *speaker) address() string { return s.options.Address.String() }

// leave stops the speaker as SIGTERM does.
func (s *speaker) leave() {
	s.stop()
	<-s.done
}

var ownAddresses atomic.Uint32

// ownAddress returns an address of loopback at which nobody else takes a port that is free for a while.
func ownAddress() netip.AddrPort {
	n := ownAddresses.Add(1)
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)}), 0)
}

// mute is a speaker that answers but does nothing by itself.
type mute struct {
	*Task
	kill func()
}

func (c *cluster) mute(node string, address netip.AddrPort, change ...func(*Options)) *mute {
	c.t.Helper()
	o := c.options(node)
	o.Address = address
	for _, f := range change {
		f(&o)
	}
	task := New(o)
	known, err := task.readSettings(c.t.Context())
	require.NoError(c.t, err)
	require.True(c.t, known)
	require.NoError(c.t, task.gossip.listen())
	kill := func() { task.list.Load().Shutdown() } //nolint:errcheck // it always returns nil
	c.t.Cleanup(kill)
	return &mute{task, kill}
}

// wait waits until the condition holds after a change of the speaker.
func (s *speaker) wait(what string, holds func() bool) {
	s.t.Helper()
	timeout := time.After(testTimeout)
	for {
		changed := s.Changed()
		if holds() {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			_, status := s.Joined()
			s.t.Fatalf("speaker %s: %s does not happen; knows %v, %s", s.options.Node, what, s.Speakers(), status)
		}
	}
}

func (s *speaker) waitJoined() {
	s.t.Helper()
	s.wait("joining", func() bool { joined, _ := s.Joined(); return joined })
}

func (s *speaker) waitFor(want map[string]bool) {
	s.t.Helper()
	s.wait(fmt.Sprint(want), func() bool { return maps.Equal(s.Speakers(), want) })
}

func TestSpeakersFindEachOtherAndShareReadiness(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1 := c.start("n1")
	n1.waitJoined()
	n2, n3 := c.start("n2"), c.start("n3")
	n2.waitJoined()
	n3.waitJoined()

	n2.SetReady(true)
	for _, s := range []*speaker{n1, n2, n3} {
		s.waitFor(map[string]bool{"n1": false, "n2": true, "n3": false})
	}
	n3.SetReady(true)
	n2.SetReady(false)
	for _, s := range []*speaker{n1, n2, n3} {
		s.waitFor(map[string]bool{"n1": false, "n2": false, "n3": true})
	}
	registry := n1.options.Registry.(prometheus.Gatherer)
	if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP lodestone_membership_ready_speakers Speakers that are alive and ready to own VIPs.
# TYPE lodestone_membership_ready_speakers gauge
lodestone_membership_ready_speakers 1
# HELP lodestone_membership_speakers Speakers that are alive, this one included.
# TYPE lodestone_membership_speakers gauge
lodestone_membership_speakers 3
`), MetricSpeakers, MetricReadySpeakers); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

func TestDeadSpeakerIsNoticedAndMayComeBack(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2 := c.start("n1"), c.start("n2")
	n1.SetReady(true)
	n2.SetReady(true)
	n1.waitFor(map[string]bool{"n1": true, "n2": true})
	n1.waitJoined()
	n3 := c.mute("n3", ownAddress())
	n3.SetReady(true)
	if err := n3.list.Load().UpdateNode(updateTimeout); err != nil {
		t.Fatal(err)
	}
	if _, err := n3.list.Load().Join([]string{n1.address()}); err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{"n1": true, "n2": true, "n3": true}
	n1.waitFor(all)
	n2.waitFor(all)

	start := time.Now()
	n3.kill()
	n1.waitFor(map[string]bool{"n1": true, "n2": true})
	t.Logf("noticed after %s", time.Since(start))
	n2.waitFor(map[string]bool{"n1": true, "n2": true})

	again := c.start("n3", func(o *Options) { o.Address = n3.options.Address })
	n1.waitFor(map[string]bool{"n1": true, "n2": true, "n3": false})
	again.SetReady(true)
	n1.waitFor(all)
	again.waitFor(all)
}

func TestLeaveIsKnownAtOnce(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1, n2 := c.start("n1"), c.start("n2")
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	n2.waitJoined()
	n2.waitCaughtUp() // it has a Lease
	n2.leave()
	n1.waitFor(map[string]bool{"n1": false})
	if others := n1.leases.others([]any{n1.leases.keep(c.lease("n2"))}); len(others) > 0 {
		t.Errorf("n1 looks for %v, which left", others)
	}
}

// A write of its Lease that was on its way when a speaker left does not undo that it left.
func TestLeavesAfterItsLastWrite(t *testing.T) {
	c := newCluster(t, "n1")
	writes := make(chan struct{}, 100)
	n1 := c.start("n1", func(o *Options) {
		o.Client = lateWrites{o.Client.(*fake.Clientset), func() {
			writes <- struct{}{}
			time.Sleep(200 * time.Millisecond)
		}}
	})
	<-writes // the first
	n1.Report(report.Report{Unmatched: []string{"default"}})
	<-writes
	n1.leave()
	require.Nil(t, c.lease("n1").Spec.HolderIdentity)
}

// lateWrites has Leases written late, but for those that give up the Lease.
type lateWrites struct {
	*fake.Clientset
	late func()
}

func (l lateWrites) CoordinationV1() coordinationclient.CoordinationV1Interface {
	return lateCoordination{l.Clientset.CoordinationV1(), l.late}
}

type lateCoordination struct {
	coordinationclient.CoordinationV1Interface
	late func()
}

func (l lateCoordination) Leases(namespace string) coordinationclient.LeaseInterface {
	return lateLeases{l.CoordinationV1Interface.Leases(namespace), l.late}
}

type lateLeases struct {
	coordinationclient.LeaseInterface
	late func()
}

func (l lateLeases) Create(ctx context.Context, lease *coordinationv1.Lease, o metav1.CreateOptions) (*coordinationv1.Lease, error) {
	l.late()
	return l.LeaseInterface.Create(ctx, lease, o)
}

func (l lateLeases) Update(ctx context.Context, lease *coordinationv1.Lease, o metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	if lease.Spec.HolderIdentity != nil {
		l.late()
	}
	return l.LeaseInterface.Update(ctx, lease, o)
}

func TestWrongKeyIsRefused(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1 := c.start("n1")
	n1.waitJoined()
	n1.waitCaughtUp() // n2 has to find its Lease
	wrong := secretOf(t, "wrong horse battery staple")
	n2 := c.start("n2", func(o *Options) { o.Secret = wrong })
	n2.wait("waiting", func() bool {
		_, status := n2.Joined()
		return strings.Contains(status, "another membership key, one on node n1")
	})
	for _, s := range []*speaker{n1, n2} {
		s.waitFor(map[string]bool{s.options.Node: false})
	}
	require.Eventually(t, func() bool { return refusedBy(n1.Task) > 0 }, testTimeout, time.Millisecond, "n1 hears a stranger")
	n1.leave()
	n2.waitJoined() // alone: there is nobody whose VIPs it could claim
}

func TestPartitionHeals(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	n1 := c.start("n1")
	n1.waitJoined()
	n2 := c.mute("n2", ownAddress())
	if _, err := n2.own.write(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	n1.wait("whole", n1.Whole)
	n2.kill()
	n1.waitFor(map[string]bool{"n1": false})
	n1.wait("not whole", func() bool { return !n1.Whole() })
	c.mute("n2", n2.options.Address) // there again, but it looks for nobody
	n1.waitFor(map[string]bool{"n1": false, "n2": false})
	n1.wait("whole again", n1.Whole)
}

func TestLoneSpeakerJoinsAtOnce(t *testing.T) {
	c := newCluster(t, "n1")
	n1 := c.start("n1", func(o *Options) { o.SettleTime = time.Hour })
	n1.waitJoined()
}

func TestSpeakerThatCrashedSettlesLonger(t *testing.T) {
	const years = 365 * 24 * time.Hour
	c := newCluster(t, "n1")
	now := time.Now()
	task := c.mute("n1", netip.MustParseAddrPort("127.0.0.1:0"))
	for _, step := range []struct {
		after   time.Duration
		leave   bool
		crashes int
	}{
		{after: 0, crashes: 0},
		{after: time.Minute, crashes: 1},
		{after: time.Minute, crashes: 2},
		{after: time.Minute, leave: true, crashes: 0},
		{after: time.Minute, crashes: 1},
		{after: time.Hour, crashes: 0},
		{after: -3 * time.Hour, leave: true, crashes: 0}, // two hours ago
		{after: -50 * years, crashes: 0},                 // the power was cut, and the clock is behind until it gets the time
		{after: time.Minute, crashes: 0},                 // once more, weeks later
	} {
		if step.leave {
			task.own.release()
		}
		now = now.Add(step.after)
		for range 2 { // writing again changes nothing
			crashes, err := task.own.write(t.Context(), now)
			if err != nil || crashes != step.crashes {
				t.Fatalf("%+v: %d crashes, %v", step, crashes, err)
			}
		}
	}
}

// crashed makes the node's Lease report as many crashes of its speaker as count.
func (c *cluster) crashed(node string) {
	c.t.Helper()
	before := c.mute(node, netip.MustParseAddrPort("127.0.0.1:0"))
	for i := range maxCrashes {
		_, err := before.own.write(c.t.Context(), time.Now().Add(time.Duration(i-maxCrashes)*time.Second))
		require.NoError(c.t, err)
	}
	before.kill()
}

// After a crash loop of all speakers nobody serves: nobody waits. One that crashed alone
// waits while another one is ready, and no longer.
func TestNobodyWaitsWhileNobodyServes(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	m := quick()
	m.GracePeriod = 3 * time.Second // one that does not run for a while is not lost
	slow := func(o *Options) {
		o.SettleTime = 400 * time.Millisecond // 51 s after all these crashes
		o.Config, o.joinTimeout = with(m), testTimeout
	}
	c.crashed("n1")
	c.crashed("n2")
	n1, n2 := c.start("n1", slow), c.start("n2", slow)
	n1.waitJoined()
	n2.waitJoined()
	n2.waitFor(map[string]bool{"n1": false, "n2": false})

	n1.SetReady(true)
	n2.waitFor(map[string]bool{"n1": true, "n2": false})
	c.crashed("n3")
	n3 := c.start("n3", slow)
	n3.wait("settling", func() bool { _, status := n3.Joined(); return strings.Contains(status, "after 7 crashes") })
	n3.waitFor(map[string]bool{"n1": true, "n2": false, "n3": false})
	time.Sleep(time.Second)
	joined, status := n3.Joined()
	require.False(t, joined, status)
	n1.SetReady(false)
	n3.waitJoined()
}

func (c *cluster) lease(node string) *coordinationv1.Lease {
	c.t.Helper()
	l, err := c.client.CoordinationV1().Leases("lodestone-system").Get(context.Background(), annotation.SpeakerLeasePrefix+node,
		metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return l
}

func TestLeaseGoesWithItsNode(t *testing.T) {
	c := newCluster(t, "n1")
	n1 := c.start("n1")
	n1.waitJoined()
	n1.waitCaughtUp()
	l := c.lease("n1")
	if o := l.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != "n1" || o[0].UID != "uid-of-n1" {
		t.Errorf("the Lease belongs to %+v", o)
	}
	if report.Of(l.Annotations).Address.String() != n1.address() {
		t.Errorf("the Lease has %v, listening on %s", l.Annotations, n1.address())
	}
}

// leaseWrites returns how often a Lease has been written.
func (c *cluster) leaseWrites() int {
	writes := 0
	for _, a := range c.client.(*fake.Clientset).Actions() {
		if a.GetResource().Resource == "leases" && (a.GetVerb() == "create" || a.GetVerb() == "update") {
			writes++
		}
	}
	return writes
}

// onSegments is the report of a node with these.
func onSegments(texts ...string) report.Report {
	r := report.Report{Network: report.Network{Segments: []report.Segment{}}}
	for _, text := range texts {
		var s report.Segment
		if err := s.UnmarshalText([]byte(text)); err != nil {
			panic(err)
		}
		r.Segments = append(r.Segments, s)
	}
	return r
}

func TestLeaseCarriesTheReport(t *testing.T) {
	c := newCluster(t, "n1")
	want := onSegments("198.18.0.0/24 eth0")
	want.Gateways = []netip.Addr{netip.MustParseAddr("198.18.0.254")}
	carries := func() bool {
		l, err := c.client.CoordinationV1().Leases("lodestone-system").Get(t.Context(), annotation.SpeakerLeasePrefix+"n1", metav1.GetOptions{})
		if err != nil {
			return false
		}
		r := report.Of(l.Annotations)
		return r.Network.Equal(want.Network) && r.Address.IsValid() && len(r.Keys) == 1
	}
	until := func(what string, holds func() bool) {
		t.Helper()
		require.Eventually(t, holds, testTimeout, time.Millisecond, what)
	}
	want.Forwards, want.KubeProxy = true, true
	n1 := c.start("n1")
	n1.waitJoined()
	n1.Report(want)
	until("the first report is written", carries)
	n1.waitCaughtUp() // of three reports in flight the speaker would not know the first one again
	want.Gateways = []netip.Addr{}
	n1.Report(want)
	until("a gateway that is gone is, too", carries)
	n1.Report(report.Report{})

	n1.waitCaughtUp()
	writes := c.leaseWrites()
	for range 10 {
		n1.Report(want)
	}
	want.Segments = onSegments("198.18.0.0/24 eth0", "2001:db8::/64 eth0").Segments
	n1.Report(want)
	until("the next report is written", carries)
	assert.Equal(t, writes+1, c.leaseWrites(), "a report that is on the Lease already was written again")

	require.NoError(t, c.client.CoordinationV1().Leases("lodestone-system").Delete(t.Context(), annotation.SpeakerLeasePrefix+"n1",
		metav1.DeleteOptions{}))
	until("a deleted Lease comes back with the report", carries)

	n1.leave()
	assert.True(t, carries(), "what the network looks like is still true")
	writes = c.leaseWrites()
	var asked atomic.Bool
	c.client.(*fake.Clientset).PrependReactor("get", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return !asked.Swap(true), nil, // what a load balancer before the API servers may answer
			apierrors.NewGenericServerResponse(http.StatusNotFound, "get",
				schema.GroupResource{Resource: "leases"}, "", "404 page not found", 0, true)
	})
	again := c.start("n1")
	until("the next start writes the Lease", func() bool { return c.leaseWrites() > writes })
	again.waitCaughtUp()
	assert.True(t, carries(), "the start took the last report away")
	writes = c.leaseWrites()
	again.Report(want)
	want.Segments = []report.Segment{}
	again.Report(want)
	until("another report is written", carries)
	assert.Equal(t, writes+1, c.leaseWrites(), "the same report was written again after the start")
}

// waitCaughtUp waits until the API server has what the speaker wrote last, and the speaker has seen it.
func (s *speaker) waitCaughtUp() {
	s.t.Helper()
	leases := s.options.Client.CoordinationV1().Leases(s.options.Namespace)
	require.Eventually(s.t, func() bool {
		l, err := leases.Get(s.t.Context(), annotation.SpeakerLeasePrefix+s.options.Node, metav1.GetOptions{})
		s.own.mu.Lock()
		defer s.own.mu.Unlock()
		return err == nil && holder(l) == s.options.Node && l.Annotations[annotation.Report] == s.own.carried && s.own.carried != "" &&
			s.own.overwritten == "" && !s.own.spoiled
	}, testTimeout, time.Millisecond)
}

// A speaker ignores what somebody else writes on its Lease, and overwrites it.
func TestASpeakerRepairsItsLeaseAtOnce(t *testing.T) {
	c := newCluster(t, "n1")
	n1 := c.start("n1")
	n1.waitJoined()
	n1.Report(onSegments("198.18.0.0/24 eth0"))
	leases := c.client.CoordinationV1().Leases("lodestone-system")
	intact := func() bool {
		l, err := leases.Get(t.Context(), annotation.SpeakerLeasePrefix+"n1", metav1.GetOptions{})
		return err == nil && report.Of(l.Annotations).Equal(onSegments("198.18.0.0/24 eth0").Network) && len(l.Annotations) == 1 &&
			len(l.Labels) == 1 && len(l.Finalizers) == 0 &&
			holder(l) == "n1" && len(l.OwnerReferences) == 1 && l.OwnerReferences[0].Name == "n1" &&
			l.Labels[annotation.LabelComponent] == annotation.ComponentSpeaker
	}
	require.Eventually(t, intact, testTimeout, time.Millisecond)
	n1.waitCaughtUp()
	segments := onSegments("198.18.0.0/24 eth0").Segments
	n1.wait("its own segments", func() bool { return slices.Equal(segments, n1.Networks()["n1"].Segments) })
	other := "n2"
	for what, forge := range map[string]func(*coordinationv1.Lease){
		"another segment": func(l *coordinationv1.Lease) { l.Annotations = onSegments("192.0.2.0/24 eth0").Annotations() },
		"nothing":         func(l *coordinationv1.Lease) { l.Annotations = nil },
		"more":            func(l *coordinationv1.Lease) { l.Annotations["a"] = "b" },
		"another label":   func(l *coordinationv1.Lease) { l.Labels["a"] = "b" },
		"another holder":  func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &other },
		"no owner":        func(l *coordinationv1.Lease) { l.OwnerReferences = nil },
		"a finalizer":     func(l *coordinationv1.Lease) { l.Finalizers = []string{"example.com/a"} },
	} {
		l := c.lease("n1")
		forge(l)
		_, err := leases.Update(t.Context(), l, metav1.UpdateOptions{})
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			require.Equal(t, segments, n1.Networks()["n1"].Segments, "it believes what somebody wrote: %s", what)
			return intact()
		}, testTimeout, time.Millisecond, what)
	}
}

// A Lease that names another node than its own, or that is too long, counts for nobody.
func TestALeaseCountsForItsNodeAlone(t *testing.T) {
	task := New(Options{Node: "n1", Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
	written := func(name, holder, text string) *lease {
		return task.leases.keep(&coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{annotation.Report: text, "other": strings.Repeat("x", 1<<20)}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder},
		})
	}
	const text = `{"address": "127.0.0.1:9", "segments": ["198.18.0.0/24 eth0"]}`
	honest := written("lodestone-speaker-n2", "n2", text)
	assert.Len(t, task.leases.others([]any{honest}), 1)
	for _, p := range []*lease{written("lodestone-speaker-n2", "n3", text), written("lodestone-speaker-n1", "n1", text),
		written("n2", "n2", text), written("lodestone-speaker-", "", text),
		written("lodestone-speaker-n2", "n2", text+strings.Repeat(" ", 1<<17))} {
		assert.Empty(t, task.leases.others([]any{p}), "%s held by %s", p.Name, p.holder)
	}
	task.leases.record(nil, written("n2", "n2", text))
	assert.Len(t, task.Networks(), 1, "its own")
	assert.Less(t, len(fmt.Sprintf("%+v", *honest)), 1<<10, "kept in memory")
}

// A Lease that is renewed and otherwise unchanged does not restart the search for those
// that are lost, of which each attempt is a broadcast on the segment.
func TestARenewedLeaseRestartsNoSearch(t *testing.T) {
	task := New(Options{Node: "n1", Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
	p := &lease{node: "n2", holder: "n2", Report: report.Report{Address: netip.MustParseAddrPort("127.0.0.1:9"),
		Keys: []string{"8201839b0c01ff82"}}}
	restarts := func(before, after *lease) bool {
		task.leases.record(before, after)
		select {
		case <-task.rejoin:
			return true
		default:
			return false
		}
	}
	other := func(change func(*lease)) *lease {
		q := *p
		change(&q)
		return &q
	}
	assert.True(t, restarts(nil, p))
	assert.False(t, restarts(p, other(func(*lease) {})))
	assert.False(t, restarts(p, other(func(q *lease) { q.Network = onSegments("198.18.0.0/24 eth0").Network })))
	assert.True(t, restarts(p, other(func(q *lease) { q.Address = netip.MustParseAddrPort("127.0.0.2:9") })))
	assert.True(t, restarts(p, other(func(q *lease) { q.holder = "" })))
	assert.True(t, restarts(p, other(func(q *lease) { q.Keys = nil })))
	for i := range 1000 {
		task.peers.at(fmt.Sprint(i)).alive = true
	}
	assert.EqualValues(t, 20, task.Crowd())
}

// A Lease is written anew from time to time, for people. Each write goes to all speakers, so that many of them
// write more seldom.
func TestLeasesOfManyAreRefreshedMoreSeldom(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ speakers, least, most int }{{1, 96, 300}, {1000, 4, 16}} {
		synctest.Test(t, func(t *testing.T) {
			c := makeCluster(t, "n1")
			task := New(c.options("n1"))
			task.ring.set(keys.Ring{keyOf(t, firstKey)})
			for i := range tt.speakers - 1 {
				task.peers.at(fmt.Sprint(i)).alive = true
			}
			go task.own.publish(t.Context(), time.Now(), make(chan int, 1))
			time.Sleep(24 * time.Hour)
			synctest.Wait()
			t.Logf("%d speakers: %d writes in a day", tt.speakers, c.leaseWrites())
			assert.GreaterOrEqual(t, c.leaseWrites(), tt.least)
			assert.LessOrEqual(t, c.leaseWrites(), tt.most)
		})
	}
}

// After a power cut the first speaker of many does not claim all VIPs while the others
// start, and does not wait for those that do not come.
func TestFirstOfManyAfterAPowerCut(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name         string
		leases       int
		every        time.Duration // one more speaker comes; 0: none does
		ready        bool          // the first of them
		after        time.Duration // the speaker has joined
		alive, least int
	}{
		{"1000 nodes, which start within 10 s", 1000, 10 * time.Millisecond, false, 5 * time.Second, 500, 400},
		{"1000 nodes, which start within two minutes", 1000, 120 * time.Millisecond, false, 10 * time.Second, 84, 80},
		{"1000 nodes, and nobody comes", 1000, 0, false, 10 * time.Second, 1, 1},
		{"1000 nodes, of which one has served all the time", 1000, time.Second, true, 2 * time.Second, 2, 1},
		{"100 nodes", 100, 10 * time.Millisecond, false, 2 * time.Second, 100, 50},
		{"20 nodes, and nobody comes", 20, 0, false, joinTimeout, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				task := New(Options{Node: "n1", Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
				task.ring.set(keys.Ring{keyOf(t, firstKey)})
				leases, crashes := cache.NewStore(cache.MetaNamespaceKeyFunc), make(chan int, 1)
				crashes <- 0
				name := func(i int) string { return fmt.Sprint("n", i) }
				for i := range tt.leases {
					require.NoError(t, leases.Add(&lease{Meta: objects.Meta{Name: name(i + 1)}, node: name(i + 1), holder: name(i + 1),
						Report: report.Report{Address: netip.MustParseAddrPort("198.18.0.1:9744"), Keys: task.ring.current().Marks()}}))
				}
				start := time.Now()
				go task.joiner.enter(t.Context(), leases, start, crashes)
				go func() {
					for i := 1; tt.every > 0 && i < tt.leases; i++ {
						time.Sleep(tt.every)
						meta := []byte{metaVersion, 0}
						if tt.ready && i == 1 {
							meta[1] = metaReady
						}
						task.mu.Lock()
						task.join(&memberlist.Node{Name: name(i + 1), Meta: meta})
						task.mu.Unlock()
					}
				}()
				<-task.Ready()
				took, alive := time.Since(start), len(task.Speakers())
				t.Logf("joined after %s, when %d of %d were alive", took, alive, tt.leases)
				assert.InDelta(t, tt.after.Seconds(), took.Seconds(), 1)
				assert.InDelta(t, tt.alive, alive, float64(max(1, tt.alive/10)))
				assert.GreaterOrEqual(t, alive, tt.least)
				time.Sleep(time.Duration(tt.leases) * tt.every) // until all are there
			})
		})
	}
}

// A speaker knows the withheld VIPs of all other speakers, and those of the previous speaker of its node.
func TestWhatIsWithheldIsKnown(t *testing.T) {
	c := newCluster(t, "n1", "n2")
	vip, claimed := netip.MustParseAddr("198.18.0.100"), netip.MustParseAddr("198.18.0.101")
	published := report.Report{Network: report.Network{Segments: []report.Segment{}, Conflicts: []report.Conflict{
		{VIP: vip, HardwareAddr: [6]byte{2}}, {VIP: claimed, HardwareAddr: [6]byte{2}, Announced: true}}}}
	for _, node := range []string{"n1", "n2"} {
		_, err := c.client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + node, Annotations: published.Annotations(),
				Labels: map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	n1 := c.start("n1")
	n1.waitJoined()
	n1.waitCaughtUp()
	for _, node := range []string{"n1", "n2"} {
		require.Equal(t, published.Conflicts[:1], n1.Networks()[node].Conflicts, node)
	}
}

// Every speaker knows the same of every node's network, its own included: what
// is on the Leases.
func TestNetworksAreThoseOfTheLeases(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	n1, n2 := c.start("n1"), c.start("n2")
	segments := func(s *speaker, want map[string]string) {
		t.Helper()
		s.wait(fmt.Sprint("segments ", want), func() bool {
			got := map[string]string{}
			for node, network := range s.Networks() {
				if network.Segments != nil {
					got[node] = fmt.Sprint(network.Segments)
				}
			}
			return maps.Equal(got, want)
		})
	}
	n1.waitJoined()
	n2.waitJoined()
	n1.Report(onSegments("198.18.0.0/24 eth0"))
	for _, s := range []*speaker{n1, n2} {
		segments(s, map[string]string{"n1": "[198.18.0.0/24 eth0]"})
	}
	n2.Report(onSegments())
	n1.Report(onSegments("198.18.1.0/24 eth0"))
	both := map[string]string{"n1": "[198.18.1.0/24 eth0]", "n2": "[]"}
	for _, s := range []*speaker{n1, n2} {
		segments(s, both)
	}

	n2.leave()
	n1.waitFor(map[string]bool{"n1": false})
	segments(n1, both) // where a node belongs does not depend on who is alive
	n3 := c.start("n3")
	n3.waitJoined()
	assert.Subset(t, slices.Collect(maps.Keys(n3.Networks())), []string{"n1", "n2"}, "who has joined may own, and must know them")
	require.NoError(t, c.client.CoordinationV1().Leases("lodestone-system").Delete(t.Context(), annotation.SpeakerLeasePrefix+"n2",
		metav1.DeleteOptions{}))
	segments(n1, map[string]string{"n1": "[198.18.1.0/24 eth0]"})
}

func TestSpeakerThatObjectsInTimeIsNotGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const grace = 50 * time.Millisecond
		task := New(Options{Node: "n1", Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()})
		task.settings.GracePeriod = grace
		heard := task.gossip
		n2 := &memberlist.Node{Name: "n2", Meta: []byte{metaVersion, metaReady}}
		heard.NotifyJoin(n2)
		changed := task.Changed()

		heard.NotifyLeave(n2)
		time.Sleep(grace / 2)
		heard.NotifyJoin(n2)
		time.Sleep(grace)
		select {
		case <-changed:
			t.Error("something changed")
		default:
		}

		heard.NotifyLeave(n2)
		time.Sleep(grace)
		synctest.Wait()
		if want := map[string]bool{"n1": false}; !maps.Equal(task.Speakers(), want) {
			t.Errorf("speakers are %v, want %v", task.Speakers(), want)
		}
	})
}

// Probe reports who answers on the membership port, and by which protocol.
func TestProbeReportsWhoAnswers(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3", "n4")
	n1 := c.start("n1")
	n1.waitJoined()
	n2 := c.start("n2")
	n2.waitJoined()
	// n3 has a Lease, and nobody listens there; n4 has another key.
	holder := "n3"
	_, err := c.client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name: annotation.SpeakerLeasePrefix + holder, Labels: map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker},
			Annotations: report.Report{Address: netip.MustParseAddrPort("127.0.0.1:9")}.Annotations(),
		}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	c.start("n4", func(o *Options) { o.Secret = secretOf(t, "wrong horse battery staple") })
	got := map[string]Reach{}
	n1.wait("three Leases of others", func() bool {
		answers, unasked := n1.Probe(t.Context())
		require.Zero(t, unasked)
		for _, r := range answers {
			got[r.Node] = r
		}
		return len(answers) == 3 && got["n2"].UDP == nil && got["n2"].TCP == nil // a busy machine may answer late
	})
	assert.Equal(t, n2.address(), got["n2"].Address.String())
	require.ErrorContains(t, got["n3"].UDP, "No response from node n3")
	require.ErrorContains(t, got["n3"].TCP, "refused")
	require.Error(t, got["n4"].UDP, "it cannot decrypt our packets")
	require.NoError(t, got["n4"].TCP)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	answers, unasked := n1.Probe(ctx)
	require.Empty(t, answers, "who was not asked has not failed to answer")
	require.Equal(t, 3, unasked)
}
