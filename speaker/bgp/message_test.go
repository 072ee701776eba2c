package bgp

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func drawPrefix(t *rapid.T, is4 bool) netip.Prefix {
	if is4 {
		b := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "IPv4")
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(b)), rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
	}
	b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "IPv6")
	b[0] = 0x20
	return netip.PrefixFrom(netip.AddrFrom16([16]byte(b)), rapid.IntRange(1, 128).Draw(t, "bits")).Masked()
}

func drawAttributes(t *rapid.T) plan.Attributes {
	a := plan.Attributes{Prepend: rapid.IntRange(0, 10).Draw(t, "prepend")}
	for _, c := range rapid.SliceOfN(rapid.Uint32(), 0, 200).Draw(t, "communities") {
		a.Communities = append(a.Communities, config.Community(c))
	}
	for _, c := range rapid.SliceOfN(rapid.Uint32(), 0, 50).Draw(t, "large communities") {
		a.LargeCommunities = append(a.LargeCommunities, config.LargeCommunity{GlobalAdmin: c, Data1: 1, Data2: c})
	}
	if rapid.Bool().Draw(t, "has preference") {
		a.LocalPreference = new(rapid.Uint32().Draw(t, "preference"))
	}
	if rapid.Bool().Draw(t, "has MED") {
		a.MED = new(rapid.Uint32().Draw(t, "MED"))
	}
	return a
}

// UPDATEs have the wanted prefixes and attributes, in messages of the allowed length:
// gobgp decodes all of them again, and countPrefixes counts them right.
func TestUpdatesHaveWhatIsWanted(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := encoding{
			internal: rapid.Bool().Draw(t, "internal"), fourOctet: true, localASN: rapid.Uint32Range(1, 1<<32-1).Draw(t, "AS"),
			next4: rapid.SampledFrom([]netip.Addr{node4, node6}).Draw(t, "next hop"), next6: node6,
		}
		if rapid.Bool().Draw(t, "link-local") {
			e.link6 = netip.MustParseAddr("fe80::1")
		}
		is4 := rapid.Bool().Draw(t, "IPv4")
		prefixes := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix { return drawPrefix(t, is4) }), 1, 1500).Draw(t, "prefixes")
		want := drawAttributes(t)
		messages, err := e.announcements(intern(want).Value(), prefixes)
		if err != nil {
			t.Fatal(err)
		}
		var got []netip.Prefix
		for _, b := range messages {
			if len(b) > maxLength {
				t.Fatalf("%d bytes", len(b))
			}
			n := len(got)
			got = append(got, checkUpdate(t, b, e, want)...)
			if counted, err := countPrefixes(b[headerLength:]); err != nil || counted != len(got)-n {
				t.Fatalf("counted %d of %d prefixes: %v", counted, len(got)-n, err)
			}
		}
		if !slices.Equal(got, prefixes) {
			t.Fatalf("%d prefixes became %d", len(prefixes), len(got))
		}
		messages, err = e.withdrawals(prefixes)
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, b := range messages {
			m, err := packet.ParseBGPMessage(b)
			if err != nil || len(b) > maxLength {
				t.Fatalf("%d bytes: %v", len(b), err)
			}
			u := m.Body.(*packet.BGPUpdate)
			for _, p := range u.WithdrawnRoutes {
				got = append(got, netip.MustParsePrefix(p.String()))
			}
			for _, a := range u.PathAttributes {
				for _, p := range a.(*packet.PathAttributeMpUnreachNLRI).Value {
					got = append(got, netip.MustParsePrefix(p.String()))
				}
			}
		}
		if !slices.Equal(got, prefixes) {
			t.Fatalf("%d prefixes became %d", len(prefixes), len(got))
		}
	})
}

// checkUpdate decodes an UPDATE, and returns its prefixes.
func checkUpdate(t *rapid.T, b []byte, e encoding, want plan.Attributes) (prefixes []netip.Prefix) {
	m, err := packet.ParseBGPMessage(b)
	if err != nil {
		t.Fatal(err)
	}
	u := m.Body.(*packet.BGPUpdate)
	got := plan.Attributes{}
	next := ""
	for _, p := range u.NLRI {
		prefixes = append(prefixes, netip.MustParsePrefix(p.String()))
	}
	for _, a := range u.PathAttributes {
		switch a := a.(type) {
		case *packet.PathAttributeAsPath:
			if e.internal != (len(a.Value) == 0) {
				t.Fatalf("path %v", a)
			}
			for _, p := range a.Value {
				got.Prepend += len(p.GetAS()) - 1
			}
		case *packet.PathAttributeMultiExitDisc:
			got.MED = &a.Value
		case *packet.PathAttributeLocalPref:
			got.LocalPreference = &a.Value
		case *packet.PathAttributeCommunities:
			for _, c := range a.Value {
				got.Communities = append(got.Communities, config.Community(c))
			}
		case *packet.PathAttributeLargeCommunities:
			for _, c := range a.Values {
				got.LargeCommunities = append(got.LargeCommunities, config.LargeCommunity{GlobalAdmin: c.ASN, Data1: c.LocalData1, Data2: c.LocalData2})
			}
		case *packet.PathAttributeNextHop:
			next = a.Value.String()
		case *packet.PathAttributeMpReachNLRI:
			next = a.Nexthop.String()
			for _, p := range a.Value {
				prefixes = append(prefixes, netip.MustParsePrefix(p.String()))
			}
		}
	}
	if e.internal {
		want.Prepend = 0
		want.LocalPreference = cmp.Or(want.LocalPreference, new(uint32(defaultPreference)))
	} else {
		want.LocalPreference = nil
	}
	if intern(got) != intern(want) {
		t.Fatalf("asked for %+v, got %+v", want, got)
	}
	hop := e.next6
	if prefixes[0].Addr().Is4() {
		hop = e.next4
	}
	if next != hop.String() {
		t.Fatalf("next hop %s, want %s", next, hop)
	}
	return prefixes
}

func TestAttributesThatDoNotFit(t *testing.T) {
	t.Parallel()
	e := encoding{next4: node4, localASN: 1, fourOctet: true}
	_, err := e.announcements(intern(plan.Attributes{Communities: make([]config.Community, 1100)}).Value(), []netip.Prefix{vip4})
	require.ErrorContains(t, err, "no room in a message of 4096 bytes")
	_, err = e.announcements(intern(plan.Attributes{Prepend: 255}).Value(), []netip.Prefix{vip4})
	require.ErrorContains(t, err, "255")
}

// A router that knows AS numbers of two bytes learns longer ones from AS4_PATH.
func TestTwoByteASNumbers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		asn         uint32
		path, path4 string
	}{{64512, "64512 64512", ""}, {4200000001, "23456 23456", "4200000001 4200000001"}} {
		messages, err := encoding{next4: node4, localASN: c.asn}.announcements(intern(plan.Attributes{Prepend: 1}).Value(), []netip.Prefix{vip4})
		require.NoError(t, err)
		m, err := packet.ParseBGPMessage(messages[0])
		require.NoError(t, err)
		path4 := ""
		for _, a := range m.Body.(*packet.BGPUpdate).PathAttributes {
			switch a := a.(type) {
			case *packet.PathAttributeAsPath:
				require.Equal(t, c.path, a.Value[0].String())
			case *packet.PathAttributeAs4Path:
				path4 = a.Value[0].String()
			}
		}
		require.Equal(t, c.path4, path4)
	}
}

// sameCount compares the number of prefixes in an UPDATE with that of the library, if the library can read it.
func sameCount(t *testing.T, body []byte) {
	t.Helper()
	update := &packet.BGPUpdate{}
	err := func() (err error) {
		defer func() { // it panics at some of what it cannot read
			if p := recover(); p != nil {
				err = fmt.Errorf("%v", p)
			}
		}()
		return update.DecodeFromBytes(body)
	}()
	if err != nil {
		return
	}
	n := len(update.NLRI)
	for _, a := range update.PathAttributes {
		if reach, ok := a.(*packet.PathAttributeMpReachNLRI); ok {
			if family := packet.AfiSafiToRouteFamily(reach.AFI, reach.SAFI); family != packet.RF_IPv4_UC && family != packet.RF_IPv6_UC {
				return
			}
			n += len(reach.Value)
		}
	}
	counted, err := countPrefixes(body)
	require.NoError(t, err)
	require.Equal(t, n, counted, "%x", body)
}

// Any bytes of a peer are read without a panic.
func FuzzRead(f *testing.F) {
	t := &target{Session: plan.Session{Peer: &config.Peer{HoldTime: 90 * time.Second}, LocalASN: nodeASN, RouterID: node4}}
	ours, err := openOf(t, true, true, true)
	require.NoError(f, err)
	f.Add(ours)
	f.Add(keepalive)
	f.Add(header(packet.BGP_MSG_NOTIFICATION, []byte{6, 2, 3, 'b', 'y', 'e'}))
	f.Add(header(packet.BGP_MSG_NOTIFICATION, []byte{6, 9, 6, 9, 6, 2}))
	f.Add(header(packet.BGP_MSG_ROUTE_REFRESH, []byte{0, 1, 0, 1}))
	f.Add(header(packet.BGP_MSG_UPDATE, []byte{0, 0, 0, 0, 24, 1, 2, 3}))
	reach, err := encoding{next6: node6, localASN: 1}.announcements(intern(plan.Attributes{}).Value(), []netip.Prefix{vip6})
	require.NoError(f, err)
	f.Add(reach[0])
	f.Fuzz(func(t *testing.T, b []byte) {
		var m message
		var err error
		s := &session{Peering: &Peering{rib: newRIB("tor")}}
		testcost.Within(t, "a message", len(b), func() {
			if m, err = readMessage(bytes.NewReader(b)); err == nil {
				s = &session{Peering: &Peering{rib: newRIB("tor")}}
				_, err = s.handle(m)
			}
		})
		if m.kind == 0 {
			return
		}
		if m.kind == packet.BGP_MSG_UPDATE && err == nil {
			sameCount(t, m.body)
		}
		if err != nil {
			text := brokenConnection(err).text
			if text == "" || strings.ContainsAny(text, "\x00\n\x1b") {
				t.Errorf("the reason is %q", text)
			}
		}
		if s.received.Load() > uint64(len(b)) {
			t.Errorf("%d prefixes in %d bytes", s.received.Load(), len(b))
		}
		if m.kind == packet.BGP_MSG_OPEN {
			var f *failure
			if _, err := negotiate(&target{Session: plan.Session{Peer: &config.Peer{}, RouterID: node4}}, m.body); err != nil &&
				!errors.As(err, &f) {
				t.Errorf("no failure: %v", err)
			}
		}
	})
}

// A capability that cannot be read hides none of those behind it. Routers may have all in one parameter, and their version of the
// software in either of two forms.
func TestCapabilityThatCannotBeRead(t *testing.T) {
	t.Parallel()
	const longASN = 4200000001
	for name, bad := range map[string]packet.ParameterCapabilityInterface{
		"the version without a length of its own": packet.NewCapUnknown(packet.BGP_CAP_SOFT_VERSION, []byte("Router 4.2")),
		"no tuple":             packet.NewCapUnknown(packet.BGP_CAP_EXTENDED_NEXTHOP, nil),
		"an AS number cut off": packet.NewCapUnknown(packet.BGP_CAP_FOUR_OCTET_AS_NUMBER, nil),
	} {
		open := raw(t, packet.NewBGPOpenMessage(packet.AS_TRANS, 90, "198.18.0.2", []packet.OptionParameterInterface{
			packet.NewOptionParameterCapability([]packet.ParameterCapabilityInterface{
				packet.NewCapMultiProtocol(packet.RF_IPv4_UC), bad, packet.NewCapMultiProtocol(packet.RF_IPv6_UC),
				packet.NewCapFourOctetASNumber(longASN), bad, packet.NewCapGracefulRestart(false, true, 60, nil)})}))
		peer := &config.Peer{PeerASN: config.ASN{Number: longASN}, GracefulRestart: time.Minute}
		n, err := negotiate(&target{Session: plan.Session{Peer: peer, LocalASN: nodeASN, RouterID: node4}}, open[headerLength:])
		require.NoError(t, err, name)
		require.Equal(t, []string{"IPv4", "IPv6"}, n.families(), name)
		require.Equal(t, []string{"four-octet AS numbers", "graceful restart", "graceful restart after notifications"}, n.capabilities(), name)
	}
}

func TestNotificationsInWords(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		body []byte
		want string
	}{
		{[]byte{2, 2}, "it expects another AS number of this node (bad peer AS) [NOTIFICATION 2/2]"},
		{[]byte{4, 0}, "it did not hear this node within the hold time [NOTIFICATION 4/0]"},
		{[]byte{6, 2, 4, 'w', 'o', 'r', 'k'}, `its administrator shut the session down [NOTIFICATION 6/2], with the message "work"`},
		{[]byte{6, 4, 9, 'w'}, "its administrator reset the session [NOTIFICATION 6/4]"},
		{[]byte{6, 2, 3, 'a', '\n', 0xff}, `its administrator shut the session down [NOTIFICATION 6/2], with the message "a��"`},
		{[]byte{6, 9, 6, 2, 2, 'h', 'i'},
			`its administrator shut the session down [NOTIFICATION 6/2], with the message "hi", hard reset [NOTIFICATION 6/9]`},
		{[]byte{6, 9, 6, 9, 6, 9}, "hard reset [NOTIFICATION 6/9]"},
		{[]byte{6, 10}, "its BFD session with this node went down [NOTIFICATION 6/10]"},
		{[]byte{3, 11}, "UPDATE message error [NOTIFICATION 3/11]"},
		{[]byte{77, 5}, "[NOTIFICATION 77/5]"},
	} {
		require.Equal(t, "the router ended the session: "+c.want, notified(c.body).text)
	}
}

func TestNextHops(t *testing.T) {
	t.Parallel()
	link := netip.MustParseAddr("fe80::1")
	all := nextHopAddrs{node4, node6}
	for _, c := range []struct {
		name         string
		local        netip.Addr
		beside       nextHopAddrs
		ipv4OverIPv6 bool
		want         encoding
	}{
		{"over IPv4", node4, all, false, encoding{next4: node4, next6: node6}},
		{"over IPv4, without IPv6", node4, nextHopAddrs{ipv4: node4}, false, encoding{next4: node4}},
		{"over IPv6", node6, all, true, encoding{next4: node4, next6: node6}},
		{"over IPv6, without IPv4", node6, nextHopAddrs{ipv6: node6}, false, encoding{next6: node6}},
		{"over IPv6, without IPv4, RFC 8950", node6, nextHopAddrs{ipv6: node6}, true, encoding{next4: node6, next6: node6}},
		{"link-local", link.WithZone("eth0"), all, false, encoding{next4: node4, next6: node6, link6: link}},
		{"link-local, RFC 8950", link.WithZone("eth0"), all, true, encoding{next4: link, next6: node6, link6: link}},
		{"link-local alone", link, nextHopAddrs{}, true, encoding{next4: link, next6: link}},
	} {
		var e encoding
		e.nextHops(c.local, c.beside, c.ipv4OverIPv6)
		require.Equal(t, c.want, e, c.name)
	}
}

func TestTTL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		peer       config.Peer
		ttl, least int
	}{
		{config.Peer{PeerASN: config.ASN{Number: peerASN}}, 1, 0},
		{config.Peer{PeerASN: config.ASN{External: true}}, 1, 0},
		{config.Peer{PeerASN: config.ASN{Number: nodeASN}}, 0, 0},
		{config.Peer{PeerASN: config.ASN{Internal: true}}, 0, 0},
		{config.Peer{}, 0, 0},
		{config.Peer{PeerASN: config.ASN{External: true}, Multihop: 3}, 3, 0},
		{config.Peer{TTLSecurity: 1}, 255, 255},
		{config.Peer{TTLSecurity: 3, PeerASN: config.ASN{Internal: true}}, 255, 253},
	} {
		s := &target{Session: plan.Session{Peer: &c.peer, LocalASN: nodeASN}}
		require.Equal(t, c.ttl, s.ttl(), "%+v", c.peer)
		require.Equal(t, c.least, s.leastTTL(), "%+v", c.peer)
	}
}

func TestKeepaliveFitsTheHoldTime(t *testing.T) {
	t.Parallel()
	n := negotiated{holdTime: 9 * time.Second}
	require.Equal(t, 3*time.Second, n.keepalive(0))
	require.Equal(t, 3*time.Second, n.keepalive(30*time.Second))
	require.Equal(t, time.Second, n.keepalive(time.Second))
}
