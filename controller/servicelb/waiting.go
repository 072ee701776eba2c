package servicelb

import (
	"container/heap"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// waiters are the Services that may get a better answer.
type waiters struct {
	// due has those that Waiting names, unless swept is false: config or facts
	// have changed since.
	due   map[*account]struct{}
	swept bool
	// classes has those that wait, oldest first.
	classes map[class]*btree.BTreeG[*account]
	// next is what NextFree returns.
	next time.Time
}

// btreeDegree is that of the trees: classes are small, or few.
const btreeDegree = 16

func newWaiters() waiters {
	return waiters{due: map[*account]struct{}{}, classes: map[class]*btree.BTreeG[*account]{}}
}

// class is what Services have in common that get the same answer: when one of
// them is refused, so are all the others. A Service whose answer depends on
// more than that is a class of its own.
type class struct {
	reason     ipam.Reason // why they hold nothing; empty: they lack a family
	missing    ipam.Family // the family that they lack
	holds      string      // what they hold of the other one: a pool, and by which name they asked for it
	families   string
	requireAll bool
	pools      string
	namespace  string
	labels     string // where a pool looks at labels of Services
	alone      string // its name
}

// classOf returns the class of a Service that waits.
func (l *Ledger) classOf(a *account) class {
	r, req, held := a.verdict.Refusal, a.asked, l.alloc.Holds(a.owner.UID)
	alone := class{alone: a.owner.Name}
	if a.obstacle != nil || len(req.Addresses) > 0 || req.Sharing != nil || len(l.alloc.Holds(leaving(a.owner).UID)) > 0 ||
		l.alloc.Expects(a.owner.Name) || l.leases(req) {
		return alone
	}
	c := class{requireAll: req.RequireAll, pools: strings.Join(req.Pools, ","), namespace: req.Subject.Namespace}
	switch v := a.verdict; {
	case r != nil && len(held) == 0:
		c.reason = r.Reason
	case r == nil && v.Missing != "" && len(held) == 1 && len(v.Disputes) == 0 && !req.Renumber && len(req.Avoid) == 0:
		c.missing, c.holds = v.Missing, held[0].Pool+","+held[0].Asked
	default:
		return alone
	}
	for _, f := range req.Families {
		c.families += string(f)
	}
	if l.config != nil && slices.ContainsFunc(l.config.Pools, func(p config.Pool) bool { return p.ServiceSelector != nil }) {
		c.labels = labels.FormatLabels(req.Subject.Labels)
	}
	return c
}

// leases reports whether the request may draw from a pool with DHCP.
func (l *Ledger) leases(req ipam.Request) bool {
	return l.config != nil && slices.ContainsFunc(l.config.Pools, func(p config.Pool) bool { return p.DHCP != nil && candidate(&p, req) })
}

// await puts a Service among those that wait.
func (l *Ledger) await(a *account) {
	l.due[a] = struct{}{}
	a.class = l.classOf(a)
	tree := l.classes[a.class]
	if tree == nil {
		tree = btree.NewG(btreeDegree, func(a, b *account) bool { return a.compare(b) < 0 })
		l.classes[a.class] = tree
	}
	tree.ReplaceOrInsert(a)
}

// dismiss takes a Service from those that are due.
func (l *Ledger) dismiss(a *account) {
	delete(l.due, a)
	l.leaveClass(a)
}

func (l *Ledger) leaveClass(a *account) {
	tree := l.classes[a.class]
	if tree == nil {
		return
	}
	if tree.Delete(a); tree.Len() == 0 {
		delete(l.classes, a.class)
	}
}

// Waiting returns the Services, oldest first, that may get a better answer
// now: those that wait for something, and those whose addresses joined or
// left pools, or are disputed or no longer so, or whose annotations may mean
// something else, when something changed that decisions depend on.
func (l *Ledger) Waiting() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	l.lookAhead()
	if !l.swept {
		l.sweep()
	}
	return namesOf(slices.Collect(maps.Keys(l.due)))
}

// Relabeled returns the Services, oldest first, that wait and whose namespace has other
// labels than when their last request was read: other pools may be open to them.
func (l *Ledger) Relabeled() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var relabeled []*account
	for a := range l.due {
		if l.NamespaceLabels != nil && !maps.Equal(l.NamespaceLabels(a.asked.Subject.Namespace), a.asked.Subject.NamespaceLabels) {
			relabeled = append(relabeled, a)
		}
	}
	return namesOf(relabeled)
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

// sweep finds out who is due. Those that there was no verdict on yet have
// their turn to come.
func (l *Ledger) sweep() {
	clear(l.due)
	for _, a := range l.accounts {
		if held := l.alloc.Holds(a.owner.UID); a.judged &&
			(a.edition != l.edition || a.verdict.waits() || !slices.Equal(a.verdict.Held, held) || !slices.Equal(a.verdict.Disputes, l.disputesOf(held))) {
			l.due[a] = struct{}{}
		}
	}
	l.swept = true
}

// Retry gives what has become free to those who wait, the oldest first, and
// returns the Services to which that is news, oldest first. Of a class that is
// refused it asks one.
func (l *Ledger) Retry() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	l.lookAhead()
	if !l.swept {
		l.sweep()
		return namesOf(slices.Collect(maps.Keys(l.due)))
	}
	if l.config == nil {
		return nil
	}
	var news []*account
	for more := true; more; {
		var told []*account
		told, more = l.round()
		news = append(news, told...)
	}
	return namesOf(news)
}

// round asks each class. joinable: somebody has come to an address that others
// may join.
func (l *Ledger) round() (news []*account, joinable bool) {
	var first oldest // of each class
	for _, class := range l.classes {
		a, _ := class.Min()
		first = append(first, a)
	}
	heap.Init(&first)
	for len(first) > 0 {
		a := first[0]
		class := l.classes[a.class]
		got, told := l.retry(a)
		switch {
		case got:
			news, joinable = append(news, a), joinable || a.asked.Sharing != nil
			l.leaveClass(a) // it is not asked again before it has been told
		case told:
			class.Ascend(func(b *account) bool { news = append(news, b); return true })
		}
		if next, ok := class.Min(); got && ok {
			first[0] = next
			heap.Fix(&first, 0)
		} else {
			heap.Pop(&first)
		}
	}
	return news, joinable
}

// retry asks for a Service once more. got: it holds something else now. told:
// its class is to be told another answer than the last one; to say that numbers
// have changed, one of many is not enough reason.
func (l *Ledger) retry(a *account) (got, told bool) {
	before := l.alloc.Holds(a.owner.UID)
	left, refusal := l.give(a, a.asked)
	a.left = append(a.left, left...)
	got = !slices.Equal(before, l.alloc.Holds(a.owner.UID))
	if a.class.alone == "" {
		return got, refusal != nil && refusal.Reason != a.class.reason
	}
	return got, !refusal.Same(a.verdict.Refusal) || l.leases(a.asked)
}

// oldest is a heap of Services.
type oldest []*account

func (o oldest) Len() int           { return len(o) }
func (o oldest) Less(i, j int) bool { return o[i].compare(o[j]) < 0 }
func (o oldest) Swap(i, j int)      { o[i], o[j] = o[j], o[i] }

// Push is part of heap.Interface.
func (o *oldest) Push(x any) { *o = append(*o, x.(*account)) } //nolint:errcheck // the heap has nothing else

// Pop is part of heap.Interface.
func (o *oldest) Pop() any {
	last := len(*o) - 1
	a := (*o)[last]
	*o = (*o)[:last]
	return a
}

// NextFree returns when the next address after the last Retry, or Waiting, ends
// its rest or ceases to be withheld; the zero time: none will. Whoever asks later
// would miss those that have done so meanwhile.
func (l *Ledger) NextFree() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// lookAhead sets what NextFree returns.
func (l *Ledger) lookAhead() {
	l.next, _ = l.alloc.NextFree(l.Now())
	if !l.lapse.IsZero() && (l.next.IsZero() || l.lapse.Before(l.next)) {
		l.next = l.lapse
	}
}
