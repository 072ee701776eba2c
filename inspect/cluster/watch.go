package cluster

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// recordsAge is how old the addresses in quarantine may be. They are read now and then, not watched.
	recordsAge = 10 * time.Second
	// recordsTimeout bounds the reading of it.
	recordsTimeout = 2 * time.Second
)

// Watcher is a task that follows what All reads. Its caches keep only what is needed of the objects.
type Watcher struct {
	place   Place
	client  kubernetes.Interface
	sources []followed
	changed notify.Signal

	mu sync.Mutex
	// parsed is the configuration in the document; nil: there is none.
	document  *string
	parsed    *config.Config
	parsedErr error
	// records are the addresses in quarantine at the time recordsAt.
	records    []quarantinestore.Record
	recordsErr error
	recordsAt  time.Time
}

type followed struct {
	source
	*kube.Follower
}

// NewWatcher returns a Watcher that starts with Run.
func NewWatcher(client kubernetes.Interface, p Place) *Watcher {
	w := &Watcher{client: client, place: p}
	for _, s := range p.sources(client) {
		s.verb = "list"
		f := kube.NewFollower(s.informer(), w.changed.Notify)
		f.Optional = s.optional
		w.sources = append(w.sources, followed{s, f})
	}
	return w
}

// Changed returns a channel that is closed as soon as Objects gives another
// answer. Take the channel first, then ask: no change is missed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed.Next() }

// Run follows the objects until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	var group errgroup.Group
	for _, s := range w.sources {
		group.Go(func() error { return s.Run(ctx) })
	}
	return group.Wait()
}

// Objects returns what there is, as All does. It is not ready until each kind has been read, or why it cannot be
// is known.
func (w *Watcher) Objects(ctx context.Context) (o *Objects, ready bool) {
	o = newObjects(w.place)
	for _, s := range w.sources {
		known, err := s.Standing()
		if !known {
			return nil, false
		}
		if err != nil {
			o.unread[s.kind] = refused(s.source, err)
		}
		s.take(o, s.Follower)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.document == nil || o.document == nil || *w.document != *o.document {
		w.document = o.document
		w.parsed, w.parsedErr = parse(o.document)
	}
	w.read(ctx)
	o.Config, o.ConfigErr, o.Records = w.parsed, w.parsedErr, w.records
	if w.recordsErr != nil {
		o.unread[inQuarantine] = w.recordsErr
	}
	return o, true
}

// read reads which addresses are in quarantine, unless that was done lately.
func (w *Watcher) read(ctx context.Context) {
	if time.Since(w.recordsAt) < recordsAge {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTimeout)
	defer cancel()
	o := newObjects(w.place)
	o.read(ctx, w.place.records(w.client))
	if w.recordsAt, w.recordsErr = time.Now(), o.unread[inQuarantine]; w.recordsErr == nil {
		w.records = o.Records
	}
}
