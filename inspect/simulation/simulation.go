// Package simulation asks what controller and speakers do, or would do: it builds
// the ledger that a controller would have and the plans that speakers would make,
// and throws them away. It needs none of them to run, and changes nothing.
//
// The files, from the outside in:
//
//	simulation.go  Cluster: what the controller would give each Service
//	explain.go     why it would
//	network.go     Network: what the speakers would announce
//	removal.go     what they would announce without a node, and which VIPs move
package simulation

import (
	"cmp"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Cluster is a cluster as the API describes it at one moment: everything that
// a controller decides by, except the answers of DHCP servers. Leased addresses are
// those that Services show.
type Cluster struct {
	Scope    kube.Scope
	Services []*corev1.Service
	// Config is the configuration in force; nil: there is none.
	Config *config.Config
	Facts  *clusterfacts.Facts
	// NamespaceLabels are the labels of each namespace.
	NamespaceLabels map[string]map[string]string
	// Records are the addresses in quarantine.
	Records []quarantinestore.Record
	Now     time.Time
}

// ledger returns the ledger of a controller that has just started and has
// looked at every Service once, and its answer to each.
func (c *Cluster) ledger() (*ledger.Ledger, map[string]ledger.Verdict) {
	l := c.primed()
	return l, c.ensureAll(l)
}

// primed returns the ledger of a controller that has just started.
func (c *Cluster) primed() *ledger.Ledger {
	l := ledger.New(c.Scope)
	l.Prime(ledger.Start{Situation: c.situation(c.Config), Services: c.Services, NamespaceLabels: c.labels, Records: c.Records}, c.Now)
	return l
}

// InQuarantine returns the released addresses that no other Service is given yet.
func (c *Cluster) InQuarantine() []ipam.Quarantined { return c.primed().InQuarantine(c.Now) }

func (c *Cluster) labels(namespace string) map[string]string { return c.NamespaceLabels[namespace] }

// situation is the cluster with a configuration, which may be nil.
func (c *Cluster) situation(cfg *config.Config) ledger.Situation {
	s := ledger.Situation{Config: cfg, Facts: c.Facts}
	if cfg == nil {
		s.Err = kube.ErrNoConfig
	}
	return s
}

// ensureAll looks at every Service that is served, older ones first.
func (c *Cluster) ensureAll(l *ledger.Ledger) map[string]ledger.Verdict {
	served := slices.DeleteFunc(slices.Clone(c.Services), func(svc *corev1.Service) bool { return !c.Scope.Serves(svc) })
	slices.SortFunc(served, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(ledger.NameOf(a), ledger.NameOf(b)))
	})
	verdicts := map[string]ledger.Verdict{}
	for _, svc := range served {
		verdicts[ledger.NameOf(svc)] = l.Ensure(svc, c.labels(svc.Namespace), c.Now)
	}
	return verdicts
}

// Allocation is how pools and Services stand.
type Allocation struct {
	// Pools are the counters of the pools, without those that lease their
	// addresses.
	Pools []ipam.PoolStats
	// Verdicts are the answers to all Services that are served, by name.
	Verdicts map[string]ledger.Verdict
}

// Allocation returns what the controller answers every Service.
func (c *Cluster) Allocation() Allocation {
	l, verdicts := c.ledger()
	return Allocation{l.Stats(c.Now).Pools, verdicts}
}

// Change is what an edit of the configuration does to one Service.
type Change string

// The changes.
const (
	Kept      Change = "kept"      // nothing
	Lost      Change = "lost"      // its leased address goes back to the DHCP server
	Stranded  Change = "stranded"  // it keeps an address that no pool gives any more
	Settled   Change = "settled"   // its stranded address is in a pool again
	Satisfied Change = "satisfied" // it gets what it was waiting for
	Refused   Change = "refused"   // what it asks for is refused now
	Pending   Change = "pending"   // it waits, as before
)

// Outcome is what an edit does to one Service.
type Outcome struct {
	// Service is "namespace/name".
	Service       string
	Change        Change
	Before, After ledger.Verdict
}

// Plan returns what the configuration would do to every Service that is
// served, in the order of their names. It is the code that the controller
// runs, on a ledger that is thrown away. Without a configuration in force, nothing
// was stranded before.
func (c *Cluster) Plan(next *config.Config) []Outcome {
	l, before := c.ledger()
	l.Follow(c.situation(next), c.Now)
	var outcomes []Outcome
	for name, after := range c.ensureAll(l) {
		stranded := c.Config != nil && before[name].Stranded()
		outcomes = append(outcomes, Outcome{name, changeOf(before[name], after, stranded), before[name], after})
	}
	slices.SortFunc(outcomes, func(a, b Outcome) int { return cmp.Compare(a.Service, b.Service) })
	return outcomes
}

// changeOf compares two verdicts; stranded is set if the Service was.
func changeOf(before, after ledger.Verdict, stranded bool) Change {
	switch {
	case !after.Holds(slices.Collect(maps.Keys(before.Leases))...):
		return Lost
	case after.Stranded() && !stranded:
		return Stranded
	case after.Refusal != nil && before.Refusal == nil:
		return Refused
	case after.Refusal != nil:
		return Pending
	case before.Refusal != nil, len(after.Held) > len(before.Held):
		return Satisfied
	case stranded && !after.Stranded():
		return Settled
	}
	return Kept
}
