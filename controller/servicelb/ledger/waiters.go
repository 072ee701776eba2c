package ledger

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

// waiters are the Services that may get a better answer.
type waiters struct {
	// due has those that Due names, unless swept is false: configuration or
	// facts have changed since.
	due   map[*account]struct{}
	swept bool
	// classes has those that wait, oldest first.
	classes map[class]*btree.BTreeG[*account]
	// next is what NextFree returns.
	next time.Time
}

// btreeDegree is that of the trees: classes are small, or few.
const btreeDegree = 16

// class identifies the Services that get the same answer: if one of them is refused, all are. A
// Service whose answer depends on anything else is a class of its own.
type class struct {
	reason     ipam.Reason // why they hold nothing; empty: they lack a family
	missing    ipam.Family // the family that they lack
	holds      string      // of the other family: the pool, and by which name they asked for it
	families   string
	count      int // of the addresses of a family
	requireAll bool
	pools      string
	namespace  string
	labels     string // where a pool looks at labels of Services
	alone      string // its name
}

// add puts a Service among those that wait.
func (w *waiters) add(a *account, c class) {
	w.due[a] = struct{}{}
	a.class = c
	tree := w.classes[c]
	if tree == nil {
		tree = newTree()
		w.classes[c] = tree
	}
	tree.ReplaceOrInsert(a)
}

// newTree returns an empty tree of Services, the oldest first.
func newTree() *btree.BTreeG[*account] {
	return btree.NewG(btreeDegree, func(a, b *account) bool { return a.compare(b) < 0 })
}

// remove takes a Service from those that wait and from those that are due.
func (w *waiters) remove(a *account) {
	delete(w.due, a)
	w.leaveClass(a)
}

func (w *waiters) leaveClass(a *account) {
	tree := w.classes[a.class]
	if tree == nil {
		return
	}
	if tree.Delete(a); tree.Len() == 0 {
		delete(w.classes, a.class)
	}
}

// round retries the oldest Service of each class. When that one gets something, it retries the
// next one of the class. It returns the Services whose answer is new. joinable is set when a
// Service has got an address that others may share.
//
// retry asks for a Service once more. It returns got if the Service holds something else now,
// and isNew if the answer to its class is another one than before.
func (w *waiters) round(retry func(*account) (got, isNew bool)) (due []*account, joinable bool) {
	oldest := newTree() // one of each class
	for _, class := range w.classes {
		a, _ := class.Min()
		oldest.ReplaceOrInsert(a)
	}
	for a, more := oldest.DeleteMin(); more; a, more = oldest.DeleteMin() {
		class := w.classes[a.class]
		got, isNew := retry(a)
		switch {
		case got:
			due, joinable = append(due, a), joinable || a.asked.Sharing != nil
			w.leaveClass(a) // it is not retried before its object has been written
		case isNew:
			class.Ascend(func(b *account) bool { due = append(due, b); return true })
		}
		if next, ok := class.Min(); got && ok {
			oldest.ReplaceOrInsert(next)
		}
	}
	return due, joinable
}

// namesOf returns the names, those of older Services first, each once.
func namesOf(accounts []*account) []string {
	sortAccounts(accounts)
	accounts = slices.Compact(accounts)
	names := make([]string, len(accounts))
	for i, a := range accounts {
		names[i] = a.owner.Name
	}
	return names
}

// classOf returns the class of a Service that waits.
func (l *Ledger) classOf(a *account) class {
	r, req, held := a.verdict.Refusal, a.asked, l.held.Holds(a.owner.UID)
	alone := class{alone: a.owner.Name}
	if a.obstacle != nil || len(req.Addresses) > 0 || req.Sharing != nil || len(l.held.Holds(a.leaving.UID)) > 0 ||
		l.held.Expects(a.owner.Name) || l.leasing.mayDraw(req) {
		return alone
	}
	c := class{count: req.Count, requireAll: req.RequireAll, pools: strings.Join(req.Pools, ","), namespace: req.Subject.Namespace}
	switch v := a.verdict; {
	case r != nil && len(held) == 0:
		c.reason = r.Reason
	case r == nil && v.Missing != "" && len(held) == 1 && len(v.Conflicts) == 0 && !req.Renumber && len(req.Avoid) == 0:
		c.missing, c.holds = v.Missing, held[0].Pool+","+held[0].Asked
	default:
		return alone
	}
	for _, f := range req.Families {
		c.families += string(f)
	}
	if l.selective {
		c.labels = labels.FormatLabels(req.Subject.Labels)
	}
	return c
}

// Due returns the Services, oldest first, that may get a better answer now, when
// something changed that decisions depend on. These are the Services that wait, those whose
// addresses joined or left pools, those with an address for which a conflict began or ended,
// and those whose annotations may mean something else.
func (l *Ledger) Due(now time.Time) []string {
	l.takeStock(now)
	return namesOf(slices.Collect(maps.Keys(l.waiters.due)))
}

// Relabeled returns the Services, oldest first, that wait and whose namespace has other
// labels than when their last request was read: other pools may be open to them. labels
// are those of a namespace.
func (l *Ledger) Relabeled(labels func(namespace string) map[string]string) []string {
	var relabeled []*account
	for a := range l.waiters.due {
		if !maps.Equal(labels(a.asked.Subject.Namespace), a.asked.Subject.NamespaceLabels) {
			relabeled = append(relabeled, a)
		}
	}
	return namesOf(relabeled)
}

// Retry gives addresses that have become free to Services that wait, the oldest first, and
// returns the Services whose answer is new, oldest first. Of a class that is refused it asks
// for one Service only, because only the figures in the refusals of the others would change. undecided is set if
// it is Ensure that decides what some of them get.
func (l *Ledger) Retry(now time.Time) (names []string, undecided bool) {
	if l.takeStock(now) {
		return l.Due(now), true
	}
	if l.Config == nil {
		return nil, false
	}
	askAgain := func(a *account) (got, isNew bool) {
		before := l.held.Holds(a.owner.UID)
		left, refusal := l.allocate(a, a.asked, now)
		a.left = append(a.left, left...)
		got = !slices.Equal(before, l.held.Holds(a.owner.UID))
		if a.class.alone == "" {
			return got, refusal != nil && refusal.Reason != a.class.reason
		}
		return got, !refusal.Same(a.verdict.Refusal) || l.leasing.mayDraw(a.asked)
	}
	var due []*account
	for more := true; more; {
		var some []*account
		some, more = l.waiters.round(askAgain)
		due = append(due, some...)
	}
	undecided = slices.ContainsFunc(due, func(a *account) bool { return l.leasing.mayDraw(a.asked) })
	return namesOf(due), undecided
}

// takeStock finds out when the next address becomes free. If something that decisions depend on
// has changed since the last time, it also finds out which Services are due. Services without a
// verdict are not among them, because they are in the queue.
func (l *Ledger) takeStock(now time.Time) (changed bool) {
	w := &l.waiters
	w.next, _ = l.held.NextFree(now)
	if lapse := l.conflicts.withheld.lapse(); !lapse.IsZero() && (w.next.IsZero() || lapse.Before(w.next)) {
		w.next = lapse
	}
	if w.swept {
		return false
	}
	clear(w.due)
	for _, a := range l.accounts {
		if held := l.held.Holds(a.owner.UID); a.edition > 0 &&
			(a.edition != l.edition || a.verdict.waits() || !slices.Equal(a.verdict.Held, held) ||
				!slices.EqualFunc(a.verdict.Conflicts, l.conflicts.about(held), clusterfacts.Conflict.Equal)) {
			w.due[a] = struct{}{}
		}
	}
	w.swept = true
	return true
}

// NextFree returns when, after the last Retry or Due, the next quarantine ends or the next
// withheld address may be drawn. The zero time: never. It is found out then and not now, because
// the time of some addresses may have come meanwhile.
func (l *Ledger) NextFree() time.Time { return l.waiters.next }
