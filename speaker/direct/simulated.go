package direct

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Simulated is a Director without a kernel and without a clock. Its caller provides the time and the kernel's state, and
// interprets the rules that a Director would write.
type Simulated struct {
	*Machine
	tables   Tables
	short    [2]*ruleset
	nextKept time.Time
	programs map[programKey]*Program
}

type programKey struct {
	at       netip.AddrPort
	shortcut bool
}

// NewSimulated returns a new Director. Directors of one process may share tables, which would be the same.
func NewSimulated(o Options, t Tables) *Simulated {
	return &Simulated{Machine: newMachine(o), tables: t, programs: map[programKey]*Program{}}
}

// Seen is the kernel's state of the segment: the subnets of each interface, and the neighbour table. Gateways are the
// routers that the node knows.
type Seen struct {
	Subnets    map[netip.Prefix]int
	Neighbours []SeenNeighbour
	Gateways   []netip.Addr
}

// SeenNeighbour is an entry of the kernel's neighbour table. Without a hardware address, the kernel is asking the neighbour
// (Asked), or it did not answer.
type SeenNeighbour struct {
	Address  netip.Addr
	Device   int
	Hardware net.HardwareAddr
	Asked    bool
}

// Connection is a connection that conntrack has and that has not ended.
type Connection struct{ Client, VIP netip.AddrPort }

// Begin takes over the first plan, and the rules of an earlier Director. Nil: there was none.
func (s *Simulated) Begin(want plan.Forwarding, before *Simulated, now time.Time) {
	s.begin(want, now)
	s.stale = true
	if before == nil || before.have == [2]*ruleset{} {
		s.absences.forget()
		return
	}
	for i, f := range families {
		if r := before.have[i]; r != nil {
			s.inheritFrom(f, r.services, func(of steer) map[netip.Addr]bool { return r.hops(of.table) }, now)
		}
	}
}

// Set takes over a plan.
func (s *Simulated) Set(want plan.Forwarding, now time.Time) { s.set(want, now) }

// Settled reports whether all nodes on the segment are known, or nothing is to be forwarded.
func (s *Simulated) Settled() bool { return !s.busy() || !s.unheard() }

// Look takes over the kernel's state, and returns which neighbours the kernel is to ask.
func (s *Simulated) Look(seen Seen, now time.Time) (asks []netip.Addr) {
	if !s.busy() {
		return nil
	}
	l := newLinks()
	l.subnets = seen.Subnets
	for _, n := range seen.Neighbours {
		l.add([]netlink.Neigh{n.entry()}, seen.Gateways)
	}
	for _, n := range s.see(l, now) {
		asks = append(asks, n.addr)
	}
	return asks
}

func (n SeenNeighbour) entry() netlink.Neigh {
	e := netlink.Neigh{LinkIndex: n.Device, IP: n.Address.AsSlice(), HardwareAddr: n.Hardware, State: netlink.NUD_REACHABLE}
	switch {
	case n.Asked:
		e.State = netlink.NUD_INCOMPLETE
	case n.Hardware == nil:
		e.State = netlink.NUD_FAILED
	}
	return e
}

// Reconcile brings the rules up to date, and returns which neighbours the kernel is to ask.
func (s *Simulated) Reconcile(seen Seen, now time.Time) (asks []netip.Addr) {
	s.advance(now)
	asks = s.Look(seen, now)
	if s.stale {
		s.update()
	}
	return asks
}

// Forget removes the rules, as if somebody had flushed them. Notice writes them anew.
func (s *Simulated) Forget() {
	s.have, s.short = [2]*ruleset{}, [2]*ruleset{}
}

// Notice checks whether the rules are there.
func (s *Simulated) Notice() {
	s.stale = s.stale || s.there != [2]bool{} && s.have == [2]*ruleset{}
}

func (s *Simulated) update() {
	for i, f := range families {
		want := s.rules(i, f, s.tables)
		if s.short[i] != nil && want != nil {
			s.short[i] = s.short[i].unchanged(want)
		} else {
			s.short[i] = nil
		}
		s.took(i, want)
	}
	s.stale = false
	clear(s.programs)
}

// Extend gives the Services without a shortcut one.
func (s *Simulated) Extend(known func() []Connection, now time.Time) {
	for i, all := range s.have {
		if all == nil || s.short[i].covers(all) && (len(s.short[i].kept) == 0 || now.Before(s.nextKept)) {
			continue
		}
		k := newKept()
		for _, c := range known() {
			if families[i].has(c.VIP.Addr()) {
				k.take(all, c.flow())
			}
		}
		s.short[i], s.nextKept = all.shortcut(k), now.Add(keptInterval)
		clear(s.programs)
	}
}

func (c Connection) flow() flow {
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	return flow{c.Client.Addr().AsSlice(), port(c.Client.Port()), c.VIP.Addr().AsSlice(), port(c.VIP.Port())}
}

// InForce reports whether the rules are there.
func (s *Simulated) InForce() bool { return s.there != [2]bool{} }

// SwitchedOff reports whether the Service at a VIP and port is switched off.
func (s *Simulated) SwitchedOff(at netip.AddrPort) bool {
	for _, r := range s.have {
		if of, has := r.at(at); has {
			return of.switchedOff
		}
	}
	return false
}

// PassesOver reports whether the rules ask a node for no connections because it did not answer.
func (s *Simulated) PassesOver(node netip.Addr) bool {
	n := s.nodes[node]
	return n != nil && n.silent
}

// Open returns, for each bucket of a VIP and port, the node that takes new connections: the zero value if that is this node
// or one that does not answer. Nil: there is no table.
func (s *Simulated) Open(at netip.AddrPort) (nodes []netip.Addr) {
	for _, r := range s.have {
		if of, has := r.at(at); has {
			for _, h := range r.tables[of.table].open {
				nodes = append(nodes, h.addr)
			}
		}
	}
	return nodes
}

func (r *ruleset) at(at netip.AddrPort) (s served, has bool) {
	if r == nil {
		return s, false
	}
	s, has = r.services[serviceKey(at.Addr(), at.Port())]
	return s, has
}

// hops returns the nodes that a table hands packets to.
func (r *ruleset) hops(table int) map[netip.Addr]bool {
	hops := map[netip.Addr]bool{}
	for _, h := range slices.Concat(r.tables[table].open, r.tables[table].next) {
		if h.device != 0 {
			hops[h.addr] = true
		}
	}
	return hops
}

// Program has the rules of a Service's chain, which may lead to other chains.
type Program struct {
	Chain  string
	Chains map[string][][]expr.Any
	// Lookup looks a key up in a set or map.
	Lookup func(set string, key []byte) (value []byte, in bool)
	// Hash is the expression hash.
	Hash func(key []byte, seed uint32) uint32
}

// Forward is the expression fwd, which the library does not have: it sends the packet to the address in a register.
type Forward struct{ expr.Any }

// Address returns the register.
func (Forward) Address() uint32 { return keys }

// Program returns the rules for packets to a VIP and port, at the interface or after conntrack. Nil: there are none. s may
// be nil.
func (s *Simulated) Program(at netip.AddrPort, shortcut bool) *Program {
	if s == nil {
		return nil
	}
	key := programKey{at, shortcut}
	p, known := s.programs[key]
	if known {
		return p
	}
	of, have := families, s.have
	if shortcut {
		of, have = shortcuts, s.short
	}
	for i, r := range have {
		if served, has := r.at(at); has {
			p = r.program(of[i], served.steer)
		}
	}
	s.programs[key] = p
	return p
}

func (r *ruleset) program(f *family, s steer) *Program {
	p := &Program{s.chain(), map[string][][]expr.Any{}, nil, jhash}
	sets := r.sets(f, s.table)
	p.Lookup = func(set string, key []byte) ([]byte, bool) {
		switch set {
		case guardSet:
			return nil, true
		case interfacesSet:
			return nil, r.interfaces[string(key[:4])]
		case hardwareSet:
			return nil, r.hardware[string(key[:6])]
		case keptSet:
			return nil, r.kept[string(key)]
		}
		h, in := sets[set].in(int(binary.NativeEndian.Uint32(key)))
		return h.addr.AsSlice(), in
	}
	if !f.ingress {
		p.Chains[s.chain()], p.Chains[s.second()] = f.steer(s), f.second(s)
		return p
	}
	p.Chains[s.chain()] = f.shortcut()
	for _, index := range s.indexes() {
		p.Chains[s.chain()] = append(p.Chains[s.chain()], join(f.hopOf(s, openName(s.table, s.buckets), index), Forward{}))
	}
	return p
}
