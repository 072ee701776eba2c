package membership

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"
)

const (
	// firstSeek and lastSeek bound the wait between two attempts to reach the
	// speakers that are lost, of a speaker alone: crowd has the others.
	firstSeek, lastSeek = 250 * time.Millisecond, 4 * time.Second
	// seekAtOnce is how many lost speakers are tried at a time; one that
	// answers brings all that it knows.
	seekAtOnce = 8

	// arrivalTime is how long a speaker that starts allows for each of the others, and
	// lastArrival for all of them: fewer than 300 are there in the time of the other waits.
	arrivalTime, lastArrival = 10 * time.Millisecond, 10 * time.Second

	// probeAtOnce is how many speakers Probe asks at a time, pings how often it
	// asks one by UDP that does not answer: a busy node is slower than the failover
	// that it is set to.
	probeAtOnce = 16
	pings       = 10
)

// discover lets others find us, finds them, and joins.
func (t *Task) discover(ctx context.Context) error {
	started, crashes := time.Now(), make(chan int, 1)
	informer := t.informer()
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { t.noteLease(nil, obj.(*peer)) },
		UpdateFunc: func(before, after any) { t.noteLease(before.(*peer), after.(*peer)) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			t.noteDeleted(obj.(*peer))
		},
	})
	if err != nil {
		return fmt.Errorf("watch Leases: %w", err)
	}
	t.mu.Lock()
	t.leases = informer.GetStore()
	t.mu.Unlock()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { informer.RunWithContext(ctx); return nil })
	group.Go(func() error {
		if cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) { // what it says of the time before us is no news then
			t.publish(ctx, started, crashes)
		}
		return nil
	})
	group.Go(func() error {
		t.say("waiting for the API server to list the speakers")
		if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
			return nil
		}
		group.Go(func() error { t.enter(ctx, informer.GetStore(), started, crashes); return nil })
		group.Go(func() error { t.watchLink(ctx, informer.GetStore()); return nil })
		group.Go(func() error { t.keepKeys(ctx, informer.GetStore()); return nil })
		t.reunite(ctx, informer.GetStore())
		return nil
	})
	return group.Wait()
}

// enter declares the speaker joined when it is.
func (t *Task) enter(ctx context.Context, leases cache.Store, started time.Time, crashes <-chan int) {
	t.awaitKey(ctx, leases)
	others, giveUp := len(t.others(leases.List())), time.After(joinTimeout)
	met := time.Now()
	if others > 0 && t.meet(ctx, others, giveUp) {
		t.settle(ctx, started, crashes, giveUp)
	}
	t.awaitMost(ctx, others, met.Add(min(time.Duration(others)*arrivalTime, lastArrival)))
	if ctx.Err() != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.joined)
	t.changed.Notify()
}

// meet waits until another speaker is there and reports whether one is.
func (t *Task) meet(ctx context.Context, others int, giveUp <-chan time.Time) bool {
	t.say("joining %d other speakers", others)
	for {
		changed := t.Changed()
		if len(t.Speakers()) > 1 {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		case <-giveUp:
			t.log.Warn("no other speaker answers, going on without: is the port open between nodes, for TCP and UDP, and the key the same everywhere?",
				"others", others, "port", t.options.Address.Port())
			return false
		}
	}
}

// settle waits until the speaker has lived long enough to be relied on. After the time that
// speakers take to meet each other it goes on only while another one is ready:
// otherwise nobody serves meanwhile.
func (t *Task) settle(ctx context.Context, started time.Time, crashes <-chan int, giveUp <-chan time.Time) {
	crashed := 0
	select {
	case crashed = <-crashes:
	case <-giveUp: // the API server does not say
	case <-ctx.Done():
	}
	settle := t.options.SettleTime << crashed
	t.say("joined %d other speakers, settling for %s after %d crashes", len(t.Speakers())-1, settle, crashed)
	select {
	case <-time.After(time.Until(started.Add(t.options.SettleTime))):
	case <-ctx.Done():
		return
	}
	due := time.After(time.Until(started.Add(settle)))
	for {
		changed := t.Changed()
		if !t.othersReady() {
			return
		}
		select {
		case <-changed:
		case <-due:
			return
		case <-ctx.Done():
			return
		}
	}
}

// awaitMost waits until half of the others are there, or one of them is ready, but not beyond
// the time. After a power cut the first of many would have to announce all VIPs, and each one
// that follows would take its part over.
func (t *Task) awaitMost(ctx context.Context, others int, until time.Time) {
	giveUp := time.After(time.Until(until))
	for said := false; ; said = true {
		changed := t.Changed()
		if 2*(len(t.Speakers())-1) >= others || t.othersReady() {
			return
		}
		if !said {
			t.say("waiting for half of %d other speakers, at most for %s", others, time.Until(until).Round(time.Second))
		}
		select {
		case <-changed:
		case <-giveUp:
			return
		case <-ctx.Done():
			return
		}
	}
}

// othersReady reports whether another speaker is ready to own VIPs.
func (t *Task) othersReady() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, ready := range t.speakers {
		if ready && name != t.options.Node {
			return true
		}
	}
	return false
}

// reunite joins the speakers that have a Lease but are not among the living:
// those that started before us, and those that a partition took away.
//
// Of many speakers each waits before it tries to reach one: by then the first of them, or
// the one that was lost, has made it known to all.
func (t *Task) reunite(ctx context.Context, leases cache.Store) {
	at, delay := time.Now(), firstSeek*t.crowd() // at: of the next attempt
	for {
		lost := t.lost(leases)
		t.setWhole(len(lost) == 0)
		var next <-chan time.Time
		// An attempt without a link would hold up the one that comes with it.
		if len(lost) > 0 && t.linkUp() {
			if !time.Now().Before(at) {
				t.contact(lost)
				at, delay = time.Now().Add(spread(delay)), min(2*delay, lastSeek*t.crowd())
			}
			next = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return
		case <-next:
		case <-t.seek:
			soon := time.Now()
			if delay = firstSeek * t.crowd(); delay > firstSeek {
				soon = soon.Add(spread(delay))
			}
			if at.Before(time.Now()) || soon.Before(at) {
				at = soon
			}
		}
	}
}

func (t *Task) lost(leases cache.Store) []string {
	var lost []string
	alive := t.Speakers()
	for node, addr := range t.others(leases.List()) {
		if _, ok := alive[node]; !ok {
			lost = append(lost, addr.String())
		}
	}
	return lost
}

// contact tries to join some of the addresses. Who does not answer is tried
// again later.
func (t *Task) contact(addresses []string) {
	rand.Shuffle(len(addresses), func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	var group errgroup.Group
	for _, a := range addresses[:min(len(addresses), seekAtOnce)] {
		group.Go(func() error {
			if _, err := t.list.Load().Join([]string{a}); err != nil {
				t.log.Debug("speaker does not answer", "address", a, "err", err)
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
}

// held is a speaker that was lost and that memberlist has met again.
type held struct {
	node  memberlist.Node // as it said last
	since time.Time
}

const (
	// firstVerify and lastVerify bound the wait until one is asked again that does
	// not answer: the first packets after a link is up are lost often.
	firstVerify, lastVerify = 50 * time.Millisecond, 500 * time.Millisecond
	// unansweredMost is how many questions may be lost, in some two seconds, before
	// that is worth a line.
	unansweredMost = 8
	// heldTime, and heldProbes times the interval of probes, is how long one is held
	// that does not answer while others tell that it lives.
	heldTime, heldProbes = 15 * time.Second, 20
)

// verifyLost counts those that were lost when they answer us.
func (t *Task) verifyLost(ctx context.Context) {
	delay := firstVerify
	for {
		var next <-chan time.Time
		if t.askHeld() > 0 {
			next = time.After(delay)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.verify:
			delay = firstVerify
		case <-next:
			delay = min(2*delay, lastVerify)
		}
	}
}

// askHeld counts those of the held that answer, and returns how many are left.
func (t *Task) askHeld() int {
	t.mu.Lock()
	asked := maps.Clone(t.held)
	t.mu.Unlock()
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for name, h := range asked {
		group.Go(func() error {
			_, err := t.list.Load().Ping(name, &net.UDPAddr{IP: h.node.Addr, Port: int(h.node.Port)})
			if err == nil || time.Since(h.since) > heldTime+heldProbes*t.settings.ProbeInterval {
				t.admit(name)
			} else {
				t.unanswered(name)
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.held)
}

// unanswered notes that the speaker has not answered, and says so once.
func (t *Task) unanswered(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unmet[name]++; t.unmet[name] == unansweredMost {
		t.log.Warn("speaker answers connections, and no packets: it does not count before it does", "node", name,
			"help", "open the membership port between all nodes, in both directions, for UDP as for TCP; lodestone diagnose --active tells where it is not")
	}
}

// admit counts the speaker, if it is still held.
func (t *Task) admit(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h, ok := t.held[name]; ok {
		delete(t.held, name)
		delete(t.unmet, name)
		t.count(&h.node)
	}
}

// Reach is how another speaker answers on the membership port.
type Reach struct {
	Node    string
	Address netip.AddrPort
	// UDP and TCP are why it does not answer by them. Who answers by UDP has our
	// key, too.
	UDP, TCP error
}

// Probe asks all other speakers that have a Lease, alive or not, for an answer
// on the membership port, and returns what came of it, by node, and how many ctx
// left no time for.
func (t *Task) Probe(ctx context.Context) (answers []Reach, unasked int) {
	t.mu.Lock()
	leases := t.leases
	t.mu.Unlock()
	if leases == nil || t.list.Load() == nil {
		return nil, 0
	}
	others := t.others(leases.List())
	all := make([]Reach, len(others))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i, node := range slices.Sorted(maps.Keys(others)) {
		group.Go(func() error {
			if ctx.Err() != nil {
				return nil
			}
			r := Reach{Node: node, Address: others[node], UDP: t.ping(node, others[node]), TCP: connect(ctx, others[node])}
			if ctx.Err() == nil || r.TCP == nil && r.UDP == nil {
				all[i] = r
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	answers = slices.DeleteFunc(all, func(r Reach) bool { return r.Node == "" })
	return answers, len(others) - len(answers)
}

func (t *Task) ping(node string, at netip.AddrPort) (err error) {
	for range pings {
		if _, err = t.list.Load().Ping(node, net.UDPAddrFromAddrPort(at)); err == nil {
			return nil
		}
	}
	return err //nolint:wrapcheck // it names the node
}

// connect opens a connection and closes it: the other side takes it for one of
// a speaker that thought better of it.
func connect(ctx context.Context, at netip.AddrPort) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", at.String())
	if err != nil {
		return err //nolint:wrapcheck // it names the address
	}
	return conn.Close() //nolint:wrapcheck // it names the address
}
