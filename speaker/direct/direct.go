// Package direct has connections outlive the node that took them in: a VIP's owner hands each
// connection to the node that keeps it, so that the VIP may move.
//
// Who takes a packet for a VIP in looks up in a table, the same on every node, which node the
// connection belongs to, and hands the packet there as it is. kube-proxy on that node has it
// as if it had come from the client, keeps the connection, and the answers go to the client
// without a detour. A connection that kube-proxy on the first node keeps already stays there,
// so that direct forwarding may be switched on and off while there are connections.
//
// The files, from the outside in:
//
//	direct.go   Director, the task: that the rules are there
//	machine.go  Machine: which rules there are to be
//	drain.go    what was switched off, and goes on for a while
//	table.go    which node a flow belongs to, and where it may have belonged before
//	absence.go  which nodes do not have a Service's rules yet
//	nodes.go    which hosts on the segment are the cluster's nodes, and which of them answer
//	rules.go    what the kernel is to do with a packet
//	shortcut.go what belongs to others is handed over before conntrack: when, and which Services
//	ingress.go  the rules for it
//	kept.go     which connections this node keeps although the table has them at another node
//	program.go  Simulated, which is a Director without a kernel
//	kernel.go   the way from the rules that there are to those that there are to be
//	status.go   what people see of it, and metrics.go
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
	// restFactor is how many times as long as its last change took the Director waits for the
	// next one, and maxRest the most: whoever changes endpoints all the time shall not keep
	// the node busy.
	restFactor = 9
	maxRest    = time.Second
	// answerTime is how long a neighbour may take to answer the kernel. The kernel itself gives it
	// three seconds, and begins anew with the next packet.
	answerTime = interval / 2
	// settleTime is how long a node that starts waits for its neighbours.
	settleTime = 2 * time.Second
	// verifyInterval is how often it is looked whether the rules are there.
	verifyInterval = 3 * time.Second
	// defaultGuard is how long the rules work without a Director that refreshes them, ten
	// times while that passes.
	defaultGuard = 10 * time.Minute
	// fullPart is the part of conntrack's entries that is a little.
	fullPart = 20
	// maxBuckets bounds the memory of a family's tables, which counts as the speaker's: some 400 bytes
	// of the kernel's for a bucket. It is enough for policy Cluster and 64 sets of nodes with policy Local.
	maxBuckets = clusterSize + 64*localSize
	// seeds is how many seeds there are: Services share the chains of one, since the kernel
	// takes a millisecond for a chain.
	seeds = 16
)

// Options are what a Director needs.
type Options struct {
	Log *slog.Logger
	// Node is this node's name.
	Node string
	// Gateways returns the routers that the node knows: they are no nodes, whatever addresses a Node has.
	Gateways func() []netip.Addr
	// Hold is how long connections wait for a node that does not answer. Zero: 10 s.
	Hold time.Duration
	// Guard is how long the rules work without a Director. Zero: 10 minutes.
	Guard time.Duration
	// Registry gets the metrics. Nil: nobody asks for them.
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
	missing  [2]bool // by family, the kernel has no table, and should
	full     bool    // conntrack has little room
	logged   summary
	began    bool // what an earlier Director left is taken over or gone
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
		shortcut: shortcut{log: o.Log, line: l, guard: o.Guard}}
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
	k, err := dial()
	if err != nil {
		return false
	}
	defer k.Close()
	return slices.ContainsFunc(families, k.exists)
}

// Changed returns a channel that is closed when InForce or NoRules has another answer.
func (d *Director) Changed() <-chan struct{} { return d.changed.Next() }

// Ready is closed once the first set is in force and the nodes on the segment were asked for,
// or that has failed.
func (d *Director) Ready() <-chan struct{} { return d.ready }

// Set replaces what is to be forwarded. It does not wait: Run brings it into force. Before the
// first call the kernel's rules stay as they are. Set is for one goroutine, and keeps want.
func (d *Director) Set(want plan.Forwarding) { notify.Replace(d.sets, want) }

// Run keeps the rules in force until ctx ends. They stay: connections outlive a speaker.
func (d *Director) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case want := <-d.sets:
		d.begin(want, time.Now())
	}
	d.inherit()
	d.settle(ctx)
	d.stale = true
	d.reconcile()
	close(d.ready)
	defer d.line.End()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for verified, refreshed := time.Now(), time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case want := <-d.sets:
			start := time.Now()
			d.take(want)
			select {
			case <-ctx.Done():
			case <-time.After(min(maxRest, restFactor*time.Since(start))):
			}
		case now := <-tick.C:
			if now.Sub(verified) >= verifyInterval {
				refresh := now.Sub(refreshed) >= d.Guard/10
				if verified = now; refresh {
					refreshed = now
				}
				d.verify(refresh)
			}
			d.reconcile()
			if d.shortcut.extend(now, d.have) {
				d.publish()
			}
		}
	}
}

// settle waits until the nodes on the segment are known, but not long for those that do not
// answer. Until then the rules of an earlier Director stay, which knew them.
func (d *Director) settle(ctx context.Context) {
	end := time.Now().Add(settleTime)
	for ; d.busy() && ctx.Err() == nil && time.Now().Before(end); time.Sleep(settleTime / 40) {
		if d.look() == nil && !d.unheard() {
			return
		}
	}
}

// verify has the rules be written anew if they are not there, and refreshes the guard.
func (d *Director) verify(refresh bool) {
	if d.have == [2]*ruleset{} {
		return
	}
	k, err := dial()
	if err != nil {
		return // reconcile will report it
	}
	defer k.Close()
	works := func(f *family, r *ruleset) bool {
		if r == nil {
			return true
		}
		if sound, err := k.sound(f, r); err == nil && !sound {
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
			d.shortcut.have[i] = nil // it is made anew
		}
	}
}

// reconcile brings the rules into force.
func (d *Director) reconcile() {
	var err error
	d.advance(time.Now())
	if d.busy() {
		err = d.look()
	} else {
		d.refused, d.full = nil, false
	}
	if err == nil && d.stale {
		err = d.apply()
		d.stale = err != nil
	}
	err = errors.Join(err, d.refused)
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

// apply makes the kernel's rules those that are to be. What fails in one family does not keep
// the other from being applied.
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
		errs = errors.Join(errs, d.applyTo(i, f, tables))
	}
	if errs != nil {
		return errs
	}
	if now := d.summarize(); now != d.logged {
		d.logged = now
		d.Log.Info("direct forwarding", "services", now.services, "draining", now.draining, "tables", now.tables,
			"neighbours", now.neighbours, "closed", now.closed)
	}
	d.began, d.shortcut.began = true, true
	return nil
}

// summary is what the log has of the rules.
type summary struct {
	services, draining, tables, neighbours int
	closed                                 string // nodes that take no new connections of some Service
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
	return summary{len(d.want.Services), len(d.draining), countTables(d.keys), reachable(d.nodes),
		strings.Join(slices.Sorted(maps.Keys(closed)), " ")}
}

// countTables counts the tables of buckets. Families have the same ones, mostly.
func countTables(families [2]map[int]string) int {
	all := map[string]bool{}
	for _, keys := range families {
		for _, of := range keys {
			all[of] = true
		}
	}
	return len(all)
}

// reachable counts the addresses of nodes that packets can be handed to, or soon again.
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
	peers := d.peers(f)
	want, keys := d.rules(i, f, peers, tables)
	k, err := d.line.open()
	if err != nil {
		return err
	}
	rest, err := d.shortcut.restrict(k, i, want)
	if want != nil || d.there[i] || !d.began && k.exists(f) {
		err = errors.Join(err, k.change(f, d.have[i], want, d.Guard))
	}
	if err == nil {
		err = k.flush(f)
	}
	if err != nil {
		// What was there before stays, as all is one transaction, and is made anew. A table that we may not change
		// is another program's.
		d.line.End()
		d.have[i], d.keys[i] = nil, nil
		d.there[i] = (d.there[i] || !d.began) && !errors.Is(err, unix.EPERM) && exists(f)
		d.missing[i] = want != nil && !d.there[i]
		return errors.Join(err, d.shortcut.drop(i))
	}
	d.shortcut.have[i] = rest
	d.took(i, want, keys, peers)
	d.missing[i] = false
	return nil
}
