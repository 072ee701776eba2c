//go:build long

package hostile

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

const (
	// crowd is how many lists the tenant asks for at a time.
	crowd = 100
	// renewals is how often the Lease is renewed. A leader that needs tooLate for one is none any more.
	renewals = 20
	tooLate  = 7 * time.Second
)

// A tenant asks for long lists, and reads none of them: each answer keeps its place among those that the API server
// gives at a time. The controllers' Lease is renewed within a moment all the same. Without the chart's
// FlowSchemas it would be lost.
func TestTenantsDoNotCrowdOutTheLeader(t *testing.T) {
	c := installed(t, "--max-requests-inflight=60", "--max-mutating-requests-inflight=20")
	ctx, end := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer func() { end(); asking.Wait() }()
	config, err := c.as(ctx, controller, "")
	require.NoError(t, err)
	leader, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	leases := leader.CoordinationV1().Leases(lab.LodestoneNamespace)
	lease, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: controller}}, metav1.CreateOptions{})
	require.NoError(t, err)
	renew := func() (slowest time.Duration) {
		for range renewals {
			began, now := time.Now(), metav1.NowMicro()
			lease.Spec.RenewTime = &now
			lease, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
			require.NoError(t, err)
			if slowest = max(slowest, time.Since(began)); slowest > tooLate {
				break
			}
		}
		return slowest
	}
	quiet := renew()
	c.gather(ctx, t, &asking)
	ours := renew()
	require.NoError(t, c.kube.FlowcontrolV1().FlowSchemas().DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=flow-control"}))
	require.NoError(t, sleep(ctx, 2*time.Second)) // the API server takes it over
	shared := renew()
	t.Logf("slowest of %d renewals: %s in a quiet cluster, %s beside %d lists, %s without FlowSchemas", renewals, quiet, ours, crowd, shared)
	require.Less(t, ours, tooLate)
	require.Greater(t, shared, tooLate)
}

// gather has an account of the tenant ask for long lists, and read none, until ctx ends.
func (c *cluster) gather(ctx context.Context, t *testing.T, asking *sync.WaitGroup) {
	t.Helper()
	random := make([]byte, 256<<10) // which is not compressed, and more than sockets hold
	for i := range 100 {
		_, _ = rand.Read(random) // does not fail
		_, err := c.kube.CoreV1().ConfigMaps(tenant).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)},
			BinaryData: map[string][]byte{"a": random}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	user := "system:serviceaccount:" + tenant + ":default"
	_, err := c.kube.RbacV1().Roles(tenant).Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "lister"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list"}}}},
		metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = c.kube.RbacV1().RoleBindings(tenant).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "lister"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "lister"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: tenant, Name: "default"}}}, metav1.CreateOptions{})
	require.NoError(t, err)
	for range crowd {
		config, err := c.config()
		require.NoError(t, err)
		config.NextProtos = []string{"http/1.1"} // a connection for each
		config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
		client, err := kubernetes.NewForConfig(config)
		require.NoError(t, err)
		asking.Go(func() {
			for ctx.Err() == nil {
				body, err := client.CoreV1().RESTClient().Get().Namespace(tenant).Resource("configmaps").Stream(ctx)
				if err != nil {
					continue // refused, or ended
				}
				_ = sleep(ctx, time.Minute)
				body.Close()
			}
		})
	}
	require.NoError(t, sleep(ctx, 5*time.Second)) // until they keep all places that there are
}
