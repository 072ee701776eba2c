package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Reason is a stable code for why a request was refused: the same string in
// Events, conditions, metrics, logs and the CLI.
type Reason string

// The reasons.
const (
	PoolExhausted       Reason = "PoolExhausted"       // every eligible address is in use or resting
	PoolNotFound        Reason = "PoolNotFound"        // no requested pool exists
	PoolNotAllowed      Reason = "PoolNotAllowed"      // the pool is reserved for other namespaces
	NoPool              Reason = "NoPool"              // no pool at all is open to the Service
	FamilyUnavailable   Reason = "FamilyUnavailable"   // no eligible pool has addresses of the family
	AddressInUse        Reason = "AddressInUse"        // the requested address belongs to another Service
	AddressOutsidePools Reason = "AddressOutsidePools" // no pool, or not the requested one, contains the requested address
	AddressWithheld     Reason = "AddressWithheld"     // a pool contains the requested address but never hands it out
	AddressQuarantined  Reason = "AddressQuarantined"  // the requested address rests after its last use by another Service
	WrongFamily         Reason = "WrongFamily"         // the requested address is of a family the Service does not have
	InvalidRequest      Reason = "InvalidRequest"      // the request contradicts itself or cannot be read
)

// Refusal says why a request could not be met. It is the one source of what
// the user reads.
type Refusal struct {
	Reason Reason
	// Pool is the pool that the refusal is about, if it is about one.
	Pool string
	// Message is a sentence with the numbers in it. It may count down (free
	// in 12s): compare reasons, not messages, to see whether a refusal is
	// new.
	Message string
}

// Error returns reason and message.
func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Message }

// byHope orders the reasons why a pool does not give an address: of several
// pools, the one closest to giving one says the reason.
var byHope = []Reason{PoolNotFound, FamilyUnavailable, PoolNotAllowed, PoolExhausted}

// listed is how many things a sentence lists before "and N more".
const listed = 5

func refuse(reason Reason, pool, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Pool: pool, Message: fmt.Sprintf(format, args...)}
}

func refuseWithheld(addr netip.Addr, p *pool) *Refusal {
	why := "excluded"
	if addr.Is4() {
		why += ", or the first or last address of an IPv4 prefix"
	}
	return refuse(AddressWithheld, p.Name, "%s is in pool %q but is never handed out (%s)", addr, p.Name, why)
}

// refuseAll refuses a request of which no family can be had: by the family
// that is closest to it.
func (a *Allocator) refuseAll(p *plan) *Refusal {
	var nearest *Refusal
	for _, f := range p.req.Families {
		r := a.refuseDraw(p, f)
		if nearest == nil || slices.Index(byHope, r.Reason) > slices.Index(byHope, nearest.Reason) {
			nearest = r
		}
	}
	return nearest
}

// refuseDraw says why no pool gives an address of the family: what is the
// matter with each pool that the Service may draw from.
func (a *Allocator) refuseDraw(p *plan, f Family) *Refusal {
	named := len(p.req.Pools) > 0
	hope, considered, about := -1, 0, ""
	var said []string
	for i := range a.candidates(&p.req) {
		q := a.candidate(&p.req, i)
		reason := q.refusal(p.req.Namespace, f)
		if !named && reason == PoolNotAllowed {
			continue
		}
		hope = max(hope, slices.Index(byHope, reason))
		if considered++; considered > listed {
			continue
		}
		if named {
			about = p.req.Pools[i]
		} else {
			about = q.Name
		}
		said = append(said, q.sentence(reason, about, p, f))
	}
	if considered == 0 {
		return a.refuseNoPool(p.req.Namespace)
	}
	if considered > 1 {
		about = ""
	}
	if considered > listed {
		said = append(said, fmt.Sprintf("and %d more", considered-listed))
	}
	return refuse(byHope[hope], about, "%s", strings.Join(said, "; "))
}

// refusal is why a pool, which may not exist, does not give an address.
func (p *pool) refusal(namespace string, f Family) Reason {
	switch {
	case p == nil:
		return PoolNotFound
	case !p.Allows(config.Subject{Namespace: namespace}):
		return PoolNotAllowed
	case p.spaces[f.index()] == nil:
		return FamilyUnavailable
	}
	return PoolExhausted
}

// sentence puts the refusal of one pool into words.
func (p *pool) sentence(reason Reason, name string, to *plan, f Family) string {
	switch reason {
	case PoolNotFound:
		return fmt.Sprintf("there is no pool %q", name)
	case PoolNotAllowed:
		return fmt.Sprintf("pool %q %s", name, p.closedTo(to.req.Namespace))
	case FamilyUnavailable:
		return fmt.Sprintf("pool %q has no %s addresses", name, f)
	}
	s := p.spaces[f.index()]
	text := fmt.Sprintf("pool %q has 0 of %.0f %s addresses free", name, s.size, f)
	switch {
	case s.resting == 1:
		text += fmt.Sprintf(" (1 is in quarantine, it is free in %s)", wait(s.queue.head.until, to.now))
	case s.resting > 1:
		text += fmt.Sprintf(" (%d are in quarantine, the next is free in %s)", s.resting, wait(s.queue.head.until, to.now))
	}
	return text
}

func (p *pool) closedTo(namespace string) string {
	return fmt.Sprintf("is not open to namespace %q, only to %s", namespace, quoted(p.Namespaces))
}

// refuseNoPool is for a Service that names no pool where none is open to all.
func (a *Allocator) refuseNoPool(namespace string) *Refusal {
	if len(a.pools) == 0 {
		return refuse(NoPool, "", "there are no pools")
	}
	off := len(a.pools) - len(a.auto)
	return refuse(NoPool, "", "none of %d pools is open to namespace %q: %d with autoAssign off, %d for other namespaces",
		len(a.pools), namespace, off, len(a.auto))
}

// quoted lists the first few names.
func quoted(names []string) string {
	var said []string
	for _, n := range names[:min(len(names), listed)] {
		said = append(said, strconv.Quote(n))
	}
	text := strings.Join(said, ", ")
	if more := len(names) - listed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// wait is the time until then in whole seconds, rounded up.
func wait(until, now time.Time) string {
	return (until.Sub(now) + time.Second - 1).Truncate(time.Second).String()
}
