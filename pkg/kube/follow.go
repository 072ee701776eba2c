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

// Follower is a task that follows the objects of one kind.
type Follower struct {
	informer cache.SharedIndexInformer
	keep     cache.TransformFunc
	notify   func()

	mu sync.Mutex
	// handler is set by Run.
	handler cache.ResourceEventHandlerRegistration
	// err is why the objects could not be listed or watched the last time.
	err error
}

// NewFollower returns a Follower that starts with Run. It keeps of each object
// what keep, a transform, makes of it. It calls notify, which must not wait,
// when something of that changes, and when Standing does.
func NewFollower(informer cache.SharedIndexInformer, keep cache.TransformFunc, notify func()) *Follower {
	return &Follower{informer: informer, keep: keep, notify: notify}
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

// listen sets the informer up, which has not been started.
func (f *Follower) listen() (handler cache.ResourceEventHandlerRegistration, err error) {
	if err := f.informer.SetTransform(f.keep); err != nil {
		return nil, err
	}
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

// failed takes note of why the objects cannot be listed or watched.
func (f *Follower) failed(ctx context.Context, r *cache.Reflector, err error) {
	f.mu.Lock()
	// What Standing says changes where another kind of error takes the place of one:
	// an API server that starts refuses everybody before it says what it lacks.
	other := f.err == nil || apierrors.ReasonForError(f.err) != apierrors.ReasonForError(err)
	f.err = err
	f.mu.Unlock()
	if other {
		f.notify()
	}
	if !apierrors.IsNotFound(err) { // Absent tells
		cache.DefaultWatchErrorHandler(ctx, r, err)
	}
}

// same reports whether nothing that is kept differs. A leader that renews its
// Lease changes nothing.
func same(before, after runtime.Object) bool {
	old := before.DeepCopyObject()
	old.(metav1.Object).SetResourceVersion(after.(metav1.Object).GetResourceVersion())
	if lease, ok := old.(*coordinationv1.Lease); ok {
		lease.Spec.RenewTime = after.(*coordinationv1.Lease).Spec.RenewTime
	}
	return equality.Semantic.DeepEqual(old, after)
}

// Standing reports whether it is known what there is, or why not: err. Objects
// that have been listed once stay as they are while the API server is down. Of a
// kind that the API server does not have, it is known that there is nothing.
func (f *Follower) Standing() (known bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listed() || apierrors.IsNotFound(f.err) {
		return true, nil
	}
	return f.err != nil, f.err
}

// Absent reports whether the API server has said that it does not have the kind.
// It is asked again now and then: it is upgraded some day.
func (f *Follower) Absent() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.listed() && apierrors.IsNotFound(f.err)
}

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
