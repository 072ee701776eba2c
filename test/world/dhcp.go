package world

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

// The kinds of faults of the DHCP server. They come beside the others, in fleets with a pool that leases its addresses.
const (
	Unserved Kind = 300 + iota // the DHCP server answers nobody
	Range                      // it has other addresses
)

var leaseNames = [...]string{"unserved", "range"}

// firstLeases is the first seed whose fleet may have a pool that leases its addresses.
const firstLeases = 30_000_000

// office is that pool.
const office = "  - {name: office, dhcp: {interface: eth0}}\n"

// The duration of a lease, when the client asks to extend it, and after how long a client without a lease asks again. The two
// numbers are how often a client asks for its last address without an answer, or although it is refused. See package dhcp.
const (
	leaseLength, leaseExtended = 20 * time.Second, 10 * time.Second
	leaseAgain                 = 4 * time.Second
	leaseTries, leaseRefusals  = 4, 2
)

// drawLeases adds a DHCP server to the scenario of a seed, and faults that concern it.
func (s *Scenario) drawLeases() {
	r := rand.New(rand.NewPCG(s.Seed, 8))
	if s.Seed < firstLeases || s.Direct || s.Dual || s.Routers > 0 || s.Segments > 1 || r.IntN(100) < 25 {
		return
	}
	s.DHCP = true
	s.add(r, []Kind{Unserved, Range, Leader, Crash, Suspend, Cutoff, Ill, Delete, Create, Ask})
}

// dhcpServer is the DHCP server of the segment. It knows its clients by their identifiers. It has few addresses, and others
// while a fault has changed its range.
type dhcpServer struct {
	*World
	away, moved int // how many faults keep it from answering, and how many have changed its range
	grants      map[netip.Addr]grant
}

// grant is a lease. It has been extended since then without a gap.
type grant struct {
	client       string
	since, until time.Duration
}

// addresses returns those that the server has.
func (d *dhcpServer) addresses() (all []netip.Addr) {
	for i := range byte(5) {
		all = append(all, netip.AddrFrom4([4]byte{203, 0, 113, 130 + byte(10*min(d.moved, 1)) + i}))
	}
	return all
}

// leases reports whether the server has the address, with or without the fault.
func (d *dhcpServer) leases(addr netip.Addr) bool {
	return d != nil && netipx.MustParseIPRange("203.0.113.130-203.0.113.144").Contains(addr)
}

// request leases an address to a client, or extends its lease. The zero Addr asks for any. A server that has none does not answer.
func (d *dhcpServer) request(client string, want netip.Addr) (answered bool, got netip.Addr) {
	if d.away > 0 {
		return false, got
	}
	for _, addr := range d.addresses() {
		g := d.grants[addr]
		switch ours := g.client == client; {
		case want.IsValid() && addr != want, !ours && g.until > d.now:
		case !got.IsValid(), ours:
			got = addr
		}
	}
	if !got.IsValid() {
		d.release(client, want)
		return want.IsValid(), got
	}
	maps.DeleteFunc(d.grants, func(addr netip.Addr, g grant) bool { return addr != got && g.client == client })
	g := d.grants[got]
	if g.client != client || g.until < d.now {
		g = grant{client: client, since: d.now}
	}
	g.until = d.now + leaseLength
	d.grants[got] = g
	return true, got
}

// replacesNone reports whether the server does not have the address, and has leased all that it has.
func (d *dhcpServer) replacesNone(addr netip.Addr) bool {
	free := func(addr netip.Addr) bool { return d.grants[addr].until < d.now }
	return !slices.Contains(d.addresses(), addr) && !slices.ContainsFunc(d.addresses(), free)
}

// release ends a client's lease of an address.
func (d *dhcpServer) release(client string, addr netip.Addr) {
	if d.grants[addr].client == client {
		delete(d.grants, addr)
	}
}

// inflict begins a fault of the server, and returns the function that ends it.
func (d *dhcpServer) inflict(f Fault) (end func()) {
	if f.Kind == Unserved {
		return d.count(&d.away, func() {})
	}
	return d.count(&d.moved, func() {})
}

// leasedTo returns the lease of the address if it runs and is that Service's.
func (d *dhcpServer) leasedTo(service string, addr netip.Addr) (g grant, ok bool) {
	g = d.grants[addr]
	_, name, _ := strings.Cut(g.client, "/")
	return g, name == service && g.until >= d.now
}

// mayLose reports whether the Service may lose an address, as its lease is over or was some time ago.
func (d *dhcpServer) mayLose(service string, addr netip.Addr) bool {
	if !d.leases(addr) {
		return false
	}
	g, ok := d.leasedTo(service, addr)
	return !ok || d.now-g.since < time.Minute
}

// mayGet reports whether the Service may be given the address: it is leased to it now, or was at the decision, or a controller that
// has just begun asks for it, as the Service had it: then a user may have overwritten it meanwhile.
func (d *dhcpServer) mayGet(service string, addr netip.Addr) bool {
	if !d.leases(addr) {
		return !ofOthers(addr)
	}
	for _, r := range d.control.replicas {
		for id, s := range r.lessees {
			if _, name, _ := strings.Cut(id, "/"); name == service && s.last == addr && !s.Addr.IsValid() {
				return true
			}
		}
	}
	g, ok := d.leasedTo(service, addr)
	return ok || d.now-g.since < staleness || g.until < d.now && d.now-g.until < staleness
}

// lessee is a client of the DHCP server: a model of package dhcp in the time of the world.
type lessee struct {
	ledger.LeaseState
	id             string
	last           netip.Addr    // what is asked for; the zero Addr: any
	had            netip.Addr    // the address that it had last
	until          time.Duration // when the lease ends
	tries, refused int           // without an answer, and without the address
}

var (
	errSilent  = errors.New("no DHCP server answers")
	errRefused = errors.New("the DHCP server refuses it")
	errOver    = errors.New("the lease is over")
)

// followLeases keeps the leases and the ledger in step, as package servicelb does.
func (r *replica) followLeases() {
	if r.dhcp == nil || !r.primed || !r.working {
		return
	}
	states := map[string]ledger.LeaseState{}
	for id, s := range r.lessees {
		states[id] = s.LeaseState
	}
	want, due, lost := r.ledger.FollowLeases(map[string]map[string]ledger.LeaseState{"eth0": states}, r.clock())
	if want == nil {
		return
	}
	for _, l := range lost {
		r.record("%s: %s loses the lease of %s: %s", r.name, l.Service, l.Addr, l.Why)
	}
	wanted := map[string]bool{}
	for _, c := range want["eth0"] {
		if wanted[c.ID] = true; r.lessees[c.ID] == nil {
			s := &lessee{id: c.ID, last: c.Last, had: c.Last}
			r.lessees[c.ID] = s
			r.after(r.upTo(10*time.Millisecond), func() { r.lease(s) })
		}
	}
	for _, id := range slices.Sorted(maps.Keys(r.lessees)) {
		if !wanted[id] {
			r.dhcp.release(id, r.lessees[id].Addr)
			delete(r.lessees, id)
		}
	}
	r.look(due...)
}

// lease makes a client ask the server, and again when that is due.
func (r *replica) lease(s *lessee) {
	if r.lessees[s.id] != s || !r.working {
		return
	}
	before, next := s.LeaseState, leaseAgain
	if s.Addr.IsValid() && s.until <= r.now {
		s.lose(errOver)
	} else if answered, got := r.dhcp.request(s.id, s.last); got.IsValid() {
		s.take(got, r.now)
		next = leaseExtended
	} else if answered {
		s.refuse()
	} else if s.wait(); s.Addr.IsValid() {
		next = min(max((s.until-r.now)/2, leaseAgain), s.until-r.now)
	}
	if s.LeaseState != before {
		r.followLeases()
		r.follow()
	}
	r.after(next, func() { r.lease(s) })
}

// take takes over a lease, new or extended.
func (s *lessee) take(addr netip.Addr, now time.Duration) {
	if old := s.had; old.IsValid() && old != addr {
		s.Lost = old
	} else {
		s.Lost = netip.Addr{}
	}
	s.Addr, s.Err, s.last, s.had, s.until, s.tries, s.refused = addr, nil, addr, addr, now+leaseLength, 0, 0
}

// lose ends the lease. From then on the client asks for any address.
func (s *lessee) lose(why error) {
	s.Lost, s.Addr, s.Err, s.last, s.tries, s.refused = s.Addr, netip.Addr{}, why, netip.Addr{}, 0, 0
}

// refuse is called when the server refuses the address. An address from before the start may be of another server.
func (s *lessee) refuse() {
	if s.refused++; s.Addr.IsValid() {
		s.lose(errRefused)
	} else if s.Err = errRefused; s.refused == leaseRefusals {
		s.last = netip.Addr{}
	}
}

// wait is called when there is no answer.
func (s *lessee) wait() {
	if s.tries++; s.tries > 1 {
		s.Err = errSilent
	}
	if s.tries == leaseTries && !s.Addr.IsValid() {
		s.last = netip.Addr{}
	}
}
