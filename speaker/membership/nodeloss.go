package membership

import (
	"context"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// lookInterval is how often our Lease is given how late the detector was, in a small cluster.
const lookInterval = 10 * time.Second

// detection has package detector find out who is lost, among those that count as alive and take part. memberlist has
// met them, and knows their addresses and sessions.
type detection struct {
	*base
	table *table
	own   published
	lease *ownLease
	task  atomic.Pointer[detector.Task] // nil before Run
}

// listen opens the sockets, and publishes that this speaker takes part, by a random number.
func (d *detection) listen(session uint64) error {
	self := watch.NewMember(d.options.Node, session, d.options.Address)
	task, err := detector.Listen(detector.Options{Self: self, Want: d.want(), Log: d.log, Refused: d.metrics.refused.Inc})
	if err != nil {
		return err //nolint:wrapcheck // it names what cannot be opened
	}
	d.task.Store(task)
	d.own.publish(func(m *metadata) { m.session = session })
	return nil
}

// run follows the verdicts until ctx ends.
func (d *detection) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.task.Load().Run(ctx) })
	group.Go(func() error { d.follow(ctx); return nil })
	var before detector.Want // what counted in listen may have changed since
	look := time.After(lookInterval)
	for ctx.Err() == nil {
		changed, document := d.table.Changed(), d.options.Config.Changed()
		if now := d.want(); !now.Equal(before) {
			d.task.Load().Set(now)
			before = now
		}
		select {
		case <-changed:
		case <-document:
		case <-look:
			d.lease.setLate(reported(d.status().Status))
			look = time.After(spread(lookInterval * time.Duration(d.table.Crowd())))
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
		Members: d.table.members(), Keys: d.ring.current().Beats(),
		Timing: watch.Timing{Interval: settings.Heartbeat, Missed: settings.Missed},
	}
}

// status returns how the detector fares. It is empty before Run.
func (d *detection) status() detector.Status {
	if task := d.task.Load(); task != nil {
		return task.Status()
	}
	return detector.Status{}
}

// diagnosis returns how the detector fares. Nil: it does not run.
func (d *detection) diagnosis() *diagnose.Detection {
	s := d.status()
	if s.Interval == 0 {
		return nil
	}
	all := &diagnose.Detection{
		Heartbeat: s.Interval.Milliseconds(), Silence: s.Allowance().Milliseconds(), RealTime: s.RealTime, Late: lateOf(s.Hour),
		Watchers: s.Watchers, Accused: s.Accused, AccusedAt: s.AccusedAt,
	}
	for _, w := range s.Watched {
		all.Watched = append(all.Watched, diagnose.Watched{Node: w.Name, Heartbeat: w.Interval.Milliseconds(), Late: w.Late.Milliseconds(),
			Silent: w.Silent.Milliseconds()})
	}
	for _, l := range s.Lost {
		all.Lost = append(all.Lost, diagnose.Loss{Node: l.Name, At: l.At, Silent: l.Silence.Milliseconds()})
	}
	return all
}

func lateOf(l watch.Lateness) report.Late {
	return report.Late{Milliseconds: l.Most.Milliseconds(), At: l.At, Times: l.Times}
}

// reported returns how late the detector was, as our Lease has it. It is empty unless the loop was later than the watchers
// wait. Each change of a Lease goes to all speakers, so the number of times is rounded down to a power of two.
func reported(s watch.Status) (l report.Late) {
	if s.Hour.Most > s.Allowance() && s.Hour.Times > 0 {
		l = lateOf(s.Hour)
		l.Times = 1 << (bits.Len(uint(l.Times)) - 1)
	}
	return l
}

// members returns the other speakers that take part in the failure detection, by name. As long as this node has no Lease it is no
// member for the others, and they are none here: nobody would answer it.
func (t *table) members() (all []watch.Member) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.listed {
		return nil
	}
	for node, p := range t.peers {
		if p.takesPart() {
			all = append(all, p.member(node, addressIn(p.met)))
		}
	}
	slices.SortFunc(all, watch.Member.Compare)
	return all
}
