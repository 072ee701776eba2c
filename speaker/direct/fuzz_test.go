package direct

import (
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// messageOf returns the conntrack entry of a connection, as the kernel encodes it.
func messageOf(t testing.TB, f *family, e flow, state uint8) []byte {
	t.Helper()
	source, destination := uint16(nl.CTA_IP_V6_SRC), uint16(nl.CTA_IP_V6_DST)
	if f.length == 4 {
		source, destination = nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	}
	a := netlink.NewAttributeEncoder()
	a.Nested(nl.CTA_TUPLE_ORIG, func(a *netlink.AttributeEncoder) error {
		a.Nested(nl.CTA_TUPLE_IP, func(a *netlink.AttributeEncoder) error {
			a.Bytes(source, e.client)
			a.Bytes(destination, e.vip)
			return nil
		})
		a.Nested(nl.CTA_TUPLE_PROTO, func(a *netlink.AttributeEncoder) error {
			a.Uint8(nl.CTA_PROTO_NUM, unix.IPPROTO_TCP)
			a.Bytes(nl.CTA_PROTO_SRC_PORT, e.clientPort)
			a.Bytes(nl.CTA_PROTO_DST_PORT, e.port)
			return nil
		})
		return nil
	})
	a.Nested(nl.CTA_PROTOINFO, func(a *netlink.AttributeEncoder) error {
		a.Nested(nl.CTA_PROTOINFO_TCP, func(a *netlink.AttributeEncoder) error {
			a.Uint8(nl.CTA_PROTOINFO_TCP_STATE, state)
			return nil
		})
		return nil
	})
	b, err := a.Encode()
	require.NoError(t, err)
	return append(make([]byte, nl.SizeofNfgenmsg), b...)
}

// A parsed connection has the lengths of its family, and is the same after it is encoded and parsed again.
func FuzzParseFlow(f *testing.F) {
	v4 := flow{[]byte{192, 0, 2, 1}, []byte{1, 2}, []byte{203, 0, 113, 1}, []byte{0, 80}}
	client, vip := netip.MustParseAddr("2001:db8::1").AsSlice(), netip.MustParseAddr("2001:db8::2").AsSlice()
	for _, state := range []uint8{nl.TCP_CONNTRACK_ESTABLISHED, nl.TCP_CONNTRACK_TIME_WAIT} {
		f.Add(messageOf(f, families[0], v4, state))
		f.Add(messageOf(f, families[1], flow{client, []byte{1, 2}, vip, []byte{0, 80}}, state))
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		for _, of := range families {
			e, ok := of.parseFlow(message)
			if !ok {
				continue
			}
			again, ok := of.parseFlow(messageOf(t, of, e, nl.TCP_CONNTRACK_ESTABLISHED))
			require.True(t, ok)
			require.Equal(t, e, again)
			_, _, ok = of.parseServiceKey(string(e.key()[of.length+4:]))
			require.True(t, ok, "a set's key has a service's in it")
			require.Less(t, steer{buckets: 5}.bucket(e), uint32(5))
		}
	})
}

// Parsed names of chains and keys of maps are the same when they are written again.
func FuzzParseNames(f *testing.F) {
	for _, s := range []steer{{}, {table: 1, buckets: 509, seed: 1 << 31, ring: 2, interfaces: "2-3"}, {byClient: true, switchedOff: true}} {
		f.Add(s.chain(), serviceKey(netip.MustParseAddr("203.0.113.1"), 80))
	}
	f.Add("steer-1-2-3", serviceKey(netip.MustParseAddr("2001:db8::1"), 443))
	f.Fuzz(func(t *testing.T, chain, key string) {
		testcost.Within(t, "a name", len(chain), func() {
			if s, ok := parseSteer(chain); ok {
				require.Equal(t, chain, s.chain())
				s.indexes()
			}
		})
		for _, of := range families {
			if vip, port, ok := of.parseServiceKey(key); ok {
				require.True(t, of.has(vip))
				require.Equal(t, key[:len(key)-2], serviceKey(vip, port)[:len(key)-2])
			}
		}
	})
}
