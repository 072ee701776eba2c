package provider_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/cloud-provider/controllers/nodelifecycle"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// The framework's controller asks only for Nodes whose kubelet is silent, so that a Node that is
// marked as gone by mistake stays while its kubelet reports.
func TestOnlyASilentNodeIsDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ready := func(name string, status corev1.ConditionStatus) *corev1.Node {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}}}
			if name == "dead" {
				n.Status.NodeInfo.SystemUUID = "4c4c4544-0044-4810-8036-b4c04f4b3532"
			}
			return n
		}
		client := testapi.New(ready("dead", corev1.ConditionTrue), ready("silent", corev1.ConditionUnknown))
		cloud := provider.New(provider.Options{Config: parse(t, machines), Client: client, Log: slog.New(slog.DiscardHandler)})
		factory := informers.NewSharedInformerFactory(client, 0)
		lifecycle, err := nodelifecycle.NewCloudNodeLifecycleController(factory.Core().V1().Nodes(), client, cloud, time.Second)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		factory.Start(ctx.Done())
		group.Go(func() { lifecycle.Run(ctx, controllersmetrics.NewControllerManagerMetrics("test")) })
		defer func() { cancel(); group.Wait(); factory.Shutdown() }()
		has := func(name string, want bool) {
			t.Helper()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			_, err := client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
			require.Equal(t, want, !apierrors.IsNotFound(err), "%s: %v", name, err)
		}
		has("dead", true)
		has("silent", true)
		_, err = client.CoreV1().Nodes().UpdateStatus(t.Context(), ready("dead", corev1.ConditionUnknown), metav1.UpdateOptions{})
		require.NoError(t, err)
		has("dead", false)
		has("silent", true)
	})
}
