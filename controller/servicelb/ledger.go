package servicelb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	alloc  *ipam.Allocator
	config *config.Config
	// edition counts how often annotations came to mean something else.
	edition int
	facts   *clusterfacts.Facts
	primed  bool
	// accounts has every Service.
	accounts map[string]*account
	waiters
	// records wait for the first configuration, which says how long released
	// addresses rest.
	records []quarantine.Record
	// rests is how long released addresses of each pool rest.
	rests map[string]time.Duration
	// losses wait to be told. leasesFreed says that somebody who had leases
	// is gone; leaseWork wakes whoever keeps them.
	losses      []Loss
	leasesFreed bool
	leaseWork   chan struct{}
	conflicts
	foreigners
	primedAt time.Time
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
	lessee
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
	// Missing is a family that the Service would like and does not get; empty
	// when there is none.
	Missing ipam.Family
	// Renumbered says that the Service asked for new addresses and has them.
	Renumbered bool
	// Leases are the interfaces on which addresses in Held are leased.
	Leases map[netip.Addr]string
	// Overdue is why a lease is not being extended; nil when all is well.
	Overdue error
	// Asked says that a DHCP server was asked for a lease, which is why there
	// is a refusal, and nothing is known to be wrong.
	Asked bool
	// Foreign are addresses that another load balancer gave, and that stay in
	// the Service's status although it does not hold them.
	Foreign []netip.Addr
	// Disputes are about the addresses in Held that other hosts claim, and
	// Left about those that the Service has just left for that reason.
	Disputes, Left []clusterfacts.Dispute
}

// waits reports whether a later call may give a better answer, though the
// Service stays the same.
func (v Verdict) waits() bool {
	if v.Refusal != nil {
		return v.Refusal.Reason != ipam.InvalidRequest && v.Refusal.Reason != ipam.WrongFamily
	}
	return v.Unjudged || v.Missing != ""
}

// Stranded reports whether an address has left its pools.
func (v Verdict) Stranded() bool {
	return slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Pool == "" })
}

// Draining reports whether an address is of a pool that is to be emptied.
func (v Verdict) Draining() bool {
	return slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Draining })
}

// Holds reports whether the Service holds all of these addresses.
func (v Verdict) Holds(addrs ...netip.Addr) bool {
	return !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !holds(v.Held, a) })
}

// Has are sentences about what the Service holds, at least one.
func (v Verdict) Has() []string {
	if len(v.Held) == 0 {
		return []string{"nothing"}
	}
	has := descriptions(v.Held)
	for i, h := range v.Held {
		for _, d := range v.Disputes {
			if d.VIP == h.Addr {
				has[i] += fmt.Sprintf(", which %s has, too", d)
			}
		}
	}
	return has
}

// NewLedger returns a ledger that knows nobody: see Prime.
func NewLedger(scope Scope, sources Sources) *Ledger {
	if sources.Now == nil {
		sources.Now = time.Now
	}
	return &Ledger{
		scope: scope, Sources: sources, alloc: ipam.New(), accounts: map[string]*account{}, waiters: newWaiters(), leaseWork: make(chan struct{}, 1),
		conflicts: conflicts{withheld: map[netip.Addr]time.Time{}, full: map[share]int{}}, foreigners: foreigners{shown: map[string][]netip.Addr{}},
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
		before = l.alloc.Holds(req.Owner.UID)
	}
	var left []clusterfacts.Dispute
	switch {
	case l.config == nil:
	case refusal == nil:
		left, refusal = l.give(a, req)
	case len(l.alloc.Holds(req.Owner.UID)) > 0: // it may have become a bad neighbour all the same
		last := a.asked
		if last.Owner.UID == "" { // taken over just now: as much of it as can be read
			last = req
		}
		last.Sharing = req.Sharing
		l.abide(a, last)
		req = last
	}
	v = l.verdict(a, req, refusal)
	stirred = stirred || req.Sharing != nil && !slices.Equal(before, v.Held)
	v.Left, a.left = slices.Concat(a.left, left), nil
	v.Renumbered = v.Renumbered || renumber && a.renumbered
	a.renumbered = v.Renumbered
	a.judged, a.asked, a.verdict, a.edition = true, req, v, l.edition
	l.dismiss(a)
	if v.waits() {
		l.await(a)
	}
	return v, stirred
}

// verdict is the answer to a request that was met or refused.
func (l *Ledger) verdict(a *account, req ipam.Request, refusal *ipam.Refusal) Verdict {
	v := Verdict{Held: l.alloc.Holds(req.Owner.UID), Refusal: refusal}
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
	l.contest(&v)
	l.seek(a, req, &v)
	if last := a.verdict.Refusal; last != nil && v.Refusal != nil && v.Refusal.Same(last) {
		v.Refusal = last // its message may count seconds: say it once
	}
	return v
}

// allocate allocates.
func (l *Ledger) allocate(a *account, req ipam.Request) (refusal *ipam.Refusal) {
	defer l.keepLeaving(a, l.alloc.Holds(a.owner.UID))
	_, err := l.alloc.Allocate(req, l.Now())
	errors.As(err, &refusal)
	return refusal
}

// abide has a Service whose request cannot be read keep what it holds, on the
// terms that can be read.
func (l *Ledger) abide(a *account, req ipam.Request) {
	defer l.keepLeaving(a, l.alloc.Holds(a.owner.UID))
	l.alloc.Abide(a.owner, req.Sharing, l.Now())
}

// keepLeaving keeps from others until Settle what the owner has given back: it is
// still in its object.
func (l *Ledger) keepLeaving(a *account, before []ipam.Held) {
	after := l.alloc.Holds(a.owner.UID)
	for _, b := range before {
		if !holds(after, b.Addr) {
			l.alloc.Restore(ipam.Holding{Owner: leaving(a.owner), Addr: b.Addr, Sharing: a.asked.Sharing, Since: l.Now()})
		}
	}
}

func holds(held []ipam.Held, addr netip.Addr) bool {
	return slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr == addr })
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

// leaving is who holds what the owner has given back but its object still
// shows.
func leaving(o ipam.Owner) ipam.Owner { return ipam.Owner{UID: o.UID + "/leaving", Name: o.Name} }

// Remember makes durable what the Service, or this incarnation of it (with a
// UID), is about to give back: from the moment when the API shows it, a
// controller that starts anew must know that it rests. all: it gives back
// everything.
func (l *Ledger) Remember(ctx context.Context, book Book, name, uid string, all bool) error {
	records := l.departing(name, uid, all)
	if len(records) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, PatchTimeout)
	defer cancel()
	return book.Keep(ctx, records...)
}

// departing returns what rests when nobody else holds it.
func (l *Ledger) departing(name, uid string, all bool) []quarantine.Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[name]
	if a == nil || l.config == nil || uid != "" && uid != a.owner.UID {
		return nil
	}
	held := l.alloc.Holds(leaving(a.owner).UID)
	if all {
		held = append(held, l.alloc.Holds(a.owner.UID)...)
	}
	var records []quarantine.Record
	now := l.Now()
	for _, h := range held {
		shared := slices.ContainsFunc(l.alloc.HoldersOf(h.Addr), func(o ipam.Owner) bool { return o.Name != name })
		if rest := l.rest(h.Pool); rest > 0 && !shared {
			records = append(records, quarantine.Record{Addr: h.Addr, Service: name, Since: now, Until: now.Add(rest)})
		}
	}
	return records
}

// rest is how long an address of the pool rests.
func (l *Ledger) rest(pool string) time.Duration {
	if rest, ok := l.rests[pool]; ok {
		return rest
	}
	return l.config.Quarantine
}

// Settle frees what the Service has given back, now that its object shows
// something else. It reports whether there was anything. What the object shows is
// not free: the Service may have moved again since.
func (l *Ledger) Settle(uid string, shows []ipam.Held) (freed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, has := leaving(ipam.Owner{UID: uid}).UID, l.alloc.Holds(uid)
	var stays []ipam.Holding
	for _, h := range l.alloc.Holds(before) {
		if holds(shows, h.Addr) && !holds(has, h.Addr) {
			owners := l.alloc.HoldersOf(h.Addr)
			owner := owners[slices.IndexFunc(owners, func(o ipam.Owner) bool { return o.UID == before })]
			stays = append(stays, ipam.Holding{Owner: owner, Addr: h.Addr, Since: l.alloc.HeldSince(before, h.Addr)})
		}
	}
	left := l.alloc.Release(before, l.Now())
	for _, g := range stays {
		l.alloc.Restore(g)
		left = slices.DeleteFunc(left, func(addr netip.Addr) bool { return addr == g.Addr })
	}
	if len(left) > 0 {
		l.leasesMoved()
		l.noteFreed(left)
	}
	return len(left) > 0
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
	l.dismiss(a)
	if a.interested() {
		l.leasesFreed = true
		l.leasesMoved()
	}
	left := slices.Concat(l.alloc.Release(leaving(a.owner).UID, l.Now()), l.alloc.Release(a.owner.UID, l.Now()))
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
	return l.alloc.Holds(uid)
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
		if ended := l.endWithholding(); ended || l.foreigners.moved {
			l.reconfigure()
		}
		return
	}
	first := l.config == nil
	if !first && !reflect.DeepEqual(compat.For(l.config), compat.For(cfg)) {
		l.edition++
	}
	l.config, l.facts = cfg, facts
	l.followDisputes()
	l.reconfigure()
	l.rests = map[string]time.Duration{}
	for _, p := range cfg.Pools {
		if l.rests[p.Name] = max(cfg.Quarantine, p.KeepFor); p.DHCP != nil {
			l.rests[p.Name] = 0 // the server decides
		}
	}
	l.restAll()
	if first || l.takesOver() {
		l.confirmAll()
	}
	if l.primed {
		l.withholdIdle()
	}
}

// reconfigure makes the allocator go by what is in force and what is leased.
func (l *Ledger) reconfigure() {
	l.swept, l.foreigners.moved = false, false
	l.dropLeases()
	l.alloc.Configure(l.setup())
}

func (l *Ledger) setup() ipam.Setup {
	s := ipam.Setup{Pools: l.config.Pools, Quarantine: l.config.Quarantine, Reservations: l.config.Reservations, Conflicted: slices.Collect(maps.Keys(l.withheld))}
	for _, f := range slices.Concat(clusterfacts.Forbid(l.config, l.facts), l.foreigners.forbidden()) {
		s.Forbidden = append(s.Forbidden, ipam.Forbidden(f))
	}
	l.addLeases(&s)
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
	return l.alloc.Consider(req, l.Now())
}
