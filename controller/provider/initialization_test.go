package provider_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	cloudproviderapi "k8s.io/cloud-provider/api"
	cloudnode "k8s.io/cloud-provider/controllers/node"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

func init() {
	// client-go's own handler waits a while after each error by the clock on the wall, and the last one was in
	// another bubble, or in none.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
}

// noted is the Events that were emitted.
type noted struct {
	sync.Mutex
	events []string
}

func (n *noted) Event(object runtime.Object, eventType, reason, message string) {
	n.Lock()
	defer n.Unlock()
	n.events = append(n.events, strings.Join([]string{object.(*corev1.Node).Name, eventType, reason, message}, " "))
}

// joined is a cluster that a node has just joined, with the framework's controller of nodes and our provider.
type joined struct {
	*testing.T
	*noted
	client *fake.Clientset

	mu      sync.Mutex
	refused error // what comes of a list of Leases
}

// refuse has the API server refuse to list Leases, and waits until what the provider knows of them is over. Nil: it lists
// them again.
func (j *joined) refuse(err error) {
	j.mu.Lock()
	j.refused = err
	j.mu.Unlock()
	time.Sleep(10 * time.Second)
}

func join(t *testing.T, o provider.Options, addresses ...corev1.NodeAddress) *joined {
	n := node("n1", addresses...)
	n.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider, Effect: corev1.TaintEffectNoSchedule}}
	j := &joined{T: t, noted: &noted{}, client: testapi.New(&n)}
	j.client.PrependReactor("list", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		j.mu.Lock()
		defer j.mu.Unlock()
		return j.refused != nil, nil, j.refused
	})
	o.Client, o.Events, o.Log = j.client, j, slog.New(slog.DiscardHandler)
	factory := informers.NewSharedInformerFactory(j.client, 0)
	nodes, err := cloudnode.NewCloudNodeController(factory.Core().V1().Nodes(), j.client, provider.New(o), 5*time.Minute, 1, 1)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	factory.Start(ctx.Done())
	group.Go(func() { nodes.RunWithContext(ctx, controllersmetrics.NewControllerManagerMetrics("test")) })
	t.Cleanup(func() { cancel(); group.Wait(); factory.Shutdown() })
	return j
}

// id returns the provider ID that the node has after that long, while its kubelet reports as kubelets do.
func (j *joined) id(after time.Duration) string {
	j.Helper()
	const interval = 5 * time.Minute
	for ; after > 0; after -= interval {
		time.Sleep(min(after, interval))
		n, err := j.client.CoreV1().Nodes().Get(j.Context(), "n1", metav1.GetOptions{})
		require.NoError(j, err)
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
		_, err = j.client.CoreV1().Nodes().UpdateStatus(j.Context(), n, metav1.UpdateOptions{})
		require.NoError(j, err)
		time.Sleep(time.Second)
		synctest.Wait()
	}
	n, err := j.client.CoreV1().Nodes().Get(j.Context(), "n1", metav1.GetOptions{})
	require.NoError(j, err)
	require.Equal(j, n.Spec.ProviderID == "", len(n.Spec.Taints) > 0)
	return n.Spec.ProviderID
}

// renew writes a Lease in kube-system, and waits until the provider has looked.
func (j *joined) renew(name string) {
	j.Helper()
	leases := j.client.CoordinationV1().Leases("kube-system")
	_ = leases.Delete(j.Context(), name, metav1.DeleteOptions{})
	_, err := leases.Create(j.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: coordinationv1.LeaseSpec{RenewTime: new(metav1.NowMicro())}}, metav1.CreateOptions{})
	require.NoError(j, err)
	time.Sleep(10 * time.Second)
}

var (
	internal = corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "192.0.2.4"}
	hostname = corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"}
)

const ours = "lodestone://n1"

func TestNewNodesAreLeftToAnotherCloudControllerManager(t *testing.T) {
	for lease, others := range map[string]bool{"cloud-controller-manager": true, "k3s-cloud-controller-manager": true, "ccm-linode": true,
		"kube-controller-manager": false, "kube-vip-cloud-controller": false, "accm": false} {
		t.Run(lease, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := join(t, provider.Options{Config: parse(t, machines), Initialization: provider.InitializeAuto})
				require.Empty(t, j.id(time.Minute)) // it has no address yet, which a kubelet reports after it has registered
				j.renew(lease)
				j.address()
				if !others {
					require.Equal(t, ours, j.id(15*time.Minute))
					return
				}
				require.Empty(t, j.id(30*time.Minute))
				require.Contains(t, j.events, "n1 Normal NotInitialized left to another cloud controller manager: the Lease kube-system/"+lease+
					" has been renewed within the last hour")
				j.renew(lease)
				require.Empty(t, j.id(50*time.Minute), "it is being upgraded, perhaps")
				require.Equal(t, ours, j.id(20*time.Minute), "it is gone")
			})
		})
	}
}

func TestTheControllersOwnLeaseIsNotThatOfAnother(t *testing.T) {
	for namespace, want := range map[string]string{"kube-system": ours, "lodestone-system": ""} {
		synctest.Test(t, func(t *testing.T) {
			j := join(t, provider.Options{Config: parse(t, machines), Lease: types.NamespacedName{Namespace: namespace, Name: "lodestone-ccm"}},
				hostname)
			j.renew("lodestone-ccm")
			j.address()
			require.Equal(t, want, j.id(15*time.Minute))
		})
	}
}

// address has the kubelet report an address.
func (j *joined) address() {
	j.Helper()
	n, err := j.client.CoreV1().Nodes().Get(j.Context(), "n1", metav1.GetOptions{})
	require.NoError(j, err)
	n.Status.Addresses = []corev1.NodeAddress{internal, hostname}
	_, err = j.client.CoreV1().Nodes().UpdateStatus(j.Context(), n, metav1.UpdateOptions{})
	require.NoError(j, err)
}

func TestNodesAreInitializedWhoeverElseIsAtWorkIfTheOperatorWantsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := join(t, provider.Options{Config: parse(t, machines), Initialization: provider.InitializeAlways}, hostname)
		j.renew("cloud-controller-manager")
		j.address()
		require.Equal(t, ours, j.id(15*time.Minute))
	})
	_, supported := provider.New(provider.Options{Initialization: provider.InitializeNever}).InstancesV2()
	require.False(t, supported)
}

func TestNodesWaitUntilItIsKnownWhoElseIsAtWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := join(t, provider.Options{Config: parse(t, machines)}, hostname)
		j.refuse(errors.New("leases.coordination.k8s.io is forbidden"))
		j.address()
		require.Empty(t, j.id(15*time.Minute))
		require.Equal(t, []string{"n1 Warning NotInitialized waits until it is known who else initializes nodes: look for another " +
			"cloud controller manager: list Leases: leases.coordination.k8s.io is forbidden"}, slices.Compact(j.events))
		j.refuse(nil)
		require.Equal(t, ours, j.id(15*time.Minute))
	})
}

// What a node gets it gets once.
func TestNodesWaitForWhatTheyCannotBeGivenLater(t *testing.T) {
	for name, tt := range map[string]struct {
		config    provider.Options
		addresses []corev1.NodeAddress
		event     string
	}{
		"an address": {provider.Options{Config: parse(t, machines)}, []corev1.NodeAddress{hostname},
			"n1 Warning NotInitialized the node has no InternalIP, and only its kubelet can know one: start the kubelet with --node-ip"},
		"a zone": {provider.Options{Config: given{state: kube.State{Read: true}}}, []corev1.NodeAddress{internal},
			"n1 Warning NotInitialized there is no valid configuration, which may name the node's zone and region: see the Events of the ConfigMap"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := join(t, tt.config, tt.addresses...)
				require.Empty(t, j.id(15*time.Minute))
				require.Equal(t, []string{tt.event}, slices.Compact(j.events))
			})
		})
	}
}

// The framework's controller looks at the addresses of all nodes now and then, from the controller's cache. A node on many networks,
// which another cloud controller manager has initialized, keeps those that the cache does not have.
func TestANodeKeepsItsManyAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node("n1")
		for i := range 20 {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: fmt.Sprint("192.0.2.", i+1)})
		}
		n.Status.Addresses = append(n.Status.Addresses, hostname)
		client := testapi.New(&n)
		factory := informers.NewSharedInformerFactory(client, 0)
		objects.Share(factory, func(*corev1.Service) bool { return true })
		cloud := provider.New(provider.Options{Config: parse(t, machines), Client: client, Log: slog.New(slog.DiscardHandler)})
		nodes, err := cloudnode.NewCloudNodeController(factory.Core().V1().Nodes(), client, cloud, 5*time.Minute, 1, 1)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		factory.Start(ctx.Done())
		group.Go(func() { nodes.RunWithContext(ctx, controllersmetrics.NewControllerManagerMetrics("test")) })
		defer func() { cancel(); group.Wait(); factory.Shutdown() }()
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		kept, err := client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		require.NoError(t, err)
		require.Equal(t, n.Status.Addresses, kept.Status.Addresses)
	})
}
