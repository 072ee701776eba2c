package direct

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// priority is after conntrack (-200), whose state the rules use, and before kube-proxy replaces
// the VIP by an endpoint (-100). It is before all other chains after conntrack: hardened hosts
// drop segments of connections that conntrack does not know (at -150, like the table mangle of
// iptables), and those have to be handed over.
const priority = -199

// forwardPriority is after kube-proxy's chains for forwarded packets (0 in its mode iptables, -110 in
// nftables), some of which refuse packets by ICMP or reset.
const forwardPriority = 10

// The TTL of a segment of an unknown connection that goes around the ring counts the nodes: the
// first node sets it to lastHop plus the number of nodes in the ring, and each decrements it. So
// it ends, whatever tables the nodes have.
const lastHop = 3

// highest is the largest TTL of a segment that is handed to the node that takes new connections,
// except a misfit. Nodes that do not know each other's hardware addresses hand it to each other until
// the TTL ends, and one of them may then send it around as a misfit: it is handed on 66 times at most,
// whatever a client has sent.
const highest = 64

// misfit is added to the TTL of two kinds of segments. They go around the ring from here, and are
// dropped in the end, where other segments are answered by a reset. The first kind has the addresses
// and ports of a connection in conntrack, but does not fit it. It may be of a later connection from the
// same port, which another node keeps, or be old or forged. The second kind cannot be handed to all
// nodes of its ring, because one is silent, which nodes further on may not know. No segment comes from
// a client with such a TTL, from 131 to 137: hosts begin with 64, 128 or 255, and none is 118 hops away.
const misfit = 128

// aroundPerSecond bounds the segments that one node sends around the ring, for each chain.
const aroundPerSecond = 50_000

// syn is TCP's flag of a first segment (RFC 9293 section 3.1).
const syn = 0x02

// The registers of 32 bits that the rules use.
const (
	keys   = unix.NFT_REG32_00
	device = unix.NFT_REG32_15
)

// family is what differs between IPv4 and IPv6.
type family struct {
	table       *nftables.Table
	ingress     bool   // the table hands over before conntrack: see shortcutrules.go
	length      uint32 // of an address, in bytes
	source, ttl uint32 // where the source address and the TTL are in the header
	checksum    bool   // the header has one
	address     nftables.SetDatatype
}

const tableName = "lodestone-direct"

var families = []*family{
	{&nftables.Table{Name: tableName, Family: nftables.TableFamilyIPv4}, false, 4, 12, 8, true, nftables.TypeIPAddr},
	{&nftables.Table{Name: tableName, Family: nftables.TableFamilyIPv6}, false, 16, 8, 7, false, nftables.TypeIP6Addr},
}

// name is the table's name in the notation of nft(8).
func (f *family) name() string {
	switch {
	case f.ingress:
		return "netdev " + f.table.Name
	case f.length == 4:
		return "ip " + f.table.Name
	}
	return "ip6 " + f.table.Name
}

// has reports whether an address is of the family.
func (f *family) has(a netip.Addr) bool { return a.Is4() == (f.length == 4) }

// The sets and maps of the table, besides those of buckets.
const (
	// interfacesSet has the interfaces that lead to nodes.
	interfacesSet = "interfaces"
	// hardwareSet has the hardware addresses of the other nodes.
	hardwareSet = "hardware"
	// guardSet has one element, which expires unless a speaker refreshes it.
	guardSet = "guard"
	// servicesMap leads from a VIP and port to the chain of the Service's table.
	servicesMap = "services"
	// keptSet has the connections that this node keeps although the table names another node.
	keptSet = "kept"
)

// The counters outlive the chains.
const (
	// handedCounter counts packets that were handed over.
	handedCounter = "handed"
)

// Discard is why a packet was dropped, and the name of the counter.
type Discard string

// The reasons.
const (
	Waits    Discard = "waits"    // a node does not answer
	Limit    Discard = "limit"    // it is too much to send around
	Unserved Discard = "unserved" // kube-proxy left the VIP as it is
)

// Discards explains each Discard.
func Discards() reason.Texts[Discard] {
	return reason.Texts[Discard]{
		Waits: {Cause: "The connection is at a node that does not answer, or may be: the client sends the packet again.",
			Cure: "See why the node does not answer. When it is back, or gone for good, this ends."},
		Limit: {Cause: "More than 50,000 packets a second were of connections that this node does not know.",
			Cure: "Find out who sends them: it is a flood, mostly. Connections that have moved in the table are slow as long as it lasts."},
		Unserved: {Cause: "The node's kube-proxy has no rule for the VIP and port: the client sends the packet again.",
			Cure: "Wait a second if the Service is new or has changed. If it goes on, see whether kube-proxy works on this node."},
	}
}

var counters = []string{handedCounter, string(Waits), string(Limit), string(Unserved)}

func counted(counter string) *expr.Objref {
	return &expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: counter}
}

// sets returns them, the guard first.
func (f *family) sets() []*nftables.Set {
	host := binaryutil.NativeEndian
	sets := []*nftables.Set{
		{Table: f.table, Name: guardSet, KeyType: nftables.TypeInetProto, HasTimeout: true},
		{Table: f.table, Name: interfacesSet, KeyType: nftables.TypeIFIndex, KeyByteOrder: host},
		{Table: f.table, Name: hardwareSet, KeyType: nftables.TypeEtherAddr},
		{Table: f.table, Name: servicesMap, IsMap: true, Concatenation: true, DataType: nftables.TypeVerdict,
			KeyType: nftables.MustConcatSetType(f.address, nftables.TypeInetService)},
	}
	if f.ingress {
		sets = append(sets, &nftables.Set{Table: f.table, Name: keptSet, Concatenation: true,
			KeyType: nftables.MustConcatSetType(f.address, nftables.TypeInetService, f.address, nftables.TypeInetService)})
	}
	return sets
}

// buckets is a map from a bucket to the address of a node, or a set of buckets. With a size the kernel
// uses a hash table of that size instead of one that grows.
func (f *family) buckets(name string, isMap bool, size int) *nftables.Set {
	return &nftables.Set{Table: f.table, Name: name, IsMap: isMap, KeyType: nftables.TypeMark, KeyByteOrder: binaryutil.NativeEndian,
		DataType: f.address, Size: uint32(size)}
}

// serviceKey is a VIP and port as the maps have them, padded to the registers' four bytes.
func serviceKey(vip netip.Addr, port uint16) string {
	key := binary.BigEndian.AppendUint16(vip.AsSlice(), port)
	return string(append(key, 0, 0))
}

// parseServiceKey is the inverse. ok is not set if the length is wrong.
func (f *family) parseServiceKey(key string) (vip netip.Addr, port uint16, ok bool) {
	if len(key) != int(f.length)+4 {
		return vip, 0, false
	}
	vip, ok = netip.AddrFromSlice([]byte(key[:f.length]))
	return vip, binary.BigEndian.Uint16([]byte(key[f.length:])), ok
}

// number is a number as sets and registers have it.
func number(n uint32) string { return string(binaryutil.NativeEndian.PutUint32(n)) }

// bases returns the base chains. The second one is for packets that still have a VIP as destination when
// they are to be forwarded.
func (f *family) bases(r *ruleset) []*nftables.Chain {
	if f.ingress {
		return f.ingressBases(r)
	}
	return []*nftables.Chain{
		{Name: "prerouting", Table: f.table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityRef(priority)},
		{Name: "forward", Table: f.table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
			Priority: nftables.ChainPriorityRef(forwardPriority)},
	}
}

// baseRule leads packets for a VIP to the chain of the Service:
//
//	meta l4proto tcp ip daddr . tcp dport vmap @services
func (f *family) baseRule() []expr.Any {
	var exprs []expr.Any
	if f.ingress {
		exprs = f.whole()
	}
	return append(exprs,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: keys},
		&expr.Cmp{Register: keys, Op: expr.CmpOpEq, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: f.source + f.length, Len: f.length},
		&expr.Payload{DestRegister: keys + f.length/4, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: keys, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: servicesMap})
}

var (
	accept = &expr.Verdict{Kind: expr.VerdictAccept}
	drop   = &expr.Verdict{Kind: expr.VerdictDrop}
)

// steer is the chain of a table for packets from the segment:
//
//	iif != @interfaces accept            from a pod: kube-proxy's
//	oif != 0 counter name unserved drop  it is forwarded as it is: kube-proxy has no rule yet
//	ct state != { new, invalid } accept  the connection is kept here
//	ip ttl <= lastHop wait by @next      all were asked that answer
//	ip ttl <= lastHop accept             all were asked
//	ip ttl == misfit + lastHop drop      as well, and one knew better
//	ether saddr @hardware goto second    another node has handed it here
//	ip ttl <= lastHop + maxRing goto second
//	ip ttl @misfits goto second          it goes around: one has that does not know the node
//	meta l4proto != @guard accept        no speaker for long: as without
//	ip ttl > highest != @misfits ip ttl set highest
//	hand over by @open                   to the node that takes new connections
//	goto second                          which is this one
//
// If the Service is switched off, a SYN is accepted before it is handed over.
//
// A node without a speaker still hands on the segments that other nodes hand to it: otherwise it would
// reset connections that they keep.
//
// A packet for a VIP that kube-proxy does not serve yet would be routed back to the segment, where no host
// answers for the VIP: the client would get an error, and conntrack would remember the flow, so that
// kube-proxy's rules would not see its next packets.
//
// A packet from a node whose hardware address is not known here is handed over once more, unless it goes
// around the ring. It ends by its TTL, which only the first node raises.
func (f *family) steer(s steer) [][]expr.Any {
	second := &expr.Verdict{Kind: expr.VerdictGoto, Chain: s.second()}
	rules := [][]expr.Any{
		join(&expr.Meta{Key: expr.MetaKeyIIF, Register: keys}, in(interfacesSet, false), accept),
		join(&expr.Meta{Key: expr.MetaKeyOIF, Register: keys}, &expr.Cmp{Register: keys, Op: expr.CmpOpNeq, Data: []byte(number(0))},
			counted(string(Unserved)), drop),
		join(stateIs(expr.CtStateBitNEW|expr.CtStateBitINVALID, false), accept),
		join(f.ttlIs(expr.CmpOpLte, lastHop), f.waits(s, nextName(s.table, s.buckets))),
		join(f.ttlIs(expr.CmpOpLte, lastHop), accept),
		join(f.ttlIs(expr.CmpOpEq, misfit+lastHop), drop),
		join(ofNode(), second),
		join(f.ttlIs(expr.CmpOpLte, lastHop+maxRing), second),
		join(f.misfits(true), second),
		join(unguarded(), accept),
	}
	if s.switchedOff {
		rules = append(rules, join(flagsAre(syn, true), accept))
	}
	rules = append(rules, join(f.ttlIs(expr.CmpOpGt, highest), f.misfits(false), f.setTTL(highest)))
	return append(append(rules, f.handOver(s, openName(s.table, s.buckets))...), join(second))
}

// second is the chain of a table for packets that have reached the node that takes new connections:
//
//	tcp flags & syn != 0 accept                                       a new one
//	limit rate over 50000/second counter name limit drop
//	ct state invalid ip ttl != @misfits ip ttl set misfit + lastHop + ring
//	the same for what waits by @next
//	ip ttl > lastHop + maxRing != @misfits ip ttl set lastHop + ring  this is the first node
//	hand over by @next                                                another one may keep the connection
//
// @misfits is misfit + lastHop to misfit + lastHop + maxRing. A FIN or RST of a connection that
// conntrack does not know is invalid, too, and with nf_conntrack_tcp_loose=0 all segments are.
func (f *family) second(s steer) [][]expr.Any {
	next, around := nextName(s.table, s.buckets), lastHop+byte(s.ring)
	return append([][]expr.Any{
		join(flagsAre(syn, true), accept),
		bounded(),
		join(stateIs(expr.CtStateBitINVALID, true), f.misfits(false), f.setTTL(misfit+around)),
		join(f.bucketOf(s), in(held(next), true), f.misfits(false), f.setTTL(misfit+around)),
		join(f.ttlIs(expr.CmpOpGt, lastHop+maxRing), f.misfits(false), f.setTTL(around)),
	}, f.handOver(s, next)...)
}

// ttlIs matches packets by their TTL.
func (f *family) ttlIs(op expr.CmpOp, ttl byte) []expr.Any {
	return []expr.Any{f.loadTTL(), &expr.Cmp{Register: keys, Op: op, Data: []byte{ttl}}}
}

// misfits matches packets that go around as misfits, or all others.
func (f *family) misfits(so bool) []expr.Any {
	op := expr.CmpOpEq
	if !so {
		op = expr.CmpOpNeq
	}
	return []expr.Any{f.loadTTL(), &expr.Range{Register: keys, Op: op, FromData: []byte{misfit + lastHop},
		ToData: []byte{misfit + lastHop + maxRing}}}
}

func (f *family) loadTTL() expr.Any {
	return &expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: f.ttl, Len: 1}
}

// bounded drops segments above aroundPerSecond.
func bounded() []expr.Any {
	return []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: aroundPerSecond, Unit: expr.LimitTimeSecond, Burst: aroundPerSecond / 5, Over: true},
		counted(string(Limit)), drop,
	}
}

func (f *family) setTTL(ttl byte) []expr.Any {
	set := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: f.ttl, Len: 1}
	if f.checksum {
		set.CsumType, set.CsumOffset = expr.CsumTypeInet, 10
	}
	return []expr.Any{&expr.Immediate{Register: keys, Data: []byte{ttl}}, set}
}

// handOver hands the packet, unchanged, to the node in the maps of a table. There is a map for each
// interface, and only the one of the packet's own interface counts: if the packet arrived by another
// segment, that node would drop it because of its source (rp_filter). Packets for a node that does not
// answer are dropped, so that clients send them again.
//
//	iif eth0 dup to jhash ip saddr . ip daddr . tcp sport mod N seed S map @open-0-8192-2 device eth0 counter name handed drop
//	jhash ip saddr . ip daddr . tcp sport mod N seed S @open-0-8192-held counter name waits drop
func (f *family) handOver(s steer, maps string) (rules [][]expr.Any) {
	for _, index := range s.indexes() {
		rules = append(rules, join(f.hopOf(s, maps, index),
			&expr.Dup{RegAddr: keys, RegDev: device, IsRegDevSet: true}, counted(handedCounter), drop))
	}
	return append(rules, f.waits(s, maps))
}

// hopOf matches packets that came in by the interface and belong to another node by these maps, and
// loads the node's address and the interface.
func (f *family) hopOf(s steer, maps string, index uint32) []expr.Any {
	return join(&expr.Meta{Key: expr.MetaKeyIIF, Register: keys},
		&expr.Cmp{Register: keys, Op: expr.CmpOpEq, Data: []byte(number(index))}, f.bucketOf(s),
		&expr.Lookup{SourceRegister: keys, DestRegister: keys, IsDestRegSet: true, SetName: on(maps, index)},
		&expr.Immediate{Register: device, Data: []byte(number(index))})
}

// waits drops packets for a node that does not answer: the client sends them again.
func (f *family) waits(s steer, maps string) []expr.Any {
	return join(f.bucketOf(s), in(held(maps), true), counted(string(Waits)), drop)
}

// bucketOf loads the bucket of the flow. The hash includes the VIP because Services share seeds.
func (f *family) bucketOf(s steer) []expr.Any {
	words := f.length / 4
	exprs := []expr.Any{
		&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.length},
		&expr.Payload{DestRegister: keys + words, Base: expr.PayloadBaseNetworkHeader, Offset: f.source + f.length, Len: f.length},
	}
	length := 2 * f.length
	if !s.byClient {
		exprs = append(exprs, &expr.Payload{DestRegister: keys + 2*words, Base: expr.PayloadBaseTransportHeader, Len: 2})
		length += 4
	}
	return append(exprs, &expr.Hash{SourceRegister: keys, DestRegister: keys, Length: length, Modulus: uint32(s.buckets), Seed: s.seed,
		Type: expr.HashTypeJenkins})
}

// ofNode matches packets that another node has sent.
func ofNode() []expr.Any {
	return join(&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}, in(hardwareSet, true))
}

// unguarded matches all packets once the guard has expired.
func unguarded() []expr.Any {
	return join(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: keys}, in(guardSet, false))
}

// in matches what is in a set, or is not.
func in(set string, so bool) *expr.Lookup {
	return &expr.Lookup{SourceRegister: keys, SetName: set, Invert: !so}
}

// stateIs matches packets that have one of the states of conntrack, or none of them.
func stateIs(states uint32, so bool) []expr.Any {
	return masked(&expr.Ct{Register: keys, Key: expr.CtKeySTATE}, binaryutil.NativeEndian.PutUint32(states), so)
}

// flagsAre matches segments that have one of TCP's flags, or none of them.
func flagsAre(flags byte, so bool) []expr.Any {
	return masked(&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1}, []byte{flags}, so)
}

func masked(load expr.Any, mask []byte, some bool) []expr.Any {
	op := expr.CmpOpEq
	if some {
		op = expr.CmpOpNeq
	}
	none := make([]byte, len(mask))
	return []expr.Any{load,
		&expr.Bitwise{SourceRegister: keys, DestRegister: keys, Len: uint32(len(mask)), Mask: mask, Xor: none},
		&expr.Cmp{Register: keys, Op: op, Data: none}}
}

// join returns the expressions of a rule.
func join(parts ...any) (all []expr.Any) {
	for _, p := range parts {
		switch p := p.(type) {
		case []expr.Any:
			all = append(all, p...)
		case expr.Any:
			all = append(all, p)
		}
	}
	return all
}
