// Package ipam decides which address a Service gets. It is pure: no
// Kubernetes, no clock, no I/O. The caller passes the time in and serializes
// the calls.
package ipam

import (
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Family is an IP address family.
type Family string

// The address families, spelled as in Kubernetes' spec.ipFamilies.
const (
	IPv4 Family = "IPv4"
	IPv6 Family = "IPv6"
)

// Owner is who holds addresses: one incarnation of a Service.
type Owner struct {
	// UID identifies the owner. A re-created Service is another owner.
	UID string
	// Name is "namespace/name", for people.
	Name string
}

// Request is what a Service asks for.
type Request struct {
	Owner Owner
	// Namespace is the namespace of the Service.
	Namespace string
	// Families are the families wanted, primary first; one or two.
	Families []Family
	// RequireAll refuses the request when not every family can be had
	// (SingleStack, RequireDualStack). Otherwise (PreferDualStack) one family
	// is enough.
	RequireAll bool
	// Pools are the only pools to draw from, in order of preference. Empty:
	// every pool with AutoAssign, by priority.
	Pools []string
	// Addresses are the exact addresses wanted, at most one per family.
	// A family without one is filled from Pools.
	Addresses []netip.Addr
}

// Held is an address that an owner holds.
type Held struct {
	Addr netip.Addr
	// Pool is the pool that the address was drawn from or now lies in. Empty:
	// stranded, no pool hands it out any more.
	Pool string
}

// PoolStats are a pool's counters for one family. The counts of an IPv6 pool
// may exceed what an integer holds, hence float64.
type PoolStats struct {
	Pool   string
	Family Family
	// Size is how many addresses the pool may hand out; Free those of them
	// that can be given now; Assigned and Quarantined the others.
	Size, Free, Assigned, Quarantined float64
}

// Allocator gives addresses out of pools. The zero value is not usable: see
// New. It is not safe for concurrent use.
type Allocator struct{ impl }

// The methods, whose documentation is their contract:
//
//	New() *Allocator
//
//	// SetPools replaces the pools and the quarantine time. Addresses in use stay with their
//	// owners, also when no pool contains them any more (they are then stranded), and addresses in quarantine stay there.
//	(a) SetPools(pools []config.Pool, quarantine time.Duration)
//
//	// Restore records that owner already holds addr, without asking any pool: the state of a
//	// cluster is true before it is valid. It returns the present owner and false when the address is held by another.
//	(a) Restore(owner Owner, addr netip.Addr) (holder Owner, ok bool)
//
//	// Allocate makes owner hold what the request asks for and returns what it holds, in the order of req.Families.
//	// What owner holds already and what still fits the request stays (pool edits never move an address); what does
//	// not fit is given back (a dropped family, another requested address or pool). Calling it again with the same request
//	// changes nothing. On refusal (always a *Refusal) the owner keeps exactly what it held before.
//	(a) Allocate(req Request, now time.Time) ([]Held, error)
//
//	// Release frees everything that the owner holds; the addresses rest until now+quarantine.
//	(a) Release(uid string, now time.Time) []netip.Addr
//
//	// Holds returns what the owner holds; OwnerOf who holds an address.
//	(a) Holds(uid string) []Held
//	(a) OwnerOf(addr netip.Addr) (Owner, bool)
//
//	// NextFree returns when the next address leaves quarantine, and false if none rests.
//	(a) NextFree() (time.Time, bool)
//
//	// Stats returns counters of every pool and family the pool has, in order of the pools, at cost independent of the pools' sizes.
//	(a) Stats(now time.Time) []PoolStats
type impl struct {
	_ *config.Pool
	_ time.Time
}

// Reason is a stable code for why a request was refused: the same string in
// Events, conditions, metrics, logs and the CLI.
type Reason string

// The reasons.
const (
	PoolExhausted       Reason = "PoolExhausted"       // every eligible address is in use or resting
	PoolNotFound        Reason = "PoolNotFound"        // the requested pool does not exist
	PoolNotAllowed      Reason = "PoolNotAllowed"      // the pool is reserved for other namespaces
	NoPool              Reason = "NoPool"              // no pool at all is open to the Service
	FamilyUnavailable   Reason = "FamilyUnavailable"   // no eligible pool has addresses of the family
	AddressInUse        Reason = "AddressInUse"        // the requested address belongs to another Service
	AddressOutsidePools Reason = "AddressOutsidePools" // no pool, or not the requested one, contains the requested address
	AddressWithheld     Reason = "AddressWithheld"     // a pool contains the requested address but never hands it out
	AddressQuarantined  Reason = "AddressQuarantined"  // the requested address rests after its last use
	WrongFamily         Reason = "WrongFamily"         // the requested address is of a family the Service does not have
	InvalidRequest      Reason = "InvalidRequest"      // the request contradicts itself or cannot be read
)

// Refusal says why a request could not be met. It is the one source of what
// the user reads.
type Refusal struct {
	Reason Reason
	// Pool is the pool that the refusal is about, if it is about one.
	Pool string
	// Message is a sentence with the numbers in it.
	Message string
}

// Error returns reason and message.
func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Message }
