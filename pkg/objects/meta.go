package objects

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// Object is what an informer's cache can keep.
type Object interface {
	runtime.Object
	metav1.ObjectMetaAccessor
}

// Meta is what an informer needs to know of an object. What a View derives embeds it in place of metav1.ObjectMeta, which is four times
// as large. Nobody modifies it.
type Meta struct {
	Namespace, Name, ResourceVersion string
	UID                              types.UID
	// last is set in the bookmark that ends the initial events of a watch.
	last bool
}

// MetaOf returns the Meta of an object.
func MetaOf(o metav1.Object) Meta {
	return Meta{o.GetNamespace(), o.GetName(), o.GetResourceVersion(), o.GetUID(), false}
}

// full returns the same as what API objects have.
func (m Meta) full() metav1.ObjectMeta {
	full := metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, ResourceVersion: m.ResourceVersion, UID: m.UID}
	if m.last {
		full.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return full
}

// GetObjectMeta implements metav1.ObjectMetaAccessor. It returns a copy.
func (m *Meta) GetObjectMeta() metav1.Object { return new(m.full()) }

// GetObjectKind implements runtime.Object, together with DeepCopyObject of what embeds the Meta.
func (*Meta) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

func (m *Meta) set(of Meta) { *m = of }

// key returns the object's key in caches.
func (m Meta) key() string { return cache.ObjectName{Namespace: m.Namespace, Name: m.Name}.String() }

// identify gives the object its Meta.
func identify(o Object, m Meta) {
	if derived, ok := o.(interface{ set(Meta) }); ok {
		derived.set(m)
		return
	}
	*o.GetObjectMeta().(*metav1.ObjectMeta) = m.full() //nolint:errcheck // an API object's is its own
}
