package ipam

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// Reason is a stable code for why a request was refused: the same string in
// Events, conditions, metrics, logs and the CLI.
type Reason string

// The reasons, which Reasons explains.
const (
	PoolExhausted       Reason = "PoolExhausted"
	PoolNotFound        Reason = "PoolNotFound"
	PoolNotAllowed      Reason = "PoolNotAllowed"
	PoolDraining        Reason = "PoolDraining"
	QuotaExceeded       Reason = "QuotaExceeded"
	NoPool              Reason = "NoPool"
	FamilyUnavailable   Reason = "FamilyUnavailable"
	SharingConflict     Reason = "SharingConflict"
	AddressInUse        Reason = "AddressInUse"
	AddressReserved     Reason = "AddressReserved"
	AddressOutsidePools Reason = "AddressOutsidePools"
	AddressWithheld     Reason = "AddressWithheld"
	AddressForbidden    Reason = "AddressForbidden"
	AddressQuarantined  Reason = "AddressQuarantined"
	RequestNotAllowed   Reason = "RequestNotAllowed"
	WrongFamily         Reason = "WrongFamily"
	InvalidRequest      Reason = "InvalidRequest"

	// NotAutoAssigned and PoolNotNamed are only in a Consideration.
	NotAutoAssigned Reason = "NotAutoAssigned"
	PoolNotNamed    Reason = "PoolNotNamed"
)

// Reasons explains each Reason.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		PoolExhausted: {Cause: "Every address that the Service may have is in use, reserved, or in quarantine after its last use.",
			Cure: "Widen a pool, delete a Service that is not needed, or wait for addresses in quarantine, which lasts as long as the " +
				"configuration's quarantine or the pool's keepFor, whichever is longer.",
			Keys: []string{"quarantine", "pools[].keepFor"}},
		PoolNotFound: {Cause: "The Service names a pool that the configuration does not have.",
			Cure: "Name a pool that exists, or add the pool to the configuration."},
		PoolNotAllowed: {Cause: "The pool is closed to the Service, by its namespace or by labels.",
			Cure: "Open the pool to the Service (namespaces, namespaceSelector, serviceSelector), or name another pool.",
			Keys: []string{"pools[].namespaces", "pools[].namespaceSelector", "pools[].serviceSelector"}},
		PoolDraining: {Cause: "The pool gives no new addresses.", Cure: "Name another pool, or set the pool's state to active.",
			Keys: []string{"pools[].state"}},
		NoPool: {Cause: "The Service names no pool, and no pool is open to every Service or to this one.",
			Cure: "Name a pool (annotation lodestone.io/address-pool), or open one to the Service.",
			Keys: []string{"lodestone.io/address-pool"}},
		FamilyUnavailable: {Cause: "No pool that is open to the Service has addresses of the family.",
			Cure: "Add addresses of the family to a pool, or ask for the other family (spec.ipFamilies, spec.ipFamilyPolicy)."},
		QuotaExceeded: {Cause: "The namespace uses as many addresses of the pool as its namespaceQuota allows; those in quarantine " +
			"after their last use count, too.", Cure: "Delete a Service of the namespace that is not needed and wait for the end of its " +
			"quarantine, or raise the pool's namespaceQuota.", Keys: []string{"pools[].namespaceQuota"}},
		AddressInUse: {Cause: "The requested address belongs to another Service.",
			Cure: "Ask for another address, or free this one. Two Services can share one with annotation lodestone.io/sharing-key.",
			Keys: []string{"lodestone.io/sharing-key"}},
		AddressOutsidePools: {Cause: "No pool contains the requested address, or not the pool that the Service names.",
			Cure: "Ask for an address of a pool, or add the address to one."},
		AddressWithheld: {Cause: "A pool contains the requested address but never hands it out: it is excluded, or the first or last of " +
			"an IPv4 prefix.", Cure: "Ask for another address, or change the pool's exclude or useFirstAndLast.",
			Keys: []string{"pools[].exclude", "pools[].useFirstAndLast"}},
		AddressForbidden: {Cause: "A pool contains the requested address, which something else uses: a node, a gateway or BGP peer, pods, " +
			"or a Service of another load balancer.", Cure: "Ask for another address: the message names what uses this one."},
		AddressReserved: {Cause: "The configuration reserves the address for another Service.",
			Cure: "Ask for another address, or change the configuration's reservations.", Keys: []string{"reservations"}},
		AddressQuarantined: {Cause: "The requested address was another Service's until just now, and is in quarantine.",
			Cure: "Ask for another one, or wait until the quarantine is over: it lasts as long as the configuration's quarantine or the " +
				"pool's keepFor, whichever is longer.", Keys: []string{"quarantine", "pools[].keepFor"}},
		RequestNotAllowed: {Cause: "The pool has requesters, and the Service's namespace is not among them.",
			Cure: "Take any address of the pool (remove annotation lodestone.io/addresses), or add the namespace to the pool's requesters.",
			Keys: []string{"pools[].requesters", "lodestone.io/addresses"}},
		SharingConflict: {Cause: "The Service cannot share the address that others hold under its sharing key: they use one of its " +
			"ports, have other pods, or are 1,000 already.",
			Cure: "Use other ports, or another sharing key, or no key for an address of its own."},
		WrongFamily: {Cause: "The requested address is of a family that the Service does not have.",
			Cure: "Ask for an address of the Service's families, or change spec.ipFamilies."},
		InvalidRequest: {Cause: "The Service's annotations cannot be read, or contradict each other or spec.loadBalancerIP.",
			Cure: "Correct what the message names."},
		NotAutoAssigned: {Cause: "Only lodestone explain shows it: the pool has autoAssign: false, and is for Services that name it.",
			Cure: "Name the pool (annotation lodestone.io/address-pool) if the Service is to draw from it.",
			Keys: []string{"pools[].autoAssign", "lodestone.io/address-pool"}},
		PoolNotNamed: {Cause: "Only lodestone explain shows it: the Service names other pools.",
			Cure: "Name this pool, too, if the Service is to draw from it."},
	}
}

// Refusal is why a request could not be met. It is the one source of what
// the user reads.
type Refusal struct {
	Reason Reason
	// Pool is the pool that the refusal is about, if it is about one.
	Pool string
	// Message is a sentence with the numbers in it. It may count (2 in quarantine,
	// the next is free in 12s): see Same.
	Message string

	// fact is the message without what counts, if anything does.
	fact string
}

// Error returns reason and message.
func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Message }

// Same reports whether the two differ in figures at most: how much is in use, and times that
// count down. Two nil refusals are the same.
func (r *Refusal) Same(s *Refusal) bool {
	if r == nil || s == nil {
		return r == s
	}
	return r.Reason == s.Reason && r.Pool == s.Pool && r.facts() == s.facts()
}

func (r *Refusal) facts() string {
	if r.fact != "" {
		return r.fact
	}
	return r.Message
}

// Behind returns a refusal for another reason. Its message is the text and then
// the message of this one.
func (r *Refusal) Behind(reason Reason, text string) *Refusal {
	return &Refusal{Reason: reason, Pool: r.Pool, Message: text + r.Message, fact: text + r.facts()}
}

// byHope orders the reasons why a Service does not get an address. Of several, the last one in
// this order is reported, because it is the closest to an address.
var byHope = []Reason{
	NoPool, PoolNotFound, FamilyUnavailable, PoolNotAllowed, PoolDraining,
	PoolExhausted, QuotaExceeded, AddressInUse, SharingConflict, AddressReserved,
}

func hope(r Reason) int { return slices.Index(byHope, r) }

// listed is how many things a sentence lists before "and N more".
const listed = 5

func refuse(reason Reason, pool, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Pool: pool, Message: fmt.Sprintf(format, args...)}
}

// wording is a message, and the same message without the figures that change with time.
type wording struct {
	message, fact strings.Builder
	asides        int
	// counts is set while figures are added, which are no facts.
	counts bool
}

func (w *wording) add(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.message.WriteString(text)
	if !w.counts {
		w.fact.WriteString(text)
	}
}

// aside adds something to the parentheses after a sentence.
func (w *wording) aside(format string, args ...any) {
	if w.asides++; w.asides == 1 {
		w.add(" (")
	} else {
		w.add("; ")
	}
	w.add(format, args...)
}

func (w *wording) endAsides() {
	if w.asides > 0 {
		w.add(")")
	}
	w.asides = 0
}

// describeFree writes when something is free.
func (w *wording) describeFree(left time.Duration) {
	left = (left + time.Second - 1).Truncate(time.Second)
	w.message.WriteString(" free in " + left.String())
}

func (w *wording) refuse(reason Reason, pool string) *Refusal {
	return &Refusal{Reason: reason, Pool: pool, Message: w.message.String(), fact: w.fact.String()}
}

// quoted lists the first few names.
func quoted(names []string) string {
	var shown []string
	for _, n := range names[:min(len(names), listed)] {
		shown = append(shown, strconv.Quote(n))
	}
	return strings.Join(shown, ", ") + more(len(names))
}

// more is the end of a list of which the first few were listed.
func more(n int) string {
	if n <= listed {
		return ""
	}
	return fmt.Sprintf(" and %d more", n-listed)
}
