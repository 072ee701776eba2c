package servicelb

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// reconcile brings one Service, by "namespace/name", into step with the
// ledger.
func (c *Controller) reconcile(ctx context.Context, name string) error {
	svc, err := c.get(name)
	switch {
	case apierrors.IsNotFound(err):
		c.release(name, "")
		return nil
	case err != nil:
		return err
	case c.Scope.Serves(svc):
		return c.serve(ctx, svc)
	case c.Scope.Keeps(svc):
		return nil
	case c.Scope.LeftBehind(svc) || len(c.Ledger.Holds(string(svc.UID))) > 0:
		return c.letGo(ctx, svc)
	default:
		c.release(name, "")
		return nil
	}
}

// serve gives the Service what it asks for, or tells it why not.
func (c *Controller) serve(ctx context.Context, svc *corev1.Service) error {
	start := c.now()
	v, freed := c.Ledger.Ensure(svc)
	if freed {
		c.wake()
	}
	if v.Unjudged && len(v.Held) == 0 {
		return nil
	}
	want := objectOf(v, svc.Generation)
	body, news := want.patch(svc, metav1.NewTime(start)), want.news(svc)
	if body != nil && news == nil && !c.mayRepair(svc) {
		return nil
	}
	wrote, err := c.write(ctx, svc, body)
	if err != nil {
		return err
	}
	if c.Ledger.Settle(string(svc.UID)) {
		c.wake()
	}
	if wrote && news != nil {
		c.tell(svc, news, v)
		if v.Refusal == nil {
			c.metrics.latency.Observe(c.now().Sub(start).Seconds())
		}
	}
	return nil
}

// letGo takes what Lodestone wrote off a Service that is not, or no longer,
// to be served. Its addresses are free only after nothing names them.
func (c *Controller) letGo(ctx context.Context, svc *corev1.Service) error {
	if _, err := c.write(ctx, svc, nothing(svc).patch(svc, metav1.NewTime(c.now()))); err != nil {
		return err
	}
	c.release(svc.Namespace+"/"+svc.Name, string(svc.UID))
	return nil
}

// release forgets the Service.
func (c *Controller) release(name, uid string) {
	c.repairs.forget(name)
	if c.Ledger.Release(name, uid) {
		c.Log.Info("addresses released", "service", name)
		c.wake()
	}
}

// write applies the patch, if there is one, to this incarnation of the
// Service, and reports whether it did.
func (c *Controller) write(ctx context.Context, svc *corev1.Service, body []byte) (bool, error) {
	if body == nil {
		return false, nil
	}
	err := c.API.PatchStatus(ctx, svc.Namespace, svc.Name, body)
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsNotFound(err), isOtherUID(err):
		return false, nil // the watch is about to say so
	default:
		return false, fmt.Errorf("patch status of Service %s/%s: %w", svc.Namespace, svc.Name, err)
	}
}

// isOtherUID reports whether the patch met another incarnation of the Service.
func isOtherUID(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// tell says what is new about the Service: to the log, to its users, to the
// metrics.
func (c *Controller) tell(svc *corev1.Service, news *metav1.Condition, v Verdict) {
	eventType := corev1.EventTypeNormal
	if news.Reason != ReasonAllocated {
		eventType = corev1.EventTypeWarning
	}
	if v.Refusal != nil {
		c.metrics.refusals.WithLabelValues(news.Reason).Inc()
	}
	c.Events.Event(svc, eventType, news.Reason, news.Message)
	c.Log.Info("service "+news.Reason, "service", svc.Namespace+"/"+svc.Name, "message", news.Message)
}
