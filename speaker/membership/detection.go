package membership

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/speaker/detector"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// detection has package detector find out who is lost, among those that count as alive and take part. memberlist has
// met them, and knows their addresses and sessions.
type detection struct {
	*base
	table *table
	own   published
	task  atomic.Pointer[detector.Task] // nil before Run
}

// listen opens the sockets, and publishes that this speaker takes part.
func (d *detection) listen() error {
	self := watch.Member{Name: d.options.Node, Session: rand.Uint64() | 1, Addr: d.options.Address}
	task, err := detector.Listen(detector.Options{Self: self, Want: d.want(), Log: d.log, Refused: d.metrics.refused.Inc})
	if err != nil {
		return err //nolint:wrapcheck // it names what cannot be opened
	}
	d.task.Store(task)
	d.own.publish(func(m *metadata) { m.session = self.Session })
	return nil
}

// run follows the verdicts until ctx ends.
func (d *detection) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.task.Load().Run(ctx) })
	group.Go(func() error { d.follow(ctx); return nil })
	before := d.want()
	for ctx.Err() == nil {
		changed, document := d.table.Changed(), d.options.Config.Changed()
		if now := d.want(); !now.Equal(before) {
			d.task.Load().Set(now)
			before = now
		}
		select {
		case <-changed:
		case <-document:
		case <-ctx.Done():
		}
	}
	return group.Wait() //nolint:wrapcheck // it is the detector's
}

// follow records the verdicts.
func (d *detection) follow(ctx context.Context) {
	for {
		select {
		case v := <-d.task.Load().Verdicts():
			d.table.declare(v)
		case <-ctx.Done():
			return
		}
	}
}

// want returns what the detector is to work with.
func (d *detection) want() detector.Want {
	settings := d.settings
	if c, _ := d.options.Config.Current(); c != nil {
		settings = c.Membership
	}
	return detector.Want{
		Members: d.table.members(), Keys: d.ring.beatKeys(),
		Timing: watch.Timing{Interval: settings.Heartbeat, Missed: settings.Missed},
	}
}

// late returns how late the loop of the detector was lately, at most.
func (d *detection) late() time.Duration {
	if task := d.task.Load(); task != nil {
		return task.Late()
	}
	return 0
}

// accused returns how many packets of others take this speaker for lost.
func (d *detection) accused() uint64 {
	if task := d.task.Load(); task != nil {
		return task.Accused()
	}
	return 0
}

// members returns the other speakers that are alive and take part in the failure detection, by name.
func (t *table) members() (all []watch.Member) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for node, p := range t.peers {
		if p.alive && p.session != 0 && p.met != nil {
			addr, _ := netip.AddrFromSlice(p.met.Addr)
			all = append(all, watch.Member{Name: node, Session: p.session, Addr: netip.AddrPortFrom(addr.Unmap(), p.met.Port)})
		}
	}
	slices.SortFunc(all, watch.Member.Compare)
	return all
}
