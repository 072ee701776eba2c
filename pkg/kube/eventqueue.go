package kube

import (
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// eventQueue holds the Events that wait. Namespaces take turns, and the Events of a namespace
// keep their order.
type eventQueue struct {
	// pushed has a value when there may be something.
	pushed chan struct{}

	mu    sync.Mutex
	waits map[string][]event // by namespace
	turns []string           // the namespaces in waits
	on    map[corev1.ObjectReference]int
	size  int
}

func newEventQueue() *eventQueue {
	return &eventQueue{pushed: make(chan struct{}, 1), waits: map[string][]event{}, on: map[corev1.ObjectReference]int{}}
}

// objectOf returns the object without its version. The bound for an object counts by that.
func (e event) objectOf() corev1.ObjectReference {
	return corev1.ObjectReference{Kind: e.object.Kind, Namespace: e.object.Namespace, Name: e.object.Name, UID: e.object.UID}
}

// push adds an Event, unless too many wait. When the queue is full, the namespace that has
// the most in it loses the last one.
func (q *eventQueue) push(e event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	namespace := e.object.Namespace
	if len(q.waits[namespace]) >= eventsPerNamespace || q.on[e.objectOf()] >= eventsPerObject {
		return
	}
	if q.size >= eventsQueued {
		most := namespace
		for other, waiting := range q.waits {
			if len(waiting) > len(q.waits[most]) {
				most = other
			}
		}
		if most == namespace {
			return
		}
		last := len(q.waits[most]) - 1
		q.leave(q.waits[most][last])
		q.waits[most] = q.waits[most][:last]
	}
	if _, inTurn := q.waits[namespace]; !inTurn {
		q.turns = append(q.turns, namespace)
	}
	q.waits[namespace] = append(q.waits[namespace], e)
	q.on[e.objectOf()]++
	q.size++
	notify.Wake(q.pushed)
}

// pop takes the Event whose turn it is.
func (q *eventQueue) pop() (e event, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.turns) > 0 {
		namespace := q.turns[0]
		q.turns = q.turns[1:]
		waiting := q.waits[namespace]
		if len(waiting) == 0 { // it has lost them to others
			delete(q.waits, namespace)
			continue
		}
		e = waiting[0]
		q.leave(e)
		if q.waits[namespace] = waiting[1:]; len(waiting) == 1 {
			delete(q.waits, namespace)
		} else {
			q.turns = append(q.turns, namespace)
		}
		return e, true
	}
	return event{}, false
}

// leave counts an Event out.
func (q *eventQueue) leave(e event) {
	q.size--
	if q.on[e.objectOf()]--; q.on[e.objectOf()] == 0 {
		delete(q.on, e.objectOf())
	}
}
