package cluster_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
	"github.com/lodestone-lb/lodestone/inspect/status"
)

// follow runs a Watcher until the test ends.
func follow(t *testing.T, c *example.Cluster) *cluster.Watcher {
	w := c.Source()
	ended := make(chan error)
	go func() { ended <- w.Run(t.Context()) }()
	t.Cleanup(func() { require.NoError(t, <-ended) })
	return w
}

// becomes waits until the Watcher's status is like that.
func becomes(t *testing.T, w *cluster.Watcher, like func(*status.Status) bool) *status.Status {
	t.Helper()
	late := time.After(30 * time.Second)
	for {
		changed := w.Changed()
		if o, ready := w.Objects(t.Context()); ready {
			if s := status.Of(o); like(s) {
				return s
			}
		}
		select {
		case <-changed:
		case <-late:
			require.FailNow(t, "it never was like that")
		}
	}
}

// A Watcher has the same objects as All.
func TestWatcherHasWhatAllHas(t *testing.T) {
	t.Parallel()
	for _, size := range []example.Size{{}, {Nodes: 1}, {Nodes: 5, Services: 60}, {Nodes: 5, Services: 60, Trouble: true}} {
		c := example.New(size)
		w := follow(t, c)
		same := func() {
			t.Helper()
			o, err := cluster.All(t.Context(), c, example.Place)
			require.NoError(t, err)
			want := status.Of(o)
			var got *status.Status
			becomes(t, w, func(s *status.Status) bool {
				s.Time, got = want.Time, s
				return len(s.Warnings) == len(want.Warnings)
			})
			require.Equal(t, want, got)
		}
		same()
		if size.Nodes > 2 {
			require.NoError(t, c.SetSpeaker(t.Context(), 2, false))
			require.NoError(t, c.SetSession(t.Context(), 1, "hold timer expired"))
			same()
		}
	}
}

func TestWatcherReportsWhatMayNotBeRead(t *testing.T) {
	t.Parallel()
	c := example.New(example.Size{Nodes: 2, Services: 4})
	c.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no"))
	})
	s := becomes(t, follow(t, c), func(*status.Status) bool { return true })
	require.Contains(t, s.Unread[0], "you need the right to list pods in namespace lodestone-system")
	require.Nil(t, s.Speakers)
	require.NotNil(t, s.Services, "the rest is there")
}
