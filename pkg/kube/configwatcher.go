package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// ErrNoConfig means that the cluster has no document: no ConfigMap, or none
// with the key.
var ErrNoConfig = errors.New("no configuration")

// State is what a ConfigWatcher knows about the document in the cluster.
type State struct {
	// Read is set once it is known which configuration is in force: that of the document, that of the copy of the
	// last valid one, or none.
	Read bool
	// Err is why the latest document is not in force; nil when it is.
	Err error
	// Since is when the configuration in force was taken over.
	Since time.Time
	// Restored is set while the configuration in force is the copy of the last
	// valid document, because there was no valid one since the start.
	Restored bool
}

// Events takes Events on objects. record.EventRecorder and Recorder implement it.
type Events interface {
	Event(object runtime.Object, eventType, reason, message string)
}

// ConfigOptions are where the document is and where its changes are reported.
type ConfigOptions struct {
	// Namespace and Name are those of the ConfigMap. Default: config's.
	Namespace, Name string
	// Events, if set, gets an Event on the ConfigMap when the document becomes invalid and
	// when it is valid again. Only one process per cluster should set it.
	Events Events
	// Log gets every change. Default: slog.Default().
	Log *slog.Logger
}

// ConfigWatcher follows the document in the ConfigMap. An invalid or missing
// document changes nothing: the last good one stays in force. That holds for a
// watcher that starts later, too: it reads the copy that Keep has made.
//
// It is also a prometheus.Collector of the lodestone_config metrics.
type ConfigWatcher struct {
	client kubernetes.Interface
	opts   ConfigOptions

	mu       sync.Mutex
	object   *corev1.ConfigMap // nil: there is none
	document string            // that of current
	current  *config.Config
	state    State
	changed  notify.Signal
}

// NewConfigWatcher returns a watcher that starts with Run.
func NewConfigWatcher(client kubernetes.Interface, opts ConfigOptions) *ConfigWatcher {
	if opts.Namespace == "" {
		opts.Namespace = config.Namespace
	}
	if opts.Name == "" {
		opts.Name = config.ConfigMapName
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	return &ConfigWatcher{client: client, opts: opts}
}

// Run follows the document until the context ends.
func (w *ConfigWatcher) Run(ctx context.Context) error {
	scope := objects.Scope{Namespace: w.opts.Namespace, Fields: fields.OneTermEqualSelector(metav1.ObjectNameField, w.opts.Name).String()}
	wake := make(chan struct{}, 1)
	follower := NewFollower(objects.ConfigMaps.Informer(w.client, scope, cache.SharedIndexInformerOptions{}), func() { notify.Wake(wake) })
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return follower.Run(ctx) })
	group.Go(func() error { w.restore(ctx); return nil })
	group.Go(func() error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-wake:
			}
			if known, err := follower.Standing(); known && err == nil {
				w.observe(w.find(Listed[*corev1.ConfigMap](follower)))
			}
		}
	})
	return group.Wait()
}

// String returns namespace and name of the ConfigMap.
func (w *ConfigWatcher) String() string { return w.opts.Namespace + "/" + w.opts.Name }

// Current returns the configuration in force, nil as long as there was no
// valid document, and what is known about the latest one.
func (w *ConfigWatcher) Current() (*config.Config, State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.current, w.state
}

// Changed returns a channel that is closed as soon as Current's answer
// changes. Take the channel first, then ask Current: no change is missed.
func (w *ConfigWatcher) Changed() <-chan struct{} { return w.changed.Next() }

// find returns the ConfigMap with the document. Nil: there is none.
func (w *ConfigWatcher) find(all []*corev1.ConfigMap) *corev1.ConfigMap {
	for _, cm := range all {
		if cm.Name == w.opts.Name {
			return cm
		}
	}
	return nil
}

// observe takes over the ConfigMap. Nil: there is none.
func (w *ConfigWatcher) observe(cm *corev1.ConfigMap) {
	parsed, err := w.parse(cm)
	before, after := w.note(cm, parsed, err)
	if fmt.Sprint(err) == fmt.Sprint(before.Err) && (err != nil || before.Since.Equal(after.Since)) {
		return
	}
	if err != nil {
		w.opts.Log.Error("configuration not taken over", "configmap", w.String(), "lastGoodInForce", !after.Since.IsZero(), "err", err)
		w.event(corev1.EventTypeWarning, ReasonConfigInvalid, err.Error())
		return
	}
	w.opts.Log.Info("configuration in force", "configmap", w.String(), "digest", parsed.Digest)
	if before.Err != nil {
		w.event(corev1.EventTypeNormal, ReasonConfigValid, "The configuration is valid again and in force.")
	}
}

// parse reads the document of the ConfigMap.
func (w *ConfigWatcher) parse(cm *corev1.ConfigMap) (*config.Config, error) {
	if cm == nil {
		return nil, fmt.Errorf("%w: ConfigMap %s does not exist", ErrNoConfig, w)
	}
	doc, ok := cm.Data[config.Key]
	if !ok {
		return nil, fmt.Errorf("%w: ConfigMap %s has no key %q", ErrNoConfig, w, config.Key)
	}
	return config.Parse([]byte(doc))
}

// note records the result of parsing and signals the change. It returns the states before and
// after.
func (w *ConfigWatcher) note(cm *corev1.ConfigMap, parsed *config.Config, err error) (before, after State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before = w.state
	w.object = cm
	if err == nil && (w.current == nil || w.current.Digest != parsed.Digest) {
		w.document, w.current, w.state.Since = cm.Data[config.Key], parsed, time.Now()
	}
	if w.state.Err = err; err == nil {
		w.state.Read, w.state.Restored = true, false
	}
	w.changed.Notify()
	return before, w.state
}

// Warn puts a warning on the ConfigMap, as an Event.
func (w *ConfigWatcher) Warn(message string) {
	w.event(corev1.EventTypeWarning, ReasonConfigWarning, message)
}

// WarnOver reports, as an Event, that a warning is over.
func (w *ConfigWatcher) WarnOver(message string) {
	w.event(corev1.EventTypeNormal, ReasonConfigWarningOver, "No longer: "+message)
}

// maxEventMessage is the API's limit on an Event's note.
const maxEventMessage = 1024

// event puts an Event on the ConfigMap, or on its name if there is none.
func (w *ConfigWatcher) event(eventType string, why EventReason, message string) {
	w.mu.Lock()
	cm := w.object
	w.mu.Unlock()
	if w.opts.Events == nil {
		return
	}
	if cm == nil {
		cm = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.opts.Namespace, Name: w.opts.Name}}
	}
	if len(message) > maxEventMessage {
		message = strings.ToValidUTF8(message[:maxEventMessage-3], "") + "..."
	}
	w.opts.Events.Event(cm, eventType, string(why), message)
}
