package world

import (
	"time"

	"github.com/lodestone-lb/lodestone/controller/leader"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
)

// answer is what the API server answers to a request.
type answer int

const (
	fine     answer = iota
	conflict        // 409: the object has changed
	missing         // 404, or another object of that name
	busy            // 429, with Retry-After
	failed          // 500
	lost            // none in time; whether it was done is not known
	fenced          // it was not sent
)

// The ways in which the API server fails requests.
const (
	illBusy  = iota // 429
	illFails        // 500
	illMute         // executes them, and does not answer
	illSlow         // executes them late, and hardly renews the leader Lease
	illnesses
)

// retryAfter is the Retry-After of a busy server.
const retryAfter = time.Second

// ask sends a request to the API server, which executes do some time later, and passes the answer on. If the client gives up
// before, the request is not executed. If there is no answer, it may have been executed.
func (r *replica) ask(timeout time.Duration, do func() answer, then func(answer)) {
	over, life := false, r.life
	end := func(a answer) {
		if !over {
			over = true
			then(a)
		}
	}
	latency := func() time.Duration { return r.between(500*time.Microsecond, 25*time.Millisecond) }
	reply := func(a answer) {
		if r.api.away[r.name] == 0 && r.life == life {
			r.after(latency(), func() { end(a) })
		}
	}
	apply := func() {
		if a := do(); !r.api.ill(illMute) {
			reply(a)
		}
	}
	r.World.after(latency(), func() {
		switch {
		case r.api.away[r.name] > 0: // the connection is refused, or hangs
			if r.life == life && r.chance(30) {
				r.after(0, func() { end(failed) })
			}
		case r.api.ill(illBusy):
			reply(busy)
		case r.api.ill(illFails):
			reply(failed)
		case timeout != leaseRequest && r.api.illness[illSlow] > 0:
			r.World.after(r.upTo(servicelb.PatchTimeout), func() {
				if !over && r.life == life {
					apply()
				}
			})
		default:
			apply()
		}
	})
	r.after(timeout, func() { end(lost) })
}

// ill reports whether the server fails a request in this way now.
func (a *api) ill(how int) bool { return a.illness[how] > 0 && a.chance(50) }

// write sends a request that changes something, as soon as the process certainly has the lease; see leader.Fence. If the
// server is busy, the request is repeated, as by client-go.
func (r *replica) write(do func() answer, then func(answer)) {
	until, me := r.clock().Add(servicelb.PatchTimeout), r.identity()
	var attempt func()
	attempt = func() {
		left := until.Sub(r.clock())
		switch {
		case left <= 0:
			then(fenced)
		case !r.term.Holds(r.clock()):
			r.after(min(left, leader.Look), attempt)
		default:
			r.ask(left, func() answer { r.checks.controllerWrites(me); return do() }, func(a answer) {
				if a == busy {
					r.after(min(r.until(until), retryAfter), attempt)
					return
				}
				then(a)
			})
		}
	}
	attempt()
}
