// Package ledger decides which Service holds which addresses.
//
// The Ledger is a deterministic machine with one owner: it has no lock, goroutine, clock,
// logger or source of its own. What has happened is handed in, with the time; what
// follows is returned, or waits in Effects until the owner asks. The same history gives
// the same answers, to the byte.
//
// The way of a Service, file by file:
//
//	ledger.go       Ensure: the Service is given what it asks for, as far as possible
//	request.go      what it asks for, by its annotations
//	takeover.go     what it had before and is given again, also at the start
//	holdings.go     what is allocated, by ipam, and what is being given back
//	verdict.go      the answer
//	reasons.go      the reasons in it, with cause and cure
//
// What else happens:
//
//	reconfigure.go  the configuration and the facts of the cluster change
//	waiters.go      something became free: who waits for it
//	dhcp.go         DHCP servers lease addresses, or end leases
//	conflicts.go    another host has an address
//	withheld.go     which addresses nobody draws for that reason
//	foreign.go      another load balancer serves a Service
//	stats.go        somebody counts
//
// names.go has how a Service is called.
//
// The Ledger lives in memory. Prime rebuilds it at the start from the objects of the Services.
package ledger

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/google/btree"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Ledger is the one truth about which Service holds which addresses. It is not safe for
// concurrent use.
type Ledger struct {
	scope  kube.Scope
	primed bool
	// Situation is what is in force.
	Situation
	// dialects are those of the configuration.
	dialects compat.Dialects
	// selective is set if a pool of the configuration looks at the labels of Services.
	selective bool
	// edition counts how often the meaning of annotations changed, from 1.
	edition  int
	accounts accounts

	held      *holdings
	waiters   waiters
	leasing   leasing
	conflicts conflicts
	foreign   foreignServices
	// retry is set when others may get a better answer now.
	retry bool
}

// accounts has every Service, by "namespace/name".
type accounts map[string]*account

// account is what the ledger knows about a Service, under its "namespace/name".
type account struct {
	owner ipam.Owner
	// leaving holds what the owner has given back but its object still shows.
	leaving ipam.Owner
	created time.Time
	// asked is the last request, verdict its answer, and edition that of the ledger then. Zero: no
	// request was answered yet.
	asked   ipam.Request
	verdict Verdict
	edition int
	takeover
	// unsettled are the addresses that it should leave, because another host had them from the
	// beginning.
	unsettled []netip.Addr
	// barred are the addresses that a Service that is kept has lost by its terms of sharing, and that its object may still show.
	barred []netip.Addr
	// left are the conflicts because of which it has left an address, as far as there is no
	// Event about them yet.
	left []clusterfacts.Conflict
	// class is the class that it waits in, if it waits.
	class class
}

// New returns an empty ledger, which Prime fills.
func New(scope kube.Scope) *Ledger {
	held := &holdings{Allocator: ipam.New()}
	return &Ledger{
		scope: scope, dialects: compat.For(nil), edition: 1, accounts: accounts{}, held: held,
		waiters:   waiters{due: map[*account]struct{}{}, classes: map[class]*btree.BTreeG[*account]{}},
		leasing:   leasing{held: held, of: map[*account]*lessee{}},
		conflicts: conflicts{held: held, withheld: newWithheld(held)},
		foreign:   foreignServices{shown: map[string][]netip.Addr{}},
	}
}

// Effects are what the ledger's owner has to do.
type Effects struct {
	// Retry: others may get a better answer now, which Ledger.Retry gives them.
	Retry bool
	// Leases: Ledger.FollowLeases returns something new.
	Leases bool
}

// Effects returns what follows from all that has happened since the last call.
func (l *Ledger) Effects() Effects {
	e := Effects{Retry: l.retry, Leases: l.leasing.work}
	l.retry, l.leasing.work = false, false
	return e
}

// Known returns the UID of the Service of this name that the ledger knows. Empty: it knows none.
func (l *Ledger) Known(name string) (uid string) {
	if a := l.accounts[name]; a != nil {
		return a.owner.UID
	}
	return ""
}

// Step is what follows from a decision about a Service.
type Step int

// The steps.
const (
	Rest      Step = iota // nothing
	Publish               // write the verdict into the object, as the doc comment of Ensure has it
	Unpublish             // remove what is ours from the object, and then call Release
	Free                  // call Release: there is nothing to remove
)

// Decide returns what a Service gets or keeps, and the step that follows. It is for the present object of the Service, and like
// Ensure for a Service whose name nobody else has in the ledger.
func (l *Ledger) Decide(svc *corev1.Service, labels map[string]string, now time.Time) (v Verdict, step Step) {
	if l.scope.Serves(svc) {
		v = l.Ensure(svc, labels, now)
		if len(v.Held) == 0 && (v.Undecided || v.Asked && !l.scope.LeftBehind(svc)) {
			return v, Rest // there is nothing to write yet
		}
		return v, Publish
	}
	held, _ := l.Holds(svc)
	if l.scope.Keeps(svc) {
		v, settled := l.keep(svc, labels, now)
		switch {
		case settled:
			return v, Rest
		case len(v.Held) > 0:
			return v, Publish
		}
	}
	if l.scope.LeftBehind(svc) || len(held) > 0 {
		return Verdict{}, Unpublish
	}
	return Verdict{}, Free
}

// Ensure makes the Service hold what it asks for, as far as possible. Make the Records of the
// verdict durable, write the object, and then call Settle: only that frees the addresses that
// the Service gave back. If another Service of the name is Known, release that one before, because
// these Records have nothing of what it held. The labels are those of the Service's namespace.
func (l *Ledger) Ensure(svc *corev1.Service, labels map[string]string, now time.Time) Verdict {
	req, refusal := RequestOf(svc, labels, l.dialects)
	if known := l.Known(req.Owner.Name); known != req.Owner.UID {
		l.Release(req.Owner.Name, known, now)
	}
	if l.leasing.vacated && l.Config != nil {
		l.reconfigure(now)
	}
	a, first := l.accounts.open(svc)
	a.barred = nil
	unreadable := refusal != nil
	if first {
		a.asked, a.unreadable = req, unreadable
	}
	l.takeOver(a, req, svc, first, now)
	// The Service may have moved already because of an annotation that its object still shows.
	moved := req.Renumber && a.verdict.Renumbered
	req.Renumber = req.Renumber && !moved
	// Other Services may wait to share an address with this one.
	l.retry = l.retry || !reflect.DeepEqual(a.asked.Sharing, req.Sharing)
	var before []ipam.Held
	if req.Sharing != nil {
		before = l.held.Holds(a.owner.UID)
	}
	var left []clusterfacts.Conflict
	switch {
	case l.Config == nil:
	case refusal == nil:
		l.held.turnBack(a, req, kube.VIPs(svc))
		left, refusal = l.allocate(a, req, now)
	case len(l.held.Holds(a.owner.UID)) > 0: // its new terms may clash with those of others at its addresses
		sharing := req.Sharing
		req = a.asked
		req.Sharing = sharing
		l.held.abide(a, req, now)
	}
	v := l.verdict(a, req, refusal, unreadable, now)
	l.retry = l.retry || req.Sharing != nil && !slices.Equal(before, v.Held)
	v.Left, a.left = slices.Concat(a.left, left), nil
	v.Renumbered = v.Renumbered || moved
	a.asked, a.verdict, a.edition = req, v, l.edition
	l.waiters.remove(a)
	if v.waits() {
		l.waiters.add(a, l.classOf(a))
	}
	return v
}

// keep is for a Service that is not served any more, and whose addresses nobody else has taken over. It keeps what its object shows,
// and waits for nothing more. It loses an address that clashes with others by the terms of sharing that it has now, that another
// Service was given back at the start, or whose lease is over. settled is set if its object shows the verdict already, or has no
// condition of ours: then its addresses may never have been ours, because only the condition cannot be written by its owner.
func (l *Ledger) keep(svc *corev1.Service, labels map[string]string, now time.Time) (v Verdict, settled bool) {
	if l.Config == nil {
		return Verdict{}, true // nothing is decided without a configuration
	}
	shows, condition := kube.VIPs(svc), kube.Allocated(svc)
	if a := l.accounts.of(NameOf(svc), string(svc.UID)); a != nil {
		asked := a.asked
		req, _ := RequestOf(svc, labels, l.dialects)
		asked.Sharing = req.Sharing
		l.held.follow(a, shows) // it may have been about to leave an address that it shows
		a.barred = append(a.barred, l.held.abide(a, asked, now)...)
		l.retry = l.retry || !reflect.DeepEqual(a.asked.Sharing, req.Sharing)
		v.Held, v.GivenBack = l.held.Holds(a.owner.UID), Addrs(l.held.Holds(a.leaving.UID))
		v.Records = l.held.departing(a, false, now)
		l.leasing.seek(a, asked, &v, now)
		l.waiters.remove(a)
		a.asked, a.edition, a.verdict = asked, 0, Verdict{Held: v.Held, Renumbered: a.verdict.Renumbered}
	}
	shown := condition != nil && condition.Status == metav1.ConditionTrue && len(v.Held) == len(shows) && len(v.GivenBack) == 0
	return v, condition == nil || shown
}

// maxLeaving is how many addresses a Service may have given back without its object having been written. Its object may not take a
// write, or change before each one: without a bound such a Service would take a whole pool, or the memory.
const maxLeaving = 2 * ipam.MaxAddresses

// allocate gives the Service what it asks for, or returns the refusal. If the Service was
// given an address moments ago and another host has it, the Service gets another address. If
// there is no other, it keeps the address.
func (l *Ledger) allocate(a *account, req ipam.Request, now time.Time) (left []clusterfacts.Conflict, refusal *ipam.Refusal) {
	if n := len(l.held.Holds(a.leaving.UID)); n >= maxLeaving {
		l.held.abide(a, req, now)
		return nil, &ipam.Refusal{Reason: ReleasePending,
			Message: fmt.Sprintf("it has given back %d addresses that its object may still show, because the object could not be written", n)}
	}
	if a.obstacle != nil && len(req.Addresses) == 0 {
		if l.held.adopt(a, req, now); a.obstacle != nil {
			return nil, a.obstacle
		}
	}
	toLeave := l.conflicts.toLeave(a, req.Renumber, now)
	req.Avoid = vips(toLeave)
	refusal = l.held.allocate(a, req, now)
	if refusal != nil && len(toLeave) > 0 && !req.Renumber {
		req.Avoid = nil
		if again := l.held.allocate(a, req, now); again != nil {
			return nil, again
		}
		return nil, refusal.Behind(AddressConflict, silenced(toLeave[0])+"; there is no other address: ")
	}
	held := l.held.Holds(a.owner.UID)
	left = slices.DeleteFunc(toLeave, func(d clusterfacts.Conflict) bool { return holds(held, d.VIP) })
	if l.conflicts.withheld.add(left, now) {
		l.reconfigure(now)
	}
	return left, refusal
}

// verdict is the answer to a request that was met or refused, or that is unreadable.
func (l *Ledger) verdict(a *account, req ipam.Request, refusal *ipam.Refusal, unreadable bool, now time.Time) Verdict {
	v := Verdict{Held: l.held.Holds(a.owner.UID), Refusal: refusal, unreadable: unreadable, GivenBack: Addrs(l.held.Holds(a.leaving.UID))}
	if len(v.Held) == 0 {
		v.Foreign = a.foreign
	}
	switch {
	case l.Config != nil:
		v.Records = l.held.departing(a, false, now)
		if refusal == nil {
			v.Missing, v.Renumbered = missing(req, v.Held), req.Renumber
		}
	case len(v.Held)+len(a.claims)+len(a.foreign) > 0:
		v.Undecided, v.Refusal = true, nil
	case refusal == nil:
		v.Refusal = unavailable(l.Err)
	}
	v.Conflicts = l.conflicts.about(v.Held)
	if v.Refusal == nil && !v.Undecided {
		v.Refusal = l.conflicts.refusal(v.Conflicts, now)
	}
	l.leasing.seek(a, req, &v, now)
	if last := a.verdict.Refusal; last != nil && v.Refusal != nil && v.Refusal.Same(last) {
		v.Refusal = last // the message may count seconds: an unchanged refusal keeps its text
	}
	return v
}

// InQuarantine returns the addresses in quarantine, in the order of their release.
func (l *Ledger) InQuarantine(now time.Time) []ipam.Quarantined { return l.held.InQuarantine(now) }

// Departing returns what has to be durable before Release, for the same name and UID. Without a configuration nobody knows how
// long the quarantine is, and the records have the longest one: how long it is counts when a configuration is there.
func (l *Ledger) Departing(name, uid string, now time.Time) []quarantinestore.Record {
	if a := l.accounts.of(name, uid); a != nil {
		return l.held.departing(a, true, now)
	}
	return nil
}

// Settle frees what the Service has given back, now that its object shows something
// else.
func (l *Ledger) Settle(name, uid string, shows []ipam.Held, now time.Time) {
	if a := l.accounts.of(name, uid); a != nil {
		a.shown = len(shows) > 0
		freed := l.held.settle(a, shows, now)
		l.leasing.work = l.leasing.work || len(freed) > 0
		l.leasing.settle(a, shows)
		l.noteFreed(freed, now)
	}
}

// Release makes the Service hold nothing and forgets it. With a UID, only that
// incarnation of the Service. It reports whether an address was freed.
func (l *Ledger) Release(name, uid string, now time.Time) (freed bool) {
	a := l.accounts.of(name, uid)
	if a == nil {
		return false
	}
	delete(l.accounts, a.owner.Name)
	l.waiters.remove(a)
	l.leasing.close(a)
	left := slices.Concat(l.held.Release(a.leaving.UID, now), l.held.Release(a.owner.UID, now))
	l.noteFreed(left, now)
	return len(left) > 0
}

// noteFreed makes addresses that Services have given back available, or withholds them.
func (l *Ledger) noteFreed(addrs []netip.Addr, now time.Time) {
	l.retry = l.retry || len(addrs) > 0
	if l.Config != nil && l.conflicts.freed(addrs, now) {
		l.reconfigure(now)
	}
}

// of returns the account of a Service, with a UID only that of this incarnation. Nil: there
// is none.
func (as accounts) of(name, uid string) *account {
	if a := as[name]; a != nil && (uid == "" || uid == a.owner.UID) {
		return a
	}
	return nil
}

// open returns the Service's account, and whether this is the first look at it.
func (as accounts) open(svc *corev1.Service) (_ *account, first bool) {
	name := NameOf(svc)
	if a := as[name]; a != nil {
		return a, false
	}
	uid := string(svc.UID)
	a := &account{owner: ipam.Owner{UID: uid, Name: name}, leaving: ipam.Owner{UID: uid + "/leaving", Name: name},
		created: svc.CreationTimestamp.Time}
	as[name] = a
	return a, true
}

// compare puts older Services before younger ones.
func (a *account) compare(b *account) int {
	return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.owner.Name, b.owner.Name))
}

func sortAccounts(accounts []*account) { slices.SortFunc(accounts, (*account).compare) }

// Holds returns what this incarnation of a Service holds. It is known if it has asked for
// something, or had something at the start.
func (l *Ledger) Holds(svc *corev1.Service) (held []ipam.Held, known bool) {
	return l.held.Holds(string(svc.UID)), l.accounts.of(NameOf(svc), string(svc.UID)) != nil
}

// Consider returns what each pool would do for the Service now.
func (l *Ledger) Consider(svc *corev1.Service, labels map[string]string, now time.Time) []ipam.Consideration {
	req, refusal := RequestOf(svc, labels, l.dialects)
	if refusal != nil || l.Config == nil {
		return nil
	}
	return l.held.Consider(req, now)
}
