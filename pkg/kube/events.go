package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
	"k8s.io/client-go/util/flowcontrol"
)

const (
	// eventsPerSecond bounds what Events may cost the API server, which has
	// addresses to write first.
	eventsPerSecond = 20
	eventsBurst     = 20
	// eventsQueued is how many Events of a type may wait; more are dropped.
	eventsQueued = 8192
)

// Recorder writes Events in the background, from a client of its own and at a
// bounded rate, warnings first: nobody ever waits for an Event.
type Recorder struct {
	client           kubernetes.Interface
	component        string
	warnings, normal chan event
}

type event struct {
	object                     *corev1.ObjectReference
	eventType, reason, message string
}

// NewRecorder returns a recorder that starts with Run. Events carry the
// component as their source.
func NewRecorder(cfg *rest.Config, component string) (*Recorder, error) {
	own := rest.CopyConfig(cfg)
	own.QPS, own.Burst = -1, 0 // Run bounds the rate
	client, err := kubernetes.NewForConfig(rest.AddUserAgent(own, component+"-events"))
	if err != nil {
		return nil, fmt.Errorf("make client for events: %w", err)
	}
	return &Recorder{client, component, make(chan event, eventsQueued), make(chan event, eventsQueued)}, nil
}

// Event queues an Event on the object; it is dropped when too many wait.
func (r *Recorder) Event(object runtime.Object, eventType, reason, message string) {
	ref, err := reference.GetReference(scheme.Scheme, object)
	if err != nil {
		return
	}
	queue := r.normal
	if eventType == corev1.EventTypeWarning {
		queue = r.warnings
	}
	select {
	case queue <- event{ref, eventType, reason, message}:
	default:
	}
}

// next returns the next Event to write; false: the context has ended.
func (r *Recorder) next(ctx context.Context) (e event, ok bool) {
	select {
	case e := <-r.warnings:
		return e, true
	default:
	}
	select {
	case e = <-r.warnings:
	case e = <-r.normal:
	case <-ctx.Done():
		return e, false
	}
	return e, true
}

// Run writes Events until the context ends.
func (r *Recorder) Run(ctx context.Context) error {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: r.client.CoreV1().Events("")})
	sink := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: r.component})
	limit := flowcontrol.NewTokenBucketRateLimiter(eventsPerSecond, eventsBurst)
	for limit.Wait(ctx) == nil {
		e, ok := r.next(ctx)
		if !ok {
			break
		}
		sink.Event(e.object, e.eventType, e.reason, e.message)
	}
	return nil
}
