package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"go4.org/netipx"
)

// Bounds and defaults of the document.
const (
	// MaxServiceAddresses is how many addresses one Service may ask for, or
	// have reserved.
	MaxServiceAddresses = 8
	// DefaultClusterID names a cluster whose operator did not.
	DefaultClusterID = "kubernetes"
	// DefaultAdvertisement is the name of the advertisement that a document
	// without any gets.
	DefaultAdvertisement = "default"

	maxQuarantine = 24 * time.Hour
	maxKeepFor    = 30 * 24 * time.Hour
	maxQuota      = 1_000_000
	minPriority   = -1000
	maxPriority   = 1000
	maxWeight     = 100 // as of a Pod's preferred node affinity

	minRefresh, maxRefresh = 10 * time.Second, time.Hour

	minProbeInterval, maxProbeInterval             = 10 * time.Millisecond, 10 * time.Second
	minProbeTimeout                                = 5 * time.Millisecond
	minSuspicionMultiplier, maxSuspicionMultiplier = 2, 10
	minGossipInterval, maxGossipInterval           = 5 * time.Millisecond, time.Second
	maxGracePeriod                                 = 10 * time.Second
)

// compile turns what is written into what it means.
func (d *decoder) compile(raw *rawConfig) *Config {
	oneOf(d, raw.APIVersion, []string{APIVersion})
	oneOf(d, raw.Kind, []string{Kind})
	find := d.pools(raw)
	c := &Config{
		ClusterID:      DefaultClusterID,
		Quarantine:     d.duration(raw.Quarantine, DefaultQuarantine, maxQuarantine),
		Membership:     d.membership(raw.Failover, raw.Membership),
		Pools:          find.pools,
		Reservations:   d.reservations(raw.Reservations, find),
		Advertisements: d.advertisements(raw),
		Peers:          d.peers(raw.Peers),
		Permit:         d.permit(raw.BGPPermit),
		Routes:         d.routes(raw.Routes, raw.peerNames()),
		Compatibility:  manyOf(d, raw.Compatibility, []Compatibility{MetalLB, KubeVIP}),
		Nodes:          d.nodes(raw.Nodes),
	}
	(&bgpCheck{decoder: d, raw: raw, Config: c}).run()
	if id, ok := d.text(raw.ClusterID, checkName); ok {
		c.ClusterID = id
	}
	return c
}

// uniqueName returns the name of an item and refuses the name of another one.
func (d *decoder) uniqueName(v value, what string, seen map[string]value) string {
	name, ok := d.text(v, checkName)
	if first, dup := seen[name]; ok && dup {
		d.errorf(v, "another %s named %s is in line %d", what, quote(name), d.lineOf(first))
	} else if ok {
		seen[name] = v
	}
	return name
}

// The states of a pool.
type state string

const (
	active   state = "active"
	draining state = "draining"
)

// pools returns the pools and what it takes to find an address in them.
func (d *decoder) pools(raw *rawConfig) *finder {
	find := &finder{sound: true}
	seen, interfaces, advertisements := map[string]value{}, map[string]value{}, raw.advertisementNames()
	for i, r := range raw.Pools {
		own := d.addresses(r, i)
		find.blocks = append(find.blocks, own...)
		find.sound = find.sound && (len(own) > 0 || r.DHCP != nil) && len(own) == len(r.Addresses)
		oneOf(d, r.State, []state{active, draining})
		p := Pool{
			Name:              d.uniqueName(r.Name, "pool", seen),
			DHCP:              d.dhcp(r, interfaces),
			AutoAssign:        d.flag(r.AutoAssign, true),
			Priority:          d.integer(r.Priority, minPriority, maxPriority),
			Namespaces:        d.texts(r.Namespaces, checkName),
			NamespaceSelector: d.namespaceSelector(r),
			ServiceSelector:   d.selector(r.ServiceSelector),
			NamespaceQuota:    d.integer(r.NamespaceQuota, 1, maxQuota),
			Requesters:        d.requesters(r),
			KeepFor:           d.duration(r.KeepFor, 0, maxKeepFor),
			Draining:          state(r.State.text()) == draining,
			Advertise:         d.references(r.Advertise, "an advertisement", advertisements),
		}
		p.Free, p.Withheld = d.split(r, own)
		find.pools = append(find.pools, p)
	}
	find.sound = !d.refuseOverlaps(raw.Pools, find.blocks) && find.sound
	slices.SortFunc(find.blocks, func(a, b block) int { return a.From().Compare(b.From()) })
	return find
}

// dhcp returns where a pool leases its addresses, if it does.
func (d *decoder) dhcp(r rawPool, seen map[string]value) *DHCP {
	if r.DHCP == nil {
		if _, listed := lookup(r.At.Node, "addresses"); !listed {
			d.errorf(r.At, "has no addresses: list some, or lease them (dhcp)")
		}
		return nil
	}
	for _, key := range []string{"addresses", "exclude", "useFirstAndLast", "requesters", "keepFor"} {
		if _, set := lookup(r.At.Node, key); set {
			d.errorf(r.At, "has both dhcp and %s: the DHCP server decides on the addresses, remove one of the two", key)
		}
	}
	v := r.DHCP.Interface
	name, ok := d.text(v, checkInterfaceName)
	if first, dup := seen[name]; ok && dup {
		d.errorf(v, "another pool leases its addresses on %s, in line %d: one pool can, and Services ask it by its name", quote(name), d.lineOf(first))
	} else if ok {
		seen[name] = v
	}
	return &DHCP{Interface: name}
}

// namespaceSelector refuses a selector of all namespaces beside a list of
// some: the pool would be open to all, and who lists some means it not to be.
// Without a list it is accepted, since it says what Kubernetes has it say.
func (d *decoder) namespaceSelector(r rawPool) Selector {
	s := d.selector(r.NamespaceSelector)
	if raw := r.NamespaceSelector; raw != nil && raw.At.present() && len(s) == 0 && len(r.Namespaces) > 0 {
		d.errorf(raw.At, "selects every namespace, so that namespaces restricts nothing: remove one of the two")
	}
	return s
}

// requesters returns the namespaces that may ask for addresses: nil when the
// document does not say, empty when none may.
func (d *decoder) requesters(r rawPool) []string {
	if r.Requesters == nil {
		return nil
	}
	listed := map[string]bool{}
	for _, v := range r.Namespaces {
		listed[v.Value] = true
	}
	names := d.texts(r.Requesters, func(s string) error {
		if len(listed) > 0 && r.NamespaceSelector == nil && checkName(s) == nil && !listed[s] {
			return errors.New("may not draw from the pool at all: add it to namespaces, or remove it here")
		}
		return checkName(s)
	})
	return append([]string{}, names...)
}

// addresses returns the entries of a pool that make sense.
func (d *decoder) addresses(r rawPool, pool int) []block {
	var blocks []block
	edges := d.flag(r.UseFirstAndLast, false)
	at := r.At.where()
	for _, v := range r.Addresses {
		v.path, v.item = at, 0 // an entry speaks for itself
		b, ok := d.block(v)
		if !ok {
			continue
		}
		if err := b.checkUsable(); err != nil {
			d.errorf(v, "%v", err)
			continue
		}
		b.pool = pool
		b.subnet = !edges && b.prefix.IsValid() && b.prefix.Addr().Is4() && b.prefix.Bits() < 31
		blocks = append(blocks, b)
	}
	return blocks
}

func (d *decoder) block(v value) (block, bool) {
	b, err := parseBlock(v.Value)
	if err != nil {
		d.errorf(v, "%v", err)
	}
	b.at = v
	return b, err == nil
}

// split divides a pool's addresses into those it hands out and the others.
func (d *decoder) split(r rawPool, blocks []block) (free, withheld *netipx.IPSet) {
	var all, give, keep netipx.IPSetBuilder
	for _, b := range blocks {
		all.AddRange(b.IPRange)
	}
	whole, _ := all.IPSet() // only valid ranges go in, here and below
	give.AddSet(whole)
	removeFirstAndLast(&give, blocks)
	d.exclude(r, &give, whole.Ranges())
	free, _ = give.IPSet()
	keep.AddSet(whole)
	keep.RemoveSet(free)
	withheld, _ = keep.IPSet()
	if len(blocks) > 0 && len(free.Ranges()) == 0 {
		d.errorf(r.At, "has no address to give: all of them are excluded, or the first or last of a prefix")
	}
	return free, withheld
}

func removeFirstAndLast(set *netipx.IPSetBuilder, blocks []block) {
	for _, b := range blocks {
		if b.subnet {
			set.Remove(b.From())
			set.Remove(b.To())
		}
	}
}

func (d *decoder) exclude(r rawPool, set *netipx.IPSetBuilder, pool []netipx.IPRange) {
	seen := map[netipx.IPRange]value{}
	for _, v := range r.Exclude {
		b, ok := d.block(v)
		if first, dup := seen[b.IPRange]; ok && dup {
			d.errorf(v, "%s is listed twice, first in line %d", b.text, d.lineOf(first))
			continue
		}
		seen[b.IPRange] = v
		if ok && len(pool) > 0 && !touches(pool, b.IPRange) {
			d.errorf(v, "%s excludes nothing: no address of the pool lies in it", b.text)
		}
		if ok {
			set.RemoveRange(b.IPRange)
		}
	}
}

func (d *decoder) refuseOverlaps(pools []rawPool, blocks []block) bool {
	found := overlaps(blocks)
	for _, o := range found {
		a, b := blocks[o.first], blocks[o.second]
		if a.pool == b.pool {
			d.errorf(b.at, "%s overlaps %s in line %d of the same pool", b.text, a.text, d.lineOf(a.at))
		} else {
			d.errorf(b.at, "%s overlaps pool %s (%s in line %d)", b.text, quote(pools[a.pool].Name.text()), a.text, d.lineOf(a.at))
		}
	}
	return len(found) > 0
}

// reserved is an address of a reservation.
type reserved struct {
	service string
	at      value
}

// reservations returns the reservations, whose addresses must be ones that
// pools hand out. A pool that drains keeps its reservations: whoever empties
// it should not have to delete and restore them.
func (d *decoder) reservations(raw []rawReservation, find *finder) []Reservation {
	services, taken := map[string]value{}, map[netip.Addr]reserved{}
	var all []Reservation
	for _, r := range raw {
		res := Reservation{Service: d.service(r.Service, services)}
		at := r.At.where()
		for i, v := range r.Addresses {
			v.path, v.item = at, 0 // an entry speaks for itself
			if i == MaxServiceAddresses {
				d.errorf(v, "%s is one too many: a Service has at most %d addresses", clip(v.Value), MaxServiceAddresses)
				break
			}
			if a, ok := d.reservable(v, find); ok && d.untaken(a, reserved{res.Service, v}, taken) {
				res.Addresses = append(res.Addresses, a)
			}
		}
		all = append(all, res)
	}
	return all
}

// service returns the name of a Service that has no other reservation.
func (d *decoder) service(v value, seen map[string]value) string {
	name, ok := d.text(v, checkService)
	if first, dup := seen[name]; ok && dup {
		d.errorf(v, "%s has a reservation in line %d: list all its addresses there", name, d.lineOf(first))
	} else if ok {
		seen[name] = v
	}
	return name
}

// reservable returns an address that a pool hands out.
func (d *decoder) reservable(v value, find *finder) (netip.Addr, bool) {
	if strings.ContainsAny(v.Value, "/-") || !strings.ContainsAny(v.Value, ".:") {
		d.errorf(v, "%s is not an address: list each one, such as 203.0.113.10", quote(v.Value))
		return netip.Addr{}, false
	}
	a, err := parseAddr(v.Value)
	if err == nil {
		err = find.check(a)
	}
	if err != nil {
		d.errorf(v, "%v", err)
	}
	return a, err == nil
}

// untaken reports whether no other reservation has the address.
func (d *decoder) untaken(a netip.Addr, r reserved, taken map[netip.Addr]reserved) bool {
	first, dup := taken[a]
	switch {
	case !dup:
		taken[a] = r
	case first.service == r.service:
		d.errorf(r.at, "%s is listed twice, first in line %d", a, d.lineOf(first.at))
	default:
		d.errorf(r.at, "%s is reserved for %s already, in line %d", a, first.service, d.lineOf(first.at))
	}
	return !dup
}

// finder finds what the pools have to do with an address.
type finder struct {
	pools  []Pool
	blocks []block // of all pools, sorted
	sound  bool    // every entry could be read, and none overlaps another
}

// check says why an address is not one that a pool hands out.
func (f *finder) check(a netip.Addr) error {
	b, ok := f.block(a)
	switch {
	case !ok && !f.sound:
		return nil // it may be in a pool whose own errors come first
	case !ok:
		return fmt.Errorf("%s is in no pool: add it to one, or reserve another address", a)
	case f.pools[b.pool].Free.Contains(a):
		return nil
	}
	name := quote(f.pools[b.pool].Name)
	if b.subnet && (a == b.From() || a == b.To()) {
		return fmt.Errorf("%s is the first or last address of %s, which pool %s withholds: set its useFirstAndLast, or reserve another address", a, b.text, name)
	}
	return fmt.Errorf("%s is excluded from pool %s: remove it from exclude there, or reserve another address", a, name)
}

// block returns the entry that contains the address.
func (f *finder) block(a netip.Addr) (block, bool) {
	i := sort.Search(len(f.blocks), func(i int) bool { return a.Compare(f.blocks[i].To()) <= 0 })
	if i == len(f.blocks) || !f.blocks[i].Contains(a) {
		return block{}, false
	}
	return f.blocks[i], true
}

// names are the names of a list that others of the document refer to.
type names struct {
	index map[string]int // of the first item with the name
	shown string         // the first of the names, for an error
}

// namesOf indexes the names of a list.
func namesOf[T any](list []T, nameOf func(T) value) names {
	n := names{index: map[string]int{}}
	for i, item := range list {
		name := nameOf(item).text()
		if _, dup := n.index[name]; !dup {
			n.index[name] = i
		}
		if len(n.shown) <= maxQuoted*utf8.UTFMax {
			n.shown += ", " + clip(name)
		}
	}
	n.shown = clip(strings.TrimPrefix(n.shown, ", "))
	return n
}

func (r *rawConfig) advertisementNames() names {
	return namesOf(r.Advertisements, func(a rawAdvertisement) value { return a.Name })
}

func (r *rawConfig) peerNames() names {
	return namesOf(r.Peers, func(p rawPeer) value { return p.Name })
}

// references returns the names of a list, which must be among those of what
// the document defines.
func (d *decoder) references(list []value, what string, defined names) []string {
	return d.texts(list, func(s string) error {
		_, ok := defined.index[s]
		switch {
		case ok:
			return nil
		case len(defined.index) == 0:
			return errors.New("is not " + what + ": the document defines none")
		default:
			return errors.New("is not " + what + ": the document defines " + defined.shown)
		}
	})
}

func (d *decoder) advertisements(raw *rawConfig) []Advertisement {
	if len(raw.Advertisements) == 0 {
		return []Advertisement{{Name: DefaultAdvertisement, Layer2: &Layer2{}}}
	}
	seen, peers := map[string]value{}, raw.peerNames()
	var all []Advertisement
	for _, r := range raw.Advertisements {
		a := Advertisement{Name: d.uniqueName(r.Name, "advertisement", seen), ServiceSelector: d.selector(r.ServiceSelector)}
		switch {
		case r.Layer2 == nil && r.BGP == nil:
			d.errorf(r.At, "announces nothing: set layer2, bgp, or both")
		case r.BGP != nil && len(raw.Peers) == 0:
			d.errorf(r.At, "announces by BGP to nobody: the document defines no peers")
		}
		if r.Layer2 != nil {
			a.Layer2 = d.layer2(r.Layer2)
		}
		if r.BGP != nil {
			a.BGP = d.bgp(r.BGP, peers)
		}
		all = append(all, a)
	}
	return all
}

func (d *decoder) layer2(r *rawLayer2) *Layer2 {
	l := &Layer2{
		NodeSelector:   d.selector(r.NodeSelector),
		Interfaces:     d.texts(r.Interfaces, checkInterface),
		PreferredNodes: d.preferences(r.PreferredNodes),
		AnySegment:     d.flag(r.AnySegment, false),
		Refresh:        d.durationFrom(r.Refresh, 0, minRefresh, maxRefresh),
		KeepOwner:      d.flag(r.KeepOwner, false),
		ShareLoad:      d.flag(r.ShareLoad, false),
	}
	switch {
	case l.ShareLoad && l.KeepOwner:
		d.errorf(r.KeepOwner, "an address with shareLoad has no owner that could be kept: remove one of the two")
	case l.ShareLoad && l.Refresh > 0:
		d.errorf(r.Refresh, "an address with shareLoad is never announced to all: remove one of the two")
	}
	return l
}

func (d *decoder) preferences(raw []rawPreference) []Preference {
	var all []Preference
	for _, r := range raw {
		all = append(all, Preference{Weight: d.integer(r.Weight, 1, maxWeight), NodeSelector: d.selector(r.NodeSelector)})
	}
	return all
}

// membership returns the settings: the document's own, else those of failover.
func (d *decoder) membership(failover value, raw rawMembership) Membership {
	oneOf(d, failover, []Failover{FailoverFast, FailoverNormal, FailoverConservative})
	m := Failover(failover.text()).Membership()
	m.ProbeInterval = d.durationFrom(raw.ProbeInterval, m.ProbeInterval, minProbeInterval, maxProbeInterval)
	if raw.ProbeInterval.present() {
		m.ProbeTimeout = m.ProbeInterval / 2
	}
	m.ProbeTimeout = d.durationFrom(raw.ProbeTimeout, m.ProbeTimeout, minProbeTimeout, maxProbeInterval)
	if m.ProbeTimeout >= m.ProbeInterval {
		d.errorf(raw.ProbeTimeout, "%s is not shorter than probeInterval, which is %s", m.ProbeTimeout, m.ProbeInterval)
	}
	if raw.SuspicionMultiplier.present() {
		m.SuspicionMultiplier = d.integer(raw.SuspicionMultiplier, minSuspicionMultiplier, maxSuspicionMultiplier)
	}
	m.GossipInterval = d.durationFrom(raw.GossipInterval, m.GossipInterval, minGossipInterval, maxGossipInterval)
	m.GracePeriod = d.duration(raw.GracePeriod, m.GracePeriod, maxGracePeriod)
	return m
}

func (d *decoder) nodes(raw []rawNode) []NodeRule {
	var rules []NodeRule
	seen := map[string]value{}
	for _, r := range raw {
		rule := NodeRule{Names: d.texts(r.Names, checkNode), Gone: d.flag(r.Gone, false)}
		rule.Region, _ = d.text(r.Region, checkTopology)
		rule.Zone, _ = d.text(r.Zone, checkTopology)
		if !r.Region.present() && !r.Zone.present() && !r.Gone.present() {
			d.errorf(r.At, "says nothing about its nodes: set region, zone or gone")
		}
		d.refuseShadowed(r.Names, seen)
		rules = append(rules, rule)
	}
	return rules
}

// refuseShadowed refuses patterns that an earlier entry has already.
func (d *decoder) refuseShadowed(names []value, seen map[string]value) {
	for _, v := range names {
		if first, dup := seen[v.Value]; dup {
			d.errorf(v, "%s never applies here: the entry in line %d has it too, and the first one counts", quote(v.Value), d.lineOf(first))
		}
	}
	for _, v := range names {
		if _, dup := seen[v.Value]; !dup {
			seen[v.Value] = v
		}
	}
}
