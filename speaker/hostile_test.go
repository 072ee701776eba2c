package speaker

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Nothing is kept of Services that have no VIP of ours, and little of those that
// have, so that their number and size cost a speaker nothing.
func TestServicesOfOthersCostNothing(t *testing.T) {
	foreign, large := "example.com/other", strings.Repeat("203.0.113.1=eth0,", 256<<10/17)
	waits := serviceObject("waits", "")
	waits.Annotations[annotation.Leases] = large
	client := testapi.New(serviceObject("web", "203.0.113.1"), waits)
	for i := range 100 {
		s := serviceObject(fmt.Sprint("foreign-", i), "203.0.113.9")
		s.Spec.LoadBalancerClass = &foreign
		s.Annotations[annotation.Leases] = fmt.Sprint(large, i) // no two share memory
		_, err := client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	c, err := newCluster(client, testScope)
	require.NoError(t, err)
	ctx, end := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.run(ctx) }()
	defer func() { end(); <-done }()
	<-c.wake
	require.Eventually(t, c.hasSynced, testTimeout, time.Millisecond)
	require.Equal(t, []string{"default/web"}, c.services.GetStore().ListKeys())

	// A Service that was announced is removed when it gets another class.
	web := serviceObject("web", "203.0.113.1")
	web.Spec.LoadBalancerClass = &foreign
	_, err = client.CoreV1().Services("default").Update(t.Context(), web, metav1.UpdateOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(c.services.GetStore().ListKeys()) == 0 }, testTimeout, time.Millisecond)
	require.Empty(t, c.derive("default/web").VIPs)
}

// A slice costs 8 bytes for each node that it names, whatever the names are.
func TestSlicesWithLongNamesCostLittle(t *testing.T) {
	c, stored := mustCluster(t), make([]*slice, 200)
	before := testcost.Live()
	for i := range stored {
		s := &discoveryv1.EndpointSlice{}
		for j := range 1000 {
			s.Endpoints = append(s.Endpoints, on(fmt.Sprintf("%s-%d-%d", strings.Repeat("n", 230), i, j)))
		}
		stored[i] = kept[slice](c, s)
	}
	require.Less(t, (testcost.Live()-before)/int64(len(stored)), int64(12<<10))
	runtime.KeepAlive(stored)
}

// Endpoints count on a Node from when it is there.
func TestEndpointsOfANodeThatComesLater(t *testing.T) {
	t.Parallel()
	c, web := mustCluster(t), serviceObject("web", "203.0.113.1")
	web.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	c.add(web)
	c.add(endpoints("web", on("n1")))
	var got plan.Service
	c.refresh(func(s plan.Service) { got = s })
	require.True(t, got.Serving)
	require.Empty(t, servingNodes(got))
	c.add(nodeObject("n1"))
	c.refresh(func(s plan.Service) { got = s })
	require.Equal(t, []string{"n1"}, servingNodes(got))
}

// One node changes its Lease all the time. That keeps no other speaker busy, and a few changes never wait.
func TestEndlessChangesOfSpeakersWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, changed := &Speaker{cluster: &cluster{}, pace: newPace()}, make(chan struct{})
		close(changed)
		start, looks := time.Now(), 0
		for ; looks < 1000 && time.Since(start) < 10*time.Second; looks++ {
			if looks <= membersBurst {
				require.Zero(t, time.Since(start))
			}
			s.wait(t.Context(), time.Now(), time.Time{}, nil, changed, nil, nil, nil)
		}
		require.LessOrEqual(t, looks, membersBurst+51)
	})
}
