package fleet

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

// API is an API server in memory, with what speakers need of one: objects are
// got, listed, watched, created and updated. It knows no selectors, so it may
// hold only what those of speakers select; and nobody is refused anything.
type API struct {
	mu      sync.Mutex
	events  []event                   // all there ever were; their place is the resource version
	latest  map[string]runtime.Object // by resource, namespace and name
	changed chan struct{}             // closed by the next event
	writes  int
}

// event is a change of an object.
type event struct {
	resource string
	kind     watch.EventType
	object   runtime.Object
}

// NewAPI returns a server without objects.
func NewAPI() *API { return &API{latest: map[string]runtime.Object{}, changed: make(chan struct{})} }

// Writes returns how many requests have changed something.
func (a *API) Writes() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.writes
}

// Put creates the object or replaces it. It counts as no write.
func (a *API) Put(resource string, object runtime.Object) error {
	kinds, _, err := scheme.Scheme.ObjectKinds(object)
	if err != nil {
		return err
	}
	named, err := meta.Accessor(object)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	key, kind := keyOf(resource, named.GetNamespace(), named.GetName()), watch.Added
	if a.latest[key] != nil {
		kind = watch.Modified
	}
	object = object.DeepCopyObject()
	object.GetObjectKind().SetGroupVersionKind(kinds[0])
	named, _ = meta.Accessor(object)
	named.SetResourceVersion(fmt.Sprint(len(a.events) + 1))
	a.latest[key] = object
	a.events = append(a.events, event{resource, kind, object})
	close(a.changed)
	a.changed = make(chan struct{})
	return nil
}

func keyOf(resource, namespace, name string) string {
	return resource + "/" + namespace + "/" + name
}

// request is what a request is about.
type request struct{ resource, namespace, name string }

// parse reads paths such as /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME.
func parse(path string) request {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	parts = parts[min(len(parts), map[string]int{"api": 2, "apis": 3}[parts[0]]):]
	var r request
	if len(parts) > 2 && parts[0] == "namespaces" {
		r.namespace, parts = parts[1], parts[2:]
	}
	parts = append(parts, "", "")
	r.resource, r.name = parts[0], parts[1]
	return r
}

// ServeHTTP implements http.Handler. Answers are JSON, which clients that
// prefer protobuf take.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	about := parse(r.URL.Path)
	switch {
	case r.Method == http.MethodPost || r.Method == http.MethodPut:
		a.write(w, r, about)
	case r.Method == http.MethodGet && about.name != "":
		a.get(w, about)
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		a.watch(w, r, about.resource)
	case r.Method == http.MethodGet:
		a.list(w, about.resource)
	default:
		respond(w, apierrors.NewMethodNotSupported(schema.GroupResource{Resource: about.resource}, r.Method).Status())
	}
}

func (a *API) write(w http.ResponseWriter, r *http.Request, about request) {
	body, err := io.ReadAll(r.Body)
	var object runtime.Object
	if err == nil {
		object, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	}
	if err == nil {
		err = a.Put(about.resource, object)
	}
	if err != nil {
		respond(w, apierrors.NewBadRequest(err.Error()).Status())
		return
	}
	a.mu.Lock()
	a.writes++
	a.mu.Unlock()
	named, _ := meta.Accessor(object) // Put has done the same
	a.get(w, request{about.resource, named.GetNamespace(), named.GetName()})
}

func (a *API) get(w http.ResponseWriter, about request) {
	a.mu.Lock()
	object := a.latest[keyOf(about.resource, about.namespace, about.name)]
	a.mu.Unlock()
	if object == nil {
		respond(w, apierrors.NewNotFound(schema.GroupResource{Resource: about.resource}, about.name).Status())
		return
	}
	respond(w, object)
}

func (a *API) list(w http.ResponseWriter, resource string) {
	items, version, _ := a.snapshot(resource)
	respond(w, map[string]any{"metadata": metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}, "items": items})
}

// snapshot returns the objects of a resource, and what comes after them.
func (a *API) snapshot(resource string) (items []runtime.Object, version int, changed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, object := range a.latest {
		if strings.HasPrefix(key, resource+"/") {
			items = append(items, object)
		}
	}
	return items, len(a.events), a.changed
}

// after returns the events after a version, the version now, and what is closed
// by the next event.
func (a *API) after(version int, resource string) (later []event, now int, changed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	later = slices.Clone(a.events[min(version, len(a.events)):])
	return slices.DeleteFunc(later, func(e event) bool { return e.resource != resource }), len(a.events), a.changed
}

// watch sends what there is, if it is asked to, and what changes.
func (a *API) watch(w http.ResponseWriter, r *http.Request, resource string) {
	send, control := streamTo(w, r), http.NewResponseController(w)
	version := 0
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		var items []runtime.Object
		items, version, _ = a.snapshot(resource)
		for _, object := range items {
			if send(watch.Added, object) != nil {
				return
			}
		}
		if send(watch.Bookmark, bookmark(resource, version)) != nil {
			return
		}
	} else if _, err := fmt.Sscan(r.URL.Query().Get("resourceVersion"), &version); err != nil {
		respond(w, apierrors.NewBadRequest(err.Error()).Status())
		return
	}
	for {
		later, now, changed := a.after(version, resource)
		for _, e := range later {
			if send(e.kind, e.object) != nil {
				return
			}
		}
		if control.Flush() != nil {
			return
		}
		version = now
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
}

// streamTo returns what sends an event: in protobuf to who prefers that, as
// speakers do and as API servers answer, else in JSON.
func streamTo(w http.ResponseWriter, r *http.Request) func(watch.EventType, runtime.Object) error {
	mediaType, send := runtime.ContentTypeJSON, json.NewEncoder(w)
	if strings.HasPrefix(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		mediaType = runtime.ContentTypeProtobuf
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), mediaType)
	w.Header().Set("Content-Type", mediaType+";stream=watch")
	return func(kind watch.EventType, object runtime.Object) error {
		raw, err := runtime.Encode(info.Serializer, object)
		if err != nil {
			return err
		}
		event := metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}
		if mediaType == runtime.ContentTypeJSON {
			return send.Encode(event)
		}
		if raw, err = event.Marshal(); err == nil {
			_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(raw))), raw...))
		}
		return err
	}
}

// bookmark ends the list that a watch began with.
func bookmark(resource string, version int) runtime.Object {
	end := metav1.ObjectMeta{ResourceVersion: fmt.Sprint(version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
	switch resource {
	case "configmaps":
		return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: end}
	case "endpointslices":
		return &discoveryv1.EndpointSlice{TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}, ObjectMeta: end}
	case "leases":
		return &coordinationv1.Lease{TypeMeta: metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}, ObjectMeta: end}
	case "nodes":
		return &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: end}
	}
	return &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: end}
}

// respond answers with the value, whose code is its own if it is a Status.
func respond(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if status, ok := value.(metav1.Status); ok {
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		w.WriteHeader(int(status.Code))
		value = status
	}
	_ = json.NewEncoder(w).Encode(value) // a client that has gone needs no answer
}
