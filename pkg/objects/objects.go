// Package objects has the table of the kinds of Kubernetes objects that controller and speaker
// watch or list: what is kept of each, and the bound of each field. Every cache is made from
// it.
//
// Users who may create objects choose their size and number. An object is therefore reduced to
// its projection before the next one is read, both in a list and in a watch. A program never
// holds more than one object as it was written.
//
//	kinds.go    the table: what is kept of each kind, within which bounds
//	objects.go  lists, watches and informers that use it
//	meta.go     what a cache needs to know of each object
//	stream.go   reads one object after the other from an answer
package objects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// pointer is a pointer to an object that can be cached.
type pointer[E any] interface {
	*E
	Object
}

// Decodable is a pointer to an object that the API server sends.
type Decodable[E any] interface {
	pointer[E]
	metav1.Object
	Unmarshal(data []byte) error
}

// Kind is a row of the table: a kind of objects, and its projection.
type Kind[E any, P Decodable[E]] struct {
	// Name is what people call the objects.
	Name string
	// Resource is the kind's name in URLs.
	Resource string
	// Optional is set if API servers that are supported may not have the kind.
	Optional bool
	rest     func(kubernetes.Interface) rest.Interface
	client   func(c kubernetes.Interface, namespace string) kindClient
	// project returns what is kept of an object, within bounds. The projection shares no
	// memory with the rest of the object.
	project func(P) P
}

// kindClient lists and watches the objects of a kind.
type kindClient interface {
	List(context.Context, metav1.ListOptions) (runtime.Object, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// typedClient is the same as it is generated: its lists are of the type L.
type typedClient[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

type untypedClient[L runtime.Object] struct{ typedClient[L] }

func untyped[L runtime.Object](c typedClient[L]) kindClient { return untypedClient[L]{c} }

func (c untypedClient[L]) List(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	return c.typedClient.List(ctx, o)
}

// Scope selects objects of a kind.
type Scope struct {
	// Namespace is that of the objects. Empty: all namespaces.
	Namespace string
	// Labels and Fields are selectors. Empty: all.
	Labels, Fields string
	// Cached is set if a list may be as old as what the API server has in memory.
	Cached bool
	// Fresh is set if the first list of an informer must have all that was written before.
	Fresh bool
}

// Shared is the scope of the informers that Share changes. What Services hold is imported from them: a list as old as
// the memory of an API server that lags behind would lack what another leader has just given.
var Shared = Scope{Fresh: true}

// First returns the options of an informer's list. An informer allows the first one to have any age.
func (s Scope) First(o metav1.ListOptions) metav1.ListOptions {
	if s.Fresh && o.ResourceVersion == "0" {
		o.ResourceVersion = ""
	}
	return o
}

func (s Scope) options(o metav1.ListOptions) metav1.ListOptions {
	o.LabelSelector, o.FieldSelector = s.Labels, s.Fields
	if s.Cached && o.ResourceVersion == "" {
		o.ResourceVersion = "0"
	}
	return o
}

// Project returns what is kept of the object.
func (k Kind[E, P]) Project(obj P) P { return k.project(obj) }

// List returns what is kept of the objects.
func (k Kind[E, P]) List(ctx context.Context, client kubernetes.Interface, scope Scope) ([]P, error) {
	var all []P
	err := k.Each(ctx, client, scope, func(obj P) { all = append(all, obj) })
	return all, err
}

// Each lists the objects and hands over what is kept of each, one after the other.
func (k Kind[E, P]) Each(ctx context.Context, client kubernetes.Interface, scope Scope, each func(P)) error {
	_, err := k.read(ctx, client, scope, metav1.ListOptions{}, func(obj P) { each(k.project(obj)) })
	return err
}

// Informer returns an informer, not yet started, whose cache has the projections
// of the objects.
func (k Kind[E, P]) Informer(client kubernetes.Interface, scope Scope, o cache.SharedIndexInformerOptions) cache.SharedIndexInformer {
	return Informer(k, client, scope, View[P, P]{Derive: func(obj P) P { return obj }}, o)
}

// Share makes the factory's informers of Services, Namespaces and Nodes keep projections. It
// must come before any other use of these informers. Of Services that are not ours, and never
// were, they keep only what shows that, and the addresses.
//
// Who asked for Nodes is shown each of them again each minute: what the framework's controller does about a new one may have
// to wait, and it looks again only when its kubelet writes the Node, minutes later.
func Share(factory informers.SharedInformerFactory, ours func(*corev1.Service) bool) {
	share(factory, ServicesFor(ours), 0)
	share(factory, Namespaces, 0)
	share(factory, WritableNodes, time.Minute)
}

// share makes the factory's informer of a kind ours. It shows all objects again after that time, or the factory's if it is 0.
func share[E any, P Decodable[E]](factory informers.SharedInformerFactory, k Kind[E, P], again time.Duration) {
	factory.InformerFor(P(new(E)), func(client kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
		return k.Informer(client, Shared, cache.SharedIndexInformerOptions{
			ResyncPeriod: cmp.Or(again, resync), Indexers: cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc},
		})
	})
}

// View is what a cache has in place of projections.
type View[P, T any] struct {
	// Derive returns what is cached of a projection.
	Derive func(P) T
	// Keep reports whether the object is cached at all. For the informer, an object that is no
	// longer kept is deleted. Nil: all are kept.
	Keep func(P) bool
}

// Handler calls note for each change of an object of a cache. before is nil for a new object, after for one that was deleted.
func Handler[E any](note func(before, after *E)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { note(nil, obj.(*E)) },
		UpdateFunc: func(before, after any) { note(before.(*E), after.(*E)) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if before, ok := obj.(*E); ok {
				note(before, nil)
			}
		},
	}
}

// Informer returns an informer, not yet started, whose cache has what the view
// shows of the projections of the objects.
func Informer[E any, P Decodable[E], K any, T pointer[K]](kind Kind[E, P], client kubernetes.Interface, scope Scope, view View[P, T],
	o cache.SharedIndexInformerOptions) cache.SharedIndexInformer {
	var informer cache.SharedIndexInformer
	empty := func() Object { return T(new(K)) }
	r := &reader{empty: empty, all: view.Keep == nil, kept: map[string]bool{}, keep: func(obj runtime.Object) (Object, bool) {
		p, ok := obj.(P)
		if !ok {
			return nil, false
		}
		if p = kind.project(p); view.Keep != nil && !view.Keep(p) {
			return nil, false
		}
		fresh := view.Derive(p)
		// An object that is cached already is not kept twice, so that a list without changes needs no memory.
		is := MetaOf(p)
		stored, _, _ := informer.GetStore().GetByKey(is.key()) //nolint:errcheck // it cannot fail
		if old, ok := stored.(Object); ok && MetaOf(old.GetObjectMeta()) == is && is.ResourceVersion != "" {
			return old, true
		}
		return fresh, true
	}}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return untilAnswered(ctx, informer.HasSynced, func() (runtime.Object, error) {
				l := &internalversion.List{}
				r.reset()
				head, err := kind.read(ctx, client, scope, scope.First(options), func(obj P) {
					if kept, ok := r.keep(obj); ok {
						r.note(MetaOf(obj).key())
						l.Items = append(l.Items, kept)
					}
				})
				l.ListMeta = head
				return l, err
			})
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			lists := options.SendInitialEvents != nil && *options.SendInitialEvents
			w, err := untilAnswered(ctx, informer.HasSynced, func() (watch.Interface, error) {
				if lists {
					r.reset()
				}
				return kind.client(client, scope.Namespace).Watch(ctx, scope.options(options))
			})
			if lists && (utilnet.IsConnectionRefused(err) || apierrors.IsTooManyRequests(err)) {
				// For these two the reflector would report nothing and wait for up to a minute, even when ctx has
				// ended. After any other error it lists, which fails in the same way, and reports that.
				return nil, fmt.Errorf("list %s: %v", kind.Name, err) //nolint:errorlint // the reflector must not see which it is
			}
			if err != nil {
				return nil, fmt.Errorf("watch %s: %w", kind.Name, err)
			}
			return filter(w, r.event), nil
		},
	}
	informer = cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, client), empty(), o)
	return informer
}

// longestWait is the longest time between two attempts to reach an API server. For reflectors it is a minute.
const longestWait = 4 * time.Second

// untilAnswered repeats a request until the API server answers, if it has answered before. A reflector waits longer and longer between
// two attempts, and nobody would see what changes in the first minute in which the API server is back. What an ill API server, or a load
// balancer before it, answers is no answer, nor is one that is cut short.
func untilAnswered[R any](ctx context.Context, before func() bool, request func() (R, error)) (R, error) {
	for wait := time.Second; ; wait = min(2*wait, longestWait) {
		answer, err := request()
		_, unanswered := errors.AsType[*url.Error](err)
		unanswered = unanswered || errors.Is(err, io.ErrUnexpectedEOF)
		if status, is := errors.AsType[*apierrors.StatusError](err); is {
			foreign := apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
			unanswered = foreign || status.ErrStatus.Code >= http.StatusInternalServerError &&
				!apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) // then the reflector lists anew
		}
		if !unanswered || !before() || ctx.Err() != nil {
			return answer, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
	}
}

// reader turns what the API server sends into what an informer keeps.
type reader struct {
	keep func(runtime.Object) (Object, bool)
	// empty returns an object of the type that the informer keeps.
	empty func() Object
	// all is set if every object is kept.
	all bool

	mu sync.Mutex
	// kept are the keys of the objects that were kept. Only of these must the informer learn
	// that they are not kept any more.
	kept map[string]bool
}

func (r *reader) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.kept)
}

func (r *reader) note(name string) {
	if r.all {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[name] = true
}

// event returns the event that an informer gets instead. If the object is not kept, that is a
// bookmark with the version.
func (r *reader) event(e watch.Event) watch.Event {
	o, ok := e.Object.(metav1.Object)
	switch {
	case e.Type == watch.Error || !ok:
		return e
	case e.Type == watch.Bookmark:
		last := o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
		return watch.Event{Type: watch.Bookmark, Object: r.bare(Meta{ResourceVersion: o.GetResourceVersion(), last: last})}
	}
	kept, keep := r.keep(e.Object)
	if r.all {
		return watch.Event{Type: e.Type, Object: kept}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	is := MetaOf(o)
	name := is.key()
	known := r.kept[name]
	if keep && e.Type != watch.Deleted {
		r.kept[name] = true
		return watch.Event{Type: e.Type, Object: kept}
	}
	delete(r.kept, name)
	if !known {
		return watch.Event{Type: watch.Bookmark, Object: r.bare(Meta{ResourceVersion: is.ResourceVersion})}
	}
	return watch.Event{Type: watch.Deleted, Object: r.bare(is)}
}

// bare returns an object of which only the Meta is known.
func (r *reader) bare(m Meta) Object {
	bare := r.empty()
	identify(bare, m)
	return bare
}

// filtered is a watch whose events are changed. Stop returns when no event is being changed
// any more.
type filtered struct {
	from    watch.Interface
	to      chan watch.Event
	stop    chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

func filter(from watch.Interface, change func(watch.Event) watch.Event) *filtered {
	f := &filtered{from: from, to: make(chan watch.Event), stop: make(chan struct{})}
	f.running.Go(func() { f.run(change) })
	return f
}

// run changes events until there are no more, or Stop.
func (f *filtered) run(change func(watch.Event) watch.Event) {
	defer close(f.to)
	for {
		select {
		case e, more := <-f.from.ResultChan():
			if !more {
				return
			}
			select {
			case f.to <- change(e):
			case <-f.stop:
				return
			}
		case <-f.stop:
			return
		}
	}
}

// Stop implements watch.Interface.
func (f *filtered) Stop() {
	f.once.Do(func() { close(f.stop) })
	f.from.Stop()
	f.running.Wait()
}

// ResultChan implements watch.Interface.
func (f *filtered) ResultChan() <-chan watch.Event { return f.to }

// read lists the objects and hands them over, one after the other.
func (k Kind[E, P]) read(ctx context.Context, client kubernetes.Interface, scope Scope, o metav1.ListOptions,
	each func(P)) (head metav1.ListMeta, err error) {
	// Ask for all objects at once, because the API server has these in memory, and reads pages
	// from etcd.
	o.Limit, o.Continue = 0, ""
	if c, ok := k.rest(client).(*rest.RESTClient); ok && c != nil {
		head, err = k.stream(ctx, c, scope, o, each)
	} else { // a client of a test
		head, err = k.atOnce(ctx, client, scope, o, each)
	}
	if err != nil {
		return head, fmt.Errorf("list %s: %w", k.Name, err)
	}
	return head, nil
}

func (k Kind[E, P]) atOnce(ctx context.Context, client kubernetes.Interface, scope Scope, o metav1.ListOptions,
	each func(P)) (head metav1.ListMeta, err error) {
	l, err := k.client(client, scope.Namespace).List(ctx, scope.options(o))
	if err != nil {
		return head, err
	}
	of, err := meta.ListAccessor(l)
	if err != nil {
		return head, err
	}
	head.ResourceVersion = of.GetResourceVersion()
	return head, meta.EachListItem(l, func(obj runtime.Object) error {
		p, ok := obj.(P)
		if !ok {
			return fmt.Errorf("one is a %s", reflect.TypeOf(obj))
		}
		each(p)
		return nil
	})
}
