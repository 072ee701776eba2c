package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// LeaseClient is a Service that wants a lease.
type LeaseClient struct {
	// ID is what the server knows the Service by.
	ID string
	// Hostname is what the server lists it as.
	Hostname string
	// Namespace is that of the Service. Namespaces take turns.
	Namespace string
	// Last is the address that it has, or had. The server is asked for it first. The zero
	// Addr: none.
	Last netip.Addr
}

// LeaseState is how a client stands.
type LeaseState struct {
	// Addr is leased at present. The zero Addr: there is no lease.
	Addr netip.Addr
	// Err is why there is no lease, or why it is not being extended.
	Err error
	// Lost is an address that the client may not use any more. Without Addr
	// and Lost nothing is known yet: LeaseClient.Last may be used on.
	Lost netip.Addr
}

// Loss is an address that a Service had to give up at once, because its lease
// is over.
type Loss struct {
	// Service is "namespace/name".
	Service string
	// Pool is empty if it was gone before the start.
	Pool string
	Addr netip.Addr
	// Why is without a full stop.
	Why string
}

// lessee is a Service that has leases or waits for one.
type lessee struct {
	*account
	// leased are the addresses of the Service, by interface. The server leased them, or the
	// object names them as leased and the server has not denied that yet.
	leased map[string]netip.Addr
	// waitsOn are the interfaces on which it waits for a lease.
	waitsOn []string
	// answers are how its leases stood last, by interface.
	answers map[string]LeaseState
	// shown are addresses whose leases are over, and which its object may still show. Nobody else gets them.
	shown []netip.Addr
	// returned are addresses that were leased to it while another Service has them and waits for a confirmation, by interface. Its
	// client is gone, which gives the lease back. It comes anew when the other one has been answered.
	returned map[string]netip.Addr
}

// on returns the interfaces on which there has to be a client.
func (s *lessee) on() []string {
	on := slices.AppendSeq(slices.Clone(s.waitsOn), maps.Keys(s.leased))
	slices.Sort(on)
	return slices.Compact(on)
}

// leasing knows what is leased from DHCP servers. A set of leases goes in, and the addresses
// that Services have lost come out.
type leasing struct {
	held   *holdings
	config *config.Config // nil until there is one
	// pools has the pools of the configuration by name, and leased those with DHCP in their order.
	pools  map[string]*config.Pool
	leased []*config.Pool
	of     map[*account]*lessee
	// losses wait to be reported. freed is set when others may have a leased address that they could not have before.
	losses []Loss
	freed  bool
	// work is set when clients or leases have to be followed.
	work bool
	// vacated is set while the allocator has leased addresses of Services that are forgotten. They are about to go back to their
	// servers, and not for another Service of the name.
	vacated bool
}

// configure takes over the configuration.
func (l *leasing) configure(cfg *config.Config) {
	l.config, l.pools, l.leased = cfg, map[string]*config.Pool{}, nil
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		if l.pools[p.Name] = p; p.DHCP != nil {
			l.leased = append(l.leased, p)
		}
	}
}

// open returns the Service as a lessee, which it becomes if it is none.
func (l *leasing) open(a *account) *lessee {
	if l.of[a] == nil {
		l.of[a] = &lessee{account: a, leased: map[string]netip.Addr{}, answers: map[string]LeaseState{},
			returned: map[string]netip.Addr{}}
	}
	return l.of[a]
}

// close forgets the Service.
func (l *leasing) close(a *account) {
	if s := l.of[a]; s != nil && len(s.on()) > 0 {
		l.freed, l.work, l.vacated = true, true, true
	}
	l.settle(a, nil)
	delete(l.of, a)
}

// settle notes that the Service's object shows these addresses now.
func (l *leasing) settle(a *account, shows []ipam.Held) {
	s := l.of[a]
	if s == nil {
		return
	}
	before := len(s.shown)
	s.shown = slices.DeleteFunc(s.shown, func(addr netip.Addr) bool { return !holds(shows, addr) })
	if len(s.shown) < before {
		l.freed, l.work = true, true
	}
}

// restore gives the Service a lease that its object names, unless it has one there.
func (l *leasing) restore(a *account, on string, addr netip.Addr) {
	if s := l.open(a); !s.leased[on].IsValid() {
		s.leased[on] = addr
	}
}

// lessees returns the lessees, oldest first, and forgets Services that are lessees no longer.
func (l *leasing) lessees() []*lessee {
	maps.DeleteFunc(l.of, func(_ *account, s *lessee) bool { return len(s.on())+len(s.shown) == 0 })
	return slices.SortedFunc(maps.Values(l.of), func(s, t *lessee) int { return s.compare(t.account) })
}

// unconfirmed returns a lookup of the Service that has an address whose lease on the interface is not confirmed yet, the oldest of
// those that share it. Nil: none has.
func (l *leasing) unconfirmed() (of func(on string, addr netip.Addr) *lessee) {
	type place struct {
		on   string
		addr netip.Addr
	}
	index := map[place]*lessee{}
	for s := range maps.Values(l.of) {
		for on, addr := range s.leased {
			at := place{on, addr}
			if first := index[at]; s.state(on) == leaseUnconfirmed && l.held.hasOrShows(s.owner.Name, addr) &&
				(first == nil || s.compare(first.account) < 0) {
				index[at] = s
			}
		}
	}
	return func(on string, addr netip.Addr) *lessee {
		if s := index[place{on, addr}]; s != nil && s.leased[on] == addr && s.state(on) == leaseUnconfirmed {
			return s
		}
		return nil
	}
}

// clients returns the clients that want a lease, for the interface of each pool that leases
// its addresses.
func (l *leasing) clients() map[string][]LeaseClient {
	want := map[string][]LeaseClient{}
	for _, p := range l.leased {
		want[p.DHCP.Interface] = nil
	}
	unconfirmed := l.unconfirmed()
	for _, s := range l.lessees() {
		namespace, hostname, _ := strings.Cut(s.owner.Name, "/")
		for _, on := range s.on() {
			if unconfirmed(on, s.returned[on]) != nil {
				continue
			}
			want[on] = append(want[on], LeaseClient{ID: l.clientID(s), Hostname: hostname, Namespace: namespace, Last: s.leased[on]})
		}
	}
	return want
}

// clientID is the client identifier of the Service. It is the same from every node.
func (l *leasing) clientID(s *lessee) string { return l.config.ClusterID + "/" + s.owner.Name }

// follow takes over the states of leases. It returns the Services for which something has
// changed, and whether pools have other addresses now.
func (l *leasing) follow(current map[string]map[string]LeaseState, now time.Time) (due []string, changed bool) {
	changed, l.freed = l.freed, false
	unconfirmed := l.unconfirmed()
	for _, s := range l.lessees() {
		isNew := false
		for _, on := range s.on() {
			if l.unused(s, on) {
				delete(s.leased, on)
				delete(s.answers, on)
				changed = true
				continue
			}
			if unconfirmed(on, s.returned[on]) != nil {
				continue
			}
			delete(s.returned, on)
			is := current[on][l.clientID(s)]
			n, c := l.answer(s, on, l.accepted(s, on, is, unconfirmed(on, is.Addr)), now)
			isNew, changed = isNew || n, changed || c
		}
		if isNew {
			due = append(due, s.owner.Name)
		}
	}
	return due, changed
}

// unserved returns the Services that do not hold an address that is leased to them: another one may have had it.
func (l *leasing) unserved() (names []string) {
	for _, s := range l.lessees() {
		for _, on := range s.on() {
			if addr, leased := s.leased[on]; leased && !holds(l.held.Holds(s.owner.UID), addr) {
				names = append(names, s.owner.Name)
			}
		}
	}
	return names
}

// unused reports whether a leased address is of no use any more.
func (l *leasing) unused(s *lessee, on string) bool {
	addr, leased := s.leased[on]
	return leased && !slices.Contains(s.waitsOn, on) && !l.held.hasOrShows(s.owner.Name, addr)
}

// accepted returns the state without an address that the Service may not have, and with the reason. other is the Service that has it and
// waits for a confirmation; nil: none does.
func (l *leasing) accepted(s *lessee, on string, is LeaseState, other *lessee) LeaseState {
	pool, listed := l.config.PoolOf(is.Addr)
	switch {
	case is.Addr == s.leased[on], other == nil && !listed:
		return is
	case other != nil:
		s.returned[on] = is.Addr
		is.Err = fmt.Errorf("the DHCP server leases %s, which %s has: it is given back, so that it can be confirmed for that Service",
			is.Addr, other.owner.Name)
	default:
		is.Err = fmt.Errorf("the DHCP server leases %s, which is in pool %q: take it out of that pool or out of the server's range",
			is.Addr, pool.Name)
	}
	is.Lost, is.Addr = s.leased[on], netip.Addr{}
	return is
}

// answer takes over the state of a lease. isNew is set when the Service has to be decided
// again, and changed when the pool has other addresses now.
func (l *leasing) answer(s *lessee, on string, is LeaseState, now time.Time) (isNew, changed bool) {
	last, had := s.answers[on], s.leased[on]
	if had.IsValid() && (is.Lost == had || is.Addr.IsValid() && is.Addr != had) {
		why := fmt.Sprintf("the DHCP server leases %s instead", is.Addr)
		if is.Err != nil {
			why = is.Err.Error()
		}
		isNew, changed = true, l.end(s, on, why, now)
		if !slices.Contains(s.waitsOn, on) {
			s.waitsOn = append(s.waitsOn, on) // it stays a client until it is looked at
		}
	}
	if is.Addr.IsValid() && is.Addr != s.leased[on] {
		s.leased[on] = is.Addr
		isNew, changed = true, true
	}
	if sameFacts(is.Err, last.Err) {
		is.Err = last.Err // only times and counts have changed
	} else {
		isNew = true
	}
	s.answers[on] = is
	return isNew || is.Addr != last.Addr, changed
}

// addressOrNumber matches addresses, which mean something, before numbers, which count.
var addressOrNumber = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+|\d+`)

// sameFacts reports whether the errors differ in times and counts at most.
func sameFacts(a, b error) bool {
	if a == nil || b == nil {
		return a == b
	}
	facts := func(err error) string {
		return addressOrNumber.ReplaceAllStringFunc(err.Error(), func(n string) string {
			if strings.Contains(n, ".") {
				return n
			}
			return "N"
		})
	}
	return facts(a) == facts(b)
}

// end ends a lease, and with it the right to the address. The Service keeps an address that
// the document lists in a pool. It reports whether there was a lease.
func (l *leasing) end(s *lessee, on, why string, now time.Time) bool {
	addr, leased := s.leased[on]
	delete(s.leased, on)
	delete(s.answers, on)
	if _, listed := l.config.PoolOf(addr); leased && !listed && l.held.hasOrShows(s.owner.Name, addr) {
		loss := Loss{Service: s.owner.Name, Addr: addr, Why: why}
		for _, h := range l.held.Holds(s.owner.UID) {
			if h.Addr == addr {
				loss.Pool = h.Pool
			}
		}
		l.held.Revoke(addr, now)
		if !slices.Contains(s.shown, addr) {
			s.shown = append(s.shown, addr)
		}
		l.losses, l.work = append(l.losses, loss), true
	}
	return leased
}

// drop ends the leases of pools that are gone.
func (l *leasing) drop(now time.Time) {
	for _, s := range l.lessees() {
		for _, on := range s.on() {
			if _, ok := l.config.PoolOn(on); !ok {
				l.end(s, on, "its pool is gone from the configuration", now)
				s.waitsOn = slices.DeleteFunc(s.waitsOn, func(other string) bool { return other == on })
			}
		}
	}
}

// addTo gives each pool with DHCP what is leased, and reserves it for the
// Service that it is leased for.
func (l *leasing) addTo(setup *ipam.Setup) {
	lessees, taken := l.lessees(), map[netip.Addr]bool{}
	if len(lessees) == 0 {
		return
	}
	shown := map[netip.Addr]*lessee{}
	for _, s := range lessees {
		for _, addr := range s.shown {
			shown[addr] = s
		}
	}
	setup.Pools, setup.Reservations = slices.Clone(setup.Pools), slices.Clone(setup.Reservations)
	for i := range setup.Pools {
		p := &setup.Pools[i]
		if p.DHCP == nil {
			continue
		}
		var free netipx.IPSetBuilder
		for _, s := range lessees {
			addr, leased := s.leased[p.DHCP.Interface]
			if _, listed := l.config.PoolOf(addr); !leased || listed || taken[addr] || shown[addr] != nil && shown[addr] != s {
				continue
			}
			taken[addr] = true
			free.Add(addr)
			setup.Reservations = append(setup.Reservations, config.Reservation{Service: l.beneficiary(s, p), Addresses: []netip.Addr{addr}})
		}
		p.Free, _ = free.IPSet() // only valid addresses went in
	}
}

// beneficiary returns the name that a leased address is reserved for, so that no other Service
// gets it. It is the Service's if the Service may draw from the pool, and if the operator has
// reserved no address for it, because it would then have both. Otherwise it is a name that no
// Service has.
func (l *leasing) beneficiary(s *lessee, p *config.Pool) string {
	reserved := slices.ContainsFunc(l.config.Reservations, func(r config.Reservation) bool {
		return r.Service == s.owner.Name && slices.ContainsFunc(r.Addresses, netip.Addr.Is4)
	})
	if reserved || !candidate(p, s.asked) {
		return "the lease of " + s.owner.Name
	}
	return s.owner.Name
}

// candidate reports whether the request may draw from the pool.
func candidate(p *config.Pool, req ipam.Request) bool {
	named := slices.Contains(req.Pools, p.Name) || len(req.Pools) == 0 && p.AutoAssign
	return named && !p.Draining && p.Allows(req.Subject)
}

// mayDraw reports whether the request may draw from a pool with DHCP. A server leases one address to a Service.
func (l *leasing) mayDraw(req ipam.Request) bool {
	return req.Count <= 1 && slices.ContainsFunc(l.leased, func(p *config.Pool) bool { return candidate(p, req) })
}

// seek decides on which interfaces the Service waits for a lease, and adds that to the
// verdict.
func (l *leasing) seek(a *account, req ipam.Request, v *Verdict, now time.Time) {
	var waitsOn []string
	if (v.Missing == ipam.IPv4 || v.Refusal != nil && v.waits()) && l.mayDraw(req) {
		waitsOn = l.toAsk(a, req, v.Held, now)
	}
	s := l.of[a]
	if s == nil && len(waitsOn) == 0 {
		return
	}
	s = l.open(a)
	if !slices.Equal(waitsOn, s.waitsOn) {
		s.waitsOn = waitsOn
		maps.DeleteFunc(s.answers, func(on string, _ LeaseState) bool { return !slices.Contains(s.on(), on) })
		l.work = true
	}
	v.Leases, v.Overdue = s.among(v.Held)
	for _, addr := range s.shown {
		if !holds(v.Held, addr) {
			v.GivenBack = append(v.GivenBack, addr)
		}
	}
	if r := v.Refusal; r == nil || len(waitsOn) == 0 || r.Reason != ipam.PoolExhausted && r.Reason != ipam.QuotaExceeded {
		return
	}
	sentences := []string{v.Refusal.Message}
	for _, on := range waitsOn {
		if err := s.answers[on].Err; err != nil {
			sentences = append(sentences, err.Error())
		}
	}
	v.Asked = len(sentences) == 1
	v.Refusal = &ipam.Refusal{Reason: LeasePending, Pool: v.Refusal.Pool, Message: strings.Join(sentences, ": ")}
}

// toAsk returns the interfaces on which the Service is to ask for a lease. These are the
// interfaces of the pools that it draws from, in their order, up to the first whose server may
// still lease an address. A pool without leases ends the search if the Service has an address of it
// or gets one.
func (l *leasing) toAsk(a *account, req ipam.Request, held []ipam.Held, now time.Time) (ask []string) {
	var s lessee
	if known := l.of[a]; known != nil {
		s = *known
	}
	for _, c := range l.held.Consider(req, now) {
		p := l.pools[c.Pool]
		if c.Family != ipam.IPv4 || !candidate(p, req) {
			continue
		}
		if p.DHCP == nil {
			if c.Reason == "" || !req.Renumber && slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Pool == p.Name && h.Addr.Is4() }) {
				return ask
			}
			continue
		}
		on := p.DHCP.Interface
		if !s.leased[on].IsValid() && c.Reason != ipam.PoolExhausted {
			continue
		}
		ask = append(ask, on)
		if s.answers[on].Err == nil {
			return ask
		}
	}
	return ask
}

// among returns the interface of each leased address among those held, and why one of their
// leases is not being extended, if one is not.
func (s *lessee) among(held []ipam.Held) (leases map[netip.Addr]string, overdue error) {
	for _, on := range s.on() {
		addr := s.leased[on]
		if !holds(held, addr) {
			continue
		}
		if leases == nil {
			leases = map[netip.Addr]string{}
		}
		leases[addr] = on
		if answer := s.answers[on]; answer.Addr == addr {
			overdue = answer.Err
		}
	}
	return leases, overdue
}

// LeaseStates are the states of a lease, for the metrics: leased; overdue, when it is not
// being extended; unconfirmed, when it is from before the start; and waiting for a lease.
var LeaseStates = []string{"leased", "overdue", leaseUnconfirmed, LeaseWaiting}

// LeaseWaiting is the one of LeaseStates in which there is no address yet.
const LeaseWaiting = "waiting"

const leaseUnconfirmed = "unconfirmed"

// state returns which of LeaseStates the lease on an interface is in.
func (s *lessee) state(on string) string {
	switch answer := s.answers[on]; {
	case !s.leased[on].IsValid():
		return LeaseWaiting
	case answer.Addr != s.leased[on]:
		return leaseUnconfirmed
	case answer.Err != nil:
		return "overdue"
	}
	return "leased"
}

// count counts the leases of each pool that leases its addresses, by state.
func (l *leasing) count() map[string]map[string]float64 {
	count := map[string]map[string]float64{}
	pools := map[string]string{} // by interface
	for _, p := range l.leased {
		pools[p.DHCP.Interface], count[p.Name] = p.Name, map[string]float64{}
	}
	for _, s := range l.lessees() {
		for _, on := range s.on() {
			if pool, ok := pools[on]; ok {
				count[pool][s.state(on)]++
			}
		}
	}
	return count
}

// FollowLeases takes over the states of leases, by interface and ID of the client. It returns
// the clients that want a lease, for the interface of each pool that leases its addresses
// (nil: there is no configuration yet), the Services that have to be decided again, and the
// addresses that were lost since the last call.
func (l *Ledger) FollowLeases(current map[string]map[string]LeaseState, now time.Time) (want map[string][]LeaseClient, due []string,
	lost []Loss) {
	if l.Config == nil {
		return nil, nil, nil
	}
	due, changed := l.leasing.follow(current, now)
	if changed {
		l.reconfigure(now)
		due = append(due, l.leasing.unserved()...)
	}
	lost, l.leasing.losses = l.leasing.losses, nil
	for _, loss := range lost {
		due = append(due, loss.Service)
	}
	return l.leasing.clients(), due, lost
}
