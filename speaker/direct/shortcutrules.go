package direct

import (
	"fmt"
	"maps"
	"net"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ingressPriority is after an operator's rules against floods at an interface (below 0), and after flow
// tables (0).
const ingressPriority = 100

// shortcuts are the tables at the interfaces, as families has those after conntrack. There is one for each
// family, because their sets have the same names.
var shortcuts = []*family{
	{&nftables.Table{Name: tableName + "-ip", Family: nftables.TableFamilyNetdev}, true, 4, 12, 8, true, nftables.TypeIPAddr},
	{&nftables.Table{Name: tableName + "-ip6", Family: nftables.TableFamilyNetdev}, true, 16, 8, 7, false, nftables.TypeIP6Addr},
}

// allTables are the tables after conntrack and those at the interfaces.
var allTables = slices.Concat(families, shortcuts)

// ingressBases returns a base chain for each interface that leads to nodes.
func (f *family) ingressBases(r *ruleset) (chains []*nftables.Chain) {
	for _, key := range slices.Sorted(maps.Keys(r.interfaces)) {
		index := int(binaryutil.NativeEndian.Uint32([]byte(key)))
		name := ""
		if i, err := net.InterfaceByIndex(index); err == nil {
			name = i.Name // the kernel refuses a chain without it
		}
		chains = append(chains, &nftables.Chain{Name: fmt.Sprint("ingress-", index), Table: f.table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookIngress, Priority: nftables.ChainPriorityRef(ingressPriority), Device: name})
	}
	return chains
}

// whole matches packets of the family that are for this host and are no fragments, which conntrack
// reassembles. A frame with a VLAN tag has another type: it comes again, at the interface of the VLAN.
//
//	meta pkttype host ether type ip ip frag-off & 0x3fff == 0
//	meta pkttype host ether type ip6 ip6 nexthdr tcp
func (f *family) whole() []expr.Any {
	etherType := []byte{0x86, 0xdd}
	unfragmented := []expr.Any{
		&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 1},
		&expr.Cmp{Register: keys, Op: expr.CmpOpEq, Data: []byte{unix.IPPROTO_TCP}}}
	if f.length == 4 {
		etherType = []byte{0x08, 0x00}
		flags := &expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 2}
		unfragmented = masked(flags, []byte{0x3f, 0xff}, false)
	}
	return join(
		&expr.Meta{Key: expr.MetaKeyPKTTYPE, Register: keys},
		&expr.Cmp{Register: keys, Op: expr.CmpOpEq, Data: []byte{unix.PACKET_HOST}},
		&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 2},
		&expr.Cmp{Register: keys, Op: expr.CmpOpEq, Data: etherType},
		unfragmented)
}

// shortcut is the chain of a table:
//
//	ether saddr @hardware accept                                   another node has handed it here
//	meta l4proto != @guard accept                                  no speaker for long
//	ip saddr . tcp sport . ip daddr . tcp dport @kept accept       this node keeps the connection
//	ip ttl <= lastHop + maxRing accept                             it goes around the ring
//	ip ttl @misfits accept
//	ip ttl > highest ip ttl set highest
//	iif eth0 counter name handed fwd ip to jhash ... map @open device eth0
//
// The library cannot encode the last rules: see kernel.further.
func (f *family) shortcut() [][]expr.Any {
	return [][]expr.Any{
		join(ofNode(), accept),
		join(unguarded(), accept),
		join(f.flow(), in(keptSet, true), accept),
		join(f.ttlIs(expr.CmpOpLte, lastHop+maxRing), accept),
		join(f.misfits(true), accept),
		join(f.ttlIs(expr.CmpOpGt, highest), f.setTTL(highest)),
	}
}

// flow loads the key of a connection, as in the set.
func (f *family) flow() []expr.Any {
	words := f.length / 4
	return []expr.Any{
		&expr.Payload{DestRegister: keys, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.length},
		&expr.Payload{DestRegister: keys + words, Base: expr.PayloadBaseTransportHeader, Len: 2},
		&expr.Payload{DestRegister: keys + words + 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.source + f.length, Len: f.length},
		&expr.Payload{DestRegister: keys + 2*words + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}
}

// addShortcut adds the chain of a steer.
func (k kernel) addShortcut(f *family, s steer) {
	k.addRules(f, k.AddChain(&nftables.Chain{Table: f.table, Name: s.chain()}), f.shortcut())
	for _, index := range s.indexes() {
		exprs := append(f.hopOf(s, openName(s.table, s.buckets), index), counted(handedCounter))
		*k.further = append(*k.further, f.forward(s.chain(), exprs))
	}
}

// The attributes of the expression fwd (linux/netfilter/nf_tables.h).
const (
	forwardDevice   = 1 // NFTA_FWD_SREG_DEV
	forwardAddress  = 2 // NFTA_FWD_SREG_ADDR
	forwardProtocol = 3 // NFTA_FWD_NFPROTO
)

// forward returns a rule that sends a packet to the node that the expressions have loaded, unchanged
// except that the kernel decrements its TTL.
func (f *family) forward(chain string, exprs []expr.Any) netlink.Message {
	protocol := uint32(unix.NFPROTO_IPV6)
	if f.length == 4 {
		protocol = unix.NFPROTO_IPV4
	}
	e := netlink.NewAttributeEncoder()
	e.String(unix.NFTA_RULE_TABLE, f.table.Name)
	e.String(unix.NFTA_RULE_CHAIN, chain)
	e.Nested(unix.NFTA_RULE_EXPRESSIONS, func(list *netlink.AttributeEncoder) error {
		for _, x := range exprs {
			encoded, err := expr.Marshal(byte(f.table.Family), x)
			if err != nil {
				return err
			}
			list.Bytes(unix.NLA_F_NESTED|unix.NFTA_LIST_ELEM, encoded)
		}
		list.Nested(unix.NFTA_LIST_ELEM, func(fwd *netlink.AttributeEncoder) error {
			fwd.String(unix.NFTA_EXPR_NAME, "fwd")
			fwd.Nested(unix.NFTA_EXPR_DATA, func(data *netlink.AttributeEncoder) error {
				data.Bytes(forwardDevice, binaryutil.BigEndian.PutUint32(device))
				data.Bytes(forwardAddress, binaryutil.BigEndian.PutUint32(keys))
				data.Bytes(forwardProtocol, binaryutil.BigEndian.PutUint32(protocol))
				return nil
			})
			return nil
		})
		return nil
	})
	attributes, _ := e.Encode() // it fails for what is longer than a message
	return netlink.Message{Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE,
		Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Append},
		Data: append([]byte{byte(f.table.Family), unix.NFNETLINK_V0, 0, 0}, attributes...)}
}

// flushFurther commits the second transaction, if there is one.
func (k kernel) flushFurther(f *family) error {
	rules := *k.further
	*k.further = nil
	if len(rules) == 0 {
		return nil
	}
	limit := func(kind netlink.HeaderType) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request},
			Data: []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}}
	}
	batch := slices.Concat([]netlink.Message{limit(unix.NFNL_MSG_BATCH_BEGIN)}, rules, []netlink.Message{limit(unix.NFNL_MSG_BATCH_END)})
	_, err := k.Socket.SendMessages(batch)
	for range rules {
		if err == nil {
			_, err = k.Socket.Receive()
		}
	}
	if err != nil {
		return fmt.Errorf("add rules that forward to the nftables table %s: %w", f.name(), err)
	}
	return nil
}
