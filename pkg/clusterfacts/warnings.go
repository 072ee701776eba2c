package clusterfacts

import (
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// maxWarnings is how many ranges of a pool, or of what is not used, are named; the others are counted.
const maxWarnings = 5

// Warnings returns what the operator should know about the document: PoolWarnings, and what
// nothing uses.
func Warnings(cfg *config.Config, f *Facts) []string {
	return append(PoolWarnings(cfg, f), unused(cfg)...)
}

// unused returns the advertisements that no pool takes, and the peers that no advertisement
// sends to.
func unused(cfg *config.Config) []string {
	named, all := map[string]bool{}, len(cfg.Pools) == 0
	for i := range cfg.Pools {
		all = all || len(cfg.Pools[i].Advertise) == 0
		for _, name := range cfg.Pools[i].Advertise {
			named[name] = true
		}
	}
	var advertisements, peers []string
	reached, allPeers := map[string]bool{}, false
	for _, a := range cfg.Advertisements {
		if !all && !named[a.Name] {
			advertisements = append(advertisements, fmt.Sprintf("advertisement %q announces nothing: no pool has it in advertise", a.Name))
		} else if a.BGP != nil {
			allPeers = allPeers || len(a.BGP.Peers) == 0
			for _, name := range a.BGP.Peers {
				reached[name] = true
			}
		}
	}
	for _, p := range cfg.Peers {
		if !allPeers && !reached[p.Name] && (cfg.Routes == nil || !cfg.Routes.AdvertisesTo(p.Name)) {
			peers = append(peers, fmt.Sprintf("peer %q gets no routes: no advertisement that a pool has sends to it by bgp, nor are "+
				"the pods' routes for it", p.Name))
		}
	}
	return append(few(advertisements, "advertisements that announce nothing"), few(peers, "peers that get no routes")...)
}

// few returns some of the warnings, and how many more there are.
func few(warnings []string, of string) []string {
	if more := len(warnings) - maxWarnings; more > 0 {
		warnings = append(warnings[:maxWarnings], fmt.Sprintf("%d more %s", more, of))
	}
	return warnings
}

// PoolWarnings returns what the operator should know about the pools, in their order: which of
// their addresses they never hand out, and which no neighbour would ask for. It does not
// mention excluded addresses, nor those that every segment has, because a pool may be as wide
// as its segment.
func PoolWarnings(cfg *config.Config, f *Facts) []string {
	withheld := intersect(cfg.Pools, mistakes(cfg, f))
	segments, beyond := merged(f.Segments), beyondSegments(cfg)
	var all []string
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		all = append(all, withheld[i].warnings(p.Name)...)
		if f.Segments == nil || beyond.announce(p) || cfg.AnnouncedByOthers() {
			continue
		}
		if w, ok := offSegment(p, segments); ok {
			all = append(all, w)
		}
	}
	return all
}

// mistakes are the ranges that pools should not contain.
func mistakes(cfg *config.Config, f *Facts) []Forbidden {
	usual := map[netipx.IPRange]bool{}
	for _, s := range f.Segments {
		for _, c := range ownOf(s) {
			usual[c.IPRange] = true
		}
	}
	return slices.DeleteFunc(Forbid(cfg, f), func(x Forbidden) bool { return usual[x.Range] })
}

// piece is a part of a pool, or of a segment.
type piece struct {
	netipx.IPRange
	pool int
}

// overlapping returns the pieces, which are sorted and disjoint, that share an
// address with the range.
func overlapping(sorted []piece, r netipx.IPRange) []piece {
	from, _ := slices.BinarySearchFunc(sorted, r.From(), func(p piece, a netip.Addr) int { return p.To().Compare(a) })
	rest := sorted[from:]
	to, found := slices.BinarySearchFunc(rest, r.To(), func(p piece, a netip.Addr) int { return p.From().Compare(a) })
	if found {
		to++
	}
	return rest[:to]
}

// overlaps are the parts of a pool that are in forbidden ranges.
type overlaps struct {
	named []Forbidden // at most maxWarnings
	total int
	last  int // the latest of the forbidden ranges
}

// intersect returns the overlaps of each pool.
func intersect(pools []config.Pool, forbidden []Forbidden) []overlaps {
	var pieces []piece
	for i := range pools {
		pieces = append(pieces, piecesOf(pools[i].Free, i)...)
	}
	slices.SortFunc(pieces, func(p, q piece) int { return p.From().Compare(q.From()) })
	all := make([]overlaps, len(pools))
	for number, f := range forbidden {
		for _, p := range overlapping(pieces, f.Range) {
			from := slices.MaxFunc([]netip.Addr{p.From(), f.Range.From()}, netip.Addr.Compare)
			to := slices.MinFunc([]netip.Addr{p.To(), f.Range.To()}, netip.Addr.Compare)
			all[p.pool].add(number+1, Forbidden{Range: netipx.IPRangeFrom(from, to), Why: f.Why})
		}
	}
	return all
}

// add notes an overlap. Overlaps with the same forbidden range come one after another, and are
// joined into one.
func (o *overlaps) add(number int, f Forbidden) {
	switch named := len(o.named); {
	case o.last == number && o.total > maxWarnings:
	case o.last == number:
		o.named[named-1].Range = netipx.IPRangeFrom(o.named[named-1].Range.From(), f.Range.To())
	default:
		o.last = number
		o.total++
		if named < maxWarnings {
			o.named = append(o.named, f)
		}
	}
}

func (o *overlaps) warnings(pool string) []string {
	var all []string
	for _, f := range o.named {
		all = append(all, fmt.Sprintf("pool %q contains %s, %s: it is never handed out; exclude it to silence this", pool,
			config.RangeText(f.Range), f.Why))
	}
	if more := o.total - len(o.named); more > 0 {
		all = append(all, fmt.Sprintf("pool %q contains %d more addresses or ranges that are never handed out", pool, more))
	}
	return all
}

// names are the names of some advertisements.
type names map[string]bool

// beyondSegments returns the advertisements that announce VIPs to others than the neighbours
// on their segment, or that are meant for other segments.
func beyondSegments(cfg *config.Config) names {
	all := names{}
	for _, a := range cfg.Advertisements {
		if a.BGP != nil || a.Layer2 == nil || a.Layer2.AnySegment {
			all[a.Name] = true
		}
	}
	return all
}

// announce reports whether one of the advertisements applies to the pool.
func (n names) announce(p *config.Pool) bool {
	if len(p.Advertise) == 0 {
		return len(n) > 0
	}
	return slices.ContainsFunc(p.Advertise, func(name string) bool { return n[name] })
}

// offSegment names the part of the pool that is on no segment.
func offSegment(p *config.Pool, segments []piece) (warning string, ok bool) {
	free := piecesOf(p.Free, 0)
	off := slices.DeleteFunc(p.Whole().Ranges(), func(r netipx.IPRange) bool {
		return len(overlapping(segments, r)) > 0 || len(overlapping(free, r)) == 0
	})
	if len(off) == 0 {
		return "", false
	}
	more := ""
	if len(off) > 1 {
		more = fmt.Sprintf(" and of %d more ranges", len(off)-1)
	}
	return fmt.Sprintf("pool %q: no node is on the segment of %s%s: the addresses are announced, but nobody asks for them unless a "+
		"router on a node's segment takes them for directly connected",
		p.Name, config.RangeText(off[0]), more), true
}

// merged returns the subnets as sorted and disjoint pieces.
func merged(subnets []netip.Prefix) []piece {
	var b netipx.IPSetBuilder
	for _, s := range subnets {
		b.AddPrefix(s)
	}
	set, _ := b.IPSet() // only valid prefixes go in
	return piecesOf(set, 0)
}

// piecesOf returns the ranges of a set as pieces of the pool.
func piecesOf(set *netipx.IPSet, pool int) []piece {
	var all []piece
	for _, r := range set.Ranges() {
		all = append(all, piece{r, pool})
	}
	return all
}
