package direct

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/test/nft"
)

// A model of nodes that hand one segment to each other. Their views of each other may be wrong, and
// differ. The rules that a Director makes from these views are interpreted.

// view is a node's opinion of another one.
type view int

const (
	hears    view = iota
	silence       // it does not answer
	stranger      // it has not answered yet: its hardware address is not known
	gone          // it is not asked
)

// modelled is a node of the model.
type modelled struct {
	rules, atInterface *Program
	// keeps is set if it has the connection, stale if the segment does not fit what it remembers.
	keeps, stale, dead bool
	// short is set if the Service has the shortcut.
	short bool
}

// modelDevice is the interface that the model's nodes are on.
const modelDevice = 2

func modelAddr(i int) netip.Addr    { return netip.AddrFrom4([4]byte{198, 18, 0, byte(i)}) }
func modelHardware(i int) string    { return string([]byte{2, 0, 0, 0, 0, byte(i)}) }
func modelName(i int) string        { return fmt.Sprint("n", i) }
func modelIndex(hop netip.Addr) int { return int(hop.As4()[3]) }

// model returns the node with that number, with its rules for the backends.
func model(self int, views []view, all []plan.Backend) *modelled {
	return modelWith(self, views, all, func(i int) int { return i })
}

// modelWith is model where a node may have the address of another one.
func modelWith(self int, views []view, all []plan.Backend, at func(int) int) *modelled {
	d := New(Options{Log: slog.New(slog.DiscardHandler), Node: modelName(self)})
	d.want = plan.Forwarding{Nodes: map[string][]netip.Addr{},
		Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Local: true, Backends: all}}}
	for i, v := range views {
		if i == self {
			continue
		}
		n := neighbour{addr: modelAddr(at(i)), device: modelDevice, hardware: modelHardware(at(i)), silent: v == silence || v == stranger}
		if v == stranger {
			n.hardware = ""
		}
		d.want.Nodes[modelName(i)], d.nodes[n.addr] = []netip.Addr{n.addr}, &host{neighbour: n, gone: v == gone}
	}
	r := d.rules(0, families[0], Tables{})
	of := r.services[serviceKey(vip4, 80)].steer
	return &modelled{rules: r.program(families[0], of), atInterface: r.program(shortcuts[0], of)}
}

// segment is the segment that the nodes hand on. It is no SYN.
type segment struct {
	bucket uint32
	from   string // hardware address
	ttl    byte
	state  uint32
}

// take applies the node's rules to a segment. to is the node to which the segment is handed. If
// there is none, dropped reports whether the segment was dropped or stays on the node.
func (n *modelled) take(s *segment) (to netip.Addr, dropped bool) {
	s.state = uint32(expr.CtStateBitNEW)
	switch {
	case n.stale:
		s.state = expr.CtStateBitINVALID
	case n.keeps:
		s.state = expr.CtStateBitESTABLISHED
	}
	if n.short {
		if to, _ = n.run(n.atInterface, s); to.IsValid() {
			return to, false
		}
	}
	return n.run(n.rules, s)
}

func (n *modelled) run(p *Program, s *segment) (to netip.Addr, dropped bool) {
	v := nft.Rules{Chains: p.Chains, Lookup: func(set string, key []byte) ([]byte, bool) {
		if set == keptSet {
			return nil, n.keeps || n.stale
		}
		return p.Lookup(set, key)
	}}.Run(p.Chain, s)
	if to, _ = netip.AddrFromSlice(v.To); to.IsValid() {
		s.ttl-- // the kernel
	}
	return to, v.Dropped
}

// Load, Store, Meta, State and Hash implement nft.Packet.
func (s *segment) Load(base expr.PayloadBase, offset, length uint32) []byte {
	switch {
	case base == expr.PayloadBaseLLHeader:
		return []byte(s.from)
	case base == expr.PayloadBaseNetworkHeader && offset == families[0].ttl:
		return []byte{s.ttl}
	case base == expr.PayloadBaseTransportHeader && offset == 13:
		return []byte{ack}
	}
	return make([]byte, length)
}

func (s *segment) Store(_ expr.PayloadBase, _ uint32, data []byte) { s.ttl = data[0] }

func (s *segment) Meta(key expr.MetaKey) []byte {
	if key == expr.MetaKeyIIF {
		return []byte(number(modelDevice))
	}
	return []byte(number(0))
}

func (s *segment) State() []byte { return []byte(number(s.state)) }

func (s *segment) Hash(_ []byte, modulus, _ uint32) []byte { return []byte(number(s.bucket % modulus)) }

// fate is what becomes of a segment.
type fate struct {
	found, reset bool
	handed       int
	way          []int
}

// send sends a segment of a client to a node.
func send(nodes []*modelled, to int, s segment) (f fate) {
	s.from = "client"
	for f.handed < 1000 {
		n := nodes[to]
		f.way = append(f.way, to)
		if n.dead {
			return f
		}
		next, dropped := n.take(&s)
		switch {
		case dropped:
			return f
		case !next.IsValid():
			f.found, f.reset = n.keeps && !n.stale, !n.keeps && !n.stale // kube-proxy drops what does not fit
			return f
		}
		s.from, to, f.handed = modelHardware(to), modelIndex(next), f.handed+1
	}
	return f
}

// Whatever views and tables nodes have, they hand a segment on a bounded number of times, with each
// TTL that a client may choose.
//
// A segment of a connection is not answered by a reset if all nodes have the keeper in their ring,
// whichever nodes each takes for silent, and whichever nodes take new connections by each table. The
// condition is that all ask the same nodes, except for one newcomer that some do not know yet. The
// keeper is found if no node takes it for silent.
func TestNodesMayThinkAnything(t *testing.T) {
	t.Parallel()
	const worlds, segments = 60, 1000
	outcomes := map[string]int{}
	for seed := range uint64(worlds) {
		random := rand.New(rand.NewPCG(seed, 0))
		kind := []string{"anything", "circle", "silence", "hearing"}[seed%4]
		agree, n := kind == "silence" || kind == "hearing", 2+random.IntN(maxRing-1)
		newcomer, silent := random.IntN(n), map[int]bool{}
		var nodes []*modelled
		for self := range n {
			views, all := make([]view, n), []plan.Backend{}
			for i := range n {
				open := random.IntN(4)
				switch {
				case kind == "anything" && random.IntN(3) == 0:
					continue
				case agree && i == newcomer && self != i && random.IntN(2) == 0:
					views[i] = []view{hears, gone}[random.IntN(2)] // nor does it know its hardware address
					continue
				case kind == "anything":
					views[i] = view(random.IntN(4))
				case kind == "circle" && i != (self+1)%n: // each hears the next one alone
					views[i] = stranger
				case kind == "silence" && random.IntN(5) == 0:
					views[i], silent[i] = silence, silent[i] || i != self
				}
				all = append(all, plan.Backend{Node: modelName(i), Open: open, Draining: 3 - open})
			}
			nodes = append(nodes, model(self, views, all))
		}
		for range segments {
			keeper := random.IntN(n + 1) // n: no node
			for i, m := range nodes {
				m.short = random.IntN(2) == 0
				m.keeps, m.stale, m.dead = i == keeper, random.IntN(4) == 0, kind == "silence" && i != keeper && random.IntN(8) == 0
			}
			s := segment{bucket: random.Uint32N(localSize), ttl: 64}
			if !agree {
				s.ttl = byte(random.Uint32())
			}
			f := send(nodes, random.IntN(n), s)
			most, wrong := mostHanded, false
			if agree {
				most = 1 + 2*maxRing
			}
			if agree && keeper < n && keeper != newcomer {
				lost := silent[keeper] || nodes[keeper].stale || slices.ContainsFunc(f.way, func(i int) bool { return nodes[i].dead })
				wrong = f.reset || !f.found && !lost
			}
			if wrong || f.handed > most {
				t.Fatalf("seed %d: %s: %d of %d keeps it, TTL %d, bucket %d: %+v", seed, kind, keeper, n, s.ttl, s.bucket, f)
			}
			outcomes[kind+" found"] += map[bool]int{true: 1}[f.found]
			outcomes[kind+" reset"] += map[bool]int{true: 1}[f.reset]
			outcomes[kind+" most"] = max(outcomes[kind+" most"], f.handed)
		}
	}
	t.Log(outcomes)
}

// A node whose kubelet reports the address of another node gives its share of new connections to that one. They stay where they
// began, as do all others that have not moved in the table. What has moved may not be found, but is handed on a bounded
// number of times.
func TestNodeWithTheAddressOfAnother(t *testing.T) {
	t.Parallel()
	const n = 5
	outcomes := map[string]int{}
	for liar := range n {
		victim := (liar + 2) % n
		at := func(i int) int {
			if i == liar {
				return victim
			}
			return i
		}
		var all []plan.Backend
		for i := range n {
			all = append(all, plan.Backend{Node: modelName(i), Open: 1})
		}
		nodes := make([]*modelled, n)
		for self := range n {
			views := make([]view, n)
			if self == victim {
				views[liar] = gone // nobody answers for it
			}
			nodes[self] = modelWith(self, views, all, at)
		}
		for bucket := range uint32(localSize / 8) {
			for to := range n {
				if to == liar {
					continue
				}
				for keeper := range n {
					for i, m := range nodes {
						m.keeps = i == keeper
					}
					s := segment{bucket: bucket, ttl: 64}
					f := send(nodes, to, s)
					require.LessOrEqual(t, f.handed, mostHanded)
					if begins := append(f.way, to)[min(1, len(f.way)-1)]; keeper == to || keeper == begins {
						require.True(t, f.found, "%+v", f)
						require.NotContains(t, f.way, liar)
					}
					outcomes[fmt.Sprint("found ", f.found)]++
				}
			}
		}
	}
	t.Log(outcomes)
}

// mostHanded is the largest number of times that a segment is handed on.
const mostHanded = 66
