package plan

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// routeTable has the routes that follow from the VIPs of each offer.
type routeTable struct {
	permit *netipx.IPSet // everything that may be announced. Nil: everything may

	aggregates map[aggregateKey]*aggregate
	inside     map[poolPrefix]bool       // whether all of a prefix is of the pool, and may be announced
	offers     map[netip.Prefix][]*offer // those that announce a prefix, in the order of the document
	routes     map[netip.Prefix]Route
	byOffers   map[string]Route // the routes by the indices of their offers
	// unsettled are the aggregates, and stale the prefixes, that changed since settle.
	unsettled map[*aggregate]bool
	stale     map[netip.Prefix]bool
}

type poolPrefix struct {
	pool   *config.Pool
	prefix netip.Prefix
}

// aggregate is a prefix with the VIPs that an offer covers.
type aggregate struct {
	aggregateKey
	assigned int
	served   map[netip.Addr]bool // the VIPs that this node announces
	added    []netip.Addr        // the VIPs that came to served since settle
	whole    bool                // the prefix is announced, and not its VIPs
}

type aggregateKey struct {
	offer  *offer
	prefix netip.Prefix
}

// reset removes all offers. Routes stay until settle.
func (t *routeTable) reset(permit *netipx.IPSet) {
	t.permit, t.inside, t.byOffers = permit, map[poolPrefix]bool{}, map[string]Route{}
	t.aggregates, t.offers = map[aggregateKey]*aggregate{}, map[netip.Prefix][]*offer{}
	t.unsettled, t.stale = map[*aggregate]bool{}, map[netip.Prefix]bool{}
	for prefix := range t.routes {
		t.stale[prefix] = true
	}
}

// join adds a VIP to those of the offer.
func (t *routeTable) join(o *offer, addr netip.Addr, p place) {
	g := t.aggregate(o, addr, p.pool)
	if g == nil {
		if p.served {
			t.announce(host(addr), o)
		}
		return
	}
	g.assigned++
	if p.served {
		g.served[addr] = true
		g.added = append(g.added, addr)
	}
	t.unsettled[g] = true
}

// leave removes a VIP from those of the offer.
func (t *routeTable) leave(o *offer, addr netip.Addr, p place) {
	t.withdraw(host(addr), o)
	if g := t.aggregate(o, addr, p.pool); g != nil {
		g.assigned--
		delete(g.served, addr)
		t.unsettled[g] = true
	}
}

// aggregate returns the aggregate of a VIP, or nil if the VIP is announced by itself. That is so if the
// document asks for it, if the pool does not contain the whole prefix, as with a leased VIP or one that is
// outside its pool, or if the prefix is not permitted.
func (t *routeTable) aggregate(o *offer, addr netip.Addr, pool *config.Pool) *aggregate {
	key := aggregateKey{o, o.BGP.Aggregate(addr)}
	if key.prefix.IsSingleIP() || pool == nil {
		return nil
	}
	if g := t.aggregates[key]; g != nil {
		return g
	}
	within := poolPrefix{pool, key.prefix}
	inside, ok := t.inside[within]
	if !ok {
		if len(t.inside) >= maxScopes {
			clear(t.inside)
		}
		inside = pool.ContainsPrefix(key.prefix) && (t.permit == nil || t.permit.ContainsPrefix(key.prefix))
		t.inside[within] = inside
	}
	if !inside {
		return nil
	}
	g := &aggregate{aggregateKey: key, served: map[netip.Addr]bool{}}
	t.aggregates[key] = g
	return g
}

func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// announce adds the offer to those that announce the prefix.
func (t *routeTable) announce(prefix netip.Prefix, o *offer) {
	all := t.offers[prefix]
	i, found := slices.BinarySearchFunc(all, o, func(a, b *offer) int { return cmp.Compare(a.index, b.index) })
	if !found {
		t.offers[prefix] = slices.Insert(all, i, o)
		t.stale[prefix] = true
	}
}

// withdraw removes the offer from those that announce the prefix.
func (t *routeTable) withdraw(prefix netip.Prefix, o *offer) {
	all := t.offers[prefix]
	i := slices.Index(all, o)
	switch {
	case i < 0:
		return
	case len(all) == 1:
		delete(t.offers, prefix)
	default:
		t.offers[prefix] = slices.Delete(all, i, i+1)
	}
	t.stale[prefix] = true
}

// settle brings routes up to date and returns the prefixes whose route has changed or is gone.
func (t *routeTable) settle() []netip.Prefix {
	for g := range t.unsettled {
		t.settleAggregate(g)
	}
	var changed []netip.Prefix
	for prefix := range t.stale {
		before, was := t.routes[prefix]
		offers, is := t.offers[prefix]
		if !is {
			delete(t.routes, prefix)
		} else if now := t.route(offers); !was || !before.equal(now) {
			t.routes[prefix] = now
		} else {
			continue
		}
		if was || is {
			changed = append(changed, prefix)
		}
	}
	t.unsettled, t.stale = map[*aggregate]bool{}, map[netip.Prefix]bool{}
	return changed
}

// settleAggregate announces the aggregate if this node serves all of its assigned VIPs, or if serving
// some of them is enough. Otherwise it announces the VIPs that the node serves.
func (t *routeTable) settleAggregate(g *aggregate) {
	whole := len(g.served) > 0 && (g.offer.BGP.AggregatePartly || len(g.served) == g.assigned)
	switch {
	case whole && !g.whole:
		t.announce(g.prefix, g.offer)
		for addr := range g.served {
			t.withdraw(host(addr), g.offer)
		}
	case !whole && g.whole:
		t.withdraw(g.prefix, g.offer)
		for addr := range g.served {
			t.announce(host(addr), g.offer)
		}
	case !whole:
		for _, addr := range g.added {
			t.announce(host(addr), g.offer)
		}
	}
	g.whole, g.added = whole, nil
	if g.assigned == 0 {
		delete(t.aggregates, g.aggregateKey)
	}
}

// route returns the Route of the offers together, mostly the same map for the same offers.
func (t *routeTable) route(offers []*offer) Route {
	var key []byte
	for _, o := range offers {
		key = binary.AppendUvarint(key, uint64(o.index))
	}
	if route := t.byOffers[string(key)]; route != nil {
		return route
	}
	route := Route{}
	for _, o := range offers {
		for _, peer := range o.peers {
			route[peer] = route[peer].with(o.BGP)
		}
	}
	if len(t.byOffers) >= maxScopes {
		clear(t.byOffers)
	}
	t.byOffers[string(key)] = route
	return route
}

// with unites the attributes with those of another advertisement. Where they contradict each other, the
// more preferred ones count, so that all nodes decide the same.
func (a Attributes) with(b *config.BGP) Attributes {
	a.Communities = append(slices.Clone(a.Communities), b.Communities...)
	slices.Sort(a.Communities)
	a.Communities = slices.Compact(a.Communities)
	a.LargeCommunities = append(slices.Clone(a.LargeCommunities), b.LargeCommunities...)
	slices.SortFunc(a.LargeCommunities, config.LargeCommunity.Compare)
	a.LargeCommunities = slices.Compact(a.LargeCommunities)
	if p := b.LocalPreference; a.LocalPreference == nil || p != nil && *p > *a.LocalPreference {
		a.LocalPreference = p
	}
	if m := b.MED; a.MED == nil || m != nil && *m < *a.MED {
		a.MED = m
	}
	if a.Prepend == 0 || b.Prepend != 0 && b.Prepend < a.Prepend {
		a.Prepend = b.Prepend
	}
	return a
}

func (r Route) equal(other Route) bool { return maps.EqualFunc(r, other, Attributes.equal) }

func (a Attributes) equal(b Attributes) bool {
	same := func(x, y *uint32) bool { return x == y || x != nil && y != nil && *x == *y }
	return slices.Equal(a.Communities, b.Communities) && slices.Equal(a.LargeCommunities, b.LargeCommunities) &&
		same(a.LocalPreference, b.LocalPreference) && same(a.MED, b.MED) && a.Prepend == b.Prepend
}
