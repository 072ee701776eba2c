package hostile

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

const (
	// writers is how many requests the hostile ones have under way.
	writers = 4
	// attempts is how often one of them is made again.
	attempts = 20
)

// each does it for every number below n, some at a time.
func (c *cluster) each(ctx context.Context, what string, n int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	var done atomic.Int64
	for i := range n {
		group.Go(func() error {
			err := do(ctx, i)
			for try := 0; err != nil && try < attempts && !apierrors.IsAlreadyExists(err); try++ { // etcd is late at times
				if err := sleep(ctx, time.Second); err != nil {
					return err
				}
				err = do(ctx, i)
			}
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("%s number %d: %w", what, i, err)
			}
			if d := done.Add(1); d%1000 == 0 {
				c.Progress("%s: %d of %d", what, d, n)
			}
			return nil
		})
	}
	return group.Wait()
}

// fill creates all hostile objects.
func (c *cluster) fill(ctx context.Context) error {
	var bytes atomic.Int64
	create := func(size int) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			s, err := c.kube.CoreV1().Services(hostile).Create(ctx, service(i, size), metav1.CreateOptions{})
			if err != nil {
				return err
			}
			if size > smallBytes && classes[i%len(classes)] == "example.com/other" {
				patch, err := json.Marshal(map[string]any{"status": status()})
				if err != nil {
					return err
				}
				if s, err = c.kube.CoreV1().Services(hostile).Patch(ctx, s.Name, types.MergePatchType, patch, metav1.PatchOptions{},
					"status"); err != nil {
					return err
				}
			}
			bytes.Add(int64(s.Size()))
			return nil
		}
	}
	if err := c.forge(ctx); err != nil {
		return err
	}
	if err := c.each(ctx, "creating EndpointSlices", c.Slices, func(ctx context.Context, i int) error {
		s, err := c.kube.DiscoveryV1().EndpointSlices(hostile).Create(ctx, slice(i), metav1.CreateOptions{})
		if err == nil {
			bytes.Add(int64(s.Size()))
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.each(ctx, "creating large Services", c.Large, create(largeBytes)); err != nil {
		return err
	}
	if err := c.each(ctx, "creating Services", c.Small, create(smallBytes)); err != nil {
		return err
	}
	c.result.Bytes = bytes.Load()
	c.Progress("the API server has %d MB of hostile objects", c.result.Bytes/1e6)
	return nil
}

// forge makes Leases of speakers: one by the token of a speaker, the others as only an
// administrator can.
func (c *cluster) forge(ctx context.Context) error {
	node, err := c.kube.CoreV1().Nodes().Get(ctx, forger, metav1.GetOptions{})
	if err != nil {
		return err
	}
	config, err := c.as(ctx, speaker, forger)
	if err != nil {
		return err
	}
	by, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if _, err := by.CoordinationV1().Leases(lab.LodestoneNamespace).Create(ctx, lease(node, 0), metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("with the token of a speaker: %w", err)
	}
	return c.each(ctx, "forging Leases", c.Leases, func(ctx context.Context, i int) error {
		l := lease(ghost(i), i)
		l.OwnerReferences = nil // there is no such node
		_, err := c.kube.CoordinationV1().Leases(lab.LodestoneNamespace).Create(ctx, l, metav1.CreateOptions{})
		return err
	})
}

func ghost(i int) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("ghost-%06d", i)}}
}

// touch changes every hostile object once.
func (c *cluster) touch(ctx context.Context) error {
	patch := []byte(`{"metadata": {"annotations": {"example.com/touched": "yes"}}}`)
	services := c.kube.CoreV1().Services(hostile)
	change := func(size int) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			_, err := services.Patch(ctx, service(i, size).Name, types.MergePatchType, patch, metav1.PatchOptions{})
			return err
		}
	}
	if err := c.each(ctx, "changing Leases", c.Leases, func(ctx context.Context, i int) error {
		_, err := c.kube.CoordinationV1().Leases(lab.LodestoneNamespace).Patch(ctx, "lodestone-speaker-"+ghost(i).Name, types.MergePatchType,
			patch, metav1.PatchOptions{})
		return err
	}); err != nil {
		return err
	}
	if err := c.each(ctx, "changing EndpointSlices", c.Slices, func(ctx context.Context, i int) error {
		_, err := c.kube.DiscoveryV1().EndpointSlices(hostile).Patch(ctx, slice(i).Name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	}); err != nil {
		return err
	}
	if err := c.each(ctx, "changing large Services", c.Large, change(largeBytes)); err != nil {
		return err
	}
	return c.each(ctx, "changing Services", c.Small, change(smallBytes))
}
