package servicelb

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// LeasePending is the reason of a refusal that ends when a DHCP server leases
// an address for the Service.
const LeasePending ipam.Reason = "LeasePending"

// Leases keep addresses leased from DHCP servers; leases.Keeper is one.
type Leases interface {
	// Set replaces, for each interface, those who want a lease there. The
	// lease of who is gone, with its interface or alone, is released.
	Set(want map[string][]LeaseClient)
	// Current returns how they stand, by interface and ID.
	Current() map[string]map[string]LeaseState
	// Changed returns a channel that is closed when Current has something
	// new. Ask for it before Current and nothing is missed.
	Changed() <-chan struct{}
}

// LeaseClient is a Service that wants a lease.
type LeaseClient struct {
	// ID is what the server knows the Service by.
	ID string
	// Hostname is what the server lists it as.
	Hostname string
	// Last is the address that it has, or had, and will be asked for first.
	// The zero Addr: none.
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

// lessee is what the ledger knows of a Service's leases, by interface.
type lessee struct {
	// leased are the addresses that are the Service's until the server says
	// otherwise: it leased them, or the object names them as leased.
	leased map[string]netip.Addr
	// sought are the interfaces on which it waits for a lease.
	sought []string
	// answers are how its leases stood last.
	answers map[string]LeaseState
}

// lease notes that an address is leased.
func (s *lessee) lease(on string, addr netip.Addr) {
	if s.leased == nil {
		s.leased = map[string]netip.Addr{}
	}
	s.leased[on] = addr
}

// interested reports whether it has to do with leases.
func (s *lessee) interested() bool { return len(s.leased)+len(s.sought) > 0 }

// wants returns the interfaces on which there has to be a client.
func (s *lessee) wants() []string {
	on := slices.AppendSeq(slices.Clone(s.sought), maps.Keys(s.leased))
	slices.Sort(on)
	return slices.Compact(on)
}

// lessees returns those who have to do with leases, oldest first.
func (l *Ledger) lessees() []*account {
	var all []*account
	for _, a := range l.accounts {
		if a.interested() {
			all = append(all, a)
		}
	}
	sortAccounts(all)
	return all
}

// leasesMoved has whoever keeps the leases look at LeaseClients again.
func (l *Ledger) leasesMoved() {
	select {
	case l.leaseWork <- struct{}{}:
	default:
	}
}

// LeaseClients returns who wants a lease, for the interface of each pool that
// leases its addresses. Nil: there is no configuration yet.
func (l *Ledger) LeaseClients() map[string][]LeaseClient {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.config == nil {
		return nil
	}
	want := map[string][]LeaseClient{}
	for _, p := range l.config.Pools {
		if p.DHCP != nil {
			want[p.DHCP.Interface] = nil
		}
	}
	for _, a := range l.lessees() {
		_, hostname, _ := strings.Cut(a.owner.Name, "/")
		for _, on := range a.wants() {
			want[on] = append(want[on], LeaseClient{ID: l.clientID(a), Hostname: hostname, Last: a.leased[on]})
		}
	}
	return want
}

// clientID is what servers know the Service by, whichever node asks.
func (l *Ledger) clientID(a *account) string { return l.config.ClusterID + "/" + a.owner.Name }

// FollowLeases takes over how leases stand. It returns the Services to which
// that is news, and what was lost since the last call.
func (l *Ledger) FollowLeases(current map[string]map[string]LeaseState) (due []string, lost []Loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow()
	if l.config == nil {
		return nil, nil
	}
	moved := l.leasesFreed
	l.leasesFreed = false
	for _, a := range l.lessees() {
		news := false
		for _, on := range a.wants() {
			if l.idle(a, on) {
				delete(a.leased, on)
				delete(a.answers, on)
				moved = true
				continue
			}
			n, m := l.answer(a, on, current[on][l.clientID(a)])
			news, moved = news || n, moved || m
		}
		if news {
			due = append(due, a.owner.Name)
		}
	}
	if moved {
		l.reconfigure()
	}
	lost, l.losses = l.losses, nil
	return due, lost
}

// idle reports whether a leased address is of no use any more.
func (l *Ledger) idle(a *account, on string) bool {
	addr, leased := a.leased[on]
	return leased && !slices.Contains(a.sought, on) && !l.holds(a, addr)
}

// holds reports whether the Service holds an address, or its object still
// shows it.
func (l *Ledger) holds(a *account, addr netip.Addr) bool {
	return slices.ContainsFunc(l.alloc.HoldersOf(addr), func(o ipam.Owner) bool { return o.Name == a.owner.Name })
}

// answer takes over how a lease stands, and tells whether that is news to the
// Service and whether the pool has other addresses now.
func (l *Ledger) answer(a *account, on string, s LeaseState) (news, moved bool) {
	last, had := a.answers[on], a.leased[on]
	if lan, listed := l.config.PoolOf(s.Addr); listed && s.Addr != had {
		s.Err = fmt.Errorf("the DHCP server leases %s, which is in pool %q: take it out of that pool or out of the server's range", s.Addr, lan.Name)
		s.Lost, s.Addr = had, netip.Addr{}
	}
	if had.IsValid() && (s.Lost == had || s.Addr.IsValid() && s.Addr != had) {
		why := fmt.Sprintf("the DHCP server leases %s instead", s.Addr)
		if s.Err != nil {
			why = s.Err.Error()
		}
		news, moved = true, l.disown(a, on, why)
		if !slices.Contains(a.sought, on) {
			a.sought = append(a.sought, on) // it stays a client until it is looked at
		}
	}
	if s.Addr.IsValid() && s.Addr != a.leased[on] {
		a.lease(on, s.Addr)
		news, moved = true, true
	}
	if sameFacts(s.Err, last.Err) {
		s.Err = last.Err // its numbers may change all the time: say it once
	} else {
		news = true
	}
	if a.answers == nil {
		a.answers = map[string]LeaseState{}
	}
	a.answers[on] = s
	return news || s.Addr != last.Addr, moved
}

// addressOrNumber matches addresses, which tell something, before numbers, which count.
var addressOrNumber = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+|\d+`)

// sameFacts reports whether both say the same, but for times and counts.
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

// disown ends a lease: the address is not ours to keep. One that the document
// lists as a pool's stays. It reports whether there was a lease.
func (l *Ledger) disown(a *account, on, why string) bool {
	addr, leased := a.leased[on]
	delete(a.leased, on)
	delete(a.answers, on)
	if _, listed := l.config.PoolOf(addr); leased && !listed && l.holds(a, addr) {
		loss := Loss{Service: a.owner.Name, Addr: addr, Why: why}
		for _, h := range l.alloc.Holds(a.owner.UID) {
			if h.Addr == addr {
				loss.Pool = h.Pool
			}
		}
		l.alloc.Revoke(addr, l.Now())
		l.losses = append(l.losses, loss)
		l.leasesMoved()
	}
	return leased
}

// LeaseOver reports whether the Service's object shows an address whose lease
// is over.
func (l *Ledger) LeaseOver(svc *corev1.Service) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[NameOf(svc)]
	for addr := range kube.Leases(svc) {
		if slices.Contains(kube.VIPs(svc), addr) && (a == nil || !l.holds(a, addr)) {
			return true
		}
	}
	return false
}

// dropLeases disowns the leases of pools that are gone.
func (l *Ledger) dropLeases() {
	for _, a := range l.lessees() {
		for _, on := range a.wants() {
			if _, ok := l.config.PoolOn(on); !ok {
				l.disown(a, on, "its pool is gone from the configuration")
				a.sought = slices.DeleteFunc(a.sought, func(s string) bool { return s == on })
			}
		}
	}
}

// addLeases gives each pool with DHCP what is leased, and reserves it for the
// Service that it is leased for.
func (l *Ledger) addLeases(s *ipam.Setup) {
	lessees, taken := l.lessees(), map[netip.Addr]bool{}
	if len(lessees) == 0 {
		return
	}
	s.Pools, s.Reservations = slices.Clone(s.Pools), slices.Clone(s.Reservations)
	for i := range s.Pools {
		p := &s.Pools[i]
		if p.DHCP == nil {
			continue
		}
		var free netipx.IPSetBuilder
		for _, a := range lessees {
			addr, leased := a.leased[p.DHCP.Interface]
			if _, listed := l.config.PoolOf(addr); !leased || listed || taken[addr] {
				continue
			}
			taken[addr] = true
			free.Add(addr)
			s.Reservations = append(s.Reservations, config.Reservation{Service: l.beneficiary(a, p), Addresses: []netip.Addr{addr}})
		}
		p.Free, _ = free.IPSet() // only valid addresses went in
	}
}

// beneficiary is who a leased address is reserved for. Nobody else is given it
// in any case; the Service itself, only if it may draw from the pool and no
// address is reserved for it by the operator, which it would have in addition.
func (l *Ledger) beneficiary(a *account, p *config.Pool) string {
	reserved := slices.ContainsFunc(l.config.Reservations, func(r config.Reservation) bool {
		return r.Service == a.owner.Name && slices.ContainsFunc(r.Addresses, netip.Addr.Is4)
	})
	if reserved || !candidate(p, a.asked) {
		return "the lease of " + a.owner.Name
	}
	return a.owner.Name
}

// candidate reports whether the request may draw from the pool.
func candidate(p *config.Pool, req ipam.Request) bool {
	named := slices.Contains(req.Pools, p.Name) || len(req.Pools) == 0 && p.AutoAssign
	return named && !p.Draining && p.Allows(req.Subject)
}

// seek decides on which interfaces the Service waits for a lease, and has the
// verdict say so.
func (l *Ledger) seek(a *account, req ipam.Request, v *Verdict) {
	sought := l.sought(a, req, *v)
	if !slices.Equal(sought, a.sought) {
		a.sought = sought
		maps.DeleteFunc(a.answers, func(on string, _ LeaseState) bool { return !slices.Contains(a.wants(), on) })
		l.leasesMoved()
	}
	v.Leases, v.Overdue = l.leasesOf(a, v.Held)
	if r := v.Refusal; r == nil || len(sought) == 0 || r.Reason != ipam.PoolExhausted && r.Reason != ipam.QuotaExceeded {
		return
	}
	said := []string{v.Refusal.Message}
	for _, on := range sought {
		if err := a.answers[on].Err; err != nil {
			said = append(said, err.Error())
		}
	}
	v.Asked = len(said) == 1
	v.Refusal = &ipam.Refusal{Reason: LeasePending, Pool: v.Refusal.Pool, Message: strings.Join(said, ": ")}
}

// sought returns the interfaces on which the Service is to ask for a lease:
// those of the pools that it draws from, in their order, as far as the first
// whose server may still give one. A pool that has an address at hand ends the
// search.
func (l *Ledger) sought(a *account, req ipam.Request, v Verdict) (sought []string) {
	if l.config == nil || v.Missing != ipam.IPv4 && (v.Refusal == nil || !v.waits()) {
		return nil
	}
	if !slices.ContainsFunc(l.config.Pools, func(p config.Pool) bool { return p.DHCP != nil && candidate(&p, req) }) {
		return nil
	}
	for _, c := range l.alloc.Consider(req, l.Now()) {
		i := slices.IndexFunc(l.config.Pools, func(p config.Pool) bool { return p.Name == c.Pool })
		p := &l.config.Pools[i]
		holds := !req.Renumber && slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return h.Pool == c.Pool && h.Addr.Is4() })
		switch {
		case c.Family != ipam.IPv4 || !candidate(p, req):
			continue
		case p.DHCP == nil && (c.Reason == "" || holds):
			return sought
		case p.DHCP == nil:
			continue
		}
		if on := p.DHCP.Interface; a.leased[on].IsValid() || c.Reason == ipam.PoolExhausted {
			sought = append(sought, on)
			if a.answers[on].Err == nil {
				return sought
			}
		}
	}
	return sought
}

// leasesOf returns the interface of each address held that is leased, and why
// one of them is not being extended, if that is so.
func (l *Ledger) leasesOf(a *account, held []ipam.Held) (leases map[netip.Addr]string, overdue error) {
	for _, on := range a.wants() {
		addr := a.leased[on]
		if !slices.ContainsFunc(held, func(h ipam.Held) bool { return h.Addr == addr }) {
			continue
		}
		if leases == nil {
			leases = map[netip.Addr]string{}
		}
		leases[addr] = on
		if s := a.answers[on]; s.Addr == addr {
			overdue = s.Err
		}
	}
	return leases, overdue
}

// leaseText is the annotation that names leases.
func leaseText(leases map[netip.Addr]string) string {
	var said []string
	for _, a := range slices.SortedFunc(maps.Keys(leases), netip.Addr.Compare) {
		said = append(said, a.String()+"="+leases[a])
	}
	return strings.Join(said, ",")
}

// keepLeases keeps the leases and the ledger in step.
func (c *Controller) keepLeases(ctx context.Context) {
	for {
		leases, config := c.Leases.Changed(), c.Config.Changed()
		c.stepLeases()
		select {
		case <-ctx.Done():
			return
		case <-leases:
		case <-config:
		case <-c.Ledger.leaseWork:
		}
	}
}

func (c *Controller) stepLeases() {
	due, lost := c.Ledger.FollowLeases(c.Leases.Current())
	if want := c.Ledger.LeaseClients(); want != nil {
		c.Leases.Set(want)
	}
	for _, l := range lost {
		c.tellLoss(l)
		due = append(due, l.Service)
	}
	for _, name := range due {
		c.queue.Add(name)
	}
}

// tellLoss says to the log, to the Service's users and to the metrics that it
// has lost an address.
func (c *Controller) tellLoss(l Loss) {
	c.metrics.lost.WithLabelValues(l.Pool).Inc()
	c.Log.Warn("leased address lost", "service", l.Service, "address", l.Addr, "pool", l.Pool, "why", l.Why)
	if svc, err := c.get(l.Service); err == nil {
		c.Events.Event(svc, corev1.EventTypeWarning, string(ReasonLeaseLost),
			fmt.Sprintf("%s is withdrawn: %s. The Service gets another address as soon as a pool gives one.", l.Addr, l.Why))
	}
}
