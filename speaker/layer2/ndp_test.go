package layer2

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	ndppacket "github.com/mdlayher/ndp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

var (
	clientIP6 = netip.MustParseAddr("2001:db8::c")
	vip6B     = netip.MustParseAddr("2001:db8::101")
	unspec    = netip.IPv6Unspecified()
)

// query is a Neighbor Solicitation, by default one of a cold client.
type query struct {
	to, from    mac
	source      netip.Addr
	destination netip.Addr
	target      netip.Addr
	options     []ndppacket.Option
}

func coldQuery(client mac, target netip.Addr) query {
	group := solicitedNode(target)
	return query{multicast(group), client, clientIP6, group, target, []ndppacket.Option{sourceOption(client)}}
}

func sourceOption(m mac) ndppacket.Option {
	return &ndppacket.LinkLayerAddress{Direction: ndppacket.Source, Addr: m[:]}
}

func (q query) frame() []byte {
	return ndpFrame(q.to, q.from, q.source, q.destination, &ndppacket.NeighborSolicitation{TargetAddress: q.target, Options: q.options})
}

// but returns the frame with a byte replaced and its checksum right.
func (q query) but(at int, b byte) []byte {
	f := q.frame()
	f[at] = b
	mend(f)
	return f
}

// followed returns the frame with bytes behind its options.
func (q query) followed(options ...byte) []byte {
	f := append(q.frame(), options...)
	binary.BigEndian.PutUint16(f[offPayloadSize:], uint16(len(f)-offType))
	mend(f)
	return f
}

// mend corrects the checksum of a frame with the library, if the frame is long enough to
// have one.
func mend(f []byte) {
	if len(f) < offType {
		return
	}
	end := offType + int(binary.BigEndian.Uint16(f[offPayloadSize:]))
	if end < offType+4 || end > len(f) {
		return
	}
	m, err := icmp.ParseMessage(unix.IPPROTO_ICMPV6, f[offType:end])
	if err != nil {
		return
	}
	payload, err := m.Marshal(icmp.IPv6PseudoHeader(f[offSource:offDestination], f[offDestination:offType]))
	if err == nil && len(payload) == end-offType {
		copy(f[offType:], payload)
	}
}

// advertised reads an advertisement with the library alone.
func advertised(t testing.TB, f []byte) (source, destination netip.Addr, na *ndppacket.NeighborAdvertisement) {
	t.Helper()
	h, err := ipv6.ParseHeader(f[offIPv6:])
	require.NoError(t, err)
	require.Equal(t, ndppacket.HopLimit, h.HopLimit)
	m, err := ndppacket.ParseMessage(f[offType:])
	require.NoError(t, err)
	source, _ = netip.AddrFromSlice(h.Src)
	destination, _ = netip.AddrFromSlice(h.Dst)
	// The library's checksum, which is what clients compare with.
	again, err := ndppacket.MarshalMessageChecksum(m, source, destination)
	require.NoError(t, err)
	require.Equal(t, again, f[offType:])
	na, ok := m.(*ndppacket.NeighborAdvertisement)
	require.True(t, ok, "a %v", m.Type())
	return source, destination, na
}

// ndpAnswers checks the answer to each sender, and which packets are ignored.
func ndpAnswers(t *testing.T, s stage) {
	cold := coldQuery(s.client, vip6)
	with := func(change func(*query)) []byte {
		q := cold
		change(&q)
		return q.frame()
	}
	answered := func(what string, f []byte, to mac, destination netip.Addr, solicited bool) {
		t.Helper()
		got := s.exchange(f)
		if !assert.Len(t, got, 1, what) {
			return
		}
		b := got[0].bytes
		source, at, na := advertised(t, b)
		assert.Equal(t, [2]mac{to, s.node}, [2]mac{mac(b[:6]), mac(b[6:12])}, "%s: frame to and from", what)
		assert.Equal(t, [2]netip.Addr{vip6, destination}, [2]netip.Addr{source, at}, "%s: packet from and to", what)
		assert.Equal(t, &ndppacket.NeighborAdvertisement{Solicited: solicited, Override: true, TargetAddress: vip6,
			Options: []ndppacket.Option{&ndppacket.LinkLayerAddress{Direction: ndppacket.Target, Addr: s.node[:]}}}, na, what)
	}
	ignored := func(what string, f []byte) {
		t.Helper()
		assert.Empty(t, s.exchange(f), what)
	}

	ignored("nothing is owned yet", cold.frame())
	s.set(everywhere(vip6))
	answered("a cold client", cold.frame(), s.client, clientIP6, true)
	probe := func(q *query) { q.to, q.destination, q.options = s.node, vip6, nil }
	answered("a unicast probe (NUD) without an option", with(probe), s.client, clientIP6, true)
	answered("a unicast probe with the option", with(func(q *query) { q.to, q.destination = s.node, vip6 }), s.client, clientIP6, true)
	answered("the option is right, not the frame", with(func(q *query) { q.from = mac{2, 0xa, 0xb, 0, 0, 1} }), s.client, clientIP6, true)
	answered("multicast without an option", with(func(q *query) { q.options = nil }), s.client, clientIP6, true)
	linkLocal := netip.MustParseAddr("fe80::c")
	answered("from a link-local address", with(func(q *query) { q.source = linkLocal }), s.client, linkLocal, true)
	dad := func(q *query) { q.source, q.options = unspec, nil }
	answered("duplicate address detection", with(dad), multicast(allNodes), allNodes, false)
	nonce, err := ndppacket.MarshalMessage(&ndppacket.NeighborSolicitation{TargetAddress: vip6,
		Options: []ndppacket.Option{ndppacket.NewNonce()}})
	require.NoError(t, err)
	answered("the same with a nonce (RFC 7527)", func() []byte { q := cold; dad(&q); return q.followed(nonce[24:]...) }(),
		multicast(allNodes), allNodes, false)
	answered("an option that nobody knows", cold.followed(253, 1, 1, 2, 3, 4, 5, 6), s.client, clientIP6, true)
	answered("a prefix of wrong size, which is not its business", cold.followed(3, 1, 0, 0, 0, 0, 0, 0), s.client, clientIP6, true)
	answered("padding behind the packet", append(cold.frame(), 0, 0, 0), s.client, clientIP6, true)

	ignored("a VIP that is not ours", coldQuery(s.client, vip6B).frame())
	ignored("to somebody else", with(func(q *query) { probe(q); q.to = mac{2, 0, 0, 0, 0, 0xee} }))
	ignored("to all nodes", with(func(q *query) { q.to, q.destination = multicast(allNodes), allNodes }))
	ignored("to another group", with(func(q *query) { q.destination = solicitedNode(vip6B) }))
	ignored("a source that is a group", with(func(q *query) { q.source = allNodes }))
	ignored("a sender who is everybody", with(func(q *query) { q.options = []ndppacket.Option{sourceOption(broadcast)} }))
	ignored("a sender who is a group", with(func(q *query) { q.options = []ndppacket.Option{sourceOption(multicast(allNodes))} }))
	ignored("a sender who is nobody", with(func(q *query) { q.options = []ndppacket.Option{sourceOption(mac{})} }))
	ignored("a sender who is the node itself", with(func(q *query) { q.options = []ndppacket.Option{sourceOption(s.node)} }))
	ignored("a sender who has the VIP", with(func(q *query) { q.source = vip6 }))
	ignored("detection with a sender", with(func(q *query) { q.source = unspec }))
	ignored("detection by unicast", with(func(q *query) { dad(q); q.to, q.destination = s.node, vip6 }))
	ignored("hop limit 254", cold.but(offHopLimit, 254))
	ignored("code 1", cold.but(offCode, 1))
	ignored("a Router Solicitation", cold.but(offType, byte(ipv6.ICMPTypeRouterSolicitation)))
	ignored("IPv4", cold.but(offIPv6, 0x40))
	ignored("UDP", cold.but(offNextHeader, unix.IPPROTO_UDP))
	ignored("a fragment", fragment(cold.frame()))
	wrong := cold.frame()
	wrong[offType+2] ^= 1
	ignored("a wrong checksum", wrong)
	for what, options := range map[string][]byte{
		"of length 0": {14, 0, 1, 2, 3, 4, 5, 6}, "longer than the packet": {14, 2, 1, 2, 3, 4, 5, 6}, "cut short": {14, 1, 1, 2},
		"of one byte": {14},
	} {
		ignored("an option "+what, cold.followed(options...))
	}
	bare := cold
	bare.options = nil
	ignored("a source option of 16 bytes", bare.followed([]byte{1, 2, 2, 0, 0, 0, 0, 0xc, 0, 0, 0, 0, 0, 0, 0, 0}...))
	ignored("a payload longer than the frame", cold.but(offPayloadSize+1, 200))
	ignored("a payload too short", cold.but(offPayloadSize+1, 16))
	for _, n := range []int{13, 53, 60, offOptions - 1, len(cold.frame()) - 1} {
		ignored("a frame cut short", cold.frame()[:n])
	}

	s.set(everywhere(vip6B))
	ignored("withdrawn", cold.frame())
	s.set(nil)
	ignored("the other withdrawn too", coldQuery(s.client, vip6B).frame())
}

// fragment returns the packet in an only fragment (RFC 6946), which hosts
// would put together.
func fragment(f []byte) []byte {
	header := []byte{unix.IPPROTO_ICMPV6, 0, 0, 0, 0, 0, 0, 1}
	g := slices.Concat(f[:offType], header, f[offType:])
	g[offNextHeader] = unix.IPPROTO_FRAGMENT
	binary.BigEndian.PutUint16(g[offPayloadSize:], uint16(len(g)-offType))
	return g
}

func TestNDPAnswersSimulated(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		ndpAnswers(t, stage{
			node:   hardwareAddr(eth(1, "eth0").HardwareAddr),
			client: clientMAC,
			set: func(want map[netip.Addr]plan.Layer2) {
				w.set(want)
				w.after(time.Minute)
			},
			exchange: func(f []byte) []frame {
				w.take()
				if c := w.conn("eth0 IPv6"); c != nil {
					c.in <- f
				}
				return w.after(0)
			},
		})
		assert.NotZero(t, testutil.ToFloat64(w.metrics.malformed.WithLabelValues("eth0", "IPv6")), "packets that break the protocol")
	}, eth(1, "eth0"))
}

// An owner announces a VIP to all nodes as often as by ARP, and once to routers, which
// may not know it.
func TestNDPTakeover(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		node := hardwareAddr(eth(1, "eth0").HardwareAddr)
		w.set(everywhere(vip6))
		var sent []string
		for _, f := range w.after(time.Hour) {
			source, destination, na := advertised(t, f.bytes)
			assert.Equal(t, [2]mac{multicast(destination), node}, [2]mac{mac(f.bytes[:6]), mac(f.bytes[6:12])})
			assert.Equal(t, vip6, source)
			assert.Equal(t, &ndppacket.NeighborAdvertisement{Override: destination == allNodes, TargetAddress: vip6,
				Options: []ndppacket.Option{
					&ndppacket.LinkLayerAddress{Direction: ndppacket.Target, Addr: node[:]},
					sealOption(claimOf(node, vip6).Seal),
				}}, na)
			sent = append(sent, f.at.String()+" "+destination.String())
		}
		assert.Equal(t, []string{"0s ff02::1", "0s ff02::2", "100ms ff02::1", "1s ff02::1", "2s ff02::1", "4s ff02::1"}, sent)
		w.set(everywhere(vip6))
		assert.Empty(t, w.after(time.Hour), "though nothing changed")
		w.set(everywhere(vip6, vip6B))
		w.after(500 * time.Millisecond)
		w.set(nil)
		assert.Empty(t, w.after(time.Hour), "after withdrawal")
	}, eth(1, "eth0"))
}

// A claim is reported and not answered. A host that is about to take the VIP is
// reported, and gets the answer that it is in use.
func TestNDPConflict(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.set(everywhere(vip6))
		w.after(time.Minute)
		claim := func(from mac, source, destination netip.Addr, solicited bool) []byte {
			return ndpFrame(multicast(destination), from, source, destination, &ndppacket.NeighborAdvertisement{
				Solicited: solicited, Override: true, TargetAddress: vip6,
				Options: []ndppacket.Option{&ndppacket.LinkLayerAddress{Direction: ndppacket.Target, Addr: from[:]}}})
		}
		fromVIP, dad := coldQuery(clientMAC, clientIP6), coldQuery(clientMAC, vip6)
		fromVIP.source = vip6
		dad.source, dad.options = unspec, nil
		bare := ndpFrame(multicast(allNodes), clientMAC, vip6, allNodes, &ndppacket.NeighborAdvertisement{TargetAddress: vip6})
		for i, f := range [][]byte{claim(clientMAC, vip6, allNodes, false), claim(clientMAC, clientIP6, allNodes, false), bare, fromVIP.frame(),
			dad.frame()} {
			w.receive("eth0 IPv6", f)
			assert.Len(t, w.after(time.Second/2), map[int]int{1: 1, 4: 1}[i],
				"frames after %d: the defence after a second, and the answer to the last", i)
			seen := time.Now().Add(-time.Second / 2)
			assert.Equal(t, []Conflict{{VIP: vip6, Interface: "eth0", HardwareAddr: clientMAC.String(), Announced: true, Seen: seen}}, w.Conflicts())
		}
		assert.EqualValues(t, 5, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv6")))
		assert.Equal(t, 1, strings.Count(w.log.String(), "foreign host claims a VIP"), "warnings in 2.5 s")

		own := hardwareAddr(eth(2, "eth1").HardwareAddr)
		w.receive("eth0 IPv6", claim(own, vip6, allNodes, false))
		w.receive("eth0 IPv6", claim(clientMAC, vip6, allNodes, true)) // invalid: to a group, and solicited
		assert.Empty(t, w.after(time.Second))
		assert.EqualValues(t, 5, testutil.ToFloat64(w.metrics.conflicts.WithLabelValues("eth0", "IPv6")),
			"the node's own packet, or an invalid one")
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// Groups follow the VIPs on each interface that answers. VIPs that end in the
// same 24 bits share one, and a socket has room for few.
func TestGroups(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		shares := netip.MustParseAddr("2001:db8:1::100")
		w.set(everywhere(vip6, shares, vipA))
		assert.Equal(t, []string{"1 ff02::1:ff00:100", "2 ff02::1:ff00:100"}, w.groups())
		w.set(everywhere(shares, vip6B))
		assert.Equal(t, []string{"1 ff02::1:ff00:100", "1 ff02::1:ff00:101", "2 ff02::1:ff00:100", "2 ff02::1:ff00:101"}, w.groups())
		w.become(eth(1, "eth0"))
		assert.Equal(t, []string{"1 ff02::1:ff00:100", "1 ff02::1:ff00:101"}, w.groups(), "eth1 is gone")
		w.become(eth(7, "eth0"))
		assert.Equal(t, []string{"7 ff02::1:ff00:100", "7 ff02::1:ff00:101"}, w.groups(), "eth0 is another one")

		many := map[netip.Addr]plan.Layer2{}
		for vip := vip6; len(many) < 10*roomForGroups; vip = vip.Next() {
			many[vip] = plan.Layer2{}
		}
		w.set(many)
		assert.Len(t, w.groups(), 10*roomForGroups)
		for vip := range many {
			delete(many, vip)
			w.set(many)
			assert.Len(t, w.groups(), len(many))
		}
	}, eth(1, "eth0"), eth(2, "eth1"))
}

// Groups that the kernel has forgotten are joined again: at once if the interfaces change, and else soon.
func TestForgottenGroups(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		forget := func(listErr error) {
			w.mu.Lock()
			clear(w.joined)
			w.listErr = listErr
			w.mu.Unlock()
		}
		joined := []string{"1 ff02::1:ff00:100", "1 ff02::1:ff00:101"}
		w.set(everywhere(vip6, vip6B))
		assert.Equal(t, joined, w.groups())
		forget(nil)
		w.become(eth(1, "eth0"))
		assert.Equal(t, joined, w.groups(), "at once")
		forget(nil)
		w.after(checkGroups)
		assert.Equal(t, joined, w.groups(), "soon")
		forget(unix.EIO)
		w.after(checkGroups)
		assert.Empty(t, w.groups(), "nobody knows")
		forget(nil)
		w.after(checkGroups)
		assert.Equal(t, joined, w.groups(), "asked again")
		assert.Zero(t, testutil.ToFloat64(w.metrics.errors.WithLabelValues("join", "eth0", "IPv6")))
	}, eth(1, "eth0"))
}

// An interface whose groups cannot be joined is an error of IPv6 alone, even
// where the kernel has no IPv6, and is tried again.
func TestGroupsFail(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		w.mu.Lock()
		w.groupErr = unix.EAFNOSUPPORT
		w.mu.Unlock()
		w.set(everywhere(vip6, vipA))
		w.after(0)
		s := w.Status()
		assert.Empty(t, s.VIPs[0].Reason)
		assert.Equal(t, InterfaceFailed, s.VIPs[1].Reason)
		assert.Contains(t, s.Interfaces[1].Error,
			`join IPv6 multicast groups on interface "eth0": join ff02::1:ff00:100 beside 0 others: address family not supported`)
		assert.EqualValues(t, 1, testutil.ToFloat64(w.metrics.errors.WithLabelValues("join", "eth0", "IPv6")))
		bare := eth(1, "eth0")
		bare.Addrs = nil
		w.become(bare)
		assert.Equal(t, NoLinkLocalAddress, w.Status().VIPs[1].Reason, "what is wrong now, not before")
		w.become(eth(1, "eth0"))
		assert.EqualValues(t, 2, testutil.ToFloat64(w.metrics.errors.WithLabelValues("join", "eth0", "IPv6")), "tried at once")
		w.mu.Lock()
		w.groupErr = nil
		w.mu.Unlock()
		w.after(time.Second)
		assert.Equal(t, []string{"1 ff02::1:ff00:100"}, w.groups())
		assert.Empty(t, w.Status().VIPs[1].Reason)
	}, eth(1, "eth0"))
}

// Without a usable link-local address there is no IPv6 on an interface, and
// the status has the reason; ARP goes on.
func TestNoLinkLocalAddress(t *testing.T) {
	t.Parallel()
	with := func(i netstate.Interface, addrs, tentative []netip.Prefix) netstate.Interface {
		i.Addrs, i.Tentative = addrs, tentative
		return i
	}
	global, other := netip.MustParsePrefix("2001:db8::1/64"), netip.MustParsePrefix("fe80::2/64")
	both := []netip.Prefix{global, linkLocal}
	bare := with(eth(1, "eth0"), nil, nil)
	inWorld(t, func(t *testing.T, w *world) {
		want := everywhere(vip6, vipA)
		want[vip6.Next()] = plan.Layer2{AnySegment: true}
		w.set(want)
		for _, step := range []struct {
			what   string
			i      netstate.Interface
			status string
		}{
			{"no address", bare, "no IPv6 link-local address that can be used: is IPv6 switched off by the sysctl net.ipv6.conf.eth0.disable_ipv6"},
			{"no link-local one", with(bare, []netip.Prefix{global, netip.MustParsePrefix("169.254.0.1/16")}, nil), "is IPv6 switched off"},
			{"a tentative one", with(bare, both, []netip.Prefix{linkLocal}), "fe80::1 is tentative"},
			{"detection is done", with(bare, both, nil), ""},
			{"another one is a duplicate", with(bare, []netip.Prefix{linkLocal, other}, []netip.Prefix{other}), ""},
			{"all are gone", bare, "is IPv6 switched off"},
		} {
			w.after(time.Minute)
			w.become(step.i)
			s := w.Status()
			require.Len(t, s.VIPs, 3)
			assert.Equal(t, []string{"eth0"}, s.VIPs[0].Interfaces, step.what)
			announced := slices.ContainsFunc(w.take(), func(f frame) bool { return f.on == "eth0 IPv6" })
			if step.status == "" {
				assert.Equal(t, []string{"eth0"}, s.VIPs[1].Interfaces, step.what)
				assert.Equal(t, step.what == "detection is done", announced, "%s: announced", step.what)
				continue
			}
			assert.Equal(t, NoLinkLocalAddress, s.VIPs[1].Reason, step.what)
			assert.Contains(t, s.Interfaces[1].Error, step.status, step.what)
			assert.False(t, announced, step.what)
			assert.Empty(t, w.groups(), step.what)
		}
		assert.Equal(t, 2, strings.Count(w.log.String(), "interface cannot announce"), "a warning for each time that it began")
	}, bare)
}

// A port of a bridge has no addresses: those of the bridge count, and there
// the groups are joined.
func TestNDPOnABridgePort(t *testing.T) {
	t.Parallel()
	port, bridge := eth(1, "eth0"), eth(2, "br0")
	port.Master, port.Addrs, bridge.Kind = 2, nil, "bridge"
	inWorld(t, func(t *testing.T, w *world) {
		w.set(map[netip.Addr]plan.Layer2{vip6: {Interfaces: []string{"eth0"}}})
		assert.Equal(t, []string{"eth0"}, w.Status().VIPs[0].Interfaces)
		assert.Equal(t, []string{"2 ff02::1:ff00:100"}, w.groups())
		w.become(port)
		assert.Equal(t, NoLinkLocalAddress, w.Status().VIPs[0].Reason, "a bridge that we have not heard of yet")
	}, port, bridge)
}

// FuzzNDP feeds frames as they may arrive past any kernel filter.
func FuzzNDP(f *testing.F) {
	cold, dad := coldQuery(clientMAC, vip6), coldQuery(clientMAC, vip6)
	dad.source, dad.options = unspec, nil
	f.Add(wire.NDP{}.Probe(claimOf(clientMAC, vip6), mac{}))
	f.Add(cold.frame())
	f.Add(dad.frame())
	f.Add(fragment(cold.frame()))
	for _, claim := range (wire.NDP{}).Announce(claimOf(clientMAC, vip6), true) {
		f.Add(claim)
	}
	for n := range cold.frame() {
		f.Add(cold.frame()[:n])
	}
	for _, options := range [][]byte{{1, 0}, {1, 0, 0, 0, 0, 0, 0, 0}, {2, 255, 0, 0, 0, 0, 0, 0}, {14, 1, 0, 0, 0, 0, 0, 0, 1}} {
		f.Add(cold.followed(options...))
	}
	f.Add(make([]byte, 1514))
	f.Fuzz(func(t *testing.T, b []byte) {
		seen := bytes.Clone(b)
		wire.NDP{}.Parse(b)
		if !bytes.Equal(seen, b) {
			t.Error("the frame was modified")
		}
		mend(b)
		m, ok := wire.NDP{}.Parse(b) // what the checksum keeps a fuzzer from
		if !ok {
			return
		}
		if m.From.Group() || m.From == (mac{}) || m.Asks.IsMulticast() || m.Claims.IsMulticast() || m.Claims == unspec ||
			m.Takes && m.Claims.IsValid() || !m.Asks.IsValid() && !m.Claims.IsValid() {
			t.Errorf("parsed %+v", m)
		}
		if m.Asks.Is4In6() || !m.Asks.IsValid() {
			return // the library marshals no IPv4, and nobody owns it
		}
		answer, ok := (wire.NDP{}).Parse(wire.NDP{}.Answer(claimOf(nodeMAC, m.Asks), m))
		if !ok || answer.From != nodeMAC || answer.Claims != m.Asks || answer.To != m.From && (!m.Takes || m.Seal != (seal.Seal{})) {
			t.Errorf("the answer to %+v is %+v", m, answer)
		}
	})
}

// The kernel may make joins wait. Nothing else waits for them.
func TestWaitingGroupsHoldUpNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		waiting := make(chan struct{})
		w, stop := newWorld(t, func(o *Options) {
			o.Groups = func() (GroupSocket, error) { <-waiting; return nil, unix.EMFILE }
		}, eth(1, "eth0"))
		before := time.Now()
		w.set(everywhere(vip6))
		assert.NotEmpty(t, w.after(0), "frames")
		w.set(everywhere(vip6B))
		w.set(nil)
		assert.Empty(t, w.conns)
		assert.Equal(t, before, time.Now())
		go func() { time.Sleep(time.Second); close(waiting) }()
		require.NoError(t, stop())
		assert.Equal(t, time.Second, time.Since(before), "Run leaves no task behind")
	})
}
