package direct

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// priority is after conntrack (-200), whose state the rules ask for, and before kube-proxy
// replaces the VIP by an endpoint (-100).
const priority = -150

// A segment of an unknown connection that one node hands to the next has a TTL that counts
// the nodes: firstHop at the first one, and one less at each, until lastHop. So it visits
// maxCandidates nodes at most, whatever their tables are.
const (
	firstHop = 9
	lastHop  = firstHop - maxCandidates + 1
)

// TCP's flags that the rules look at (RFC 9293 section 3.1).
const (
	fin = 0x01
	syn = 0x02
	rst = 0x04
)

// The registers of 32 bits, from the first one.
const (
	reg0 = unix.NFT_REG32_00
	reg8 = unix.NFT_REG32_08
)

// family is what differs between IPv4 and IPv6.
type family struct {
	table       *nftables.Table
	length      uint32 // of an address, in bytes
	source, ttl uint32 // where the source address and the TTL are in the header
	checksum    bool   // the header has one
	address     nftables.SetDatatype
}

const tableName = "lodestone-direct"

var families = []*family{
	{&nftables.Table{Name: tableName, Family: nftables.TableFamilyIPv4}, 4, 12, 8, true, nftables.TypeIPAddr},
	{&nftables.Table{Name: tableName, Family: nftables.TableFamilyIPv6}, 16, 8, 7, false, nftables.TypeIP6Addr},
}

// has reports whether an address is of the family.
func (f *family) has(a netip.Addr) bool { return a.Is4() == (f.length == 4) }

// The sets of the table.
const (
	interfacesSet = "interfaces"
	nodesSet      = "nodes"
	guardSet      = "guard"
	servicesMap   = "services"
)

// base returns the chain that the kernel calls, which passes on what is for a VIP:
//
//	meta l4proto tcp ip daddr . tcp dport vmap @services
func (f *family) base() *nftables.Chain {
	return &nftables.Chain{Name: "prerouting", Table: f.table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(priority)}
}

func (f *family) baseRule() []expr.Any {
	next := reg0 + f.length/4
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg0},
		&expr.Cmp{Register: reg0, Op: expr.CmpOpEq, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: f.source + f.length, Len: f.length},
		&expr.Payload{DestRegister: next, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg0, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: servicesMap},
	}
}

// services is the map from a VIP and port to the chain of its table.
func (f *family) services() *nftables.Set {
	return &nftables.Set{Table: f.table, Name: servicesMap, IsMap: true, Concatenation: true, DataType: nftables.TypeVerdict,
		KeyType: nftables.MustConcatSetType(f.address, nftables.TypeInetService)}
}

func serviceKey(vip netip.Addr, port uint16) string {
	key := binary.BigEndian.AppendUint16(vip.AsSlice(), port)
	return string(append(key, 0, 0))
}

// plainSets are the sets without a verdict.
func (f *family) plainSets() []*nftables.Set {
	return []*nftables.Set{
		{Table: f.table, Name: interfacesSet, KeyType: nftables.TypeIFIndex, KeyByteOrder: binaryutil.NativeEndian},
		{Table: f.table, Name: nodesSet, KeyType: nftables.TypeEtherAddr},
		{Table: f.table, Name: guardSet, KeyType: nftables.TypeMark, KeyByteOrder: binaryutil.NativeEndian, HasTimeout: true},
	}
}

// buckets is a map from a bucket to the chain of a node.
func (f *family) buckets(name string) *nftables.Set {
	return &nftables.Set{Table: f.table, Name: name, IsMap: true, DataType: nftables.TypeVerdict, KeyType: nftables.TypeMark,
		KeyByteOrder: binaryutil.NativeEndian}
}

// guardElement is in guardSet for as long as a speaker refreshes it.
var guardElement = binaryutil.NativeEndian.PutUint32(1)

// steer is the chain of a table for what comes in on the segment:
//
//	iif != @interfaces accept                             from a pod: kube-proxy's
//	1 != @guard accept                                    no speaker for long: as without
//	ct state != { new, invalid } accept                   the connection is kept here
//	ct state invalid tcp flags & (fin | rst) == 0 accept  of a connection that is kept here, perhaps
//	ether saddr @nodes goto second                        another node has handed it here
//	jhash ip saddr . tcp sport mod N vmap @open           the node that takes new connections
//	tcp flags & syn != 0 accept                           which is this one
//	jhash ip saddr . tcp sport mod N vmap @next           or an earlier one has the connection
//
// While the table drains, the rule on SYN comes before the one above it.
// A FIN or RST of a connection that conntrack does not know is invalid, other segments of it
// are new.
func (f *family) steer(s steer) [][]expr.Any {
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	rest := [][]expr.Any{f.lookUp(s, openName(s.table)), join(flagsAre(syn, true), accept), f.lookUp(s, nextName(s.table))}
	if s.drains {
		rest[0], rest[1] = rest[1], rest[0]
	}
	return append([][]expr.Any{
		{&expr.Meta{Key: expr.MetaKeyIIF, Register: reg0}, &expr.Lookup{SourceRegister: reg0, SetName: interfacesSet, Invert: true}, accept},
		{&expr.Immediate{Register: reg0, Data: guardElement}, &expr.Lookup{SourceRegister: reg0, SetName: guardSet, Invert: true}, accept},
		join(stateIs(expr.CtStateBitNEW|expr.CtStateBitINVALID, false), accept),
		join(stateIs(expr.CtStateBitINVALID, true), flagsAre(fin|rst, false), accept),
		{&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6},
			&expr.Lookup{SourceRegister: reg0, SetName: nodesSet}, &expr.Verdict{Kind: expr.VerdictGoto, Chain: s.second()}},
	}, rest...)
}

// second is the chain of a table for what another node handed here, of a connection that is
// not known:
//
//	tcp flags & syn != 0 accept                     a new one
//	ip ttl <= lastHop accept                        nobody knows it
//	ip ttl > firstHop ip ttl set firstHop
//	jhash ip saddr . tcp sport mod N vmap @next     it is kept where the bucket was before, perhaps
func (f *family) second(s steer) [][]expr.Any {
	ttl := &expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: f.ttl, Len: 1}
	set := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: f.ttl, Len: 1}
	if f.checksum {
		set.CsumType, set.CsumOffset = expr.CsumTypeInet, 10
	}
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	return [][]expr.Any{
		join(flagsAre(syn, true), accept),
		{ttl, &expr.Cmp{Register: reg0, Op: expr.CmpOpLte, Data: []byte{lastHop}}, accept},
		{ttl, &expr.Cmp{Register: reg0, Op: expr.CmpOpGt, Data: []byte{firstHop}}, &expr.Immediate{Register: reg0, Data: []byte{firstHop}}, set},
		f.lookUp(s, nextName(s.table)),
	}
}

// lookUp goes to the chain of the node that has the flow in a map of buckets.
func (f *family) lookUp(s steer, set string) []expr.Any {
	exprs := []expr.Any{&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.length}}
	length := f.length
	if !s.byClient {
		exprs = append(exprs, &expr.Payload{DestRegister: reg0 + f.length/4, Base: expr.PayloadBaseTransportHeader, Len: 2})
		length += 4
	}
	return append(exprs,
		&expr.Hash{SourceRegister: reg0, DestRegister: reg8, Length: length, Modulus: s.buckets, Seed: s.seed, Type: expr.HashTypeJenkins},
		&expr.Lookup{SourceRegister: reg8, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: set})
}

// hand is the chain of a node: it hands the packet to it as it is.
//
//	counter dup to ADDRESS device INTERFACE drop
func hand(to neighbour) [][]expr.Any {
	return [][]expr.Any{{
		&expr.Counter{},
		&expr.Immediate{Register: reg0, Data: to.addr.AsSlice()},
		&expr.Immediate{Register: reg8, Data: binaryutil.NativeEndian.PutUint32(uint32(to.device))},
		&expr.Dup{RegAddr: reg0, RegDev: reg8, IsRegDevSet: true},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}}
}

// hold is the chain of a node that is silent: what belongs to it waits until it is back.
//
//	counter drop
func hold() [][]expr.Any {
	return [][]expr.Any{{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}}
}

// stateIs matches packets that have one of the states of conntrack, or none of them.
func stateIs(states uint32, so bool) []expr.Any {
	return bits(&expr.Ct{Register: reg0, Key: expr.CtKeySTATE}, binaryutil.NativeEndian.PutUint32(states), so)
}

// flagsAre matches segments that have one of TCP's flags, or none of them.
func flagsAre(flags byte, so bool) []expr.Any {
	return bits(&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1}, []byte{flags}, so)
}

func bits(load expr.Any, mask []byte, some bool) []expr.Any {
	op := expr.CmpOpEq
	if some {
		op = expr.CmpOpNeq
	}
	none := make([]byte, len(mask))
	return []expr.Any{load,
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: uint32(len(mask)), Mask: mask, Xor: none},
		&expr.Cmp{Register: reg0, Op: op, Data: none}}
}

// join returns the expressions of a rule. The last part is its verdict.
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
