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

// The ways in which a server that is ill treats requests.
const (
	illBusy  = iota // refuses them for now
	illFails        // fails
	illMute         // does them, and does not answer
	illSlow         // does them late, and hardly renews the leader Lease
	illnesses
)

// retryAfter is what the server asks for that is busy.
const retryAfter = time.Second

// ask sends a request to the API server, which does it some time later, and hands on its answer. A client that gives up
// has it not done any more; what it has no answer to may have been done.
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

// ill reports whether the server treats a request in this way now.
func (a *api) ill(how int) bool { return a.illness[how] > 0 && a.chance(50) }

// write sends a request that changes something, as soon as the process certainly has the lease: see leader.Fence. It is
// repeated as client-go does when the server is busy.
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
