package config

import (
	"net/netip"
	"slices"

	"go4.org/netipx"
)

// crossCheck refuses mistakes that involve several parts of the document: pools, advertisements,
// peers and bgpPermit. Each of these lists can fill the document. They are therefore indexed
// first, so that none is searched once for each item of another.
type crossCheck struct {
	*report
	raw *rawConfig
	*Config

	peers map[string]int // peers by name
	pools []poolFacts
	open  *reach            // the pools that every advertisement applies to
	by    map[string]*reach // the pools that name an advertisement
}

// byFamily has something for IPv4, and for IPv6.
type byFamily[T any] [2]T

// poolFacts are the facts about a pool that advertisements are compared with.
type poolFacts struct {
	has       byFamily[bool]
	narrowest byFamily[[]aggregate]
}

// aggregate is the shortest prefix of an address that contains only addresses of one pool.
type aggregate struct {
	bits int
	of   netip.Addr
	pool int
}

// reach is the pools that an advertisement applies to, in their order.
type reach struct {
	pools     []int
	first     byFamily[int] // the first pool with addresses of the family; -1: none
	leased    int           // the first pool with DHCP; -1: none
	narrowest byFamily[[]aggregate]
}

func newReach() *reach { return &reach{first: byFamily[int]{-1, -1}, leased: -1} }

func (k *crossCheck) run() {
	k.index()
	k.refuseForbidden()
	n, seen := 0, map[string]bool{}
	var earlier []*announcement
	for i := range k.Advertisements {
		a := &k.Advertisements[i]
		if a.BGP == nil || seen[a.Name] { // another one of the name is refused already
			continue
		}
		seen[a.Name] = true
		if n++; n > maxBGPAdvertisements {
			k.errorf(k.raw.Advertisements[i].At, "is one too many: a document has at most %d advertisements by BGP", maxBGPAdvertisements)
			return
		}
		k.refuseUnheard(k.raw.Advertisements[i].BGP, a.BGP)
		k.refuseWideAggregates(k.raw.Advertisements[i].BGP, a)
		next := k.announcement(i)
		k.refuseContradictions(next, earlier)
		earlier = append(earlier, next)
	}
}

// index indexes the peers and the pools.
func (k *crossCheck) index() {
	k.peers, k.by, k.open = map[string]int{}, map[string]*reach{}, newReach()
	for i := range k.Peers {
		if _, dup := k.peers[k.Peers[i].Name]; !dup {
			k.peers[k.Peers[i].Name] = i
		}
	}
	k.pools = make([]poolFacts, len(k.Config.Pools))
	for i := range k.Config.Pools {
		p := &k.Config.Pools[i]
		k.pools[i] = factsOf(p, i)
		if len(p.Advertise) == 0 {
			k.open.add(k, i)
		}
		for _, name := range p.Advertise {
			if k.by[name] == nil {
				k.by[name] = newReach()
			}
			k.by[name].add(k, i)
		}
	}
}

func (r *reach) add(k *crossCheck, pool int) {
	r.pools = append(r.pools, pool)
	if r.leased < 0 && k.Config.Pools[pool].DHCP != nil {
		r.leased = pool
	}
	for family, has := range k.pools[pool].has {
		if has && r.first[family] < 0 {
			r.first[family] = pool
		}
		for _, a := range k.pools[pool].narrowest[family] {
			r.narrowest[family] = widen(r.narrowest[family], a)
		}
	}
}

// widen appends an aggregate if its prefix has to be longer than all before it. The others add
// nothing. At most as many are kept as a prefix can have lengths.
func widen(sorted []aggregate, a aggregate) []aggregate {
	if len(sorted) == 0 || sorted[len(sorted)-1].bits < a.bits {
		return append(sorted, a)
	}
	return sorted
}

// tooWide returns the first aggregate that is longer than the length.
func tooWide(sorted []aggregate, bits int) (aggregate, bool) {
	i, _ := slices.BinarySearchFunc(sorted, bits+1, func(a aggregate, bits int) int { return a.bits - bits })
	if i == len(sorted) {
		return aggregate{}, false
	}
	return sorted[i], true
}

func factsOf(p *Pool, pool int) poolFacts {
	facts := poolFacts{has: byFamily[bool]{p.DHCP != nil, false}}
	whole := p.Whole().Ranges()
	for _, r := range p.Free.Ranges() {
		family := 0
		if r.From().Is6() {
			family = 1
		}
		facts.has[family] = true
		for len(whole) > 0 && whole[0].To().Less(r.From()) {
			whole = whole[1:]
		}
		for _, end := range []netip.Addr{r.From(), r.To()} {
			bits := shortest(end, whole[0])
			facts.narrowest[family] = widen(facts.narrowest[family], aggregate{bits, end, pool})
		}
	}
	return facts
}

// shortest returns the length of the shortest prefix of the address that lies
// in the range, which contains the address.
func shortest(a netip.Addr, in netipx.IPRange) int {
	low, high := 0, a.BitLen()
	for low < high {
		bits := (low + high) / 2
		prefix, _ := a.Prefix(bits)
		if r := netipx.RangeOfPrefix(prefix); r.From().Less(in.From()) || in.To().Less(r.To()) {
			low = bits + 1
		} else {
			high = bits
		}
	}
	return low
}

// reachesOf returns the pools that the advertisement applies to: the ones that name it, and
// the ones that name no advertisement.
func (k *crossCheck) reachesOf(name string) []*reach {
	if named := k.by[name]; named != nil {
		return []*reach{named, k.open}
	}
	return []*reach{k.open}
}

// refuseForbidden refuses pools that are announced by BGP and are not wholly in bgpPermit.
func (k *crossCheck) refuseForbidden() {
	if k.Permit == nil {
		return
	}
	permit := k.Permit.Ranges()
	byBGP, any := map[string]bool{}, false
	for i := range k.Advertisements {
		if k.Advertisements[i].BGP != nil {
			byBGP[k.Advertisements[i].Name], any = true, true
		}
	}
	for i := range k.Config.Pools {
		p := &k.Config.Pools[i]
		free := p.Free.Ranges()
		outside := slices.IndexFunc(free, func(r netipx.IPRange) bool { return !covers(permit, r) })
		if outside >= 0 && any && (len(p.Advertise) == 0 ||
			slices.ContainsFunc(p.Advertise, func(name string) bool { return byBGP[name] })) {
			k.errorf(k.raw.Pools[i].At, "is announced by BGP, and bgpPermit does not contain all of %s: add it there, or exclude it "+
				"here, or have other advertisements announce the pool", free[outside])
		}
	}
	if k.Routes == nil || k.Routes.Mode != RoutesBGP {
		return
	}
	for _, cidr := range k.Routes.CIDRs {
		if !covers(permit, netipx.RangeOfPrefix(cidr)) {
			k.errorf(k.raw.Routes.At, "%s is announced by BGP, and bgpPermit does not contain all of it: add it there", cidr)
		}
	}
}

// covers reports whether one of the sorted ranges contains all of r.
func covers(sorted []netipx.IPRange, r netipx.IPRange) bool {
	i, _ := slices.BinarySearchFunc(sorted, r, func(s, r netipx.IPRange) int { return s.To().Compare(r.To()) })
	return i < len(sorted) && sorted[i].From().Compare(r.From()) <= 0
}

// refuseUnheard refuses attributes that no peer of the advertisement is sent.
func (k *crossCheck) refuseUnheard(r *rawBGP, b *BGP) {
	if !r.LocalPreference.present() && !r.ASPathPrepend.present() {
		return
	}
	internal, external := true, true // all of them, for certain
	add := func(p *Peer) {
		in, ex := p.kind()
		internal, external = internal && in, external && ex
	}
	for _, name := range b.Peers {
		if i, ok := k.peers[name]; ok {
			add(&k.Peers[i])
		}
	}
	for i := 0; len(b.Peers) == 0 && i < len(k.Peers) && (internal || external); i++ {
		add(&k.Peers[i])
	}
	if external && !internal && r.LocalPreference.present() {
		k.errorf(r.LocalPreference, "it is sent to internal peers only (RFC 4271, section 5.1.5), and these are all external: remove it, "+
			"or use med or communities")
	}
	if internal && !external && r.ASPathPrepend.present() {
		k.errorf(r.ASPathPrepend, "a longer path is sent to external peers only, and these are all internal: remove it, or use "+
			"localPreference")
	}
}

// refuseWideAggregates refuses prefixes with addresses that are not the pool's, because their
// traffic would come here. Of several such pools it names the first.
func (k *crossCheck) refuseWideAggregates(r *rawBGP, a *Advertisement) {
	b := a.BGP
	for _, reach := range k.reachesOf(a.Name) {
		for family, v := range []value{r.AggregationLength, r.AggregationLengthV6} {
			bits := byFamily[int]{b.AggregationLength, b.AggregationLengthV6}[family]
			if wide, found := tooWide(reach.narrowest[family], bits); v.present() && found {
				k.errorf(v, "%s is not all in pool %s, so that the traffic of others would come here: write a larger number, or "+
					"advertise the pool by another advertisement",
					b.Aggregate(wide.of), Quote(k.Config.Pools[wide.pool].Name))
			}
		}
		if reach.leased >= 0 && b.AggregationLength < 32 {
			k.errorf(r.AggregationLength, "pool %s leases its addresses, and others have the rest of a /%d: advertise the pool by "+
				"another advertisement",
				Quote(k.Config.Pools[reach.leased].Name), b.AggregationLength)
		}
	}
}

// singular are the settings of which a route can have one value only.
var singular = []struct {
	at func(*rawBGP) value
	of func(*BGP) (n uint32, set bool)
}{
	{func(r *rawBGP) value { return r.LocalPreference }, func(b *BGP) (uint32, bool) { return pointee(b.LocalPreference) }},
	{func(r *rawBGP) value { return r.MED }, func(b *BGP) (uint32, bool) { return pointee(b.MED) }},
	{func(r *rawBGP) value { return r.ASPathPrepend }, func(b *BGP) (uint32, bool) { return uint32(b.Prepend), b.Prepend > 0 }},
}

func pointee(p *uint32) (uint32, bool) {
	if p == nil {
		return 0, false
	}
	return *p, true
}

// announcement has the parts of an advertisement that are compared with others. There are up
// to half a million pairs.
type announcement struct {
	*BGP
	name            string
	raw             *rawBGP
	services, nodes string // the selectors; empty: everything
	peers           []int  // that the advertisement names; none: all
	pools           []int  // that name the advertisement
}

func (k *crossCheck) announcement(i int) *announcement {
	a := &k.Advertisements[i]
	next := &announcement{BGP: a.BGP, name: a.Name, raw: k.raw.Advertisements[i].BGP, services: a.ServiceSelector.String(),
		nodes: a.BGP.NodeSelector.String()}
	for _, name := range a.BGP.Peers {
		if p, ok := k.peers[name]; ok {
			next.peers = append(next.peers, p)
		}
	}
	if named := k.by[a.Name]; named != nil {
		next.pools = named.pools
	}
	return next
}

// refuseContradictions refuses a setting that differs from that of an earlier advertisement,
// if both are certain to announce the same routes.
func (k *crossCheck) refuseContradictions(a *announcement, earlier []*announcement) {
	peers, pools := setOf(a.peers, len(k.Peers)), setOf(a.pools, len(k.pools))
	for _, s := range singular {
		n, isSet := s.of(a.BGP)
		if !isSet {
			continue
		}
		for _, b := range earlier {
			if m, wasSet := s.of(b.BGP); !wasSet || m == n || !bothSelect(a.services, b.services) || !bothSelect(a.nodes, b.nodes) {
				continue
			}
			peer, samePeer := k.commonPeer(a, b, peers)
			if !samePeer {
				continue
			}
			if pool, samePool := k.commonPool(a, b, pools); samePool {
				at, other := s.at(a.raw), s.at(b.raw)
				k.errorf(at, "%s contradicts advertisement %s (%s in line %d), since both announce pool %s to peer %s: write one "+
					"value, or distinguish them by pools, peers or selectors",
					at.Value, Quote(b.name), other.Value, k.lineOf(other), Quote(k.Config.Pools[pool].Name), Quote(k.Peers[peer].Name))
				break
			}
		}
	}
}

// bothSelect reports whether two selectors are certain to select something in
// common, if they select anything.
func bothSelect(a, b string) bool { return a == "" || b == "" || a == b }

// commonPeer returns a peer that both advertisements are sent to. Those that a names are given as a set, too.
func (k *crossCheck) commonPeer(a, b *announcement, namedByA []bool) (int, bool) {
	switch {
	case len(a.BGP.Peers) == 0 && len(b.BGP.Peers) == 0:
		return 0, len(k.Peers) > 0
	case len(a.BGP.Peers) == 0:
		return first(b.peers, func(int) bool { return true })
	case len(b.BGP.Peers) == 0:
		return first(a.peers, func(int) bool { return true })
	}
	return first(b.peers, func(peer int) bool { return namedByA[peer] })
}

// commonPool returns a pool whose VIPs both advertisements announce with the
// same prefixes. Those that name a are given as a set, too.
func (k *crossCheck) commonPool(a, b *announcement, namesA []bool) (int, bool) {
	same4, same6 := a.AggregationLength == b.AggregationLength, a.AggregationLengthV6 == b.AggregationLengthV6
	same := func(pool int) bool { return k.pools[pool].has[0] && same4 || k.pools[pool].has[1] && same6 }
	if pool, found := first(b.pools, func(pool int) bool { return namesA[pool] && same(pool) }); found {
		return pool, true
	}
	return first(k.open.first[:], func(pool int) bool { return pool >= 0 && same(pool) })
}

// first returns the first number for which is reports true.
func first(list []int, is func(int) bool) (int, bool) {
	i := slices.IndexFunc(list, is)
	if i < 0 {
		return 0, false
	}
	return list[i], true
}

// setOf returns a set of some of the first numbers.
func setOf(numbers []int, size int) []bool {
	set := make([]bool, size)
	for _, n := range numbers {
		set[n] = true
	}
	return set
}
