package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Follower is a task that runs an informer, the objects of one kind, and knows whether they were listed.
type Follower struct {
	// Optional is set, before Run, if some API servers do not have the kind, which is then known to have no objects. Of any
	// other kind a load balancer before the API server may answer that it is not found.
	Optional bool

	informer cache.SharedIndexInformer
	notify   func()

	mu sync.Mutex
	// handler is set by Run.
	handler cache.ResourceEventHandlerRegistration
	// err is why the objects could not be listed or watched the last time, and failures how often that was so.
	err      error
	failures int
}

// NewFollower returns a Follower that starts with Run. It calls notify, which must not wait, when
// what the informer keeps of an object changes, and when Standing changes.
func NewFollower(informer cache.SharedIndexInformer, notify func()) *Follower {
	return &Follower{informer: informer, notify: notify}
}

// Run follows the objects until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	handler, err := f.listen()
	if err != nil {
		return fmt.Errorf("follow objects: %w", err)
	}
	var listed sync.WaitGroup
	listed.Go(func() {
		if cache.WaitFor(ctx, "", handler.HasSyncedChecker()) {
			f.notify()
		}
	})
	f.informer.RunWithContext(ctx)
	listed.Wait()
	return nil
}

// listen sets up the informer, which must not have been started.
func (f *Follower) listen() (handler cache.ResourceEventHandlerRegistration, err error) {
	if err := f.informer.SetWatchErrorHandlerWithContext(f.failed); err != nil {
		return nil, err
	}
	handler, err = f.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { f.notify() },
		UpdateFunc: func(before, after any) {
			if !same(before.(runtime.Object), after.(runtime.Object)) {
				f.notify()
			}
		},
		DeleteFunc: func(any) { f.notify() },
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handler = handler
	return handler, err
}

// failed records why the objects cannot be listed or watched.
func (f *Follower) failed(ctx context.Context, r *cache.Reflector, err error) {
	f.mu.Lock()
	// Standing changes also when one kind of error replaces another: an API server that starts
	// first refuses everybody, and only then answers that it lacks a kind.
	other := f.err == nil || apierrors.ReasonForError(f.err) != apierrors.ReasonForError(err) || f.Optional && apierrors.IsNotFound(err)
	f.err = err
	f.failures++
	f.mu.Unlock()
	if other {
		f.notify()
	}
	if !f.Optional || !apierrors.IsNotFound(err) { // see Absent
		cache.DefaultWatchErrorHandler(ctx, r, err)
	}
}

// same reports whether the kept parts of both are equal. They are equal if a leader has only renewed its
// Lease.
func same(before, after runtime.Object) bool {
	old := before.DeepCopyObject()
	old.(metav1.Object).SetResourceVersion(after.(metav1.Object).GetResourceVersion())
	if lease, ok := old.(*coordinationv1.Lease); ok {
		lease.Spec.RenewTime = after.(*coordinationv1.Lease).Spec.RenewTime
	}
	return equality.Semantic.DeepEqual(old, after)
}

// Standing reports whether an attempt to list the objects has ended, and returns why none has
// succeeded. Objects that have been listed once stay known while the API server is down.
func (f *Follower) Standing() (known bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listed() || f.absent() {
		return true, nil
	}
	return f.err != nil, f.err
}

// Absent returns how often listing an optional kind has failed, if the API server answers now that it does not have it; else 0. It is
// asked again from time to time, because it may be upgraded.
func (f *Follower) Absent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.absent() {
		return 0
	}
	return f.failures
}

// absent is Absent; mu is held.
func (f *Follower) absent() bool { return f.Optional && !f.listed() && apierrors.IsNotFound(f.err) }

// listed reports whether the objects have been listed; mu is held.
func (f *Follower) listed() bool { return f.handler != nil && f.handler.HasSynced() }

// Listed returns the objects that are kept, by namespace and name. Nobody may
// change them.
func Listed[T metav1.Object](f *Follower) []T {
	var all []T
	for _, obj := range f.informer.GetStore().List() {
		if t, ok := obj.(T); ok {
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b T) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return all
}
