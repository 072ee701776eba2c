package servicelb

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// reconcile brings one Service, by "namespace/name", into step with the
// ledger.
func (c *Controller) reconcile(ctx context.Context, name string) error {
	svc, err := c.get(name)
	switch {
	case apierrors.IsNotFound(err):
		return c.release(ctx, name)
	case err != nil:
		return err
	case c.leavesToUpstream(svc):
		return nil
	case c.Scope.Serves(svc):
		return c.serve(ctx, svc)
	case c.Scope.Keeps(svc) && !c.Ledger.LeaseOver(svc):
		return nil
	case c.Scope.LeftBehind(svc) || len(c.Ledger.Holds(string(svc.UID))) > 0:
		return c.letGo(ctx, svc)
	default:
		return c.release(ctx, name)
	}
}

// serve gives the Service what it asks for, or tells it why not.
func (c *Controller) serve(ctx context.Context, svc *corev1.Service) error {
	start := c.now()
	v, stirred := c.Ledger.Ensure(svc)
	if stirred {
		c.wake()
	}
	c.emitLeft(svc, v.Left)
	if len(v.Held) == 0 && (v.Unjudged || v.Asked && !c.Scope.LeftBehind(svc)) {
		return nil // there is nothing to say yet
	}
	want := objectOf(v, svc.Generation)
	want.upstream = c.drivenByUpstream(svc)
	body, event := want.patch(svc, metav1.NewTime(start)), want.event(svc)
	repair := body != nil && c.repairs.wrote(svc, want.sum())
	if repair {
		if wait := c.repairs.wait(NameOf(svc), start); wait > 0 {
			c.queue.AddAfter(NameOf(svc), wait)
			return nil
		}
	}
	if err := c.Ledger.Remember(ctx, c.Book, NameOf(svc), string(svc.UID), false); err != nil {
		return err
	}
	wrote, err := c.write(ctx, svc, body)
	if err != nil {
		return err
	}
	if c.Ledger.Settle(string(svc.UID), v.Held) {
		c.wake()
	}
	if wrote && repair {
		c.repaired(svc)
		return nil
	}
	c.repairs.note(svc, want.sum())
	if !wrote {
		return nil
	}
	c.emitAdopted(svc, v)
	if event == nil {
		return nil
	}
	c.emit(svc, event, v)
	if v.Refusal == nil {
		c.metrics.latency.Observe(c.now().Sub(start).Seconds())
	}
	return nil
}

// letGo takes what Lodestone wrote off a Service that is not, or no longer,
// to be served. Its addresses are free only after nothing names them.
func (c *Controller) letGo(ctx context.Context, svc *corev1.Service) error {
	name, uid := NameOf(svc), string(svc.UID)
	if err := c.Ledger.Remember(ctx, c.Book, name, uid, true); err != nil {
		return err
	}
	want := nothing(svc)
	// Who has written the status of a Service that is not ours any more has written the
	// conventional finalizer, too.
	want.upstream = c.drivenByUpstream(svc) || want.keepIngress && !c.Scope.Covers(svc)
	if _, err := c.write(ctx, svc, want.patch(svc, metav1.NewTime(c.now()))); err != nil {
		return err
	}
	c.forget(name, uid)
	return nil
}

// release forgets the Service, whose object is gone or no concern of ours.
func (c *Controller) release(ctx context.Context, name string) error {
	if err := c.Ledger.Remember(ctx, c.Book, name, "", true); err != nil {
		return err
	}
	c.forget(name, "")
	return nil
}

// forget takes back what the Service holds, or only this incarnation of it.
func (c *Controller) forget(name, uid string) {
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

const (
	// promptRepairs is how many times in a row what others did to a Service's
	// object is undone at once.
	promptRepairs = 5
	// firstDelay and lastDelay bound the time between repairs after that.
	firstDelay = time.Second
	lastDelay  = time.Minute
	// calm is how long nobody has to touch the object until it is forgotten.
	calm = 10 * time.Minute
)

// repairs bounds the repairs of each Service's object: two load balancers
// that both believe a Service to be theirs must not fight at full speed. A repair
// is a write of the same that was written last: somebody else has changed it since.
type repairs struct {
	mu sync.Mutex
	of map[string]repair
}

type repair struct {
	// uid and sum are of what was written last.
	uid        types.UID
	sum        [sha256.Size]byte
	count      int
	last, next time.Time
}

// wrote reports whether this is what was written last.
func (r *repairs) wrote(svc *corev1.Service, sum [sha256.Size]byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, ok := r.of[NameOf(svc)]
	return ok && last.uid == svc.UID && last.sum == sum
}

// note notes what was written, or is there already.
func (r *repairs) note(svc *corev1.Service, sum [sha256.Size]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := r.of[NameOf(svc)]
	if last.uid != svc.UID {
		last = repair{uid: svc.UID}
	}
	last.sum = sum
	if r.of == nil {
		r.of = map[string]repair{}
	}
	r.of[NameOf(svc)] = last
}

// wait returns how long the Service is to be left as it is.
func (r *repairs) wait(name string, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[name].next.Sub(now)
}

// count counts a repair that was made, and returns how many in a row it is.
func (r *repairs) count(name string, now time.Time) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.of[name]
	if now.Sub(f.last) > calm {
		f.count, f.next = 0, time.Time{}
	}
	f.count++
	f.last = now
	if over := f.count - promptRepairs; over >= 0 {
		f.next = now.Add(min(lastDelay, firstDelay<<min(over, 10)))
	}
	r.of[name] = f
	return f.count
}

func (r *repairs) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, name)
}

// repaired notes that the Service's object was restored. What could not be
// written says nothing about others, and is no repair.
func (c *Controller) repaired(svc *corev1.Service) {
	count := c.repairs.count(NameOf(svc), c.now())
	if count == promptRepairs+1 {
		message := fmt.Sprintf("Lodestone has restored the status of this Service %d times in a row. "+
			"Does another load balancer serve it, too? Lodestone now restores it less often.", count)
		c.Log.Warn("service contested", "service", NameOf(svc))
		c.Events.Event(svc, corev1.EventTypeWarning, string(ReasonContested), message)
	}
}
