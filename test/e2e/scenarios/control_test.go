package scenarios

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// free are the unused installations, each in a lab of its own, and taken those of running
// stories, by the names of their tests.
var (
	free  = make(chan *lodestone.Installation, lab.Places)
	taken sync.Map
)

// TestMain brings up as many labs as the machine has places and processor time for: stories run side by side, each in one of
// them. With LODESTONE_LAB=keep all run in the one that is up, if any, which stays up.
func TestMain(m *testing.M) {
	code, err := runStories(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "scenarios:", err)
		code = 1
	}
	os.Exit(code)
}

func runStories(m *testing.M) (code int, err error) {
	if os.Getenv("LODESTONE_LAB") == "keep" {
		if cluster, err := lab.Open(""); err == nil {
			return runIn(m, cluster)
		}
	}
	ctx := context.Background()
	clusters, start := make([]*lab.Cluster, lab.Places), time.Now()
	up := func(wait time.Duration) (*lab.Cluster, error) {
		return lab.Up(ctx, lab.Options{DualStack: true, Router: lab.RouterBoth, Failover: failover, Wait: wait,
			Progress: func(format string, args ...any) {
				fmt.Printf("lab: %5.1fs %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
			}})
	}
	var group errgroup.Group
	for i := range clusters {
		group.Go(func() (err error) {
			if clusters[i], err = up(time.Second); clusters[i] == nil && errors.Is(err, context.DeadlineExceeded) {
				return nil // another program has the place: there are fewer labs
			}
			return err
		})
	}
	defer func() {
		var group errgroup.Group
		for _, cluster := range clusters {
			group.Go(func() error { return cluster.Down(ctx) })
		}
		err = errors.Join(err, group.Wait())
	}()
	err = group.Wait()
	clusters = slices.DeleteFunc(clusters, func(c *lab.Cluster) bool { return c == nil })
	if err == nil && len(clusters) == 0 {
		var one *lab.Cluster
		if one, err = up(0); one != nil {
			clusters = append(clusters, one)
		}
	}
	if err != nil {
		return 1, err
	}
	for len(clusters) > 1 {
		idle := 0
		for range 6 { // something else may run for a while
			now, err := idlePercent(5 * time.Second)
			if err != nil {
				return 1, err
			}
			if idle = max(idle, now); idle >= roomPercent {
				break
			}
		}
		fmt.Printf("lab: the processors are idle for %d %% beside %d labs without a story\n", idle, len(clusters))
		if idle >= roomPercent {
			break
		}
		last := clusters[len(clusters)-1]
		clusters = clusters[:len(clusters)-1]
		if err := last.Down(ctx); err != nil {
			return 1, err
		}
	}
	return runIn(m, clusters...)
}

// roomPercent is how long the processors have to be idle beside labs in which nothing happens. On a slow machine there are fewer
// labs than places: a node without processor time loses packets that no load balancer could save.
const roomPercent = 70

// idlePercent is for how much of the next time the processors are idle.
func idlePercent(of time.Duration) (int, error) {
	var ticks [2][2]int // before and after: idle, and all
	for i := range ticks {
		text, err := os.ReadFile("/proc/stat")
		if err != nil {
			return 0, err
		}
		first, _, _ := strings.Cut(string(text), "\n")
		for column, field := range strings.Fields(first)[1:] { // proc_stat(5)
			n, err := strconv.Atoi(field)
			if err != nil {
				return 0, fmt.Errorf("read /proc/stat: %w", err)
			}
			if ticks[i][1] += n; column == 3 || column == 4 { // idle, and waiting for a disk
				ticks[i][0] += n
			}
		}
		if i == 0 {
			time.Sleep(of)
		}
	}
	return 100 * (ticks[1][0] - ticks[0][0]) / max(1, ticks[1][1]-ticks[0][1]), nil
}

func runIn(m *testing.M, clusters ...*lab.Cluster) (int, error) {
	for _, cluster := range clusters {
		i, err := lodestone.New(cluster)
		if err != nil {
			return 1, err
		}
		free <- i
	}
	if err := flag.Set("test.parallel", strconv.Itoa(len(clusters))); err != nil { // -parallel counts for more
		return 1, err
	}
	return m.Run(), nil
}

func (s *story) stopController() {
	s.Helper()
	require.NoError(s, s.ScaleController(s.ctx, 0))
	s.Cleanup(s.startController) // whatever happens, the next story finds one
}

func (s *story) startController() {
	s.Helper()
	ctx := context.WithoutCancel(s.ctx)
	require.NoError(s, s.ScaleController(ctx, 2))
}

func (s *story) restartController() {
	s.Helper()
	require.NoError(s, s.ScaleController(s.ctx, 0))
	s.startController()
}

// killController ends the leading controller by SIGKILL, and deletes its Lease, so that the next
// one does not wait until it expires. TestStandbyTakesOverFromTheLeader measures that wait.
func (s *story) killController() {
	s.Helper()
	leader, err := s.Leader(s.ctx)
	require.NoError(s, err)
	require.NoError(s, s.Kill(s.ctx, leader))
	require.NoError(s, s.ForgetLeader(s.ctx))
}

// runController runs a controller beside the cluster, with no flag but the
// kubeconfig and those given, until stop.
func (s *story) runController(flags ...string) (stop func()) {
	s.Helper()
	end, err := s.RunController(s.ctx, flags...)
	require.NoError(s, err)
	ended := false
	stop = func() {
		if !ended {
			ended = true
			require.NoError(s, end(unix.SIGTERM))
		}
	}
	s.Cleanup(stop)
	return stop
}

// slowAPIServer stops and continues the API server ten times a second, so
// that every request takes long, until the story ends.
func (s *story) slowAPIServer() (stop func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.stutter(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(s, <-ended)
		}
	}
	s.Cleanup(stop)
	return stop
}

func (s *story) stutter(ctx context.Context) error {
	server, err := s.Lab.Process("kube-apiserver")
	for err == nil && ctx.Err() == nil {
		err = server.Freeze()
		time.Sleep(60 * time.Millisecond)
		err = errors.Join(err, server.Thaw())
		time.Sleep(40 * time.Millisecond)
	}
	return err
}

// frozenAPIServer keeps the API server from answering anybody, until thaw.
func (s *story) frozenAPIServer() (thaw func()) {
	s.Helper()
	server, err := s.Lab.Process("kube-apiserver")
	require.NoError(s, err)
	require.NoError(s, server.Freeze())
	thaw = func() { require.NoError(s, server.Thaw()) }
	s.Cleanup(thaw)
	return thaw
}

// count counts the story's Services for which the condition holds.
func (s *story) count(holds func(*corev1.Service) bool) int {
	s.Helper()
	list, err := s.Kube.CoreV1().Services(s.namespace).List(s.ctx, metav1.ListOptions{})
	require.NoError(s, err)
	n := 0
	for _, svc := range list.Items {
		if holds(&svc) {
			n++
		}
	}
	return n
}

// noAddressTwice checks every Service of the cluster.
func (s *story) noAddressTwice() {
	s.Helper()
	list, err := s.Kube.CoreV1().Services("").List(s.ctx, metav1.ListOptions{})
	require.NoError(s, err)
	holder := map[string]string{}
	for _, svc := range list.Items {
		for _, address := range addresses(&svc) {
			require.Empty(s, holder[address], "%s is given twice, also to %s/%s", address, svc.Namespace, svc.Name)
			holder[address] = svc.Namespace + "/" + svc.Name
		}
	}
}

// label sets a label of a node, or removes it if the value is empty.
func (s *story) label(node, key, value string) {
	s.Helper()
	require.NoError(s, s.Label(s.ctx, node, key, value))
}

// resourceAttributes splits "services/status" and "leases.coordination.k8s.io".
func resourceAttributes(resource string) authorizationv1.ResourceAttributes {
	resource, subresource, _ := strings.Cut(resource, "/")
	gr := schema.ParseGroupResource(resource)
	return authorizationv1.ResourceAttributes{Group: gr.Group, Resource: gr.Resource, Subresource: subresource}
}

// logs returns the whole log of the component's containers.
func (s *story) logs(ctx context.Context, component string) string {
	s.Helper()
	pods, err := s.Pods(ctx, component)
	require.NoError(s, err)
	var all strings.Builder
	for _, pod := range pods {
		raw, err := s.Kube.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
		fmt.Fprintf(&all, "--- %s on %s (%v)\n%s", pod.Name, pod.Spec.NodeName, err, raw)
	}
	return all.String()
}
