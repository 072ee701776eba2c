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
	// eventsPerSecond bounds what Events may cost the API server.
	eventsPerSecond = 50
	eventsBurst     = 50
	// eventsQueued is how many Events may wait; more are dropped.
	eventsQueued = 8192
)

// Recorder writes Events in the background, from a client of its own and at a
// bounded rate: nobody ever waits for an Event.
type Recorder struct {
	client    kubernetes.Interface
	component string
	queue     chan event
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
	return &Recorder{client: client, component: component, queue: make(chan event, eventsQueued)}, nil
}

// Event queues an Event on the object; it is dropped when too many wait.
func (r *Recorder) Event(object runtime.Object, eventType, reason, message string) {
	ref, err := reference.GetReference(scheme.Scheme, object)
	if err != nil {
		return
	}
	select {
	case r.queue <- event{ref, eventType, reason, message}:
	default:
	}
}

// Run writes Events until the context ends.
func (r *Recorder) Run(ctx context.Context) error {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: r.client.CoreV1().Events("")})
	sink := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: r.component})
	limit := flowcontrol.NewTokenBucketRateLimiter(eventsPerSecond, eventsBurst)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-r.queue:
			if limit.Wait(ctx) == nil {
				sink.Event(e.object, e.eventType, e.reason, e.message)
			}
		}
	}
}
