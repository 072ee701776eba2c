package apiservers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// ip runs ip(8) on a node, for both families.
func (c *cluster) ip(node string, args ...string) (output string) {
	c.Helper()
	for _, family := range []string{"-4", "-6"} {
		out, err := c.Lab.Command(c.Context(), node, append([]string{"ip", family}, args...)...).CombinedOutput()
		require.NoError(c, err, "%s", out)
		output += string(out)
	}
	return output
}

// wait waits until check finds nothing wrong.
func (c *cluster) wait(what string, check func() error) {
	c.Helper()
	require.NoError(c, lodestone.Wait(c.Context(), what, check))
}

func (c *cluster) node(name string) *corev1.Node {
	c.Helper()
	node, err := c.Kube.CoreV1().Nodes().Get(c.Context(), name, metav1.GetOptions{})
	require.NoError(c, err)
	return node
}

// routed checks that each node has a route of ours to each pod CIDR of the others, and no
// route of anybody else to pods of other nodes.
func (c *cluster) routed() error {
	var errs []error
	for _, from := range c.Lab.Nodes() {
		routes := c.ip(from, "route", "show", "table", "main")
		for _, to := range c.Lab.Nodes() {
			for _, cidr := range c.node(to).Spec.PodCIDRs {
				if from == to {
					continue
				}
				if n := strings.Count(routes, cidr+" via "); n != 1 || !strings.Contains(lineOf(routes, cidr+" via "), " proto 76 ") {
					errs = append(errs, fmt.Errorf("%s has %d routes to %s of %s, want one with protocol 76:\n%s", from, n, cidr, to, routes))
				}
			}
		}
	}
	return errors.Join(errs...)
}

func lineOf(text, with string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, with) {
			return line
		}
	}
	return ""
}

// echoPods are the pods of the story, by node.
func (c *cluster) echoPods() map[string]*corev1.Pod {
	c.Helper()
	list, err := c.Kube.CoreV1().Pods(metav1.NamespaceDefault).List(c.Context(),
		metav1.ListOptions{LabelSelector: "app=" + lodestone.EchoName})
	require.NoError(c, err)
	pods := map[string]*corev1.Pod{}
	for i := range list.Items {
		pods[list.Items[i].Spec.NodeName] = &list.Items[i]
	}
	require.Len(c, pods, len(c.Lab.Nodes()), "nodes with echo pods")
	return pods
}

// reaches sends packets from a pod to every address of another one. The error names the
// addresses that did not answer.
func (c *cluster) reaches(from, to *corev1.Pod) error {
	var errs []error
	for _, a := range to.Status.PodIPs {
		if err := c.InPod(c.Context(), from, "ping", "-n", "-c", "1", "-W", "1", a.IP); err != nil {
			errs = append(errs, fmt.Errorf("%s on %s to %s on %s: %w", from.Name, from.Spec.NodeName, a.IP, to.Spec.NodeName, err))
		}
	}
	return errors.Join(errs...)
}

// allReach checks that every pod reaches every other one.
func (c *cluster) allReach(pods map[string]*corev1.Pod) error {
	var errs []error
	for _, from := range pods {
		for _, to := range pods {
			if from != to {
				errs = append(errs, c.reaches(from, to))
			}
		}
	}
	return errors.Join(errs...)
}

// network waits until the node's condition NetworkUnavailable is this, for this reason.
func (c *cluster) network(node string, unavailable corev1.ConditionStatus, reason string) {
	c.Helper()
	c.wait(fmt.Sprintf("NetworkUnavailable of %s is %s, %s", node, unavailable, reason), func() error {
		conditions := c.node(node).Status.Conditions
		i := slices.IndexFunc(conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeNetworkUnavailable })
		if i < 0 || conditions[i].Status != unavailable || conditions[i].Reason != reason {
			return fmt.Errorf("conditions are %+v", conditions)
		}
		return nil
	})
}

// permit changes which pod CIDRs may have routes.
func (c *cluster) permit(cidrs ...string) {
	c.Helper()
	m, err := c.Kube.CoreV1().ConfigMaps(lodestone.Namespace).Get(c.Context(), lodestone.ConfigMap, metav1.GetOptions{})
	require.NoError(c, err)
	var document map[string]any
	require.NoError(c, yaml.Unmarshal([]byte(m.Data["config.yaml"]), &document))
	document["routes"].(map[string]any)["cidrs"] = cidrs
	text, err := yaml.Marshal(document)
	require.NoError(c, err)
	require.NoError(c, c.Configure(c.Context(), string(text)))
}

// Only Lodestone makes routes between the nodes' pods. Packets arrive while its routes are there,
// and not without them. Deleted routes come back. A node whose pods may have no routes gets no pods
// and announces no VIPs.
func TestPodsReachEachOtherByOurRoutesAlone(t *testing.T) {
	c := start(t)
	c.wait("all routes to pods are ours", c.routed)
	pods := c.echoPods()
	c.wait("every pod reaches every other one", func() error { return c.allReach(pods) })

	nodes := c.Lab.Nodes()
	first, last := nodes[0], nodes[len(nodes)-1]
	speakers, err := c.Pods(t.Context(), "speaker")
	require.NoError(t, err)
	speaker := &speakers[slices.IndexFunc(speakers, func(p corev1.Pod) bool { return p.Spec.NodeName == first })]
	require.NoError(t, c.Signal(t.Context(), speaker, unix.SIGSTOP))
	c.ip(first, "route", "flush", "proto", "76")
	lost := c.reaches(pods[first], pods[last])
	require.NoError(t, c.Signal(t.Context(), speaker, unix.SIGCONT))
	for _, a := range pods[last].Status.PodIPs {
		require.ErrorContains(t, lost, a.IP, "packets go without our routes")
	}
	c.wait("the routes are back", c.routed)
	begin := time.Now()
	c.ip(first, "route", "flush", "proto", "76")
	c.wait("the routes are back again", func() error { return c.reaches(pods[first], pods[last]) })
	require.Less(t, time.Since(begin), 20*time.Second, "by the notification, and not by the look every 30 s")

	c.nodeWithoutRoutes(pods, first, last)
}

// nodeWithoutRoutes checks a node whose IPv4 pod CIDR is refused.
func (c *cluster) nodeWithoutRoutes(pods map[string]*corev1.Pod, first, last string) {
	c.Helper()
	var some, all []string // of all nodes but the last one, of all
	for _, node := range c.Lab.Nodes() {
		for _, cidr := range c.node(node).Spec.PodCIDRs {
			if all = append(all, cidr); node != last || netip.MustParsePrefix(cidr).Addr().Is6() {
				some = append(some, cidr)
			}
		}
	}
	c.permit(some...)
	ipv4 := pods[last].Status.PodIPs[slices.IndexFunc(pods[last].Status.PodIPs,
		func(a corev1.PodIP) bool { return netip.MustParseAddr(a.IP).Is4() })].IP
	c.wait("packets go to the addresses that are permitted alone", func() error {
		err := c.reaches(pods[first], pods[last])
		if err == nil || strings.Count(err.Error(), " to ") != 1 || !strings.Contains(err.Error(), ipv4) {
			return fmt.Errorf("want that %s alone does not answer: %w", ipv4, err)
		}
		return nil
	})
	c.network(last, corev1.ConditionTrue, "NoRouteCreated")
	c.wait("pods are kept off", func() error {
		if taints := c.node(last).Spec.Taints; !slices.ContainsFunc(taints,
			func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNetworkUnavailable }) {
			return fmt.Errorf("taints are %+v", taints)
		}
		return nil
	})
	c.wait("it announces no VIPs", func() error {
		for vip := range c.owners {
			owner, err := c.Owner(c.Context(), vip)
			if err != nil || owner == last {
				return fmt.Errorf("%s announces %s: %w", owner, vip, err)
			}
		}
		return nil
	})
	late := c.podOn(last)
	c.wait("a pod for it waits", func() error {
		return c.scheduled(late, corev1.ConditionFalse, corev1.PodReasonUnschedulable)
	})

	c.permit(all...)
	c.network(last, corev1.ConditionFalse, "RouteCreated")
	c.wait("all routes are there again", c.routed)
	c.wait("the pod is scheduled", func() error { return c.scheduled(late, corev1.ConditionTrue, "") })
	c.wait("packets reach it", func() error {
		pod, err := c.Kube.CoreV1().Pods(late.Namespace).Get(c.Context(), late.Name, metav1.GetOptions{})
		if err == nil && len(pod.Status.PodIPs) != 2 {
			err = fmt.Errorf("it has addresses %+v", pod.Status.PodIPs)
		}
		return errors.Join(err, c.reaches(pods[first], pod))
	})
	c.wait("every pod reaches every other one again", func() error { return c.allReach(pods) })
}

// podOn creates an echo pod that runs on the node and nowhere else. It goes with the story.
func (c *cluster) podOn(node string) *corev1.Pod {
	c.Helper()
	all := c.Kube.CoreV1().Pods(metav1.NamespaceDefault)
	pod, err := all.Create(c.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "late-"}, Spec: corev1.PodSpec{
		NodeSelector: map[string]string{corev1.LabelHostname: node},
		Containers:   []corev1.Container{{Name: lodestone.EchoName, Image: lab.EchoImage, ImagePullPolicy: corev1.PullNever}},
	}}, metav1.CreateOptions{})
	require.NoError(c, err)
	c.Cleanup(func() {
		require.NoError(c, all.Delete(context.WithoutCancel(c.Context()), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	})
	return pod
}

// scheduled checks the pod's condition PodScheduled.
func (c *cluster) scheduled(pod *corev1.Pod, status corev1.ConditionStatus, reason string) error {
	now, err := c.Kube.CoreV1().Pods(pod.Namespace).Get(c.Context(), pod.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, condition := range now.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == status && condition.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("conditions are %+v", now.Status.Conditions)
}
