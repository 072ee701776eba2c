// Package limit caps new connections to the VIPs that this node serves; package plan divides a limit among
// nodes. The kernel counts and drops connections, by nftables rules in a table of our own. Other rules are
// not touched, and without limits there is no table.
//
// One goroutine, Run, owns all state. It compares the kernel's table with the wanted one and sends the
// difference as one transaction. So a restarted speaker continues with the rules, the token buckets and the
// counters that it finds, and rules that somebody else removes come back.
//
//	limit.go    Limiter: keeps the limits in force, and tries again
//	table.go    the kernel's table, the wanted one, and the difference
//	rules.go    the encoding of rules and maps
//	status.go   the wanted limits, and whether they are in force
//	metrics.go  what the kernel counted
package limit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/nft"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// defaultCheck is how often the kernel's table is compared with the wanted one: as often as
	// kube-proxy repairs its own rules.
	defaultCheck = 30 * time.Second
	// After a failure there is a new attempt after firstRetry. The delay doubles up to lastRetry.
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// guardTime is how long limits work without a Limiter that refreshes them, as it does with each look.
	guardTime = 10 * time.Minute
)

// Options are what a Limiter needs.
type Options struct {
	Log      *slog.Logger
	Registry prometheus.Registerer
	// Check is how often rules that somebody else changed are restored. Zero:
	// every 30 seconds.
	Check time.Duration
}

// Limiter is a task that keeps limits in force.
type Limiter struct {
	log   *slog.Logger
	check time.Duration
	sets  chan map[plan.LimitKey]plan.Limit

	// Owned by Run.
	line    nft.Line
	set     bool // want is what Set was called with
	want    map[plan.LimitKey]plan.Limit
	inForce map[plan.LimitKey]plan.Limit // what was written to the kernel last
	err     error                        // why want is not in force
	delay   time.Duration
	due     time.Time // of the next look at the kernel's table; zero: none

	published atomic.Pointer[state]
}

// state is the last result of Run. It is immutable.
type state struct {
	want map[plan.LimitKey]plan.Limit
	err  error
}

// New returns a Limiter that does nothing until it runs.
func New(o Options) *Limiter {
	l := &Limiter{
		log:   o.Log,
		check: cmp.Or(o.Check, defaultCheck),
		sets:  make(chan map[plan.LimitKey]plan.Limit, 1),
	}
	l.published.Store(&state{})
	o.Registry.MustRegister(collector{l})
	return l
}

// String names the task.
func (l *Limiter) String() string { return "limit" }

// Set replaces the whole set of limits. It does not wait: Run brings the set into force, and tries again if
// that fails. Before the first call the kernel's table stays as it is. Set is for one goroutine, and keeps
// want.
func (l *Limiter) Set(want map[plan.LimitKey]plan.Limit) { notify.Replace(l.sets, want) }

// Run keeps the limits in force until ctx ends, then removes the table. It
// returns an error only if that fails.
func (l *Limiter) Run(ctx context.Context) error {
	defer l.line.End()
	for {
		var due <-chan time.Time
		if !l.due.IsZero() {
			due = time.After(time.Until(l.due))
		}
		select {
		case <-ctx.Done():
			return l.remove()
		case want := <-l.sets:
			if !l.set || !maps.EqualFunc(want, l.want, plan.Limit.Equal) {
				l.set, l.want = true, want
				l.reconcile()
			}
		case <-due:
			l.reconcile()
		}
	}
}

// remove removes the table. A process that may not change the kernel's tables has none.
func (l *Limiter) remove() error {
	if _, err := apply(&l.line, nil, guardTime); err != nil && (len(l.inForce) > 0 || !unavailable(err)) {
		return fmt.Errorf("remove connection rate limits: %w", err)
	}
	l.published.Store(&state{})
	return nil
}

// reconcile brings want into force.
func (l *Limiter) reconcile() {
	changed, err := apply(&l.line, l.want, guardTime)
	if len(l.want) == 0 && len(l.inForce) == 0 && unavailable(err) {
		err = nil // the node has no limits and needs none
	}
	if err != nil {
		l.fail(err)
	} else {
		l.succeed(changed)
	}
	l.published.Store(&state{l.want, l.err})
}

func (l *Limiter) fail(err error) {
	if l.err == nil || l.err.Error() != err.Error() {
		l.log.Error("connection rate limits not up to date: Services work without them", "wanted", len(l.want), "in_force", len(l.inForce),
			"err", err, "hint", hint(err))
		l.delay = firstRetry
	}
	l.err, l.due = err, time.Now().Add(l.delay)
	l.delay = min(2*l.delay, lastRetry)
}

func (l *Limiter) succeed(changed bool) {
	switch {
	case l.err != nil:
		l.log.Info("connection rate limits up to date again", "limits", len(l.want))
	case changed && len(l.want) > 0 && maps.EqualFunc(l.want, l.inForce, plan.Limit.Equal):
		l.log.Warn("connection rate limits restored: somebody else had changed the nftables table", "table", tableName, "limits", len(l.want))
	}
	l.logTransitions()
	l.inForce, l.err, l.due = l.want, nil, time.Time{}
	if len(l.want) > 0 {
		l.due = time.Now().Add(l.check)
	}
}

// logTransitions logs the limits that come into force, change or end, in order.
func (l *Limiter) logTransitions() {
	for _, key := range keys(l.inForce) {
		if _, ok := l.want[key]; !ok {
			l.log.Info("connections no longer limited", "vip", key.VIP, "service", key.Service)
		}
	}
	for _, key := range keys(l.want) {
		if before, now := l.inForce[key], l.want[key]; !now.Equal(before) {
			l.log.Info("limiting connections", "vip", key.VIP, "service", key.Service, "per_second", now.PerSecond, "before", before.PerSecond)
		}
	}
}

// keys returns the keys in order.
func keys(of map[plan.LimitKey]plan.Limit) []plan.LimitKey {
	return slices.SortedFunc(maps.Keys(of), func(a, b plan.LimitKey) int {
		return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Service, b.Service))
	})
}

// unavailable reports whether this process cannot use nftables. Then the kernel has either no table of ours, or one of an
// earlier speaker, which limits nothing once its guard has expired.
func unavailable(err error) bool {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES): // the process lacks NET_ADMIN
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT): // the kernel lacks nfnetlink
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // it lacks nf_tables
	default:
		return false
	}
	return true
}

// hint returns what an operator can do about the error.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return "the speaker needs the capability NET_ADMIN, and nobody else may own the table"
	case unavailable(err), errors.Is(err, unix.ENOENT):
		return "the node's kernel needs nf_tables with ct, limit, counter and maps"
	}
	return "it is tried again"
}
