package clusterfacts

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// TestMain takes away what makes errors of client-go rest, by the time of the
// process's start: in a bubble that is yet to come.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	os.Exit(m.Run())
}

// cluster is a fake API server with a watcher, both in a bubble whose time is
// simulated.
type cluster struct {
	*testing.T
	client  *fake.Clientset
	watcher *Watcher
	log     bytes.Buffer
}

// bubble runs a story on a cluster with the objects.
func bubble(t *testing.T, story func(*cluster), objects ...runtime.Object) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{T: t, client: testapi.New(objects...)}
		c.watcher = NewWatcher(Options{Client: c.client, Log: slog.New(slog.NewTextHandler(&c.log, nil))})
		story(c)
	})
}

// start runs the watcher until the story ends.
func (c *cluster) start() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- c.watcher.Run(ctx) }()
	c.Cleanup(func() {
		cancel()
		require.NoError(c, <-done)
	})
	c.settle()
}

// settle lets everything happen that is going to.
func (c *cluster) settle() {
	time.Sleep(5 * gatherDelay)
	synctest.Wait()
}

func (c *cluster) facts() *Facts {
	c.Helper()
	f, ready := c.watcher.Current()
	require.True(c, ready, "waits for %v\n%s", c.watcher.Waiting(), c.log.String())
	return f
}

// changes reports whether doing it changes the facts.
func (c *cluster) changes(do func() error) bool {
	c.Helper()
	changed := c.watcher.Changed()
	require.NoError(c, do())
	c.settle()
	select {
	case <-changed:
		return true
	default:
		return false
	}
}

func (c *cluster) updateNode(n *corev1.Node) func() error {
	return func() error {
		_, err := c.client.CoreV1().Nodes().Update(c.Context(), n, metav1.UpdateOptions{})
		return err
	}
}

func TestWatcherFollowsTheCluster(t *testing.T) {
	speaker := lease("n1", said("198.18.0.0/24 eth0", "198.18.0.254"))
	speaker.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	n1 := node("n1", nil, internal("198.18.0.11"))
	v6, other := endpoints("2001:db8::2"), endpoints("192.0.2.1")
	v6.Name, other.Name, other.Labels = "kubernetes-v6", "web", map[string]string{discoveryv1.LabelServiceName: "web"}
	bubble(t, func(c *cluster) {
		_, ready := c.watcher.Current()
		require.False(t, ready)
		require.Len(t, c.watcher.Waiting(), 5)
		c.start()
		assert.Equal(t, []string{
			"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12",
			"198.18.0.0 is the network address of 198.18.0.0/24",
			"198.18.0.2 is an endpoint of the API server",
			"198.18.0.11 is the address of node n1",
			"198.18.0.254 is the default gateway of node n1",
			"198.18.0.255 is the broadcast address of 198.18.0.0/24",
			"2001:db8::2 is an endpoint of the API server",
		}, sentences(c.facts()))
		assert.Equal(t, "[198.18.0.0/24]", fmt.Sprint(c.facts().Segments))

		beat := n1.DeepCopy()
		beat.ResourceVersion = "2"
		beat.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.Now()}}
		beat.Status.Images = []corev1.ContainerImage{{Names: []string{"image"}}}
		assert.False(t, c.changes(c.updateNode(beat)), "a heartbeat")

		moved := n1.DeepCopy()
		moved.ResourceVersion, moved.Status.Addresses[0].Address = "3", "198.18.0.12"
		assert.True(t, c.changes(c.updateNode(moved)), "another address")
		assert.Contains(t, sentences(c.facts()), "198.18.0.12 is the address of node n1")

		assert.True(t, c.changes(func() error {
			l := speaker.DeepCopy()
			l.Annotations = said("198.18.0.0/24 eth0", "198.18.0.253")
			_, err := c.client.CoordinationV1().Leases(l.Namespace).Update(t.Context(), l, metav1.UpdateOptions{})
			return err
		}), "another gateway")
		assert.Contains(t, sentences(c.facts()), "198.18.0.253 is the default gateway of node n1")

		assert.True(t, c.changes(func() error {
			return c.client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{})
		}), "the node goes")
		assert.Equal(t, []string{"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12", "198.18.0.2 is an endpoint of the API server",
			"2001:db8::2 is an endpoint of the API server"}, sentences(c.facts()))
		assert.Nil(t, c.facts().Segments)
	}, n1, speaker, serviceCIDR("kubernetes", "10.96.0.0/12"), endpoints("198.18.0.2"), v6, other, apiService("10.96.0.1"))
}

// What Collect would not read is not kept: a cluster has a thousand nodes.
func TestWatcherKeepsLittle(t *testing.T) {
	n1 := node("n1", []string{"10.244.1.0/24"}, internal("198.18.0.11"))
	n1.Labels, n1.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	n1.Status.Images = []corev1.ContainerImage{{Names: []string{"image"}}}
	hostile := lease("n1", map[string]string{annotation.Report: strings.Repeat("x", 1<<20), "a": strings.Repeat("x", 1<<17)})
	hostile.Labels = map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker}
	bubble(t, func(c *cluster) {
		c.start()
		assert.Equal(t, []*corev1.Node{node("n1", []string{"10.244.1.0/24"}, internal("198.18.0.11"))},
			listed[*corev1.Node](c.watcher.nodes))
		assert.Equal(t, []*coordinationv1.Lease{lease("n1", map[string]string{annotation.Report: "{}"})},
			listed[*coordinationv1.Lease](c.watcher.leases))
	}, n1, hostile)
}

func TestManyNodesCostFewLooks(t *testing.T) {
	bubble(t, func(c *cluster) {
		c.start()
		looks := 0
		for range 10 { // a second
			changed := c.watcher.Changed()
			for i := range 30 {
				_, err := c.client.CoreV1().Nodes().Create(t.Context(),
					node(fmt.Sprint("n", time.Now().UnixNano(), "-", i), nil, internal("198.18.0.1")), metav1.CreateOptions{})
				require.NoError(t, err)
			}
			time.Sleep(gatherDelay / 2)
			synctest.Wait()
			select {
			case <-changed:
				looks++
			default:
			}
		}
		c.settle()
		assert.Contains(t, sentences(c.facts())[0], " and 299 more")
		assert.LessOrEqual(t, looks, 5)
		assert.Positive(t, looks, "changes without end must not put off the look")
	})
}

// retry is how long a reflector waits at the most after it could not list.
const retry = time.Minute

// An API server before v1.33 does not have ServiceCIDRs, until it is upgraded.
func TestWithoutServiceCIDRs(t *testing.T) {
	bubble(t, func(c *cluster) {
		var upgraded atomic.Bool
		c.client.PrependReactor("list", "servicecidrs", func(clienttesting.Action) (bool, runtime.Object, error) {
			return !upgraded.Load(), nil, apierrors.NewNotFound(networkingv1.Resource("servicecidrs"), "")
		})
		c.start()
		time.Sleep(5 * time.Second) // it is asked again, as in TestServiceCIDRsAreWaitedFor
		assert.Equal(t, []string{"10.96.0.1 is the cluster IP of the API server"}, sentences(c.facts()))
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Equal(t, 1, strings.Count(c.log.String(), "has no ServiceCIDRs"), c.log.String())

		upgraded.Store(true)
		time.Sleep(retry)
		c.settle()
		assert.Equal(t, []string{"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12"}, sentences(c.facts()))
	}, apiService("10.96.0.1"), serviceCIDR("kubernetes", "10.96.0.0/12"))
}

// A load balancer before API servers that start answers 404 to everything. That is no API server without ServiceCIDRs.
func TestServiceCIDRsAreWaitedFor(t *testing.T) {
	for i := range 20 { // each kind is asked for anew after a time that is drawn by lot
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			bubble(t, func(c *cluster) {
				began := time.Now()
				c.client.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
					return time.Since(began) < 10*time.Second, nil, apierrors.NewGenericServerResponse(http.StatusNotFound, "list",
						action.GetResource().GroupResource(), "", "404 page not found", 0, true)
				})
				c.start()
				for {
					changed := c.watcher.Changed()
					if _, ready := c.watcher.Current(); ready {
						break
					}
					<-changed
				}
				require.Equal(c, []string{"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12"}, sentences(c.facts()))
			}, apiService("10.96.0.1"), serviceCIDR("kubernetes", "10.96.0.0/12"))
		})
	}
}

// Nothing may be handed out before everything is known, and the log names what
// is missing.
func TestNotReadyBeforeEverythingIsListed(t *testing.T) {
	for resource, missing := range map[string]string{"servicecidrs": "ServiceCIDRs", "leases": "Leases of speakers", "nodes": "Nodes"} {
		t.Run(resource, func(t *testing.T) {
			bubble(t, func(c *cluster) {
				var allowed atomic.Bool
				c.client.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) {
					return !allowed.Load(), nil, apierrors.NewForbidden(networkingv1.Resource(resource), "", nil)
				})
				c.start()
				time.Sleep(lateAfter)
				synctest.Wait()
				_, ready := c.watcher.Current()
				assert.False(t, ready)
				assert.Equal(t, []string{missing}, c.watcher.Waiting())
				assert.Equal(t, 1, strings.Count(c.log.String(), "is not known yet"), c.log.String())
				assert.Contains(t, c.log.String(), "["+missing+"]")
				assert.Equal(t, 1, strings.Count(c.log.String(), "is forbidden"), c.log.String())

				allowed.Store(true)
				time.Sleep(retry)
				c.settle()
				assert.Equal(t, []string{"10.96.0.0/12 is in the Service CIDR 10.96.0.0/12"}, sentences(c.facts()))
			}, serviceCIDR("kubernetes", "10.96.0.0/12"))
		})
	}
}
