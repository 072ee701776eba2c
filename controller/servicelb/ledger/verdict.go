package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

// Verdict is the ledger's answer to a Service.
type Verdict struct {
	// Held is what the Service holds now, refused or not.
	Held []ipam.Held
	// Refusal is why it does not hold what it asks for; nil when it does.
	Refusal *ipam.Refusal
	// unreadable is set if the refusal is about what is written on the Service alone.
	unreadable bool
	// Undecided is set while there is no configuration to decide by. The object must then stay
	// as it is, as far as Held does not contradict it.
	Undecided bool
	// Missing is a family that the Service would like and does not get; empty
	// when there is none.
	Missing ipam.Family
	// Renumbered is set when the Service asked for new addresses and has them.
	Renumbered bool
	// Leases are the interfaces on which addresses in Held are leased.
	Leases map[netip.Addr]string
	// Overdue is why a lease is not being extended; nil when all is well.
	Overdue error
	// Asked is set when there is a refusal only because a DHCP server has not answered yet.
	Asked bool
	// Foreign are addresses that another load balancer gave, and that stay in
	// the Service's status although it does not hold them.
	Foreign []netip.Addr
	// Conflicts are those over addresses in Held, and Left those over addresses that the
	// Service has just left for that reason.
	Conflicts, Left []clusterfacts.Conflict
	// Records have to be durable before the Service's object shows what it holds now:
	// what it has given back goes into quarantine then.
	Records []quarantinestore.Record
	// GivenBack are addresses that the object may still show. Settle frees them.
	GivenBack []netip.Addr
}

// waits reports whether a later call may give a better answer, though the
// Service stays the same.
func (v Verdict) waits() bool {
	if v.Refusal != nil {
		return !v.unreadable && v.Refusal.Reason != ipam.WrongFamily
	}
	return v.Undecided || v.Missing != ""
}

// Stranded reports whether an address has left its pools.
func (v Verdict) Stranded() bool {
	return slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Pool == "" })
}

// Draining reports whether an address is of a pool that is to be emptied.
func (v Verdict) Draining() bool {
	return slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Draining })
}

// Holds reports whether the Service holds all of these addresses.
func (v Verdict) Holds(addrs ...netip.Addr) bool {
	return !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !holds(v.Held, a) })
}

// Has are sentences about what the Service holds, at least one.
func (v Verdict) Has() []string {
	if len(v.Held) == 0 {
		return []string{"nothing"}
	}
	has := descriptions(v.Held)
	for i, h := range v.Held {
		for _, d := range v.Conflicts {
			if d.VIP == h.Addr {
				has[i] += fmt.Sprintf(", which %s has, too", d)
			}
		}
	}
	return has
}

// Condition is what a person reads about the Service: reason and sentence. An empty
// reason: there is no configuration to decide by.
func (v Verdict) Condition() (reason, message string) {
	message = describe(v.Held)
	switch {
	case v.Undecided:
		return "", "there is no valid configuration; keeps " + message
	case v.Refusal != nil && len(v.Held) > 0:
		return string(v.Refusal.Reason), v.Refusal.Message + "; keeps " + message
	case v.Refusal != nil:
		return string(v.Refusal.Reason), v.Refusal.Message
	case len(v.Conflicts) > 0:
		return string(AddressConflict), message + "; " + claimed(v.Conflicts[0])
	case v.Stranded():
		return string(ReasonStranded), message + toMove
	case v.Overdue != nil:
		return string(ReasonLeaseOverdue), message + "; " + v.Overdue.Error()
	case v.Draining():
		return string(ReasonDraining), message + toMove
	case v.Missing != "":
		return string(ReasonPartial), message + fmt.Sprintf("; no pool gives it an %s address, which it would like, too", v.Missing)
	}
	return string(ReasonAllocated), message
}

// toMove is how a Service gets away from an address that it should leave.
const toMove = "; " + moving + " gives it another one"

// moving is how to ask for that.
const moving = "annotation " + annotation.Renumber + "=" + annotation.Renumbering

// String is the condition in one line.
func (v Verdict) String() string {
	reason, message := v.Condition()
	return strings.TrimPrefix(reason+": "+message, ": ")
}

// describe names addresses and their pools.
func describe(held []ipam.Held) string { return strings.Join(descriptions(held), " and ") }

func descriptions(held []ipam.Held) []string {
	var parts []string
	for _, h := range held {
		switch {
		case h.Pool == "":
			parts = append(parts, fmt.Sprintf("%s, which no pool gives any more: it is %s", h.Addr, h.Why))
		case h.Draining:
			parts = append(parts, fmt.Sprintf("%s from pool %q, which is draining", h.Addr, h.Pool))
		default:
			parts = append(parts, fmt.Sprintf("%s from pool %q", h.Addr, h.Pool))
		}
	}
	return parts
}

// missing returns the family that the Service would like and does not hold.
func missing(req ipam.Request, held []ipam.Held) ipam.Family {
	for _, f := range req.Families {
		if !slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr.Is4() == (f == ipam.IPv4) }) {
			return f
		}
	}
	return ""
}
