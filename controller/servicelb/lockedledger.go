package servicelb

import (
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// lockedLedger shares the ledger between goroutines. It has the lock and the clock, and hands
// the ledger the configuration and the facts in force.
type lockedLedger struct {
	mu     sync.Mutex
	ledger *ledger.Ledger
	config Config
	facts  Facts
	now    func() time.Time
	// retry receives a value when Ledger.Retry has to be called, and leases one when leases
	// have to be followed.
	retry, leases chan struct{}
}

func newLockedLedger(scope kube.Scope, config Config, facts Facts) *lockedLedger {
	return &lockedLedger{
		ledger: ledger.New(scope), config: config, facts: facts, now: time.Now,
		retry: make(chan struct{}, 1), leases: make(chan struct{}, 1),
	}
}

// open returns the ledger with what is in force now. It is the caller's until close.
func (s *lockedLedger) open() (*ledger.Ledger, time.Time) {
	s.mu.Lock()
	now := s.now()
	s.ledger.Follow(s.situation(), now)
	return s.ledger, now
}

// close gives the ledger back and wakes the goroutines that have work now.
func (s *lockedLedger) close() {
	effects := s.ledger.Effects()
	s.mu.Unlock()
	if effects.Retry {
		notify.Wake(s.retry)
	}
	if effects.Leases {
		notify.Wake(s.leases)
	}
}

// known returns the UID of the Service of this name that the ledger knows. Empty: it knows none.
func (s *lockedLedger) known(name string) string {
	l, _ := s.open()
	defer s.close()
	return l.Known(name)
}

// departing returns the addresses that go into quarantine once the Service has given them back.
func (s *lockedLedger) departing(name, uid string) []quarantinestore.Record {
	l, now := s.open()
	defer s.close()
	return l.Departing(name, uid, now)
}

// foreign returns the addresses in the Service's status that another load balancer gave.
func (s *lockedLedger) foreign(svc *corev1.Service) []netip.Addr {
	l, _ := s.open()
	defer s.close()
	return l.Foreign(svc)
}

// seeForeign records what a Service of another load balancer shows. The ledger is not opened for that, which would set the
// allocator up anew for each one that has changed: every Service of the cluster comes by here. The next one who opens it does that.
func (s *lockedLedger) seeForeign(svc *corev1.Service, gone bool) {
	s.mu.Lock()
	defer s.close()
	s.ledger.SeeForeign(svc, gone)
}

// inQuarantine returns the addresses in quarantine, with the ends that follow from the
// configuration in force.
func (s *lockedLedger) inQuarantine() (records []quarantinestore.Record) {
	l, now := s.open()
	defer s.close()
	if l.Config == nil {
		return nil
	}
	for _, q := range l.InQuarantine(now) {
		records = append(records, quarantinestore.Record{Addr: q.Addr, Service: q.Name, Since: q.Since, Until: q.Until})
	}
	return records
}

func (s *lockedLedger) stats() ledger.Stats {
	l, now := s.open()
	defer s.close()
	return l.Stats(now)
}

func (s *lockedLedger) situation() ledger.Situation {
	cfg, state := s.config.Current()
	facts, _ := s.facts.Current()
	return ledger.Situation{Config: cfg, Err: state.Err, Facts: facts}
}
