// Package nft interprets rules of nftables, as the kernel would, for simulations of it. It knows the expressions that
// package speaker/direct uses, and panics for all others.
package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Packet is what rules see of a packet.
type Packet interface {
	// Load returns a part of the packet.
	Load(base expr.PayloadBase, offset, length uint32) []byte
	// Store replaces a part.
	Store(base expr.PayloadBase, offset uint32, data []byte)
	// Meta returns what the kernel knows of it.
	Meta(key expr.MetaKey) []byte
	// State is what conntrack knows of it.
	State() []byte
	// Hash is the expression hash.
	Hash(key []byte, modulus, seed uint32) []byte
}

// Segment is a Packet: a TCP segment from a client, as a node has received it.
type Segment struct {
	Client, To netip.AddrPort
	Flags, TTL byte
	// From is the hardware address that sent the frame, and Device the interface that it came in by.
	From   [6]byte
	Device uint32
	Known  State
	Jhash  func(key []byte, seed uint32) uint32
}

// State is what conntrack knows of a packet.
type State uint32

// The states.
const (
	New         State = State(expr.CtStateBitNEW)
	Established State = State(expr.CtStateBitESTABLISHED)
	Invalid     State = State(expr.CtStateBitINVALID)
)

// Load implements Packet. The offsets are those of RFC 791, RFC 8200 and RFC 9293.
func (s *Segment) Load(base expr.PayloadBase, offset, length uint32) []byte {
	size, source, ttl := uint32(4), uint32(12), uint32(8)
	if s.To.Addr().Is6() {
		size, source, ttl = 16, 8, 7
	}
	switch at := (place{base, offset}); at {
	case place{expr.PayloadBaseLLHeader, 6}:
		return s.From[:]
	case place{expr.PayloadBaseNetworkHeader, ttl}:
		return []byte{s.TTL}
	case place{expr.PayloadBaseNetworkHeader, source}:
		return s.Client.Addr().AsSlice()
	case place{expr.PayloadBaseNetworkHeader, source + size}:
		return s.To.Addr().AsSlice()
	case place{expr.PayloadBaseTransportHeader, 0}:
		return binary.BigEndian.AppendUint16(nil, s.Client.Port())
	case place{expr.PayloadBaseTransportHeader, 2}:
		return binary.BigEndian.AppendUint16(nil, s.To.Port())
	case place{expr.PayloadBaseTransportHeader, 13}:
		return []byte{s.Flags}
	default:
		panic(fmt.Sprintf("what is at %v?", at))
	}
}

type place struct {
	base   expr.PayloadBase
	offset uint32
}

// Store implements Packet: nothing but the TTL is replaced.
func (s *Segment) Store(_ expr.PayloadBase, _ uint32, data []byte) { s.TTL = data[0] }

// Meta implements Packet. The segment has come in, and was not routed yet.
func (s *Segment) Meta(key expr.MetaKey) []byte {
	switch key {
	case expr.MetaKeyIIF:
		return binaryutil.NativeEndian.PutUint32(s.Device)
	case expr.MetaKeyL4PROTO:
		return []byte{unix.IPPROTO_TCP}
	}
	return make([]byte, 4)
}

// State implements Packet.
func (s *Segment) State() []byte { return binaryutil.NativeEndian.PutUint32(uint32(s.Known)) }

// Hash implements Packet.
func (s *Segment) Hash(key []byte, modulus, seed uint32) []byte {
	return binaryutil.NativeEndian.PutUint32(uint32(uint64(s.Jhash(key, seed)) * uint64(modulus) >> 32))
}

// Rules are chains, and what is in sets and maps.
type Rules struct {
	Chains map[string][][]expr.Any
	Lookup func(set string, key []byte) (value []byte, in bool)
}

// Verdict is what becomes of a packet.
type Verdict struct {
	// To is the address that it is handed on to. Nil: to nobody.
	To []byte
	// Dropped is set if it is neither handed on nor accepted, and Counter is the last counter then.
	Dropped bool
	Counter string
}

// forward is the expression fwd: it hands on to the address in a register.
type forward interface{ Address() uint32 }

// Run has the rules of a chain, and of those that it leads to, decide about a packet. Where none decides it is accepted.
func (r Rules) Run(name string, p Packet) (v Verdict) {
	chain := r.Chains[name]
next:
	for i := 0; i < len(chain); i++ {
		var registers [unix.NFT_REG32_15 + 1 + 16][]byte // with room for what one of the last ones begins
		counter := ""
		for _, e := range chain[i] {
			switch e := e.(type) {
			case *expr.Meta:
				registers[e.Register] = p.Meta(e.Key)
			case *expr.Ct:
				registers[e.Register] = p.State()
			case *expr.Payload:
				if e.OperationType == expr.PayloadWrite {
					p.Store(e.Base, e.Offset, registers[e.SourceRegister][:e.Len])
				} else {
					registers[e.DestRegister] = p.Load(e.Base, e.Offset, e.Len)
				}
			case *expr.Immediate:
				registers[e.Register] = e.Data
			case *expr.Hash:
				registers[e.DestRegister] = p.Hash(join(registers[e.SourceRegister:], int(e.Length)), e.Modulus, e.Seed)
			case *expr.Bitwise:
				registers[e.DestRegister] = masked(registers[e.SourceRegister], e.Mask)
			case *expr.Cmp:
				if !compare(e.Op, bytes.Compare(registers[e.Register], e.Data)) {
					continue next
				}
			case *expr.Range:
				value := registers[e.Register]
				if in := bytes.Compare(value, e.FromData) >= 0 && bytes.Compare(value, e.ToData) <= 0; in != (e.Op == expr.CmpOpEq) {
					continue next
				}
			case *expr.Lookup:
				value, in := r.Lookup(e.SetName, join(registers[e.SourceRegister:], 0))
				if in == e.Invert {
					continue next
				}
				if e.IsDestRegSet {
					registers[e.DestRegister] = value
				}
			case *expr.Dup:
				v.To = registers[e.RegAddr]
			case forward:
				return Verdict{To: registers[e.Address()]}
			case *expr.Limit:
				continue next // it is never too much
			case *expr.Objref:
				counter = e.Name
			case *expr.Verdict:
				switch e.Kind {
				case expr.VerdictAccept:
					return v
				case expr.VerdictDrop:
					v.Dropped, v.Counter = v.To == nil, counter
					return v
				}
				chain, i = r.Chains[e.Chain], -1
				continue next
			default:
				panic(fmt.Sprintf("what is %T?", e))
			}
		}
	}
	return v
}

// join returns what is in the registers, each value padded to four bytes, up to a length. Zero: up to the first register
// that nothing was loaded into.
func join(registers [][]byte, length int) (all []byte) {
	for i := 0; i < len(registers) && registers[i] != nil && (length == 0 || len(all) < length); {
		value := registers[i]
		all = append(all, value...)
		for len(all)%4 != 0 {
			all = append(all, 0)
		}
		i += (len(value) + 3) / 4
	}
	return all
}

func masked(value, mask []byte) []byte {
	out := bytes.Clone(value)
	for i := range out {
		out[i] &= mask[i]
	}
	return out
}

func compare(op expr.CmpOp, order int) bool {
	switch op {
	case expr.CmpOpEq:
		return order == 0
	case expr.CmpOpNeq:
		return order != 0
	case expr.CmpOpLte:
		return order <= 0
	case expr.CmpOpGt:
		return order > 0
	}
	panic(fmt.Sprintf("what is comparison %d?", op))
}
