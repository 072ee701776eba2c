package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
)

const uninitialized = "node.cloudprovider.kubernetes.io/uninitialized"

// register makes a Node object as a kubelet with --cloud-provider=external
// does, for a machine that does not exist. It is deleted when the test ends.
func (s *story) register(name string, change func(*corev1.Node)) {
	s.Helper()
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}},
		Spec: corev1.NodeSpec{
			Unschedulable: true,
			Taints:        []corev1.Taint{{Key: uninitialized, Value: "true", Effect: corev1.TaintEffectNoSchedule}},
		},
	}
	if change != nil {
		change(node)
	}
	nodes := s.Kube.CoreV1().Nodes()
	_, err := nodes.Create(s.ctx, node, metav1.CreateOptions{})
	require.NoError(s, err)
	s.Cleanup(func() {
		if err := nodes.Delete(context.WithoutCancel(s.ctx), name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			require.NoError(s, err)
		}
	})
}

// initialized waits for the node's taint to go and returns the node.
func (s *story) initialized(name string) *corev1.Node {
	s.Helper()
	var node *corev1.Node
	s.eventually("node "+name+" is initialized", func() (err error) {
		node, err = s.Kube.CoreV1().Nodes().Get(s.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, taint := range node.Spec.Taints {
			if taint.Key == uninitialized {
				return fmt.Errorf("it is tainted: %v", taint)
			}
		}
		return nil
	})
	return node
}

// report changes the status of a node, as a kubelet does.
func (s *story) report(name string, change func(*corev1.Node)) {
	s.Helper()
	nodes := s.Kube.CoreV1().Nodes()
	require.NoError(s, retry.RetryOnConflict(retry.DefaultRetry, func() error { // controllers write it, too
		node, err := nodes.Get(s.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(node)
		_, err = nodes.UpdateStatus(s.ctx, node, metav1.UpdateOptions{})
		return err
	}))
}

func internalIPs(node *corev1.Node) string {
	var ips []string
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			ips = append(ips, a.Address)
		}
	}
	return strings.Join(ips, ",")
}

func providedIPs(ips string) func(*corev1.Node) {
	return func(node *corev1.Node) {
		node.Annotations = map[string]string{"alpha.kubernetes.io/provided-node-ip": ips}
	}
}

// With the lab's real kubelets.
func TestNodesOfRealKubeletsAreInitialized(t *testing.T) {
	s := begin(t)
	for i, name := range s.Lab.Nodes() {
		node := s.initialized(name)
		require.Equal(t, "lodestone://"+name, node.Spec.ProviderID)
		require.Equal(t, fmt.Sprintf("198.18.0.%d,2001:db8:0:1::%d", 11+i, 11+i), internalIPs(node))
	}
}

func TestNodeGetsProviderIDAddressesAndZone(t *testing.T) {
	s := begin(t)
	s.config(usualPools + `
nodes:
  - {names: ["rack1-*"], region: fra, zone: fra-1}
`)
	for name, want := range map[string]struct{ provided, zone string }{
		"other":     {"198.18.0.60", ""},
		"rack1-one": {"198.18.0.61", "fra-1"},
		"rack1-two": {"198.18.0.62,2001:db8::62", "fra-1"},
	} {
		s.register(name, providedIPs(want.provided))
		node := s.initialized(name)
		require.Equal(t, "lodestone://"+name, node.Spec.ProviderID)
		require.Equal(t, want.zone, node.Labels[corev1.LabelTopologyZone])
		s.eventually("the node has its addresses", func() error { // a write of its own
			if got := internalIPs(s.initialized(name)); got != want.provided {
				return fmt.Errorf("it has %q, want %q", got, want.provided)
			}
			return nil
		})
	}
}

func TestNotReadyNodeIsDeletedOnlyWhenTheOperatorDeclaresItGone(t *testing.T) {
	s := begin(t)
	notReady := func(node *corev1.Node) {
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "Test"}}
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.18.0.60"}}
		node.Status.NodeInfo.SystemUUID = "4c4c4544-0044-4810-8036-b4c04f4b3532"
	}
	there := func() error {
		_, err := s.Kube.CoreV1().Nodes().Get(s.ctx, "silent", metav1.GetOptions{})
		return err
	}
	s.register("silent", notReady)
	s.initialized("silent")
	// Another machine had the name.
	s.config(usualPools + "\nnodes:\n  - {names: [silent], gone: true, systemUUID: 00000000-0044-4810-8036-b4c04f4b3532}\n")
	s.always(12*time.Second, "the node exists, over two rounds of the node lifecycle controller", there)
	s.config(usualPools + "\nnodes:\n  - {names: [silent], gone: true, systemUUID: 4c4c4544-0044-4810-8036-b4c04f4b3532}\n")
	s.eventually("the node is deleted", func() error {
		err := there()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there (%w)", err)
	})
}

// The other cloud controller manager is known by its Lease only, so the test has only a Lease.
func TestNewNodeIsLeftToAnotherCloudControllerManager(t *testing.T) {
	s := begin(t)
	leases := s.Kube.CoordinationV1().Leases("kube-system")
	now := metav1.NowMicro()
	other, err := leases.Create(s.ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "k3s-cloud-controller-manager"},
		Spec: coordinationv1.LeaseSpec{RenewTime: &now}}, metav1.CreateOptions{})
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, leases.Delete(s.ctx, other.Name, metav1.DeleteOptions{})) })
	name := fmt.Sprint("new-", now.Unix()) // there are Events about those of earlier runs
	s.register(name, nil)
	heartbeat := func() {
		s.Helper()
		s.report(name, func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
				Reason: fmt.Sprint("At", time.Now().UnixNano())}}
		})
	}
	waits := func(why string) {
		s.Helper()
		s.eventually("the node waits: "+why, func() error {
			heartbeat()
			if all := s.events("default", "Node", name, "NotInitialized"); !strings.Contains(strings.Join(all, "\n"), why) {
				return fmt.Errorf("the Events on it are %q", all)
			}
			return nil
		})
	}
	waits("left to another cloud controller manager")
	s.always(5*time.Second, "the node keeps its taint", func() error {
		n, err := s.Kube.CoreV1().Nodes().Get(s.ctx, name, metav1.GetOptions{})
		if err == nil && n.Spec.ProviderID != "" {
			err = fmt.Errorf("it is %s", n.Spec.ProviderID)
		}
		return err
	})

	hour := metav1.NewMicroTime(now.Add(-time.Hour))
	other.Spec.RenewTime = &hour
	_, err = leases.Update(s.ctx, other, metav1.UpdateOptions{})
	require.NoError(s, err)
	waits("no InternalIP")
	s.report(name, func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.18.0.60"}}
	})
	s.eventually("the node is initialized", func() error {
		n, err := s.Kube.CoreV1().Nodes().Get(s.ctx, name, metav1.GetOptions{})
		if heartbeat(); err == nil && n.Spec.ProviderID != "lodestone://"+name {
			err = fmt.Errorf("it is %q", n.Spec.ProviderID)
		}
		return err
	})
}

// No flag but the kubeconfig, no cluster CIDR.
func TestControllerStartsWithDefaultFlags(t *testing.T) {
	s := begin(t)
	s.stopController()
	stop := s.runController()
	s.service("web")
	s.assigned("web")
	s.register("new", providedIPs("198.18.0.60"))
	s.initialized("new")
	stop()
	s.startController()
}

func TestForeignServiceWithAFinalizerLikeOursIsLeftAlone(t *testing.T) {
	s := begin(t)
	finalized := func(svc *corev1.Service) {
		svc.Finalizers = []string{"service.kubernetes.io/load-balancer-cleanup"}
	}
	foreign := s.service("foreign", class("example.com/other"), finalized)
	plain := s.service("plain", ofType(corev1.ServiceTypeClusterIP), finalized)
	s.untouched(foreign, plain)
	s.restartController()
	s.untouched(foreign, plain)
	for _, name := range []string{"foreign", "plain"} {
		s.delete(name)
	}
	s.always(time.Second, "only their owner may let the Services go", func() error {
		s.get("foreign")
		s.get("plain")
		return nil
	})
	for _, name := range []string{"foreign", "plain"} {
		s.change(name, func(svc *corev1.Service) { svc.Finalizers = nil })
	}
}
