package servicelb

import (
	"context"
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/retry"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

var (
	// errUndecided is returned while it cannot be decided whether a Service keeps what it has.
	errUndecided = errors.New("there is no valid configuration to decide by; the Service keeps what it has")
	// errNamespace is returned for a Service that was heard of before its namespace.
	errNamespace = errors.New("the Service's namespace is not known yet: it is asked for once more")
)

// Primed is closed once it is known what the cluster's Services hold. Before,
// Provide and Withdraw must not be called.
func (c *Controller) Primed() <-chan struct{} { return c.primed }

// Provide gives the Service what it asks for, for a caller that writes finalizer and status
// itself. The queue writes the rest of the object, and what changes for the Service without
// another call. If the request is refused, the error is the refusal, and the Service keeps what
// it holds.
func (c *Controller) Provide(ctx context.Context, svc *corev1.Service) ([]ipam.Held, error) {
	if !c.Namespaces.Known(svc.Namespace) {
		return nil, errNamespace
	}
	v, _, err := c.decide(ctx, svc)
	if err != nil {
		return nil, err
	}
	// The queue looks at the Service as it is by then. If it is gone, its addresses are freed.
	defer c.queue.Add(ledger.NameOf(svc))
	if err := c.record(ctx, v.Records); err != nil {
		return nil, err
	}
	switch {
	case v.Refusal != nil:
		return nil, v.Refusal
	case v.Undecided:
		return nil, errUndecided
	}
	return v.Held, nil
}

// Withdraw removes what Lodestone wrote on the Service, except the conventional finalizer, and
// frees its addresses.
func (c *Controller) Withdraw(ctx context.Context, svc *corev1.Service) error {
	name, uid := ledger.NameOf(svc), string(svc.UID)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if current, err := c.get(name); err == nil && current.UID == svc.UID {
			return c.unpublish(ctx, current)
		}
		return c.free(ctx, name, uid) // its object is gone
	})
}

// Holds returns what the Service holds.
func (c *Controller) Holds(svc *corev1.Service) []ipam.Held {
	l, _ := c.ledger.open()
	defer c.ledger.close()
	held, _ := l.Holds(svc)
	return held
}

// drivenByUpstream reports whether Kubernetes' own service controller calls Provide and
// Withdraw for the Service.
func (o *Options) drivenByUpstream(svc *corev1.Service) bool {
	return o.Upstream && svc.Spec.LoadBalancerClass == nil
}

// leavesToUpstream reports whether Kubernetes' own service controller is about to call Provide
// or Withdraw. It calls Withdraw for Services that are deleted or of another type, and not for those that are
// left to others. The finalizer shows that it has not done so yet.
func (c *Controller) leavesToUpstream(svc *corev1.Service) bool {
	if !c.drivenByUpstream(svc) {
		return false
	}
	if c.Scope.Serves(svc) {
		l, _ := c.ledger.open()
		defer c.ledger.close()
		_, known := l.Holds(svc)
		return !known
	}
	withdraws := svc.DeletionTimestamp != nil || svc.Spec.Type != corev1.ServiceTypeLoadBalancer
	return withdraws && slices.Contains(svc.Finalizers, annotation.Finalizer)
}
