package servicelb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// errGone is returned for an old object of a Service that was deleted and created again.
var errGone = errors.New("the Service is gone, and there is another one of its name")

// reconcile brings one Service, by "namespace/name", into step with the
// ledger.
func (c *Controller) reconcile(ctx context.Context, name string) error {
	known := c.ledger.known(name) // before the look: a Service that is created meanwhile keeps what it is given
	svc, err := c.get(name)
	switch {
	case apierrors.IsNotFound(err):
		return c.free(ctx, name, known)
	case err != nil:
		return err
	case c.leavesToUpstream(svc):
		return nil
	case c.Scope.Serves(svc) && !c.Namespaces.Known(svc.Namespace):
		c.queue.AddAfter(name, namespaceRetry) // without its labels other pools are open to it
		return nil
	}
	start := c.ledger.now()
	v, step, err := c.decide(ctx, svc)
	switch {
	case err != nil:
		return err
	case step == ledger.Publish:
		return c.publish(ctx, svc, v, start)
	case step == ledger.Unpublish:
		return c.unpublish(ctx, svc)
	case step == ledger.Free:
		return c.free(ctx, name, known)
	}
	return nil
}

// publish writes the verdict, which was asked for at start, on the Service, and settles the account.
func (c *Controller) publish(ctx context.Context, svc *corev1.Service, v ledger.Verdict, start time.Time) error {
	name, want := ledger.NameOf(svc), objectOf(v, svc.Generation)
	want.upstream = c.drivenByUpstream(svc)
	body, event := want.patch(svc, metav1.NewTime(start)), want.event(svc)
	repair := body != nil && c.repairs.wrote(svc, want.sum())
	if repair {
		if wait := c.repairs.wait(name, start); wait > 0 {
			c.queue.AddAfter(name, wait)
			return nil
		}
	}
	if body == nil && len(v.GivenBack) > 0 {
		body = unchanged(svc) // the object may be an old one, and the present one show what is about to be freed
	}
	if err := c.record(ctx, v.Records); err != nil {
		return err
	}
	wrote, err := write(ctx, c.API, svc, body)
	if err != nil {
		return err
	}
	l, now := c.ledger.open()
	l.Settle(name, string(svc.UID), v.Held, now)
	c.ledger.close()
	if wrote && repair { // a failed write does not show that others write
		if count := c.repairs.count(name, now); count == promptRepairs+1 {
			c.emit.contested(svc, count)
		}
		return nil
	}
	c.repairs.note(svc, want.sum())
	if !wrote {
		return nil
	}
	c.emit.adopted(svc, v.Held)
	if event == nil {
		return nil
	}
	c.emit.condition(svc, event, v.Refusal != nil)
	if v.Refusal == nil {
		c.metrics.latency.Observe(c.ledger.now().Sub(start).Seconds())
	}
	return nil
}

// unpublish removes what Lodestone wrote on a Service that it does not serve, or serves no longer,
// and then frees the addresses.
func (c *Controller) unpublish(ctx context.Context, svc *corev1.Service) error {
	name, uid := ledger.NameOf(svc), string(svc.UID)
	if err := c.record(ctx, c.ledger.departing(name, uid)); err != nil {
		return err
	}
	want := nothing(c.ledger.foreign(svc))
	// If another load balancer has written the status of a Service that is not ours any more,
	// the conventional finalizer is its own, too.
	want.upstream = c.drivenByUpstream(svc) || want.keepIngress && !c.Scope.Covers(svc)
	if _, err := write(ctx, c.API, svc, want.patch(svc, metav1.NewTime(c.ledger.now()))); err != nil {
		return err
	}
	c.freeNow(name, uid, want.keepIngress)
	return nil
}

// free takes back the addresses of an incarnation of a Service that is gone or that Lodestone does not serve. Without a UID
// there is none.
func (c *Controller) free(ctx context.Context, name, uid string) error {
	if uid == "" {
		c.repairs.forget(name)
		return nil
	}
	if err := c.record(ctx, c.ledger.departing(name, uid)); err != nil {
		return err
	}
	c.freeNow(name, uid, false)
	return nil
}

// freeNow has the ledger free what this incarnation of the Service holds, once the records are durable. What
// it still shows, if it shows anything, is in use: nobody else gets it in between.
func (c *Controller) freeNow(name, uid string, shows bool) {
	c.repairs.forget(name)
	l, now := c.ledger.open()
	freed := l.Release(name, uid, now)
	if shows {
		if svc, err := c.get(name); err == nil { // looked up while nobody else notes that it is gone
			l.SeeForeign(svc, false)
		}
	}
	c.ledger.close()
	if freed {
		c.Log.Info("addresses released", "service", name)
	}
}

// decide asks the ledger.
func (c *Controller) decide(ctx context.Context, svc *corev1.Service) (v ledger.Verdict, step ledger.Step, err error) {
	l, now, err := c.openFor(ctx, svc)
	if err != nil {
		return v, step, err
	}
	v, step = l.Decide(svc, c.Namespaces.Labels(svc.Namespace), now) // whoever follows labels opens the ledger after they have changed
	c.ledger.close()
	c.emit.left(svc, v.Left)
	return v, step, nil
}

// openFor returns the ledger once what a former incarnation of the Service held has been taken back, as from every Service
// that is gone. Without an error it is the caller's until close.
func (c *Controller) openFor(ctx context.Context, svc *corev1.Service) (*ledger.Ledger, time.Time, error) {
	name := ledger.NameOf(svc)
	for {
		l, now := c.ledger.open()
		former := l.Known(name)
		if former == "" || former == string(svc.UID) {
			return l, now, nil
		}
		c.ledger.close()
		if current, err := c.get(name); err == nil && string(current.UID) == former {
			return nil, now, errGone
		}
		if err := c.free(ctx, name, former); err != nil {
			return nil, now, err
		}
	}
}

// recordEnds records when quarantines end by the configuration in force. If it fails, the next
// release writes these records, too.
func (c *Controller) recordEnds(ctx context.Context) {
	if err := c.record(ctx, c.ledger.inQuarantine()); err != nil && ctx.Err() == nil {
		c.Log.Warn("ends of quarantines not recorded: a controller that starts now uses those by the configuration before", "err", err)
	}
}

// record makes records durable. A controller that starts after the API shows a release must know
// of it.
func (c *Controller) record(ctx context.Context, records []quarantinestore.Record) error {
	if len(records) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, PatchTimeout)
	defer cancel()
	return c.Quarantine.Keep(ctx, records...)
}

// write applies the patch, if there is one, to this incarnation of the
// Service, and reports whether it did.
func write(ctx context.Context, api API, svc *corev1.Service, body []byte) (bool, error) {
	if body == nil {
		return false, nil
	}
	err := api.PatchStatus(ctx, svc.Namespace, svc.Name, body)
	switch {
	case err == nil:
		return true, nil
	case kube.Missing(err), isOtherUID(err):
		return false, nil // the watch is about to deliver that
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
