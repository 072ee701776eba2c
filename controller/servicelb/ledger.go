package servicelb

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantine"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// ConfigUnavailable is the reason of a refusal for want of any configuration.
const ConfigUnavailable ipam.Reason = "ConfigUnavailable"

// ConfigSource tells the configuration in force; kube.ConfigWatcher is one.
type ConfigSource interface {
	Current() (*config.Config, kube.State)
}

// FactSource tells what the cluster itself uses, and whether that is known
// yet; clusterfacts.Watcher is one.
type FactSource interface {
	Current() (facts *clusterfacts.Facts, ready bool)
}

// Sources are what a ledger judges by, besides the Services.
type Sources struct {
	Config ConfigSource
	// Facts tell which addresses must never be handed out. Nil: there are
	// none.
	Facts FactSource
	// NamespaceLabels returns the labels of a namespace. Nil: none has any.
	NamespaceLabels func(namespace string) map[string]string
	// Now is the clock. Nil: time.Now.
	Now func() time.Time
}

// Ledger is the one truth about which Service holds which addresses.
// It is safe for concurrent use.
type Ledger struct {
	scope Scope
	Sources

	mu     sync.Mutex
	config *config.Config // nil until there is a valid one
	facts  *clusterfacts.Facts
	// edition counts how often annotations came to mean something else.
	edition int
	primed  bool
	// accounts has every Service, by "namespace/name".
	accounts map[string]*account

	held      *holdings
	waiters   waiters
	leasing   leasing
	conflicts conflicts
	foreign   foreigners
}

// account is what the ledger knows about a Service, under its
// "namespace/name".
type account struct {
	owner   ipam.Owner
	created time.Time
	// judged says that there was a verdict since the start. asked and verdict
	// are the last request and the answer.
	judged  bool
	asked   ipam.Request
	verdict Verdict
	// edition is the ledger's when it was asked.
	edition int
	// claims are addresses from before the first look, of which a configuration
	// has to say whether the Service may have them.
	claims []netip.Addr
	// unreadable says that the request was not understood at the start.
	unreadable bool
	takeover
	// unsettled are the addresses that it should leave, because another host
	// has had them all the time.
	unsettled []netip.Addr
	// left are disputes because of which it has left an address, and which it
	// has not been told.
	left []clusterfacts.Dispute
	// renumbered says that it has moved because of an annotation that its object may
	// still show: it does not move for that one again.
	renumbered bool
	// class is the class that it waits in, if it waits.
	class class
}

// NewLedger returns a ledger that knows nobody: see Prime.
func NewLedger(scope Scope, sources Sources) *Ledger {
	if sources.Now == nil {
		sources.Now = time.Now
	}
	held := &holdings{Allocator: ipam.New(), now: sources.Now}
	return &Ledger{
		scope: scope, Sources: sources, accounts: map[string]*account{},
		held: held, waiters: newWaiters(), leasing: newLeasing(held), conflicts: newConflicts(held),
		foreign: foreigners{shown: map[string][]netip.Addr{}},
	}
}

// request reads what the Service asks for.
func (l *Ledger) request(svc *corev1.Service) (ipam.Request, *ipam.Refusal) {
	var labels map[string]string
	if l.NamespaceLabels != nil {
		labels = l.NamespaceLabels(svc.Namespace)
	}
	cfg := l.config
	if cfg == nil {
		cfg, _ = l.Config.Current()
	}
	return RequestOf(svc, labels, compat.For(cfg))
}

// Ensure makes the Service hold what it asks for, as far as possible. Call
// Settle once its object says so: only then are addresses free that it gave
// back. stirred says that others may get a better answer now: an earlier
// Service of the name held an address, or this one uses other ports or shares
// another address.
func (l *Ledger) Ensure(svc *corev1.Service) (v Verdict, stirred bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	req, refusal := l.request(svc)
	if a := l.accounts[req.Owner.Name]; a != nil && a.owner.UID != req.Owner.UID {
		stirred = l.close(a)
	}
	a, first := l.open(svc)
	l.takeOver(a, req, svc)
	if first {
		l.comeBack(a, req, refusal, svc)
	}
	renumber := req.Renumber
	req.Renumber = renumber && !a.renumbered
	stirred = stirred || a.asked.Owner.UID != "" && !reflect.DeepEqual(a.asked.Sharing, req.Sharing)
	var before []ipam.Held
	if req.Sharing != nil {
		before = l.held.Holds(req.Owner.UID)
	}
	var left []clusterfacts.Dispute
	switch {
	case l.config == nil:
	case refusal == nil:
		left, refusal = l.allocate(a, req)
	case len(l.held.Holds(req.Owner.UID)) > 0: // it may have become a bad neighbour all the same
		last := a.asked
		if last.Owner.UID == "" { // taken over just now: as much of it as can be read
			last = req
		}
		last.Sharing = req.Sharing
		l.held.abide(a, last)
		req = last
	}
	v = l.verdict(a, req, refusal)
	stirred = stirred || req.Sharing != nil && !slices.Equal(before, v.Held)
	v.Left, a.left = slices.Concat(a.left, left), nil
	v.Renumbered = v.Renumbered || renumber && a.renumbered
	a.renumbered = v.Renumbered
	a.judged, a.asked, a.verdict, a.edition = true, req, v, l.edition
	l.waiters.remove(a)
	if v.waits() {
		l.waiters.add(a, l.classOf(a))
	}
	return v, stirred
}

// allocate gives the Service what it asks for, or says why not. A Service leaves an
// address that it was given just now and that turns out to be another host's; if there
// is no other, it stays.
func (l *Ledger) allocate(a *account, req ipam.Request) (left []clusterfacts.Dispute, refusal *ipam.Refusal) {
	if a.obstacle != nil && len(req.Addresses) == 0 {
		if l.held.adopt(a, req, a.foreign); a.obstacle != nil {
			return nil, a.obstacle
		}
	}
	toLeave := l.conflicts.toLeave(a, req.Renumber)
	req.Avoid = vips(toLeave)
	refusal = l.held.allocate(a, req)
	if refusal != nil && len(toLeave) > 0 && !req.Renumber {
		req.Avoid = nil
		if again := l.held.allocate(a, req); again != nil {
			return nil, again
		}
		return nil, refusal.Behind(AddressConflict, silenced(toLeave[0])+"; there is no other address: ")
	}
	held := l.held.Holds(a.owner.UID)
	left = slices.DeleteFunc(toLeave, func(d clusterfacts.Dispute) bool { return holds(held, d.VIP) })
	if l.conflicts.withhold(vips(left)...) {
		l.reconfigure()
	}
	return left, refusal
}

// verdict is the answer to a request that was met or refused.
func (l *Ledger) verdict(a *account, req ipam.Request, refusal *ipam.Refusal) Verdict {
	v := Verdict{Held: l.held.Holds(req.Owner.UID), Refusal: refusal}
	if len(v.Held) == 0 {
		v.Foreign = a.foreign
	}
	switch {
	case l.config != nil && refusal == nil:
		v.Missing, v.Renumbered = missing(req, v.Held), req.Renumber
	case l.config != nil:
	case len(v.Held)+len(a.claims)+len(a.foreign) > 0:
		v.Unjudged, v.Refusal = true, nil
	case refusal == nil:
		v.Refusal = l.unavailable()
	}
	v.Disputes = l.conflicts.about(v.Held)
	if v.Refusal == nil && !v.Unjudged {
		v.Refusal = l.conflicts.refusal(v.Disputes)
	}
	l.leasing.seek(a, req, &v)
	if last := a.verdict.Refusal; last != nil && v.Refusal != nil && v.Refusal.Same(last) {
		v.Refusal = last // its message may count seconds: say it once
	}
	return v
}

// missing returns the family that the Service would like and does not hold.
func missing(req ipam.Request, held []ipam.Held) ipam.Family {
	for _, f := range req.Families {
		if !slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr.Is4() == (f == ipam.IPv4) }) {
			return f
		}
	}
	return ""
}

// Remember makes durable what the Service, or this incarnation of it (with a
// UID), is about to give back: from the moment when the API shows it, a
// controller that starts anew must know that it rests. all: it gives back
// everything.
func (l *Ledger) Remember(ctx context.Context, book Book, name, uid string, all bool) error {
	l.mu.Lock()
	var records []quarantine.Record
	if a := l.accounts[name]; a != nil && l.config != nil && (uid == "" || uid == a.owner.UID) {
		records = l.held.departing(a.owner, all)
	}
	l.mu.Unlock()
	if len(records) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, PatchTimeout)
	defer cancel()
	return book.Keep(ctx, records...)
}

// Settle frees what the Service has given back, now that its object shows
// something else. It reports whether there was anything.
func (l *Ledger) Settle(uid string, shows []ipam.Held) (freed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.held.settle(uid, shows)
	if len(left) > 0 {
		l.leasing.wake()
		l.noteFreed(left)
	}
	return len(left) > 0
}

// noteFreed has the pools offer what Services have given back, or withhold it.
func (l *Ledger) noteFreed(addrs []netip.Addr) {
	if l.config != nil && l.conflicts.freed(addrs) {
		l.reconfigure()
	}
}

func (l *Ledger) unavailable() *ipam.Refusal {
	message := "the configuration has not been read yet"
	if _, state := l.Config.Current(); state.Err != nil {
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
	l.waiters.remove(a)
	l.leasing.close(a)
	left := l.held.releaseAll(a.owner)
	l.noteFreed(left)
	return len(left) > 0
}

// Knows reports whether this incarnation of a Service has asked for something, or
// had something at the start.
func (l *Ledger) Knows(svc *corev1.Service) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[NameOf(svc)]
	return a != nil && a.owner.UID == string(svc.UID)
}

// Holds returns what this incarnation of a Service holds.
func (l *Ledger) Holds(uid string) []ipam.Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held.Holds(uid)
}

// follow takes over the configuration and the facts in force.
func (l *Ledger) follow() {
	cfg, _ := l.Config.Current()
	var facts *clusterfacts.Facts
	if l.Facts != nil {
		facts, _ = l.Facts.Current()
	}
	if cfg == nil {
		return
	}
	if cfg == l.config && facts == l.facts {
		if ended := l.conflicts.expire(); ended || l.foreign.moved {
			l.reconfigure()
		}
		return
	}
	first := l.config == nil
	if !first && !reflect.DeepEqual(compat.For(l.config), compat.For(cfg)) {
		l.edition++
	}
	l.config, l.facts, l.leasing.config = cfg, facts, cfg
	l.conflicts.follow(facts)
	l.held.follow(cfg)
	l.reconfigure()
	l.held.quarantineRecorded()
	if first || takesOver(cfg) {
		l.confirmAll()
	}
	if l.primed && l.conflicts.withholdIdle() {
		l.reconfigure()
	}
}

// reconfigure makes the allocator go by what is in force and what is leased.
func (l *Ledger) reconfigure() {
	l.waiters.swept, l.foreign.moved = false, false
	l.leasing.drop()
	l.held.Configure(l.setup())
}

func (l *Ledger) setup() ipam.Setup {
	s := ipam.Setup{Pools: l.config.Pools, Quarantine: l.config.Quarantine, Reservations: l.config.Reservations,
		Conflicted: slices.Collect(maps.Keys(l.conflicts.withheld))}
	for _, f := range slices.Concat(clusterfacts.Forbid(l.config, l.facts), l.foreign.forbidden()) {
		s.Forbidden = append(s.Forbidden, ipam.Forbidden(f))
	}
	l.leasing.addTo(&s)
	return s
}

// open returns the Service's account, and whether this is the first look at it.
func (l *Ledger) open(svc *corev1.Service) (_ *account, first bool) {
	name := NameOf(svc)
	if a := l.accounts[name]; a != nil {
		return a, false
	}
	a := &account{owner: ipam.Owner{UID: string(svc.UID), Name: name}, created: svc.CreationTimestamp.Time}
	l.accounts[name] = a
	return a, true
}

// compare puts older Services before younger ones.
func (a *account) compare(b *account) int {
	return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.owner.Name, b.owner.Name))
}

func sortAccounts(accounts []*account) { slices.SortFunc(accounts, (*account).compare) }

// Consider returns what each pool would do for the Service now.
func (l *Ledger) Consider(svc *corev1.Service) []ipam.Consideration {
	l.mu.Lock()
	defer l.mu.Unlock()
	req, refusal := l.request(svc)
	if refusal != nil || l.config == nil {
		return nil
	}
	return l.held.Consider(req, l.Now())
}

// Overrun are sentences about pools of which other hosts have more addresses
// than are withheld.
func (l *Ledger) Overrun() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conflicts.overrun()
}
