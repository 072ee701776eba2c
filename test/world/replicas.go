package world

import (
	"fmt"
	"time"

	"github.com/lodestone-lb/lodestone/controller/leader"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
)

// The leader election, by the controller's defaults. A request for the Lease may take half of its renewal.
const (
	leaseTime, leaseRenewal, leaseRetry = 10 * time.Second, 7 * time.Second, time.Second
	leaseRequest                        = leaseRenewal / 2
)

// control are the replicas of the controller, of which one leads.
type control struct {
	*World
	replicas [2]*replica
	writes   int // the writes of all replicas to Services, without those about waiting for a lease
}

// replica is a process of the controller: the real Term of its lease, and what client-go's election does around it. What
// it does while it leads is in leader.go.
type replica struct {
	*World
	systemClock
	name             string
	life             int // counts the processes
	running, working bool
	resigned         bool // its requests for the Lease are cancelled
	// paused is set while the process does not run, and frozen has the functions that became due in that time. pausedAt
	// is when it was last paused.
	paused   bool
	frozen   []func()
	pausedAt time.Duration

	// seen is the Lease as the process last saw it, at seenAt.
	seen   lease
	seenAt time.Time
	term   *leader.Term

	leading
}

// lease is the leader Lease.
type lease struct {
	holder  string
	edition int // counts the writes
	length  time.Duration
}

func newControl(w *World) *control {
	c := &control{World: w}
	for i := range c.replicas {
		c.replicas[i] = &replica{World: w, name: fmt.Sprintf("controller-%d", i),
			systemClock: systemClock{world: w, ahead: w.upTo(time.Second), drift: w.random.Int64N(201) - 100}}
	}
	return c
}

// begin starts all replicas.
func (c *control) begin() {
	for _, r := range c.replicas {
		r.begin()
	}
}

// leader returns the replica that works as the leader; if none does, the one of that number.
func (c *control) leader(otherwise int) *replica {
	for _, r := range c.replicas {
		if r.working {
			return r
		}
	}
	return c.replicas[otherwise%len(c.replicas)]
}

// replace makes another replica lead.
func (c *control) replace() {
	r := c.leader(0)
	r.stop(func() { r.World.after(time.Second, r.begin) })
}

// identity is the process's name on the Lease.
func (r *replica) identity() string { return fmt.Sprintf("%s_%d", r.name, r.life) }

// begin starts the process, which stands for election.
func (r *replica) begin() {
	if r.running {
		return
	}
	r.life++
	r.running, r.paused, r.working, r.resigned, r.frozen = true, false, false, false, nil
	r.seen, r.seenAt = lease{}, time.Time{}
	r.term = leader.NewTerm(leaseTime, leader.Margin(leaseTime, leaseRenewal, servicelb.PatchTimeout))
	r.after(r.upTo(leaseRetry), r.stand)
}

// kill ends the process at once. Its requests that are under way may still be executed.
func (r *replica) kill() {
	r.life++
	r.record("%s: is gone", r.name)
	r.running, r.paused, r.working = false, false, false
	r.end()
}

// stop ends the process in order: it finishes its writes, and gives the lease back.
func (r *replica) stop(done func()) {
	r.record("%s: is stopped", r.name)
	r.working = false
	r.whenIdle(func() {
		r.resigned = true
		r.term.Resign()
		r.giveBack(func() { r.kill(); done() })
	})
}

// after runs do in the process after a time. A paused process runs it when it continues.
func (r *replica) after(d time.Duration, do func()) {
	life := r.life
	r.World.after(d, func() {
		if r.life == life {
			r.run(do)
		}
	})
}

// run runs do in the process, now or when it continues.
func (r *replica) run(do func()) {
	if r.paused {
		life := r.life
		r.frozen = append(r.frozen, func() {
			if r.life == life {
				do()
			}
		})
		return
	}
	do()
}

// pause suspends the process. The returned function continues it.
func (r *replica) pause() (resume func()) {
	life := r.life
	r.paused, r.pausedAt = true, r.now
	return func() {
		if r.life != life {
			return
		}
		r.record("%s: goes on", r.name)
		r.paused, r.pausedAt = false, r.now
		for len(r.frozen) > 0 && r.life == life {
			do := r.frozen[0]
			r.frozen = r.frozen[1:]
			do()
		}
	}
}

// stand tries to get the lease until the process has it. See package leaderelection of client-go.
func (r *replica) stand() {
	r.try(func(ok bool) {
		switch {
		case ok:
			r.record("%s: leads", r.name)
			r.after(leaseRetry, func() { r.renew(r.clock().Add(leaseRenewal)) })
			r.lead()
		default:
			r.after(leaseRetry+r.upTo(leaseRetry*6/5), r.stand)
		}
	})
}

// renew tries to renew the lease until the deadline, and begins anew after each success.
func (r *replica) renew(until time.Time) {
	r.try(func(ok bool) {
		switch {
		case ok:
			r.after(leaseRetry, func() { r.renew(r.clock().Add(leaseRenewal)) })
		case r.clock().Add(leaseRetry).Before(until):
			r.after(leaseRetry, func() { r.renew(until) })
		default:
			r.after(r.until(until), r.lost)
		}
	})
}

// lost ends a leader that could not renew its lease: it begins no more writes, and ends when the API server answers.
func (r *replica) lost() {
	r.record("%s: has lost the lease", r.name)
	r.working = false
	var wait func()
	wait = func() {
		if r.api.away[r.name] > 0 {
			r.after(time.Second, wait)
			return
		}
		r.kill()
		r.World.after(r.between(time.Second, 3*time.Second), r.begin)
	}
	r.giveBack(wait)
}

// try tries to get or to renew the lease.
func (r *replica) try(done func(ok bool)) {
	asked := r.clock()
	ours := func() bool { return r.seen.holder == r.identity() }
	valid := func() bool { return r.seenAt.Add(r.seen.length).After(asked) }
	take := func(then func(answer)) {
		r.putLease(lease{r.identity(), r.seen.edition, leaseTime}, func(a answer) {
			if a == fine {
				r.term.Granted(asked)
			}
			then(a)
		})
	}
	slowly := func() {
		r.getLease(func(a answer, now lease) {
			if a != fine {
				done(false)
				return
			}
			if now != r.seen {
				r.seen, r.seenAt = now, r.clock()
			}
			if now.holder != "" && valid() && !ours() {
				done(false)
				return
			}
			take(func(a answer) { done(a == fine) })
		})
	}
	if !ours() || !valid() {
		slowly()
		return
	}
	take(func(a answer) {
		if a == fine {
			done(true)
		} else {
			slowly()
		}
	})
}

// giveBack gives the lease back, if the process has it and may.
func (r *replica) giveBack(done func()) {
	r.getLease(func(a answer, now lease) {
		if a != fine || r.seen.holder != r.identity() || now.holder != r.identity() || !r.term.GivesBack() {
			done()
			return
		}
		r.seen = now
		r.putLease(lease{"", r.seen.edition, time.Second}, func(answer) { done() })
	})
}

func (r *replica) getLease(then func(answer, lease)) {
	var now lease
	r.ask(leaseRequest, func() answer { now = r.api.lease; return fine }, func(a answer) { then(a, now) })
}

// putLease writes the Lease, if the process has its last version.
func (r *replica) putLease(l lease, then func(answer)) {
	before := l.edition
	l.edition++
	r.ask(leaseRequest, func() answer {
		if r.api.lease.edition != before || l.holder != "" && r.resigned {
			return conflict
		}
		if l.holder == r.api.lease.holder && r.api.illness[illSlow] > 0 && r.chance(95) {
			return failed
		}
		if l.holder != r.api.lease.holder {
			r.record("the leader Lease: %q", l.holder)
		}
		r.api.lease = l
		return fine
	}, func(a answer) {
		if a == fine {
			r.seen, r.seenAt = l, r.clock()
		}
		then(a)
	})
}

// leaders are the replicas that work as the leader, by name.
func (c *control) leaders() (names []string) {
	for _, r := range c.replicas {
		if r.working {
			names = append(names, r.name)
		}
	}
	return names
}
