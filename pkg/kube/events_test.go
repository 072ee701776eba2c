package kube

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// Two controllers, one after the other, tell the same: the API server has it once.
func TestEventsWithAnIDAreWrittenOnce(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
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
		r := &Recorder{client, "lodestone-controller", make(chan event, 9), make(chan event, 9)}
		r.Once(svc, corev1.EventTypeNormal, "OwnerChanged", "once", "id")
		r.Event(svc, corev1.EventTypeNormal, "OwnerChanged", last)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		require.Eventually(t, func() bool { return slices.Contains(events(), last) }, 10*time.Second, time.Millisecond)
		cancel()
		require.NoError(t, <-ended)
	}
	require.ElementsMatch(t, []string{"once", "first", "second"}, events())
}
