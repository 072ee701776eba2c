// Package apiservers tests that VIPs survive the loss of one of three API servers. Pods reach
// them as in any cluster, by the Service "kubernetes": kube-proxy chooses one for each
// connection, also one that is lost, until the others take it out. The lab has no routes to pods
// but Lodestone's, which another story tests.
package apiservers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

const (
	// soon is how long a change takes at most until it is seen on the wire, on a machine with other things to do.
	soon = 50 * time.Second
	// moment is how long a VIP may be elsewhere, because its owner got no processor time and was taken for lost. A look at all VIPs
	// takes seconds on a busy machine.
	moment = 15 * time.Second
	// fault is longer than a speaker waits before it reports that it has no API server: 25 s without an
	// answer, noticed by requests every 5 s that wait for 4 s.
	fault = 42 * time.Second
)

// installation is the Lodestone that the stories share, in a lab with three API servers and
// without routes to pods but those that Lodestone makes.
var installation *lodestone.Installation

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "apiservers:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx, begin := context.Background(), time.Now()
	options := lab.Options{APIServers: 3, DualStack: true, Failover: "conservative", OwnPodRoutes: true,
		Progress: func(format string, args ...any) {
			fmt.Printf("lab: %5.1fs %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
		}}
	cluster, err := lab.Up(ctx, options)
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, cluster.Down(ctx)) }()
	if installation, err = lodestone.New(cluster); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// cluster is the lab with some Services.
type cluster struct {
	*testing.T
	*lodestone.Installation
	owners map[string]string // of the VIPs
}

func start(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{T: t, Installation: installation, owners: map[string]string{}}
	for _, node := range c.Lab.Nodes() { // before, no pods are scheduled there, and it announces no VIPs
		c.network(node, corev1.ConditionFalse, "RouteCreated")
		c.wait("pods are scheduled on "+node, func() error { // Kubernetes takes the taint off a moment after the condition
			for _, taint := range c.node(node).Spec.Taints {
				if taint.Key == corev1.TaintNodeNetworkUnavailable {
					return fmt.Errorf("it is tainted %s", taint.Key)
				}
			}
			return nil
		})
	}
	require.NoError(t, c.RunEcho(t.Context(), metav1.NamespaceDefault, 3))
	for range 9 {
		c.addService()
	}
	return c
}

// addService creates a Service, and returns how long it took until its VIP was announced.
func (c *cluster) addService() time.Duration {
	c.Helper()
	begin, services := time.Now(), c.Kube.CoreV1().Services(metav1.NamespaceDefault)
	web, err := services.Create(c.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{GenerateName: "web-"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": lodestone.EchoName}, AllocateLoadBalancerNodePorts: new(false),
		Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(lodestone.EchoPort)}},
	}}, metav1.CreateOptions{})
	require.NoError(c, err)
	require.NoError(c, lodestone.Wait(c.Context(), web.Name+" is announced", func() error {
		service, err := services.Get(c.Context(), web.Name, metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case len(service.Status.LoadBalancer.Ingress) == 0:
			return errors.New("it has no address")
		}
		vip := service.Status.LoadBalancer.Ingress[0].IP
		owner, err := c.Owner(c.Context(), vip)
		if err == nil {
			c.owners[vip] = owner
		}
		return err
	}))
	return time.Since(begin)
}

// changesArrive checks that a change is seen on the wire soon.
func (c *cluster) changesArrive(when string) {
	c.Helper()
	took := c.addService()
	c.Logf("%s: a new Service was announced after %s", when, took.Round(time.Millisecond))
	require.Less(c, took, soon, when)
}

// nothingMoves checks for a while that every VIP is where it was, but for moments.
func (c *cluster) nothingMoves(d time.Duration, when string) {
	c.Helper()
	var wrong time.Time // when the first look ended that found something; zero: the last one found nothing
	for end := time.Now().Add(d); time.Now().Before(end) || !wrong.IsZero(); {
		now, all := map[string]string{}, error(nil)
		for vip := range c.owners {
			owner, err := c.Owner(c.Context(), vip)
			now[vip], all = owner, errors.Join(all, err)
		}
		switch {
		case maps.Equal(c.owners, now):
			wrong = time.Time{}
		case wrong.IsZero():
			wrong = time.Now()
		default:
			require.Less(c, time.Since(wrong), moment, "%s: owners were %v, are %v, %v", when, c.owners, now, all)
		}
	}
}

// victim returns the API server that nodes have most connections to, beside the first,
// which other programs need. If chance has connected all to the first, it restarts that, and
// they go to the others.
func (c *cluster) victim() string {
	c.Helper()
	host := c.mostConnected()
	if host == "" {
		c.restart(c.Lab.APIHosts()[0])
		host = c.mostConnected()
	}
	require.NotEmpty(c, host, "nodes have connections to the first API server alone, although it has restarted")
	return host
}

// mostConnected returns the API server that nodes have most connections to, without the first;
// "" if they have none.
func (c *cluster) mostConnected() (host string) {
	c.Helper()
	most := 0
	for _, server := range c.Lab.APIHosts()[1:] {
		out, err := c.Lab.Command(c.Context(), server, "ss", "-Htn", "state", "established", "sport", "=", ":6443").Output()
		require.NoError(c, err)
		connections := 0
		for line := range strings.Lines(string(out)) {
			for _, node := range c.Lab.Nodes() {
				if strings.Contains(line, c.Lab.Addresses(node)[0].String()+"]:") || strings.Contains(line, c.Lab.Addresses(node)[0].String()+":") {
					connections++
				}
			}
		}
		c.Logf("%s has %d connections of nodes", server, connections)
		if connections > most {
			host, most = server, connections
		}
	}
	return host
}

func (c *cluster) restart(host string) {
	c.Helper()
	server, err := c.Lab.Process(lab.APIServerOf(host))
	require.NoError(c, err)
	require.NoError(c, server.Kill(c.Context()))
	require.NoError(c, server.Restart())
	require.NoError(c, c.Lab.WaitAPIServerOf(c.Context(), host))
}

// One API server loses power, one hangs, and all restart one after the other: no VIP moves, and
// changes arrive.
func TestOneOfThreeAPIServers(t *testing.T) {
	c := start(t)
	for _, lost := range []struct {
		what       string
		lose, heal func(host string) error
	}{
		{"without power", c.Lab.NodeLoss, c.Lab.HealNode},
		{"hanging", func(host string) error { return c.signal(host, true) }, func(host string) error { return c.signal(host, false) }},
	} {
		host := c.victim()
		when := host + " is " + lost.what
		require.NoError(t, lost.lose(host))
		t.Cleanup(func() { require.NoError(t, lost.heal(host)) }) // it may be healed twice
		begin := time.Now()
		c.changesArrive(when)
		c.nothingMoves(fault-time.Since(begin), when)
		c.changesArrive(when + " still")
		require.NoError(t, lost.heal(host))
		require.NoError(t, c.Lab.WaitAPIServerOf(t.Context(), host))
		c.nothingMoves(5*time.Second, when+" no more")
	}
	for _, host := range c.Lab.APIHosts() {
		c.restart(host)
		c.changesArrive(host + " has restarted")
		c.nothingMoves(5*time.Second, host+" has restarted")
	}
	c.nothingMoves(30*time.Second, "all have restarted")
}

func (c *cluster) signal(host string, freeze bool) error {
	server, err := c.Lab.Process(lab.APIServerOf(host))
	if err != nil {
		return err
	}
	if freeze {
		return server.Freeze()
	}
	return server.Thaw()
}
