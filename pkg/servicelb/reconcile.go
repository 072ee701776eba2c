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
		return c.release(ctx, name, "")
	case err != nil:
		return err
	case c.Scope.Serves(svc):
		return c.serve(ctx, svc)
	case c.Scope.Keeps(svc) && !c.Ledger.LeaseOver(svc):
		return nil
	case c.Scope.LeftBehind(svc) || len(c.Ledger.Holds(string(svc.UID))) > 0:
		return c.letGo(ctx, svc)
	default:
		return c.release(ctx, name, "")
	}
}

// serve gives the Service what it asks for, or tells it why not.
func (c *Controller) serve(ctx context.Context, svc *corev1.Service) error {
	start := c.now()
	v, stirred := c.Ledger.Ensure(svc)
	if stirred {
		c.wake()
	}
	if len(v.Held) == 0 && (v.Unjudged || v.Asked && !c.Scope.LeftBehind(svc)) {
		return nil // there is nothing to say yet
	}
	want := objectOf(v, svc.Generation)
	body, news := want.patch(svc, metav1.NewTime(start)), want.news(svc)
	if body != nil && news == nil && !c.mayRepair(svc) {
		return nil
	}
	if err := c.remember(ctx, NameOf(svc), string(svc.UID), false); err != nil {
		return err
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
	name, uid := NameOf(svc), string(svc.UID)
	if err := c.remember(ctx, name, uid, true); err != nil {
		return err
	}
	if _, err := c.write(ctx, svc, nothing(svc).patch(svc, metav1.NewTime(c.now()))); err != nil {
		return err
	}
	return c.release(ctx, name, uid)
}

// release forgets the Service, or only this incarnation of it.
func (c *Controller) release(ctx context.Context, name, uid string) error {
	if err := c.remember(ctx, name, uid, true); err != nil {
		return err
	}
	c.repairs.forget(name)
	if c.Ledger.Release(name, uid) {
		c.Log.Info("addresses released", "service", name)
		c.wake()
	}
	return nil
}

// remember makes durable what the Service is about to give back: from the
// moment when the API shows it, a controller that starts anew must know that
// it rests.
func (c *Controller) remember(ctx context.Context, name, uid string, all bool) error {
	records := c.Ledger.Departing(name, uid, all)
	if len(records) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	return c.Book.Keep(ctx, records...)
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
	c.Log.Info("service "+news.Reason, "service", NameOf(svc), "message", news.Message)
}
