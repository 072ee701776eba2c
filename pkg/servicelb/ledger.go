package servicelb

import (
	"cmp"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// ConfigUnavailable is the reason of a refusal for want of any configuration.
const ConfigUnavailable ipam.Reason = "ConfigUnavailable"

// ConfigSource tells the configuration in force; kube.ConfigWatcher is one.
type ConfigSource interface {
	Current() (*config.Config, kube.State)
}

// Ledger is the one truth about which Service holds which addresses.
// It is safe for concurrent use.
type Ledger struct {
	scope  Scope
	source ConfigSource
	now    func() time.Time

	mu       sync.Mutex
	alloc    *ipam.Allocator
	config   *config.Config
	primed   bool
	accounts map[string]*account
}

// account is what the ledger knows about a Service, under its
// "namespace/name".
type account struct {
	owner     ipam.Owner
	namespace string
	created   time.Time
	// asked, under and verdict are the last request, the configuration it was
	// judged under, and the answer.
	asked   ipam.Request
	under   *config.Config
	verdict Verdict
	// claims are addresses from before the start that only a configuration
	// can confirm.
	claims []netip.Addr
}

// Verdict is the ledger's answer to a Service.
type Verdict struct {
	// Held is what the Service holds now, refused or not.
	Held []ipam.Held
	// Refusal is why it does not hold what it asks for; nil when it does.
	Refusal *ipam.Refusal
	// Unjudged says that there is no configuration to judge by: what Held
	// does not contradict must stay as it is.
	Unjudged bool
	// Partial says that a family that the Service prefers is missing.
	Partial bool
}

// waits reports whether a later call may give a better answer, though the
// Service stays the same.
func (v Verdict) waits() bool {
	if v.Refusal != nil {
		return v.Refusal.Reason != ipam.InvalidRequest && v.Refusal.Reason != ipam.WrongFamily
	}
	return v.Unjudged || v.Partial
}

// stranded reports whether an address has left its pools.
func (v Verdict) stranded() bool {
	return slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Pool == "" })
}

// NewLedger returns a ledger that knows nobody: see Prime.
func NewLedger(scope Scope, source ConfigSource) *Ledger {
	return &Ledger{scope: scope, source: source, now: time.Now, alloc: ipam.New(), accounts: map[string]*account{}}
}

// Ensure makes the Service hold what it asks for, as far as possible. Call
// Settle once its object says so: only then are addresses free that it gave
// back. freed says that an earlier Service of the name held an address.
func (l *Ledger) Ensure(svc *corev1.Service) (v Verdict, freed bool) {
	req, refusal := RequestOf(svc)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	if a := l.accounts[req.Owner.Name]; a != nil && a.owner.UID != req.Owner.UID {
		freed = l.close(a)
	}
	a := l.open(svc)
	if refusal == nil && l.config != nil {
		refusal = l.allocate(req)
	}
	v = Verdict{Held: l.alloc.Holds(req.Owner.UID), Refusal: refusal}
	v.Partial = len(v.Held) < len(req.Families)
	switch {
	case l.config != nil:
	case len(v.Held)+len(a.claims) > 0:
		v.Unjudged, v.Refusal = true, nil
	case refusal == nil:
		v.Refusal = l.unavailable()
	}
	if a.repeats(v.Refusal) && a.under == l.config && reflect.DeepEqual(a.asked, req) {
		v.Refusal = a.verdict.Refusal // its message may count seconds: say it once
	}
	a.asked, a.under, a.verdict = req, l.config, v
	return v, freed
}

// allocate allocates. What the owner gives back is still in its object: it is
// kept from others until Settle.
func (l *Ledger) allocate(req ipam.Request) *ipam.Refusal {
	before := l.alloc.Holds(req.Owner.UID)
	held, err := l.alloc.Allocate(req, l.now())
	var refusal *ipam.Refusal
	if errors.As(err, &refusal) {
		return refusal
	}
	for _, b := range before {
		if !slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr == b.Addr }) {
			l.alloc.Restore(leaving(req.Owner), b.Addr)
		}
	}
	return nil
}

// leaving is who holds what the owner has given back but its object still
// shows.
func leaving(o ipam.Owner) ipam.Owner { return ipam.Owner{UID: o.UID + "/leaving", Name: o.Name} }

// Settle frees what the Service has given back, now that its object does not
// show it any more. It reports whether there was anything.
func (l *Ledger) Settle(uid string) (freed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.alloc.Release(leaving(ipam.Owner{UID: uid}).UID, l.now())) > 0
}

// repeats reports whether the refusal says again what the last one said.
func (a *account) repeats(r *ipam.Refusal) bool {
	last := a.verdict.Refusal
	return r != nil && last != nil && r.Reason == last.Reason && r.Pool == last.Pool
}

func (l *Ledger) unavailable() *ipam.Refusal {
	message := "the configuration has not been read yet"
	if _, state := l.source.Current(); state.Err != nil {
		message = "no valid configuration: " + state.Err.Error()
		message = message[:min(len(message), 4*maxQuoted)]
	}
	return &ipam.Refusal{Reason: ConfigUnavailable, Message: strings.ToValidUTF8(message, "")}
}

// Release makes the Service hold nothing and forgets it. With a UID, only
// that incarnation of the Service. It reports whether an address was freed.
func (l *Ledger) Release(name, uid string) (freed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[name]
	if a == nil || uid != "" && uid != a.owner.UID {
		return false
	}
	return l.close(a)
}

// close frees everything that the account's owner holds.
func (l *Ledger) close(a *account) (freed bool) {
	delete(l.accounts, a.owner.Name)
	left := l.alloc.Release(leaving(a.owner).UID, l.now())
	return len(left)+len(l.alloc.Release(a.owner.UID, l.now())) > 0
}

// Holds returns what this incarnation of a Service holds.
func (l *Ledger) Holds(uid string) []ipam.Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.alloc.Holds(uid)
}

// Waiting returns the Services, oldest first, that may get a better answer
// now: those that wait for something, and those whose addresses joined or
// left pools when the configuration changed.
func (l *Ledger) Waiting() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	var due []*account
	for _, a := range l.accounts {
		switch {
		case a.asked.Owner.UID == "": // its turn has not come yet
		case a.verdict.waits():
			due = append(due, a)
		case a.under == l.config:
		case slices.Equal(a.verdict.Held, l.alloc.Holds(a.owner.UID)):
			a.under = l.config
		default:
			due = append(due, a)
		}
	}
	sortAccounts(due)
	names := make([]string, len(due))
	for i, a := range due {
		names[i] = a.owner.Name
	}
	return names
}

// NextFree returns when the next address ends its rest, and false if none
// rests.
func (l *Ledger) NextFree() (time.Time, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.alloc.NextFree()
}

// follow takes over the configuration in force.
func (l *Ledger) follow() {
	cfg, _ := l.source.Current()
	if cfg == l.config || cfg == nil {
		return
	}
	first := l.config == nil
	l.config = cfg
	l.alloc.SetPools(cfg.Pools, cfg.Quarantine)
	if first {
		l.confirmAll()
	}
}

// open returns the Service's account.
func (l *Ledger) open(svc *corev1.Service) *account {
	name := svc.Namespace + "/" + svc.Name
	a := l.accounts[name]
	if a == nil {
		a = &account{owner: ipam.Owner{UID: string(svc.UID), Name: name}, namespace: svc.Namespace, created: svc.CreationTimestamp.Time}
		l.accounts[name] = a
	}
	return a
}

func sortAccounts(accounts []*account) {
	slices.SortFunc(accounts, func(a, b *account) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.owner.Name, b.owner.Name))
	})
}
