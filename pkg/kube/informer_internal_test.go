package kube

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// An API server that has just started refuses at first, and reports only then that it
// does not have the kind: whoever waits for that has to get that error.
func TestEveryOtherKindOfErrorIsReported(t *testing.T) {
	t.Parallel()
	resource := schema.GroupResource{Group: "networking.k8s.io", Resource: "servicecidrs"}
	notified := 0
	reflector := cache.NewReflector(&cache.ListWatch{}, &networkingv1.ServiceCIDR{}, cache.NewStore(cache.MetaNamespaceKeyFunc), 0)
	f := &Follower{Optional: true, notify: func() { notified++ }}
	for _, step := range []struct {
		err      error
		notified int
		absent   int
	}{
		{apierrors.NewForbidden(resource, "", nil), 1, 0},
		{apierrors.NewForbidden(resource, "", nil), 1, 0},
		{apierrors.NewNotFound(resource, ""), 2, 3},
		{apierrors.NewNotFound(resource, ""), 3, 4},
		{apierrors.NewServiceUnavailable("starting"), 4, 0},
		{apierrors.NewNotFound(resource, ""), 5, 6},
	} {
		f.failed(t.Context(), reflector, step.err)
		require.Equal(t, step.notified, notified, step.err)
		require.Equal(t, step.absent, f.Absent(), step.err)
	}
}

// A load balancer before the API server may answer 404 of a kind that every API server has. That there are no Nodes would let
// Services have their addresses.
func TestKindsThatAreAlwaysThere(t *testing.T) {
	t.Parallel()
	reflector := cache.NewReflector(&cache.ListWatch{}, &networkingv1.ServiceCIDR{}, cache.NewStore(cache.MetaNamespaceKeyFunc), 0)
	for _, optional := range []bool{false, true} {
		f := &Follower{Optional: optional, notify: func() {}}
		f.failed(t.Context(), reflector, apierrors.NewGenericServerResponse(http.StatusNotFound, "list",
			schema.GroupResource{Resource: "nodes"}, "", "404 page not found", 0, true))
		known, err := f.Standing()
		require.True(t, known)
		require.Equal(t, optional, f.Absent() > 0)
		require.Equal(t, optional, err == nil, err)
	}
}
