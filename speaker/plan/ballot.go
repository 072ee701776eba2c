package plan

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/rendezvous"
)

// ballot elects the owners of a scope's VIPs.
type ballot struct {
	tiers []tier // the most preferred first
	// claimants are the nodes that claim a bucket, sorted, by bucket. Nil: owners are not kept.
	claimants map[uint16][]string
}

// tier has the nodes of one weight. Load is balanced within a tier: it does not overrule preference.
type tier struct {
	weight int
	*rendezvous.Electorate
}

// elect returns the owner of the VIP among these nodes, which are sorted, "" if there is none. Nil: among all. If owners are
// kept, it is the node that claims the VIP. If several nodes claim it, one of them is elected: the claims are
// not up to date, a partition has just ended, or the nodes claim other VIPs of the same bucket.
func (b *ballot) elect(addr netip.Addr, among []string) string {
	if len(b.claimants) > 0 {
		claimants := b.claimants[report.Bucket(addr)]
		if among != nil {
			claimants = common(claimants, among)
		}
		if len(claimants) > 0 {
			if owner := b.firstOf(addr, claimants); owner != "" {
				return owner
			}
		}
	}
	return b.firstOf(addr, among)
}

// firstOf returns the owner of the VIP in the first tier that has one of these nodes. Nil: of all nodes.
func (b *ballot) firstOf(addr netip.Addr, among []string) string {
	for _, t := range b.tiers {
		if owner := t.OwnerAmong(addr, among); owner != "" {
			return owner
		}
	}
	return ""
}

// tiers returns the tiers of the candidates on the segment. able reports which of them are able. Where the last
// ballot has a tier of the same weight, its decisions are used again.
func (s *scope) tiers(last *ballot, able func(name string) bool) (tiers []tier) {
	byWeight := map[int]map[string]bool{}
	for name, c := range s.candidates {
		if c.elsewhere {
			continue
		}
		if byWeight[c.weight] == nil {
			byWeight[c.weight] = map[string]bool{}
		}
		byWeight[c.weight][name] = able(name)
	}
	for _, weight := range slices.Backward(slices.Sorted(maps.Keys(byWeight))) {
		tiers = append(tiers, tier{weight, last.electorate(weight, byWeight[weight])})
	}
	return tiers
}

// electorate returns the electorate of the nodes. It is made from the ballot's electorate of that weight, if
// there is one.
func (b *ballot) electorate(weight int, nodes map[string]bool) *rendezvous.Electorate {
	for _, t := range b.tiers {
		if t.weight == weight {
			return t.With(nodes)
		}
	}
	return rendezvous.New(nodes)
}

// readClaims returns the nodes that claim a bucket, sorted, by bucket.
func (s *scope) readClaims() map[uint16][]string {
	claimants := map[uint16][]string{}
	for _, name := range slices.Sorted(maps.Keys(s.candidates)) {
		claims := s.Nodes[name].Claims
		if claims == (report.Claims{}) {
			continue
		}
		for b := range report.Buckets {
			if claims.Has(b) {
				claimants[b] = append(claimants[b], name)
			}
		}
	}
	return claimants
}
