package leaseevents_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/controller/leaseevents"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

var morning = time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)

// recorder is a channel of Events that were emitted.
type recorder chan string

func (t recorder) Event(object runtime.Object, eventType, reason, message string) {
	t <- eventType + " " + object.(metav1.Object).GetName() + " " + reason + ": " + message
}

func (t recorder) Once(object runtime.Object, eventType, reason, message, _ string) {
	t.Event(object, eventType, reason, message)
}

// identified is a channel of the ids of Events.
type identified chan string

func (i identified) Event(runtime.Object, string, string, string) {}

func (i identified) Once(_ runtime.Object, _, _, _, id string) { i <- id }

func lease(node string, sessions ...report.Session) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: "lodestone-system", Name: annotation.SpeakerLeasePrefix + node,
		Labels:      map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker},
		Annotations: report.Report{Sessions: sessions}.Annotations(),
	}}
}

// story is an Emitter in a cluster of these Services, and the Leases that the
// speakers write.
type story struct {
	t      *testing.T
	client *fake.Clientset
	events recorder
}

// begin begins an Emitter and the informer that it uses. end ends both.
func begin(t *testing.T, client *fake.Clientset, events leaseevents.Events) (services cache.SharedIndexInformer, end func()) {
	t.Helper()
	services = coreinformers.NewServiceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{})
	n, err := leaseevents.New(leaseevents.Options{Client: client, Namespace: "lodestone-system", Services: services, Events: events})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { services.RunWithContext(ctx) })
	running.Go(func() { _ = n.Run(ctx) }) // returns nil
	return services, func() { cancel(); running.Wait() }
}

func newStory(t *testing.T, objects ...runtime.Object) *story {
	t.Helper()
	s := &story{t: t, client: testapi.New(objects...), events: make(recorder, 100)}
	services, end := begin(t, s.client, s.events)
	t.Cleanup(end)
	require.True(t, cache.WaitForCacheSync(t.Context().Done(), services.HasSynced))

	_, err := s.client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), lease("n1"), metav1.CreateOptions{})
	require.NoError(t, err)
	first := ""
	for try := 0; first == ""; try++ { // until the watch runs, which holds no more than 100 Leases
		s.writes(report.Report{Sessions: []report.Session{session(report.Session{Since: morning, Message: fmt.Sprint("try ", try)})}})
		select {
		case first = <-s.events:
		case <-time.After(100 * time.Millisecond):
		}
	}
	require.Contains(t, first, `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): try `)
	s.writes(report.Report{Sessions: []report.Session{session(report.Session{Since: morning, Message: "hold timer expired"})}})
	require.Eventually(t, func() bool {
		return <-s.events == `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): hold timer expired`
	}, time.Minute, time.Millisecond)
	return s
}

func session(s report.Session) report.Session {
	s.Peer, s.Router = "tor", netip.MustParseAddr("203.0.113.254")
	return s
}

// writes writes the Lease of n1.
func (s *story) writes(r report.Report) {
	s.t.Helper()
	l := lease("n1")
	l.Annotations = r.Annotations()
	_, err := s.client.CoordinationV1().Leases("lodestone-system").Update(s.t.Context(), l, metav1.UpdateOptions{})
	require.NoError(s.t, err)
}

func TestSessionsThatComeAndGoAreEvents(t *testing.T) {
	t.Parallel()
	s := newStory(t, lease("n0", report.Session{Peer: "old", Message: "refused"}))
	write := func(of report.Session) { s.writes(report.Report{Sessions: []report.Session{session(of)}}) }
	write(report.Session{Since: morning, Message: "hold timer expired"}) // nothing new
	write(report.Session{Established: true, Since: morning})
	require.Equal(t, `Normal n1 BGPSessionUp: BGP session with peer "tor" (203.0.113.254) is established`, <-s.events)
	write(report.Session{Established: true, Since: morning, BFD: "Up"})       // nothing new
	write(report.Session{Established: true, Since: morning.Add(time.Minute)}) // down and up in between
	require.Equal(t, `Normal n1 BGPSessionUp: BGP session with peer "tor" (203.0.113.254) is established`, <-s.events)
	write(report.Session{Since: morning, Message: "the peer: Cease, administrative shutdown"})
	require.Equal(t, `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): the peer: Cease, administrative shutdown`, <-s.events)
	write(report.Session{Established: true, Since: morning.Add(time.Hour), Message: "node n2 has the router ID, too"})
	require.Equal(t, `Normal n1 BGPSessionUp: BGP session with peer "tor" (203.0.113.254) is established`, <-s.events)
	require.Equal(t, `Warning n1 BGPSessionFlawed: BGP session with peer "tor" (203.0.113.254): node n2 has the router ID, too`, <-s.events)
	require.Empty(t, s.events)
}

func service(name string, vips ...string) *corev1.Service {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name),
		Annotations: map[string]string{annotation.Assigned: strings.Join(vips, ",")}}}
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	for _, vip := range vips {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: vip})
	}
	return svc
}

// Each Service hears once of each move of its VIPs, and nobody else.
func TestVIPsThatChangeHandsAreEvents(t *testing.T) {
	t.Parallel()
	s := newStory(t, service("dual", "203.0.113.1", "2001:db8::1"), service("shares", "203.0.113.1"), service("alone", "203.0.113.2"),
		service("stays", "203.0.113.3"))
	a, b, six, nobodys := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8::1"),
		netip.MustParseAddr("203.0.113.9")
	lost := report.Move{At: morning, From: "n9", Why: report.SpeakerLost, To: map[string][]netip.Addr{"n1": {a, six}, "n2": {b, nobodys}}}
	s.writes(report.Report{Moves: []report.Move{lost}})
	because := ": the speaker on node n9 is not heard any more: the node is down or cut off, or its speaker was killed"
	require.Equal(t, "Normal dual OwnerChanged: node n1 announces 203.0.113.1 and 2001:db8::1 instead of node n9"+because, <-s.events)
	require.Equal(t, "Normal shares OwnerChanged: node n1 announces 203.0.113.1 instead of node n9"+because, <-s.events)
	require.Equal(t, "Normal alone OwnerChanged: node n2 announces 203.0.113.2 instead of node n9"+because, <-s.events)

	gone := report.Move{At: morning.Add(time.Minute), From: "n2", Why: "NoServingEndpoint", To: map[string][]netip.Addr{"": {b}}}
	s.writes(report.Report{Moves: []report.Move{lost, gone}})
	require.Equal(t, "Warning alone NoOwner: no node announces 203.0.113.2 by layer 2 any more, node n2 did: no endpoint of the Service "+
		"takes traffic", <-s.events)
	first := report.Move{At: morning.Add(time.Hour), Why: report.FirstOwner, To: map[string][]netip.Addr{"n2": {a, six}}}
	s.writes(report.Report{Moves: []report.Move{gone, first}})
	require.Equal(t, "Normal dual Announced: node n2 announces 203.0.113.1 and 2001:db8::1 by layer 2", <-s.events)
	require.Equal(t, "Normal shares Announced: node n2 announces 203.0.113.1 by layer 2", <-s.events)
	s.writes(report.Report{})

	t.Log("a Lease that was deleted comes back with what everybody knows")
	require.NoError(t, s.client.CoordinationV1().Leases("lodestone-system").Delete(t.Context(), lease("n1").Name, metav1.DeleteOptions{}))
	time.Sleep(time.Second) // otherwise it was only changed, and who emits the Event of an old move again changes nothing
	again := lease("n1", session(report.Session{Message: "refused"}))
	again.Annotations = report.Report{Sessions: []report.Session{session(report.Session{Message: "refused"})},
		Moves: []report.Move{lost}}.Annotations()
	_, err := s.client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), again, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Equal(t, `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): refused`, <-s.events)
	require.Empty(t, s.events)
}

// The leader goes with the node whose VIPs move. The next one emits the same Event
// about them, and none about what moved long ago.
func TestNextLeaderEmitsMoves(t *testing.T) {
	t.Parallel()
	l, vip := lease("n1"), netip.MustParseAddr("203.0.113.1")
	l.Annotations = report.Report{Moves: []report.Move{
		{At: time.Now().Add(-time.Minute), From: "n9", Why: report.SpeakerLost, To: map[string][]netip.Addr{"n1": {vip}}},
		{At: time.Now().Add(-time.Hour), From: "n8", Why: report.SpeakerLost, To: map[string][]netip.Addr{"n9": {vip}}},
	}}.Annotations()
	client := testapi.New(l, service("web", vip.String()))
	leads := func() []string {
		events := make(identified, 9)
		_, end := begin(t, client, events)
		ids := []string{<-events}
		end()
		close(events)
		for id := range events {
			ids = append(ids, id)
		}
		return ids
	}
	first := leads()
	require.Len(t, first, 1)
	require.Contains(t, first[0], "web n1 ")
	require.Contains(t, first[0], `"n9" "n1" SpeakerLost`)
	require.Equal(t, first, leads())
}

func TestUnmatchedAdvertisementsAreEvents(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.writes(report.Report{Unmatched: []string{"lan", "storage"}})
	require.Contains(t, <-s.events, `Warning n1 InterfaceMissing: advertisement "lan" announces on none of this node's interfaces`)
	require.Contains(t, <-s.events, `Warning n1 InterfaceMissing: advertisement "storage" announces on none of this node's interfaces`)
	s.writes(report.Report{Unmatched: []string{"storage"}})
	require.Equal(t,
		`Normal n1 InterfaceMissingOver: advertisement "lan" has an interface on this node again, or does not need one any more`, <-s.events)
	s.writes(report.Report{Unmatched: []string{"storage", strings.Repeat("x", 64)}})
	s.writes(report.Report{})
	require.Equal(t,
		`Normal n1 InterfaceMissingOver: advertisement "storage" has an interface on this node again, or does not need one any more`, <-s.events)
	require.Empty(t, s.events)
}

// Whoever has the token of one node writes its Lease again and again, with as many moves as it can have, of a VIP that many Services
// share. It gets as many Events as a node that loses its last VIPs, and others theirs.
func TestOneLeaseMakesFewEvents(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("203.0.113.1")
	objects := []runtime.Object{service("victim", "203.0.113.2"), lease("n1"), lease("n2")}
	for i := range 100 {
		objects = append(objects, service(fmt.Sprint("shares-", i), vip.String()))
	}
	client, events := testapi.New(objects...), make(recorder, 100_000)
	_, end := begin(t, client, events)
	ctx := t.Context()
	write := func(node string, r report.Report) {
		l := lease(node)
		l.Annotations = r.Annotations()
		_, err := client.CoordinationV1().Leases("lodestone-system").Update(ctx, l, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	for round := range 60 {
		var moves []report.Move
		for i := range report.MaxVIPs {
			moves = append(moves, report.Move{At: morning.Add(time.Duration(round)*time.Minute + time.Duration(i)*time.Millisecond), From: "n9",
				Why: report.SpeakerLost, To: map[string][]netip.Addr{"": {vip}}})
		}
		write("n1", report.Report{Moves: moves, Sessions: []report.Session{session(report.Session{Message: fmt.Sprint("round ", round)})}})
		if round%20 == 0 {
			require.NoError(t, client.CoordinationV1().Leases("lodestone-system").Delete(ctx, lease("n1").Name, metav1.DeleteOptions{}))
			_, err := client.CoordinationV1().Leases("lodestone-system").Create(ctx, lease("n1"), metav1.CreateOptions{})
			require.NoError(t, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	others, victims := 0, 0
	count := func(e string) {
		if strings.Contains(e, " victim ") {
			victims++
		} else {
			others++
		}
	}
	for try := 0; victims == 0; try++ { // until its watch runs
		require.Less(t, try, 100)
		write("n2", report.Report{Moves: []report.Move{{At: morning.Add(time.Duration(try) * time.Second), From: "n9", Why: report.SpeakerLost,
			To: map[string][]netip.Addr{"n2": {netip.MustParseAddr("203.0.113.2")}}}}})
		time.Sleep(500 * time.Millisecond)
		for range len(events) {
			count(<-events)
		}
	}
	end()
	close(events)
	for e := range events {
		count(e)
	}
	require.NotZero(t, others)
	require.Less(t, others, report.MaxVIPs+1000) // a minute's few a second, and more
}
