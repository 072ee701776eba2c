package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// Two controllers, one after the other, write the same Event: the API server has it once.
func TestEventsWithAnIDAreWrittenOnce(t *testing.T) {
	t.Parallel()
	client := testapi.New()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "web"}}
	events := func() (messages []string) {
		list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		for _, e := range list.Items {
			require.Empty(t, e.Annotations)
			messages = append(messages, e.Message)
		}
		return messages
	}
	for _, last := range []string{"first", "second"} {
		r := &Recorder{client: client, component: "lodestone-controller", warnings: newEventQueue(), normal: newEventQueue()}
		r.Once(svc, corev1.EventTypeNormal, "OwnerChanged", "once", "id")
		r.Event(svc, corev1.EventTypeNormal, "OwnerChanged", last)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		require.Eventually(t, func() bool { return slices.Contains(events(), last) }, 30*time.Second, time.Millisecond)
		cancel()
		require.NoError(t, <-ended)
	}
	require.ElementsMatch(t, []string{"once", "first", "second"}, events())
}

// An object that much happens to, such as a node with many sessions, is reported of all the same.
func TestManyEventsOnOneObjectAreWritten(t *testing.T) {
	t.Parallel()
	client := testapi.New()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1"}}
	r := &Recorder{client: client, component: "lodestone-speaker", warnings: newEventQueue(), normal: newEventQueue()}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	for i := range 40 {
		reason := fmt.Sprint("Reason", i) // those of one reason are put together
		r.Event(node, corev1.EventTypeWarning, reason, "happened")
		require.Eventually(t, func() bool {
			list, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
			return err == nil && slices.ContainsFunc(list.Items, func(e corev1.Event) bool { return e.Reason == reason })
		}, 20*time.Second, time.Millisecond, reason)
	}
	cancel()
	require.NoError(t, <-ended)
}

// One tenant's flood of Events delays nobody else's, and what waits is bounded.
func TestEventsOfOneNamespaceDelayNoOther(t *testing.T) {
	t.Parallel()
	q := newEventQueue()
	on := func(namespace, name string) event {
		return event{object: &corev1.ObjectReference{Kind: "Service", Namespace: namespace, Name: name}}
	}
	for i := range 3 * eventsPerNamespace {
		q.push(on("noisy", "web"))
		q.push(on("loud", fmt.Sprint(i)))
		q.push(on("shrill", fmt.Sprint(i)))
	}
	require.Len(t, q.waits["noisy"], eventsPerObject)
	require.LessOrEqual(t, len(q.waits["loud"]), eventsPerNamespace)
	require.Equal(t, eventsQueued, q.size)
	q.push(on("shop", "web"))
	require.Equal(t, eventsQueued, q.size)
	for turn := 0; ; turn++ {
		e, ok := q.pop()
		require.True(t, ok)
		if e.object.Namespace == "shop" {
			require.Less(t, turn, 4, "its turn")
			break
		}
	}
	n := 1
	for ; ; n++ {
		if _, ok := q.pop(); !ok {
			break
		}
	}
	require.Less(t, n, eventsQueued)
	require.Zero(t, q.size)
	require.Empty(t, q.on)
	require.Empty(t, q.waits)
	require.Empty(t, q.next)
}

// So it is while the API server takes longer for an Event than the rate allows.
func TestASlowAPIServerDelaysNoOthersEvents(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := testapi.New()
		var written []string
		client.PrependReactor("create", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
			time.Sleep(time.Second)
			written = append(written, a.GetNamespace())
			return false, nil, nil
		})
		r := &Recorder{client: client, component: "lodestone-controller", warnings: newEventQueue(), normal: newEventQueue()}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		on := func(namespace, name string) {
			r.Event(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}, corev1.EventTypeWarning, "PoolExhausted", "")
		}
		for i := range eventsPerNamespace {
			on("loud", fmt.Sprint(i))
		}
		time.Sleep(2 * time.Minute)
		on("shop", "web")
		time.Sleep(10 * time.Second)
		cancel()
		require.NoError(t, <-ended)
		time.Sleep(time.Minute) // for the one that is under way
		synctest.Wait()
		require.Contains(t, written[:130], "shop")
	})
}

// An Event is written when the API server answers again.
func TestAnEventOutlastsAnAPIServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, back := testapi.New(), time.Now().Add(time.Minute)
		client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
			return time.Now().Before(back), nil, errors.New("connection refused")
		})
		r := &Recorder{client: client, component: "lodestone-controller", warnings: newEventQueue(), normal: newEventQueue()}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		r.Event(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}, corev1.EventTypeNormal, "Allocated", "")
		time.Sleep(time.Until(back) + 2*eventRetry)
		list, err := client.CoreV1().Events("shop").List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		require.Len(t, list.Items, 1)
		require.WithinDuration(t, back.Add(-time.Minute), list.Items[0].LastTimestamp.Time, 0, "it has the time at which it was reported")
		cancel()
		require.NoError(t, <-ended)
	})
}

func TestWarningsDelayNoOthersEvents(t *testing.T) {
	t.Parallel()
	r := &Recorder{warnings: newEventQueue(), normal: newEventQueue()}
	take := func() string {
		e, ok := r.next(t.Context())
		require.True(t, ok)
		return e.object.Namespace
	}
	on := func(namespace, name string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	}
	r.Event(on("shop", "web"), corev1.EventTypeNormal, "Allocated", "")
	r.Event(on("shop", "api"), corev1.EventTypeNormal, "Allocated", "")
	for i := range 100 {
		r.Event(on("loud", fmt.Sprint(i)), corev1.EventTypeWarning, "PoolExhausted", "")
	}
	var first []string
	for range 2 * normalTurn {
		first = append(first, take())
	}
	require.Equal(t, []string{"loud", "loud", "loud", "shop", "loud", "loud", "loud", "shop"}, first)
}
