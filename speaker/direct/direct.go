// Package direct lets connections survive a move of their VIP: the VIP's owner hands the packets of
// each connection to the node that keeps it.
//
// A node that receives a packet for a VIP looks up in a table, which is the same on every node, which
// node the connection belongs to, and hands the packet to it unchanged. kube-proxy on that node handles
// the packet as if it had come from the client, and keeps the connection; answers go to the client
// directly. A connection that kube-proxy on the first node keeps already stays there, so that direct
// forwarding may be switched on and off while there are connections.
//
// The files, from the outside in:
//
//	direct.go         Director, the task: keeps the rules in force
//	machine.go        Machine: which rules are wanted
//	switchedoff.go    Services that were switched off, whose connections are handed over for a while
//	fair.go           how namespaces share what is bounded
//	table.go          which node a flow belongs to, and where it may have belonged before
//	absence.go        which nodes do not have a Service's rules yet
//	nodes.go          which hosts on the segment are the cluster's nodes, and which of them answer
//	rules.go          the rules for a packet: hand it over, keep it, or ask the next node
//	shortcut.go       which Services have packets handed over before conntrack, and when
//	shortcutrules.go  the rules for the shortcut
//	kept.go           which connections this node keeps although the table has them at another node
//	simulated.go      Simulated, a Director without a kernel
//	kernel.go         changes the kernel's rules to the wanted ones
//	status.go         the status, and metrics.go the metrics
package direct

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	// interval is how often the Director looks at its neighbours.
	interval = time.Second
	// defaultHold is how long connections wait for a node that does not answer.
	defaultHold = 10 * time.Second
	// After a change the Director rests for restFactor times as long as the change took, maxRest
	// at most, so that constant changes of endpoints do not keep the node busy.
	restFactor = 9
	maxRest    = time.Second
	// answerTime is how long a neighbour may take to answer the kernel. The kernel itself waits
	// three seconds, and begins anew with the next packet.
	answerTime = interval / 2
	// settleTime is how long a node that starts waits for its neighbours.
	settleTime = 2 * time.Second
	// verifyInterval is how often the kernel's rules are compared with those that were written.
	verifyInterval = 3 * time.Second
	// defaultGuard is how long the rules work without a Director. It refreshes them ten times as
	// often.
	defaultGuard = 10 * time.Minute
	// Conntrack counts as full when less than one fullPart-th of its entries is free.
	fullPart = 20
	// maxBuckets bounds the kernel memory of a family's tables, some 400 bytes for a bucket, which is
	// charged to the speaker. It is enough for policy Cluster and 64 sets of nodes with policy Local.
	maxBuckets = clusterSize + 64*localSize
	// seeds is how many hash seeds there are. Services with the same seed share chains, because the
	// kernel takes a millisecond for a chain.
	seeds = 16
)

// Options are what a Director needs.
type Options struct {
	Log *slog.Logger
	// Node is this node's name.
	Node string
	// Gateways returns the routers that the node knows. They never count as nodes, even if a Node object
	// has their address.
	Gateways func() []netip.Addr
	// Hold is how long connections wait for a node that does not answer. Zero: 10 s.
	Hold time.Duration
	// Guard is how long the rules work without a Director. Zero: 10 minutes.
	Guard time.Duration
	// Registry gets the metrics. Nil: there are none.
	Registry prometheus.Registerer
}

// Director is a task that keeps the rules in force. One goroutine, Run, owns all state.
type Director struct {
	Options
	sets chan plan.Forwarding

	// Owned by Run.
	*Machine
	shortcut shortcut
	line     *line
	missing  [2]bool // by family: the kernel has no table, and should
	compared uint32  // the generation of nftables when the elements were compared last
	writes   [2]attempts
	full     bool // conntrack is nearly full
	logged   summary
	began    bool // the rules of an earlier Director are taken over or gone
	err      error

	ready     chan struct{}
	published atomic.Pointer[Status]
	changed   notify.Signal // Status.InForce
}

// New returns a Director that does nothing until it runs.
func New(o Options) *Director {
	o.Hold, o.Guard = cmp.Or(o.Hold, defaultHold), cmp.Or(o.Guard, defaultGuard)
	l := &line{}
	d := &Director{Options: o, Machine: newMachine(o), line: l, sets: make(chan plan.Forwarding, 1), ready: make(chan struct{}),
		shortcut: shortcut{log: o.Log, line: l, guard: o.Guard, left: [2]left{{may: true}, {may: true}}}}
	d.published.Store(&Status{})
	if o.Registry != nil {
		o.Registry.MustRegister(collector{d})
	}
	return d
}

// String names the task.
func (d *Director) String() string { return "direct" }

// InForce reports whether the rules are in the kernel: until Ready, those of an earlier
// Director.
func (d *Director) InForce() bool {
	if s := d.Status(); s.known {
		return s.InForce
	}
	return slices.ContainsFunc(families, func(f *family) bool {
		there, err := exists(f)
		return err == nil && there
	})
}

// Changed returns a channel that is closed when InForce or NoRules has another answer.
func (d *Director) Changed() <-chan struct{} { return d.changed.Next() }

// Ready is closed once the first set is in force, or has failed, and the nodes on the segment were
// asked.
func (d *Director) Ready() <-chan struct{} { return d.ready }

// Set replaces what is to be forwarded. It does not wait: Run brings it into force. Before the
// first call the kernel's rules stay as they are. Set is for one goroutine, and keeps want.
func (d *Director) Set(want plan.Forwarding) { notify.Replace(d.sets, want) }

// Run keeps the rules in force until ctx ends. Then they stay, so that connections survive a
// restart of the speaker.
func (d *Director) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case want := <-d.sets:
		d.begin(want, time.Now())
	}
	d.settle(ctx)
	d.stale = true
	d.reconcile()
	close(d.ready)
	defer d.line.End()
	verifies, refreshes := every(verifyInterval), every(d.Guard/10)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case want := <-d.sets:
			start := time.Now()
			d.take(want)
			rest(ctx, time.Since(start))
		case now := <-tick.C:
			if verifies(now) {
				d.verify(refreshes(now))
			}
			d.reconcile()
			if d.shortcut.extend(now, d.have) {
				d.publish()
			}
		}
	}
}

// every returns a function that reports whether the interval has passed since it last did, at first since now.
func every(interval time.Duration) (due func(now time.Time) bool) {
	last := time.Now()
	return func(now time.Time) bool {
		if now.Sub(last) < interval {
			return false
		}
		last = now
		return true
	}
}

// rest rests after a change that took so long.
func rest(ctx context.Context, took time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(min(maxRest, restFactor*took)):
	}
}

// settle takes over the rules of an earlier Director and waits until the nodes on the segment are known, for settleTime at
// most. Meanwhile these rules stay, because that Director knew the nodes.
func (d *Director) settle(ctx context.Context) {
	err, end := d.inherit(), time.Now().Add(settleTime)
	for ctx.Err() == nil && time.Now().Before(end) && (err != nil || d.busy() && (d.look() != nil || d.unheard())) {
		time.Sleep(settleTime / 40)
		if err != nil {
			err = d.inherit()
		}
	}
	if err != nil {
		d.Log.Error("connections of Services that no longer ask for direct forwarding may end", "err", err)
	}
}

// verify checks whether the rules are in the kernel. Missing rules are to be written anew. With
// refresh it also refreshes the guard. Elements are compared only if a program has changed something since they were there last:
// with thousands of Services that takes a tenth of a second.
func (d *Director) verify(refresh bool) {
	if d.have == [2]*ruleset{} {
		return
	}
	k, err := dial()
	if err != nil {
		return // reconcile will report it
	}
	defer k.Close()
	now, err := k.generation() // before the look: what changes meanwhile is looked at next time
	changed := err != nil || refresh || now != d.compared
	d.compared = now
	works := func(f *family, r *ruleset) bool {
		if r == nil {
			return true
		}
		sound, err := k.sound(f, r, changed)
		if err != nil {
			d.compared = 0 // it is looked at again next time
		} else if !sound {
			d.Log.Warn("direct forwarding restored: somebody else had changed the nftables table", "table", f.name())
			return false
		}
		return !refresh || k.refresh(f, d.Guard) == nil
	}
	for i := range families {
		if !works(families[i], d.have[i]) {
			d.have[i], d.stale, d.logged = nil, true, summary{}
		}
		if !works(shortcuts[i], d.shortcut.have[i]) {
			d.shortcut.drop(i, time.Now()) // it is made anew
		}
	}
}

// take takes over a plan and brings it into force.
func (d *Director) take(want plan.Forwarding) {
	d.set(want, time.Now())
	d.reconcile()
}

// reconcile brings the rules into force.
func (d *Director) reconcile() {
	now := time.Now()
	d.advance(now)
	d.shortcut.clear(now)
	var err error
	if d.busy() {
		err = d.look()
	} else {
		d.refused, d.full = nil, false
	}
	if err == nil && d.stale {
		err = d.apply()
		d.stale = err != nil
	}
	err = errors.Join(err, d.refused, d.shortcut.left[0].err, d.shortcut.left[1].err)
	if err != nil && (d.err == nil || d.err.Error() != err.Error()) {
		d.Log.Error("direct forwarding not up to date: VIPs work without", "err", err, "hint", hint(err))
	} else if err == nil && d.err != nil {
		d.Log.Info("direct forwarding up to date again")
	}
	d.err = err
	d.publish()
}

// hint returns what an operator can do about the error.
func hint(err error) string {
	switch {
	case errors.Is(err, errIPVS):
		return "set mode nftables or iptables in kube-proxy's configuration"
	case errors.Is(err, errBond):
		return "the bond sends with other hardware addresses than it answers with: use another mode"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return "the speaker needs the capability NET_ADMIN: speaker.directForwarding in the chart's values"
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
		return "the node's kernel needs nf_tables with ct, dup, hash and maps"
	}
	return "it is tried again"
}

// lookAtConntrack warns when conntrack is full.
func (d *Director) lookAtConntrack() {
	read := func(name string, otherwise int) int {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
		if n, notNumber := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && notNumber == nil {
			return n
		}
		return otherwise
	}
	count, limit := read("count", 0), read("max", 0)
	full := limit > 0 && count >= limit/fullPart*(fullPart-1)
	if full && !d.full {
		d.Log.Warn("conntrack is nearly full: when it is, this node takes no new connections", "entries", count, "at_most", limit,
			"hint", "raise net.netfilter.nf_conntrack_max, or find out who opens so many connections")
	}
	d.full = full
}

// apply writes the wanted rules. If it fails in one family, the other is applied all the same.
func (d *Director) apply() error {
	idle := !d.busy() && d.have == [2]*ruleset{}
	if !idle {
		if err := d.line.permitted(); err != nil {
			return err
		}
	}
	tables := Tables{}
	var errs error
	for i, f := range families {
		// A kernel that refuses the rules goes through all of them each time, while kube-proxy waits for its turn.
		errs = errors.Join(errs, d.writes[i].try(time.Now(), lastWrite, func() error {
			had := d.have[i] != nil
			err := d.applyTo(i, f, tables)
			if err != nil && had { // differences to a table that somebody else has removed, perhaps: now all is written
				err = d.applyTo(i, f, tables)
			}
			return err
		}))
	}
	if errs != nil {
		return errs
	}
	if now := d.summarize(); now != d.logged {
		d.logged = now
		d.Log.Info("direct forwarding", "services", now.services, "draining", now.switchedOff, "tables", now.tables,
			"neighbours", now.neighbours, "closed", now.closed)
	}
	d.began = true
	return nil
}

// summary is the part of the rules that is logged.
type summary struct {
	services, switchedOff, tables, neighbours int
	closed                                    string // nodes that take no new connections of some Service
}

func (d *Director) summarize() summary {
	closed, seen := map[string]bool{}, map[*plan.Backend]bool{}
	for _, s := range d.want.Services {
		if len(s.Backends) == 0 || seen[&s.Backends[0]] {
			continue
		}
		seen[&s.Backends[0]] = true
		for _, b := range s.Backends {
			if b.Open == 0 {
				closed[b.Node] = true
			}
		}
	}
	for node, addrs := range d.want.Nodes {
		for _, a := range addrs {
			if h := d.nodes[a]; h != nil && h.silent {
				closed[node] = true
			}
		}
	}
	return summary{len(d.want.Services), len(d.switchedOff), countTables(d.have), reachable(d.nodes),
		strings.Join(slices.Sorted(maps.Keys(closed)), " ")}
}

// countTables counts the tables of buckets. Both families mostly have the same ones.
func countTables(families [2]*ruleset) int {
	all := map[string]bool{}
	for _, r := range families {
		if r != nil {
			for _, of := range r.madeOf {
				all[of] = true
			}
		}
	}
	return len(all)
}

// reachable counts the addresses of nodes to which packets can be handed, now or soon again.
func reachable(nodes map[netip.Addr]*host) (n int) {
	for _, h := range nodes {
		if h.hardware != "" && !h.gone {
			n++
		}
	}
	return n
}

// applyTo is apply for one family.
func (d *Director) applyTo(i int, f *family, tables Tables) error {
	want := d.rules(i, f, tables)
	k, err := d.line.open()
	if err != nil {
		return err
	}
	rest, err := d.shortcut.restrict(k, i, want)
	changes := want != nil || d.there[i]
	if !changes && !d.began {
		var unknown error
		changes, unknown = k.exists(f)
		err = errors.Join(err, unknown)
	}
	if changes {
		err = errors.Join(err, k.change(f, d.have[i], want, d.Guard))
	}
	if err == nil {
		err = k.flush(f)
	}
	if err != nil {
		// All is one transaction, so the rules from before stay, and are made anew with the next change. A table that we
		// may not change is another program's.
		d.line.End()
		d.have[i] = nil
		if there, unknown := exists(f); unknown == nil {
			d.there[i] = there && (d.there[i] || !d.began) && !errors.Is(err, unix.EPERM)
		}
		d.missing[i] = want != nil && !d.there[i]
		d.shortcut.drop(i, time.Now())
		return err
	}
	d.shortcut.have[i] = rest
	d.took(i, want)
	d.missing[i] = false
	return nil
}
