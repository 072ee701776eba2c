package limit

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// priority is after conntrack (-200), whose state the rules read, and before kube-proxy replaces the VIP by
// an endpoint (-100). At -110 kube-proxy drops packets that loadBalancerSourceRanges does not admit: they
// take no tokens.
const priority = -105

// perSecond ends the comment of a limit's rule.
const perSecond = " new connections per second"

// confirmed is IPS_CONFIRMED of linux/netfilter/nf_conntrack_common.h: the kernel has let a packet of the
// connection through.
const confirmed = 1 << 3

// The 32-bit registers behind an IPv4 and an IPv6 address that begins in register 1. The rest of a look-up's
// key goes there.
const (
	reg32_1 = unix.NFT_REG32_00 + 1
	reg32_4 = unix.NFT_REG32_00 + 4
)

var base = &nftables.Chain{
	Name: baseName, Table: table, Type: nftables.ChainTypeFilter,
	Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(priority),
}

// family is what differs between IPv4 and IPv6.
type family struct {
	protocol byte          // NFPROTO_*
	address  *expr.Payload // the destination
	next     uint32        // the register behind it
	vips     *nftables.Set
}

var families = []family{
	{unix.NFPROTO_IPV4, destination(16, 4), reg32_1, vips("vips4", 1, nftables.TypeIPAddr)},
	{unix.NFPROTO_IPV6, destination(24, 16), reg32_4, vips("vips6", 2, nftables.TypeIP6Addr)},
}

func destination(offset, length uint32) *expr.Payload {
	return &expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}
}

// vips is the map from a VIP and port to the chain of its limit. The id names
// it inside a transaction.
func vips(name string, id uint32, address nftables.SetDatatype) *nftables.Set {
	return &nftables.Set{
		Table: table, Name: name, ID: id, IsMap: true, Concatenation: true, DataType: nftables.TypeVerdict,
		KeyType: nftables.MustConcatSetType(address, nftables.TypeInetProto, nftables.TypeInetService),
	}
}

// setOf returns the map that has the key.
func setOf(key string) *nftables.Set {
	for _, f := range families {
		if int(f.vips.KeyType.Bytes) == len(key) {
			return f.vips
		}
	}
	return nil
}

// guard keeps its elements as long as a Limiter refreshes them. Without them nothing is limited, because a killed
// speaker may be followed by one without the right to change rules.
var guard = &nftables.Set{Table: table, Name: "guard", ID: 3, KeyType: nftables.TypeNFProto, HasTimeout: true}

// refresh adds to the transaction that the limits work for that long from now on.
func refresh(conn *nftables.Conn, long time.Duration) error {
	elements := func(timeout time.Duration) (all []nftables.SetElement) {
		for _, f := range families {
			all = append(all, nftables.SetElement{Key: []byte{f.protocol}, Timeout: timeout})
		}
		return all
	}
	// What is there keeps its time, and what is not there cannot be deleted.
	err := errors.Join(conn.SetAddElements(guard, elements(long)), conn.SetDeleteElements(guard, elements(0)),
		conn.SetAddElements(guard, elements(long)))
	if err != nil {
		return fmt.Errorf("encode elements of nftables set %s: %w", guard.Name, err)
	}
	return nil
}

// guarded is meta nfproto @guard.
func guarded() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: unix.NFT_REG_1},
		&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: guard.Name, SetID: guard.ID},
	}
}

func comment(text string) []byte { return userdata.AppendString(nil, userdata.TypeComment, text) }

// writeBase makes the table anew: maps, hook and the rules that look VIPs up.
func writeBase(conn *nftables.Conn) error {
	conn.AddTable(table) // DelTable fails if the table does not exist
	conn.DelTable(table)
	conn.AddTable(table)
	conn.AddChain(base)
	if err := conn.AddSet(guard, nil); err != nil {
		return fmt.Errorf("encode nftables set %s: %w", guard.Name, err)
	}
	for _, f := range families {
		if err := conn.AddSet(f.vips, nil); err != nil {
			return fmt.Errorf("encode nftables map %s: %w", f.vips.Name, err)
		}
		conn.AddRule(&nftables.Rule{Table: table, Chain: base, Exprs: slices.Concat(f.first(), guarded(), f.lookUp()), UserData: comment(format)})
	}
	return nil
}

// first is, for IPv4:
//
//	meta nfproto ipv4 ct state new ct status ! confirmed
//
// A packet is "new" to conntrack until there was an answer. Only the first packet of a connection is also
// unconfirmed, so that one-way UDP traffic takes one token per flow and not per packet. A dropped packet
// leaves no connection behind: its retransmission is a first packet again.
func (f family) first() []expr.Any {
	bits := func(key expr.CtKey, mask uint32, op expr.CmpOp) []expr.Any {
		return []expr.Any{
			&expr.Ct{Register: unix.NFT_REG_1, Key: key},
			&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(mask),
				Xor: make([]byte, 4)},
			&expr.Cmp{Register: unix.NFT_REG_1, Op: op, Data: make([]byte, 4)},
		}
	}
	return slices.Concat(
		[]expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: unix.NFT_REG_1},
			&expr.Cmp{Register: unix.NFT_REG_1, Op: expr.CmpOpEq, Data: []byte{f.protocol}},
		},
		bits(expr.CtKeySTATE, expr.CtStateBitNEW, expr.CmpOpNeq),
		bits(expr.CtKeySTATUS, confirmed, expr.CmpOpEq),
	)
}

// lookUp is, for IPv4:
//
//	ip daddr . meta l4proto . th dport vmap @vips4
func (f family) lookUp() []expr.Any {
	return []expr.Any{
		f.address,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.next},
		&expr.Payload{DestRegister: f.next + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: f.vips.Name,
			SetID: f.vips.ID},
	}
}

// limitTo is:
//
//	limit rate over 100/second burst 100 packets counter name ... drop
//
// The limit is a token bucket. It is full at first, each packet takes a token, and tokens come back evenly.
// The bucket holds the tokens of one second, so that clients that arrive together get through, and at most
// twice the rate in any second.
func limitTo(rate uint32, counter string) []expr.Any {
	return []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(rate), Unit: expr.LimitTimeSecond, Burst: rate, Over: true},
		&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: counter},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}
}

// write adds to the transaction the steps from have to want. References are deleted before the objects that
// they refer to, and added after them.
func write(conn *nftables.Conn, have, want ruleset) error {
	if err := writeElements(have.elements, want.elements, conn.SetDeleteElements); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(have.chains)) {
		if _, ok := want.chains[name]; !ok {
			conn.DelChain(&nftables.Chain{Table: table, Name: name})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have.counters)) {
		if !want.counters[name] {
			conn.DeleteObject(counter(name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.chains)) {
		if rate := want.chains[name]; have.chains[name] != rate || !have.counters[name] {
			conn.AddObj(counter(name)) // an existing counter keeps its value
			c := conn.AddChain(&nftables.Chain{Table: table, Name: name})
			conn.FlushChain(c)
			conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: limitTo(rate, name), UserData: comment(fmt.Sprint(rate, perSecond))})
		}
	}
	return writeElements(want.elements, have.elements, conn.SetAddElements)
}

func counter(name string) *nftables.NamedObj {
	return &nftables.NamedObj{Table: table, Name: name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}}
}

// writeElements encodes with f the elements that others does not have, or has with another chain.
func writeElements(elements, others map[string]string, f func(*nftables.Set, []nftables.SetElement) error) error {
	differ := map[*nftables.Set][]nftables.SetElement{}
	for _, key := range slices.Sorted(maps.Keys(elements)) {
		if chain := elements[key]; others[key] != chain {
			differ[setOf(key)] = append(differ[setOf(key)], nftables.SetElement{
				Key: []byte(key), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain},
			})
		}
	}
	for _, family := range families {
		for part := range slices.Chunk(differ[family.vips], perMessage) {
			if err := f(family.vips, part); err != nil {
				return fmt.Errorf("encode elements of nftables map %s: %w", family.vips.Name, err)
			}
		}
	}
	return nil
}
