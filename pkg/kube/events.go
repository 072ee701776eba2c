package kube

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
)

const (
	// eventsPerSecond bounds what Events may cost the API server, because writing addresses is
	// more important.
	eventsPerSecond = 20
	eventsBurst     = 20
	// eventsQueued is how many Events of a type may wait, eventsPerNamespace how many
	// of them on objects of one namespace, and eventsPerObject on one object. More are
	// dropped.
	eventsQueued       = 8192
	eventsPerNamespace = 4096
	eventsPerObject    = 16
	// eventsOnObject is how many Events on one object are written at once. After them one is written every ten
	// seconds. client-go's default would drop all for five minutes after 25.
	eventsOnObject       = 250
	eventsOnObjectPerSec = 0.1
	// eventRetry is the time between attempts to write an Event that the API server does not answer, eventTries how many
	// there are.
	eventRetry = 10 * time.Second
	eventTries = 12
	// normalTurn is the share of normal Events while warnings wait: one in that many. Otherwise warnings without end
	// would keep all normal Events from being written.
	normalTurn = 4
)

// Recorder writes Events in the background, from a client of its own and at a bounded rate.
// Warnings come first, but for one in four Events, and namespaces take turns. No caller ever waits for
// an Event, and many Events of one namespace do not delay those of another.
type Recorder struct {
	client           kubernetes.Interface
	component        string
	warnings, normal *eventQueue
	// taken counts the Events that next has returned.
	taken int
}

type event struct {
	object                     *corev1.ObjectReference
	eventType, reason, message string
	id                         string    // see Once
	at                         time.Time // when it was reported
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
	return &Recorder{client: client, component: component, warnings: newEventQueue(), normal: newEventQueue()}, nil
}

// Event queues an Event on the object; it is dropped when too many wait.
func (r *Recorder) Event(object runtime.Object, eventType, reason, message string) {
	r.Once(object, eventType, reason, message, "")
}

// Once is Event for something that another process may have reported before this one led. Of
// Events with one id the API server takes the first.
func (r *Recorder) Once(object runtime.Object, eventType, reason, message, id string) {
	ref, err := reference.GetReference(scheme.Scheme, object)
	if err != nil {
		return
	}
	queue := r.normal
	if eventType == corev1.EventTypeWarning {
		queue = r.warnings
	} else {
		eventType = corev1.EventTypeNormal // there is no other
	}
	queue.push(event{ref, eventType, reason, message, id, time.Now()})
}

// next returns the next Event to write; false: the context has ended.
func (r *Recorder) next(ctx context.Context) (e event, ok bool) {
	r.taken++
	queues := []*eventQueue{r.warnings, r.normal}
	if r.taken%normalTurn == 0 {
		slices.Reverse(queues)
	}
	for {
		for _, q := range queues {
			if e, ok := q.pop(); ok {
				return e, true
			}
		}
		select {
		case <-r.warnings.pushed:
		case <-r.normal.pushed:
		case <-ctx.Done():
			return e, false
		}
	}
}

// Run writes Events until the context ends, one after the other. While the API server takes long, the others wait in
// their queues: behind them there is none in which all namespaces would wait for one.
func (r *Recorder) Run(ctx context.Context) error {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	w := eventWriter{EventSink: named{&typedcorev1.EventSinkImpl{Interface: r.client.CoreV1().Events("")}},
		EventCorrelator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{BurstSize: eventsOnObject, QPS: eventsOnObjectPerSec})}
	written, at := make(chan struct{}, 1), time.Time{}
	broadcaster.StartEventWatcher(func(e *corev1.Event) {
		e.FirstTimestamp, e.LastTimestamp = metav1.NewTime(at), metav1.NewTime(at) // client-go's are those of the writing
		w.write(ctx, e)
		written <- struct{}{}
	})
	to := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: r.component})
	limit := flowcontrol.NewTokenBucketRateLimiter(eventsPerSecond, eventsBurst)
	for limit.Wait(ctx) == nil {
		e, ok := r.next(ctx)
		if !ok {
			break
		}
		at = e.at
		to.AnnotatedEventf(e.object, map[string]string{eventID: e.id}, e.eventType, e.reason, "%s", e.message)
		select {
		case <-written:
		case <-ctx.Done():
		}
	}
	return nil
}

// eventWriter writes Events as client-go does, which would have a queue of its own before that.
type eventWriter struct {
	record.EventSink
	*record.EventCorrelator
}

// write writes an Event, which the correlator may join with others like it. Without an answer it tries again.
func (w eventWriter) write(ctx context.Context, e *corev1.Event) {
	result, err := w.EventCorrelate(e)
	if err != nil || result.Skip {
		return
	}
	for range eventTries {
		written, err := w.put(result)
		if err == nil {
			w.UpdateState(written)
			return
		}
		answer := apierrors.APIStatus(nil)
		refused := errors.As(err, &answer)
		if !refused || !apierrors.IsAlreadyExists(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			klog.FromContext(ctx).Error(err, "Event not written", "kind", e.InvolvedObject.Kind,
				"object", klog.KRef(e.InvolvedObject.Namespace, e.InvolvedObject.Name), "reason", e.Reason)
		}
		if refused {
			return
		}
		select {
		case <-time.After(eventRetry):
		case <-ctx.Done():
			return
		}
	}
}

// put writes an Event once. One that was joined with another replaces that, if the API server still has it.
func (w eventWriter) put(r *record.EventCorrelateResult) (*corev1.Event, error) {
	if r.Event.Count > 1 {
		if written, err := w.Patch(r.Event, r.Patch); !apierrors.IsNotFound(err) {
			return written, err //nolint:wrapcheck // its kind counts
		}
		r.Event.ResourceVersion = ""
	}
	return w.Create(r.Event) //nolint:wrapcheck // as above
}

// eventID is the annotation that carries an Event's id to the sink, which removes it.
// client-go's recorder makes the names itself.
const eventID = "id"

// named is a sink that names Events after their ids.
type named struct{ record.EventSink }

func (s named) Create(e *corev1.Event) (*corev1.Event, error) {
	e = e.DeepCopy()
	if id := e.Annotations[eventID]; id != "" {
		sum := sha256.Sum256([]byte(id))
		e.Name = fmt.Sprintf("%s.%x", e.InvolvedObject.Name, sum[:8])
	}
	e.Annotations = nil
	return s.EventSink.Create(e) //nolint:wrapcheck // client-go looks at it
}
