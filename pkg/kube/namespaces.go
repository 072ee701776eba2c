package kube

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// Namespaces follows the labels of the namespaces.
type Namespaces struct {
	lister  corelisters.NamespaceLister
	handler cache.ResourceEventHandlerRegistration
	changed notify.Signal
}

// NewNamespaces listens to the informer, which somebody else runs.
func NewNamespaces(informer coreinformers.NamespaceInformer) (*Namespaces, error) {
	n := &Namespaces{lister: informer.Lister()}
	var err error
	n.handler, err = informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { n.changed.Notify() },
		UpdateFunc: func(before, after any) {
			if !maps.Equal(before.(*corev1.Namespace).Labels, after.(*corev1.Namespace).Labels) {
				n.changed.Notify()
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch namespaces: %w", err)
	}
	return n, nil
}

// Labels returns the labels of the namespace, which nobody may change; none
// if there is no such namespace.
func (n *Namespaces) Labels(namespace string) map[string]string {
	ns, err := n.lister.Get(namespace)
	if err != nil { // not found: a lister has no other error
		return nil
	}
	return ns.Labels
}

// Known reports whether the labels of the namespace are known.
func (n *Namespaces) Known(namespace string) bool {
	_, err := n.lister.Get(namespace)
	return err == nil
}

// Wait waits until all namespaces are known, and returns false if the context
// ends before.
func (n *Namespaces) Wait(ctx context.Context) bool {
	return cache.WaitFor(ctx, "", n.handler.HasSyncedChecker())
}

// Changed returns a channel that is closed when the labels of a namespace
// change. Take the channel first, then ask Labels: no change is missed.
func (n *Namespaces) Changed() <-chan struct{} { return n.changed.Next() }
