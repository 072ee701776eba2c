// Package quarantinestore records the addresses in quarantine in a ConfigMap: which Service
// released each of them, when, and until when nobody else may have it. The Services are gone by
// then. A restart of the controller ends neither a quarantine nor the time that an address is
// kept for a Service that comes back. Package ipam decides which addresses are in quarantine.
//
//	store.go    Store: Load at the start, Keep before an address is released
//	write.go    reads and writes the ConfigMap, and tries again
//	record.go   Record, and the text that has them all
//	metrics.go  the metrics, and why a record is lost
package quarantinestore

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
)

const (
	// ConfigMapName is the name of the ConfigMap, in the controller's
	// namespace.
	ConfigMapName = "lodestone-quarantine"
	// Key is the key of the text in it.
	Key = "quarantine"
)

// Store is the record of addresses in quarantine. The leader alone writes it, and what the
// leader knows counts. Lines that somebody removes come back with the next write. Lines that
// somebody adds stay, and count from the next start.
//
// It has no goroutine. A call of Keep while nobody writes does the writing, also for the calls
// that come meanwhile. An idle store writes nothing. It is safe for concurrent use, and a
// prometheus.Collector of the lodestone_quarantine metrics.
type Store struct {
	client    typedcorev1.ConfigMapInterface
	namespace string
	log       *slog.Logger
	metrics   metrics

	// turn is held by the goroutine that reads or writes the ConfigMap. The fields below it
	// belong to that goroutine.
	turn chan struct{}
	// object is the ConfigMap as last seen, without a resourceVersion if there was none, and
	// nil if its state is not known.
	object *corev1.ConfigMap
	// unreadable is the resourceVersion whose unreadable lines were counted last.
	unreadable string
	// next is when the next write may begin.
	next time.Time
	// full is set when the last write had no room for all records.
	full bool

	mu sync.Mutex
	// records has what is or should be in the ConfigMap. A record that is over
	// stays until the ConfigMap is known to have no older one of the address.
	records map[netip.Addr]Record
	// noted counts the calls of Keep that change something, saved those of them whose records
	// are durable.
	noted, saved uint64
	// size is that of the text last written or read, in bytes.
	size int
	// fault is why the API server did not do what it was last asked for.
	fault error
}

// New returns a Store whose ConfigMap is in the namespace. It is of no use until
// Load.
func New(client kubernetes.Interface, namespace string, log *slog.Logger) *Store {
	return &Store{
		client: client.CoreV1().ConfigMaps(namespace), namespace: namespace, log: log, metrics: newMetrics(),
		turn: make(chan struct{}, 1), records: map[netip.Addr]Record{},
	}
}

// String returns namespace and name of the ConfigMap.
func (s *Store) String() string { return s.namespace + "/" + ConfigMapName }

// Load returns what is on record, oldest first, and nothing if there is no ConfigMap. A release
// in the future counts as one now, because the clock was set back. Load tries until ctx ends or
// an error is permanent.
//
// List the Services before Load. A Service that was gone by then has its record, because the
// record is written before the Service goes.
func (s *Store) Load(ctx context.Context) ([]Record, error) {
	err := s.inTurn(ctx, func() error { return s.insist(ctx, s.read) })
	if err != nil {
		return nil, fmt.Errorf("load released addresses: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	live, _ := s.sift(time.Now())
	sortOldestFirst(live)
	return live, nil
}

// Keep puts releases on record and returns nil once they are durable: release the addresses in
// the API after that. A record replaces an older one of the same address. Calls during a write
// share the next write. Keep tries until ctx ends or an error is permanent, and a later call
// saves what it could not save. A full store drops records of the namespaces that have most,
// those that end first, and counts them.
func (s *Store) Keep(ctx context.Context, records ...Record) error {
	for _, r := range records {
		if err := r.check(); err != nil {
			return fmt.Errorf("record the release of %s: %w", r.Addr, err)
		}
	}
	mine, needed := s.note(records)
	if !needed {
		return nil
	}
	err := s.inTurn(ctx, func() error {
		if s.isSaved(mine) {
			return nil
		}
		return s.insist(ctx, s.write)
	})
	if err != nil {
		return fmt.Errorf("record the release of %s: %w", names(records), err)
	}
	return nil
}

// names names the addresses of the records and their Services.
func names(records []Record) string {
	name := records[0].Addr.String() + " by " + records[0].Service
	if len(records) > 1 {
		name += fmt.Sprintf(" and %d more", len(records)-1)
	}
	return name
}

// note takes the records over and returns which call of Keep this is. It need
// not be saved if it changes nothing: an address that is free at once and is
// not recorded, or a record that is.
func (s *Store) note(records []Record) (mine uint64, needed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	saved := s.saved >= s.noted
	for _, r := range records {
		r = r.rounded()
		before, known := s.records[r.Addr]
		if known && !(saved && before == r) || !known && r.Until.After(r.Since) {
			s.records[r.Addr] = r
			needed = true
		}
	}
	if needed {
		s.noted++
	}
	return s.noted, needed
}

func (s *Store) isSaved(mine uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.saved >= mine
}

// inTurn calls f while nobody else reads or writes the ConfigMap.
func (s *Store) inTurn(ctx context.Context, f func() error) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
		return f()
	case <-ctx.Done():
		return s.because(ctx.Err())
	}
}

// because adds to an error why the API server did not do what it was last asked for.
func (s *Store) because(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault == nil {
		return fmt.Errorf("ConfigMap %s: %w", s, err)
	}
	return fmt.Errorf("%w (gave up: %w)", s.fault, err)
}

// merge adds the records of the ConfigMap. Of an address the newest record counts, but a
// record from the future does not replace one that is known.
func (s *Store) merge(records []Record, size int, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size = size
	for _, r := range records {
		ours, known := s.records[r.Addr]
		future := r.Since.After(now)
		if known && (future || !r.newer(ours)) {
			continue
		}
		if future {
			r.Since, r.Until = now, now.Add(r.Until.Sub(r.Since))
		}
		s.records[r.Addr] = r.rounded()
	}
}

// sift parts the records into those that still count and those that are over.
func (s *Store) sift(now time.Time) (live, over []Record) {
	for _, r := range s.records {
		if r.Until.After(now) {
			live = append(live, r)
		} else {
			over = append(over, r)
		}
	}
	return live, over
}

// draft is a text to write.
type draft struct {
	text string
	// noted is how many calls of Keep it contains.
	noted uint64
	// over and full are records that are not in it: they have ended, or had no
	// room.
	over, full []Record
}

func (s *Store) draft(now time.Time) draft {
	s.mu.Lock()
	defer s.mu.Unlock()
	live, over := s.sift(now)
	text, full := format(live)
	return draft{text: text, noted: s.noted, over: over, full: full}
}

// settle records that the ConfigMap has the draft.
func (s *Store) settle(d draft) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saved, s.size = d.noted, len(d.text)
	for _, r := range slices.Concat(d.over, d.full) {
		if s.records[r.Addr] == r {
			delete(s.records, r.Addr)
		}
	}
}
