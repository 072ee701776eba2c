package direct

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A model of nodes that hand each other one segment. What they think of each other need not be
// so, nor be the same; their rules are those that a Director has for it, and are interpreted.

// view is what a node thinks of another one.
type view int

const (
	hears    view = iota
	silence       // it does not answer
	stranger      // it has not answered yet: its hardware address is not known
	gone          // it is not to be asked
)

// modelled is a node of the model.
type modelled struct {
	chains   map[string][][]expr.Any
	sets     map[string]*bucketSet
	steer    steer
	hardware map[string]bool
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

// model returns the node with that number of those that have the backends, as it has the rules.
func model(self int, views []view, all []plan.Backend) *modelled {
	d := New(Options{Log: slog.New(slog.DiscardHandler), Node: modelName(self)})
	d.want = plan.Forwarding{Nodes: map[string][]netip.Addr{},
		Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: all}}}
	for i, v := range views {
		if i == self {
			continue
		}
		n := neighbour{addr: modelAddr(i), device: modelDevice, hardware: modelHardware(i), silent: v == silence || v == stranger}
		if v == stranger {
			n.hardware = ""
		}
		d.want.Nodes[modelName(i)], d.nodes[n.addr] = []netip.Addr{n.addr}, &host{neighbour: n, gone: v == gone}
	}
	r, _ := d.rules(0, families[0], d.peers(families[0]), map[string]table{})
	s := r.services[serviceKey(vip4, 80)].steer
	m := &modelled{steer: s, hardware: r.hardware, sets: r.sets(families[0], s.table), chains: map[string][][]expr.Any{
		s.chain(): families[0].steer(s), s.second(): families[0].second(s), "shortcut": shortcuts[0].shortcut()}}
	for _, index := range s.indexes() {
		m.chains["shortcut"] = append(m.chains["shortcut"], join(shortcuts[0].hopOf(s, openName(s.table, s.buckets), index), &fwd{}))
	}
	return m
}

// fwd is the expression that the library does not have.
type fwd struct{ expr.Any }

// segment is what the nodes hand on. It is no SYN.
type segment struct {
	bucket uint32
	from   string // hardware address
	ttl    byte
}

// take has the node do what its rules say. To is the node that the segment is handed to; if it
// is none, dropped says whether the segment stays.
func (n *modelled) take(s *segment) (to netip.Addr, dropped bool) {
	state := uint32(expr.CtStateBitNEW)
	switch {
	case n.stale:
		state = expr.CtStateBitINVALID
	case n.keeps:
		state = expr.CtStateBitESTABLISHED
	}
	if n.short {
		if to, _ = n.run("shortcut", state, s); to.IsValid() {
			return to, false
		}
	}
	return n.run(n.steer.chain(), state, s)
}

// run interprets the rules of a chain.
func (n *modelled) run(name string, state uint32, s *segment) (to netip.Addr, dropped bool) {
	chain := n.chains[name]
next:
	for i := 0; i < len(chain); i++ {
		var registers [unix.NFT_REG32_15 + 1][]byte
		for _, e := range chain[i] {
			switch e := e.(type) {
			case *expr.Meta:
				switch e.Key { // the protocol is for the guard, which is there
				case expr.MetaKeyIIF:
					registers[e.Register] = []byte(number(modelDevice))
				case expr.MetaKeyOIF:
					registers[e.Register] = []byte(number(0))
				}
			case *expr.Ct:
				registers[e.Register] = []byte(number(state))
			case *expr.Payload:
				switch {
				case e.OperationType == expr.PayloadWrite:
					s.ttl = registers[e.SourceRegister][0]
				case e.Base == expr.PayloadBaseLLHeader:
					registers[e.DestRegister] = []byte(s.from)
				case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == families[0].ttl:
					registers[e.DestRegister] = []byte{s.ttl}
				case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 13:
					registers[e.DestRegister] = []byte{ack}
				}
			case *expr.Immediate:
				registers[e.Register] = e.Data
			case *expr.Hash:
				registers[e.DestRegister] = []byte(number(s.bucket % e.Modulus))
			case *expr.Bitwise:
				masked := bytes.Clone(registers[e.SourceRegister])
				for i := range masked {
					masked[i] &= e.Mask[i]
				}
				registers[e.DestRegister] = masked
			case *expr.Cmp:
				order := bytes.Compare(registers[e.Register], e.Data)
				if is := e.Op == expr.CmpOpEq && order == 0 || e.Op == expr.CmpOpNeq && order != 0 ||
					e.Op == expr.CmpOpLte && order <= 0 || e.Op == expr.CmpOpGt && order > 0; !is {
					continue next
				}
			case *expr.Range:
				v := registers[e.Register]
				if in := bytes.Compare(v, e.FromData) >= 0 && bytes.Compare(v, e.ToData) <= 0; in != (e.Op == expr.CmpOpEq) {
					continue next
				}
			case *expr.Lookup:
				h, in := n.lookup(e.SetName, registers[e.SourceRegister])
				if in == e.Invert {
					continue next
				}
				if e.IsDestRegSet {
					registers[e.DestRegister] = h.addr.AsSlice()
				}
			case *expr.Dup:
				to, _ = netip.AddrFromSlice(registers[e.RegAddr])
				s.ttl-- // the kernel
			case *fwd:
				to, _ = netip.AddrFromSlice(registers[keys])
				s.ttl--
				return to, false
			case *expr.Limit:
				continue next // it is not reached
			case *expr.Objref:
			case *expr.Verdict:
				switch e.Kind {
				case expr.VerdictAccept:
					return to, false
				case expr.VerdictDrop:
					return to, !to.IsValid()
				}
				chain, i = n.chains[e.Chain], -1
				continue next
			default:
				panic(fmt.Sprintf("what is %T?", e))
			}
		}
	}
	return to, false
}

func (n *modelled) lookup(set string, key []byte) (hop, bool) {
	switch set {
	case interfacesSet, guardSet:
		return hop{}, true
	case keptSet:
		return hop{}, n.keeps || n.stale
	case hardwareSet:
		return hop{}, n.hardware[string(key)]
	}
	return n.sets[set].in(int(binaryutil.NativeEndian.Uint32(key)))
}

// fate is what becomes of a segment.
type fate struct {
	found, reset bool
	handed       int
	way          []int
}

// send has a client send a segment to a node.
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

// Whatever nodes think of each other, and whichever tables they have, they hand a segment on a
// bounded number of times, with each TTL that a client may choose.
//
// A segment of a connection that is kept by a node that all have in their ring is not answered by a
// reset, whoever thinks whomever silent, and whoever takes new connections by whose table: as long as
// all ask the same nodes, but for one newcomer that some do not know yet. Where nobody thinks the
// keeper silent it is found.
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
				case kind == "anything" && random.IntN(3) == 0, agree && i == newcomer && self != i && random.IntN(2) == 0:
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
			keeper := random.IntN(n + 1) // the last one is nobody
			for i, m := range nodes {
				m.short = random.IntN(2) == 0
				m.keeps, m.stale, m.dead = i == keeper, random.IntN(4) == 0, kind == "silence" && i != keeper && random.IntN(8) == 0
			}
			s := segment{bucket: random.Uint32N(clusterSize), ttl: 64}
			if !agree {
				s.ttl = byte(random.Uint32())
			}
			f := send(nodes, random.IntN(n), s)
			why := fmt.Sprintf("seed %d: %s: %d of %d keeps it, TTL %d, bucket %d: %+v", seed, kind, keeper, n, s.ttl, s.bucket, f)
			require.LessOrEqual(t, f.handed, map[bool]int{true: 1 + 2*maxRing, false: mostHanded}[agree], why)
			if agree && keeper < n && keeper != newcomer {
				require.False(t, f.reset, why)
				lost := silent[keeper] || nodes[keeper].stale || slices.ContainsFunc(f.way, func(i int) bool { return nodes[i].dead })
				require.True(t, f.found || lost, why)
			}
			outcomes[kind+" found"] += map[bool]int{true: 1}[f.found]
			outcomes[kind+" reset"] += map[bool]int{true: 1}[f.reset]
			outcomes[kind+" most"] = max(outcomes[kind+" most"], f.handed)
		}
	}
	t.Log(outcomes)
}

// mostHanded is how often a segment is handed on at most.
const mostHanded = 66
