package kube

import (
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// eventQueue holds the Events that wait.
type eventQueue struct {
	// pushed has a value when there may be something.
	pushed chan struct{}

	mu sync.Mutex
	Turns[event]
	on map[corev1.ObjectReference]int
}

func newEventQueue() *eventQueue {
	return &eventQueue{pushed: make(chan struct{}, 1), on: map[corev1.ObjectReference]int{}}
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
	if q.Len() >= eventsQueued {
		most := namespace
		for other, waiting := range q.waits {
			if len(waiting) > len(q.waits[most]) {
				most = other
			}
		}
		if most == namespace {
			return
		}
		q.leave(q.dropLast(most))
	}
	q.Push(namespace, e)
	q.on[e.objectOf()]++
	notify.Wake(q.pushed)
}

// pop takes the Event whose turn it is.
func (q *eventQueue) pop() (e event, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e, ok = q.Pop(); ok {
		q.leave(e)
	}
	return e, ok
}

// leave removes an Event from the count of its object.
func (q *eventQueue) leave(e event) {
	if q.on[e.objectOf()]--; q.on[e.objectOf()] == 0 {
		delete(q.on, e.objectOf())
	}
}
