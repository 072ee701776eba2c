package servicelb

import (
	"strings"
	"sync"

	"k8s.io/client-go/util/workqueue"

	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// order is the order in which Services are worked on. Namespaces take turns, so that one with many
// Services, or with some that change all the time, delays no other's. It implements
// workqueue.Queue for the names of Services.
type order struct {
	kube.Turns[string]
	mu sync.Mutex
	// aged are those that are about to be pushed and keep the order of their age, since the oldest
	// gets what there is. They take turns with the namespaces, as one.
	aged map[string]bool
}

// add puts Services into the queue that are worked on in this order.
func (o *order) add(queue workqueue.TypedInterface[string], names []string) {
	o.mu.Lock()
	for _, name := range names {
		o.aged[name] = true
	}
	o.mu.Unlock()
	for _, name := range names {
		queue.Add(name)
	}
}

// isAged reports whether the Service keeps its order, and forgets that.
func (o *order) isAged(name string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	is := o.aged[name]
	delete(o.aged, name)
	return is
}

// Touch implements workqueue.Queue: the Service is in the queue already.
func (o *order) Touch(name string) { o.isAged(name) }

// Push implements workqueue.Queue.
func (o *order) Push(name string) {
	namespace, _, _ := strings.Cut(name, "/")
	if o.isAged(name) {
		namespace = "" // no namespace has this name
	}
	o.Turns.Push(namespace, name)
}

// Pop implements workqueue.Queue. It is called only when there is something.
func (o *order) Pop() string {
	name, _ := o.Turns.Pop()
	return name
}
