package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"go4.org/netipx"
)

// poolCompiler reads pools and what is reserved in them.
type poolCompiler struct{ values }

// The states of a pool.
type state string

const (
	active   state = "active"
	draining state = "draining"
)

// pools returns the pools, and a finder of addresses in them.
func (c poolCompiler) pools(raw *rawConfig) *finder {
	find := &finder{sound: true}
	seen, interfaces, advertisements := map[string]value{}, map[string]value{}, raw.advertisementNames()
	for i, r := range raw.Pools {
		own := c.addresses(r, i)
		find.blocks = append(find.blocks, own...)
		find.sound = find.sound && (len(own) > 0 || r.DHCP != nil) && len(own) == len(r.Addresses)
		oneOf(c.report, r.State, []state{active, draining})
		p := Pool{
			Name:              c.uniqueName(r.Name, "pool", seen),
			DHCP:              c.dhcp(r, interfaces),
			AutoAssign:        c.flag(r.AutoAssign, true),
			Priority:          c.integer(r.Priority, minPriority, maxPriority),
			Namespaces:        c.texts(r.Namespaces, checkName),
			NamespaceSelector: c.namespaceSelector(r),
			ServiceSelector:   c.selector(r.ServiceSelector),
			NamespaceQuota:    c.integer(r.NamespaceQuota, 1, maxQuota),
			Requesters:        c.requesters(r),
			KeepFor:           c.duration(r.KeepFor, 0, maxKeepFor),
			Draining:          state(r.State.text()) == draining,
			Advertise:         c.references(r.Advertise, "an advertisement", advertisements),
		}
		p.Free, p.Withheld = c.split(r, own)
		find.pools = append(find.pools, p)
	}
	find.sound = !c.refuseOverlaps(raw.Pools, find.blocks) && find.sound
	slices.SortFunc(find.blocks, func(a, b block) int { return a.From().Compare(b.From()) })
	return find
}

// dhcp returns where a pool leases its addresses, if it does.
func (c poolCompiler) dhcp(r rawPool, seen map[string]value) *DHCP {
	if r.DHCP == nil {
		if _, listed := lookup(r.At.Node, "addresses"); !listed {
			c.errorf(r.At, "has no addresses: list some, or lease them (dhcp)")
		}
		return nil
	}
	for _, key := range []string{"addresses", "exclude", "useFirstAndLast", "requesters", "keepFor"} {
		if _, set := lookup(r.At.Node, key); set {
			c.errorf(r.At, "has both dhcp and %s: the DHCP server decides on the addresses, remove one of the two", key)
		}
	}
	v := r.DHCP.Interface
	name, ok := c.text(v, checkInterfaceName)
	if ok {
		once(c.report, seen, name, v, "another pool leases its addresses on %s, in line %d: one pool can, and Services ask it by its name",
			Quote(name))
	}
	return &DHCP{Interface: name}
}

// namespaceSelector refuses a selector of all namespaces beside a list of some. The pool would
// be open to all, and the list shows that this is not meant. Without a list such a selector is
// accepted, as in Kubernetes.
func (c poolCompiler) namespaceSelector(r rawPool) Selector {
	s := c.selector(r.NamespaceSelector)
	if raw := r.NamespaceSelector; raw != nil && raw.At.present() && len(s) == 0 && len(r.Namespaces) > 0 {
		c.errorf(raw.At, "selects every namespace, so that namespaces restricts nothing: remove one of the two")
	}
	return s
}

// requesters returns the namespaces that may ask for addresses: nil when the
// document does not restrict them, empty when none may.
func (c poolCompiler) requesters(r rawPool) []string {
	if r.Requesters == nil {
		return nil
	}
	listed := map[string]bool{}
	for _, v := range r.Namespaces {
		listed[v.Value] = true
	}
	names := c.texts(r.Requesters, func(s string) error {
		if len(listed) > 0 && r.NamespaceSelector == nil && checkName(s) == nil && !listed[s] {
			return errors.New("may not draw from the pool at all: add it to namespaces, or remove it here")
		}
		return checkName(s)
	})
	return append([]string{}, names...)
}

// addresses returns the valid entries of a pool.
func (c poolCompiler) addresses(r rawPool, pool int) []block {
	var blocks []block
	edges := c.flag(r.UseFirstAndLast, false)
	at := r.At.where()
	for _, v := range r.Addresses {
		v.path, v.item = at, 0 // an entry speaks for itself
		b, ok := c.block(v)
		if !ok {
			continue
		}
		if err := b.checkUsable(); err != nil {
			c.errorf(v, "%v", err)
			continue
		}
		b.pool = pool
		b.subnet = !edges && b.prefix.IsValid() && b.prefix.Addr().Is4() && b.prefix.Bits() < 31
		blocks = append(blocks, b)
	}
	return blocks
}

// split divides a pool's addresses into those it hands out and the others.
func (c poolCompiler) split(r rawPool, blocks []block) (free, withheld *netipx.IPSet) {
	var all, give, keep netipx.IPSetBuilder
	for _, b := range blocks {
		all.AddRange(b.IPRange)
	}
	whole, _ := all.IPSet() // only valid ranges go in, here and below
	give.AddSet(whole)
	removeFirstAndLast(&give, blocks)
	c.exclude(r, &give, whole.Ranges())
	free, _ = give.IPSet()
	keep.AddSet(whole)
	keep.RemoveSet(free)
	withheld, _ = keep.IPSet()
	if len(blocks) > 0 && len(free.Ranges()) == 0 {
		c.errorf(r.At, "has no address to give: all of them are excluded, or the first or last of a prefix")
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

func (c poolCompiler) exclude(r rawPool, set *netipx.IPSetBuilder, pool []netipx.IPRange) {
	seen := map[netipx.IPRange]value{}
	for _, v := range r.Exclude {
		b, ok := c.block(v)
		if !ok || !once(c.report, seen, b.IPRange, v, "%s is listed twice, first in line %d", b.text) {
			continue
		}
		if len(pool) > 0 && !touches(pool, b.IPRange) {
			c.errorf(v, "%s excludes nothing: no address of the pool lies in it", b.text)
		}
		set.RemoveRange(b.IPRange)
	}
}

func (c poolCompiler) refuseOverlaps(pools []rawPool, blocks []block) bool {
	found := overlaps(blocks)
	for _, o := range found {
		a, b := blocks[o.first], blocks[o.second]
		if a.pool == b.pool {
			c.errorf(b.at, "%s overlaps %s in line %d of the same pool", b.text, a.text, c.lineOf(a.at))
		} else {
			c.errorf(b.at, "%s overlaps pool %s (%s in line %d)", b.text, Quote(pools[a.pool].Name.text()), a.text, c.lineOf(a.at))
		}
	}
	return len(found) > 0
}

// reserved is an address of a reservation.
type reserved struct {
	service string
	at      value
}

// reservations returns the reservations, whose addresses must be ones that pools hand out. A
// pool that drains keeps its reservations, so that an operator who empties it need not delete
// and restore them.
func (c poolCompiler) reservations(raw []rawReservation, find *finder) []Reservation {
	services, taken := map[string]value{}, map[netip.Addr]reserved{}
	var all []Reservation
	for _, r := range raw {
		res := Reservation{Service: c.service(r.Service, services)}
		at := r.At.where()
		for i, v := range r.Addresses {
			v.path, v.item = at, 0 // an entry speaks for itself
			if i == MaxServiceAddresses {
				c.errorf(v, "%s is one too many: a Service has at most %d addresses", clip(v.Value), MaxServiceAddresses)
				break
			}
			if a, ok := c.reservable(v, find); ok && c.untaken(a, reserved{res.Service, v}, taken) {
				res.Addresses = append(res.Addresses, a)
			}
		}
		all = append(all, res)
	}
	return all
}

// service returns the name of a Service that has no other reservation.
func (c poolCompiler) service(v value, seen map[string]value) string {
	name, ok := c.text(v, checkService)
	if ok {
		once(c.report, seen, name, v, "%s has a reservation in line %d: list all its addresses there", name)
	}
	return name
}

// reservable returns an address that a pool hands out.
func (c poolCompiler) reservable(v value, find *finder) (netip.Addr, bool) {
	if strings.ContainsAny(v.Value, "/-") || !strings.ContainsAny(v.Value, ".:") {
		c.errorf(v, "%s is not an address: list each one, such as 203.0.113.10", Quote(v.Value))
		return netip.Addr{}, false
	}
	a, err := parseAddr(v.Value)
	if err == nil {
		err = find.check(a)
	}
	if err != nil {
		c.errorf(v, "%v", err)
	}
	return a, err == nil
}

// untaken reports whether no other reservation has the address.
func (c poolCompiler) untaken(a netip.Addr, r reserved, taken map[netip.Addr]reserved) bool {
	first, dup := taken[a]
	switch {
	case !dup:
		taken[a] = r
	case first.service == r.service:
		c.errorf(r.at, "%s is listed twice, first in line %d", a, c.lineOf(first.at))
	default:
		c.errorf(r.at, "%s is reserved for %s already, in line %d", a, first.service, c.lineOf(first.at))
	}
	return !dup
}

// finder finds the entry of a pool that contains an address.
type finder struct {
	pools  []Pool
	blocks []block // of all pools, sorted
	sound  bool    // every entry could be read, and none overlaps another
}

// check returns why no pool hands the address out, nil if one does.
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
	name := Quote(f.pools[b.pool].Name)
	if b.subnet && (a == b.From() || a == b.To()) {
		return fmt.Errorf("%s is the first or last address of %s, which pool %s withholds: set its useFirstAndLast, or reserve "+
			"another address", a, b.text, name)
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
