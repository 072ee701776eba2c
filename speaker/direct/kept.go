package direct

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"

	"github.com/google/nftables/binaryutil"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// maxKept bounds the connections of a family that are excepted from the shortcut.
const maxKept = 1 << 15

// kept are connections that this node keeps although the table has them at another node.
type kept struct {
	// of has the connections by the VIP and port, which is a key of the map of services.
	of map[string]*keptAt
	n  int
	// crowded are the VIPs and ports that had too many of them, so that all together exceeded maxKept.
	crowded map[string]bool
	buffer  []byte
}

// keptAt are those of a Service at a VIP and port.
type keptAt struct {
	service string
	flows   map[string]bool // as keys of the set
}

// keptBy looks the connections of the families that have rules up in conntrack. Each time the kernel goes through
// all connections of the machine, so that both families are looked up at once.
func keptBy(rules [2]*ruleset) (all [2]*kept, err error) {
	family := unix.AF_UNSPEC
	switch {
	case rules[1] == nil:
		family = unix.AF_INET
	case rules[0] == nil:
		family = unix.AF_INET6
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(family), Version: nl.NFNETLINK_V0})
	for i, r := range rules {
		if r != nil {
			all[i] = newKept()
		}
	}
	err = request.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
		i := 0 // of the family, by which the message begins
		if len(message) > 0 && message[0] == unix.AF_INET6 {
			i = 1
		}
		if c, ok := shortcuts[i].parseFlow(message); ok && rules[i] != nil {
			all[i].take(rules[i], c)
		}
		return true
	})
	if err != nil {
		return [2]*kept{}, fmt.Errorf("list conntrack: %w", err)
	}
	return all, nil
}

func newKept() *kept { return &kept{of: map[string]*keptAt{}, crowded: map[string]bool{}} }

// take adds a connection that this node keeps, if it has to be excepted.
func (k *kept) take(r *ruleset, c flow) {
	k.buffer = append(append(append(k.buffer[:0], c.vip...), c.port...), 0, 0)
	s, ok := r.services[string(k.buffer)]
	if ok && !s.switchedOff && !k.crowded[string(k.buffer)] && r.tables[s.table].open[s.bucket(c)].device != 0 {
		k.add(string(k.buffer), s.service, string(c.key()))
	}
}

func (k *kept) add(at, service, flow string) {
	if k.of[at] == nil {
		k.of[at] = &keptAt{service, map[string]bool{}}
	}
	flows := k.of[at].flows
	k.n -= len(flows)
	flows[flow] = true
	k.n += len(flows)
	if k.n > maxKept {
		k.crowd()
	}
}

// crowd gives up VIPs and ports. Namespaces share the room, and in each those with the fewest connections come first. It
// leaves room for more, because it costs a sort each time.
func (k *kept) crowd() {
	all := slices.SortedFunc(maps.Keys(k.of), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(k.of[a].flows), len(k.of[b].flows)), cmp.Compare(a, b))
	})
	fair(all, func(at string) (string, int) { return k.of[at].service, len(k.of[at].flows) })
	k.n = 0
	for _, at := range all {
		if n := len(k.of[at].flows); k.n+n <= maxKept*7/8 {
			k.n += n
		} else {
			delete(k.of, at)
			k.crowded[at] = true
		}
	}
}

// flows returns all connections.
func (k *kept) flows() map[string]bool {
	all := make(map[string]bool, k.n)
	for _, at := range k.of {
		maps.Copy(all, at.flows)
	}
	return all
}

// ended reports whether a connection in that state is over. Conntrack remembers it for longer than clients. A
// client may use the port again, for a connection that belongs to the node in the table.
func ended(state uint8) bool {
	return state == nl.TCP_CONNTRACK_TIME_WAIT || state == nl.TCP_CONNTRACK_CLOSE
}

// flow is a connection in conntrack: the addresses and ports of its first segment.
type flow struct{ client, clientPort, vip, port []byte }

// key returns the connection's key in the set (family.flow).
func (e flow) key() []byte {
	key := make([]byte, 0, 2*len(e.client)+8)
	key = append(append(append(key, e.client...), e.clientPort...), 0, 0)
	return append(append(append(key, e.vip...), e.port...), 0, 0)
}

// parseFlow reads a TCP connection that has not ended from a message of the kernel (linux/netfilter/nfnetlink_conntrack.h).
func (f *family) parseFlow(message []byte) (e flow, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return e, false
	}
	attributes, err := netlink.NewAttributeDecoder(message[nl.SizeofNfgenmsg:])
	if err != nil {
		return e, false
	}
	tcp, over := false, false
	for attributes.Next() {
		if about := attributes.Type(); about != nl.CTA_TUPLE_ORIG && about != nl.CTA_PROTOINFO {
			continue
		}
		eachInner(attributes, func(at path, of *netlink.AttributeDecoder) {
			switch at {
			case path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_IP, nl.CTA_IP_V4_SRC}, path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_IP, nl.CTA_IP_V6_SRC}:
				e.client = of.Bytes()
			case path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_IP, nl.CTA_IP_V4_DST}, path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_IP, nl.CTA_IP_V6_DST}:
				e.vip = of.Bytes()
			case path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_PROTO, nl.CTA_PROTO_NUM}:
				tcp = of.Uint8() == unix.IPPROTO_TCP
			case path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_PROTO, nl.CTA_PROTO_SRC_PORT}:
				e.clientPort = of.Bytes()
			case path{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_PROTO, nl.CTA_PROTO_DST_PORT}:
				e.port = of.Bytes()
			case path{nl.CTA_PROTOINFO, nl.CTA_PROTOINFO_TCP, nl.CTA_PROTOINFO_TCP_STATE}:
				over = over || ended(of.Uint8())
			}
		})
	}
	whole := len(e.client) == int(f.length) && len(e.vip) == int(f.length) && len(e.clientPort) == 2 && len(e.port) == 2
	return e, whole && tcp && !over && attributes.Err() == nil
}

// path are the types of nested attributes, from the outside in.
type path [3]uint16

// eachInner calls visit for each attribute two levels within the current one.
func eachInner(outer *netlink.AttributeDecoder, visit func(at path, of *netlink.AttributeDecoder)) {
	outer.Nested(func(middle *netlink.AttributeDecoder) error {
		for middle.Next() {
			middle.Nested(func(inner *netlink.AttributeDecoder) error {
				for inner.Next() {
					visit(path{outer.Type(), middle.Type(), inner.Type()}, inner)
				}
				return nil
			})
		}
		return nil
	})
}

// bucket returns the bucket that the rules find for a connection (family.bucketOf).
func (s steer) bucket(e flow) uint32 {
	key := make([]byte, 0, 2*len(e.client)+4)
	key = append(append(key, e.client...), e.vip...)
	if !s.byClient {
		key = append(append(key, e.clientPort...), 0, 0)
	}
	return uint32(uint64(jhash(key, s.seed)) * uint64(s.buckets) >> 32)
}

// jhash is the kernel's hash (linux/jhash.h, after Bob Jenkins' lookup3), of whole words.
func jhash(key []byte, seed uint32) uint32 {
	initial := 0xdeadbeef + uint32(len(key)) + seed
	a, b, c := initial, initial, initial
	word := func(at int) uint32 {
		if at >= len(key) {
			return 0
		}
		return binaryutil.NativeEndian.Uint32(key[at : at+4])
	}
	for ; len(key) > 12; key = key[12:] {
		a, b, c = a+word(0), b+word(4), c+word(8)
		for _, turn := range [...]int{4, 6, 8, 16, 19, 4} {
			a = (a - c) ^ bits.RotateLeft32(c, turn)
			a, b, c = b, c+b, a
		}
	}
	a, b, c = a+word(0), b+word(4), c+word(8)
	for _, turn := range [...]int{14, 11, 25, 16, 4, 14, 24} {
		c = (c ^ b) - bits.RotateLeft32(b, turn)
		a, b, c = b, c, a
	}
	return b
}
