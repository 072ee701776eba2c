package dhcp

import (
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
)

var discard = slog.New(slog.DiscardHandler)

// without removes an option, with replaces one by bytes.
func without(code dhcpv4.OptionCode) dhcpv4.Modifier { return dhcpv4.WithoutOption(code) }

func with(code dhcpv4.OptionCode, b ...byte) dhcpv4.Modifier {
	return dhcpv4.WithOption(dhcpv4.OptGeneric(code, b))
}

func yiaddr(a string) dhcpv4.Modifier { return dhcpv4.WithYourIP(net.ParseIP(a).To4()) }

// An answer counts only if it can be true. Unusable answers are reported, those
// for somebody else are not.
func TestUnusableAnswers(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		change dhcpv4.Modifier
		want   string // in the error; empty: ignored
	}{
		{"no address", yiaddr("0.0.0.0"), "0.0.0.0 is no address of a host"},
		{"this network", yiaddr("0.1.2.3"), "0.1.2.3 is no address of a host"},
		{"loopback", yiaddr("127.0.0.53"), "127.0.0.53 is no address of a host"},
		{"link-local", yiaddr("169.254.169.254"), "169.254.169.254 is no address of a host"},
		{"multicast", yiaddr("224.0.0.18"), "224.0.0.18 is no address of a host"},
		{"broadcast", yiaddr("255.255.255.255"), "255.255.255.255 is no address of a host"},
		{"its own", yiaddr("198.18.0.2"), "198.18.0.2 is the server itself"},
		{"ours", yiaddr("198.18.0.1"), `198.18.0.1 is this node's own address on interface "eth0"`},
		{"first of the subnet", yiaddr("198.18.0.0"), "198.18.0.0 is the first or last address of its subnet, a /24"},
		{"last of the subnet", yiaddr("198.18.0.255"), "198.18.0.255 is the first or last address of its subnet, a /24"},
		{"no mask", with(dhcpv4.OptionSubnetMask, 255, 0, 255, 0), "255.0.255.0 is no subnet mask"},
		{"empty mask", with(dhcpv4.OptionSubnetMask, 0, 0, 0, 0), "0.0.0.0 is no subnet mask"},
		{"short mask", with(dhcpv4.OptionSubnetMask, 255, 255), "a subnet mask (option 1) of 2 bytes"},
		{"no time", without(dhcpv4.OptionIPAddressLeaseTime), "it has no valid lease time (option 51)"},
		{"no time at all", with(dhcpv4.OptionIPAddressLeaseTime, 0, 0, 0, 0), "it has no valid lease time (option 51)"},
		{"short time", with(dhcpv4.OptionIPAddressLeaseTime, 1), "it has no valid lease time (option 51)"},
		{"no server", without(dhcpv4.OptionServerIdentifier), "<nil> is no identifier of a server (option 54)"},
		{"server 0", with(dhcpv4.OptionServerIdentifier, 0, 0, 0, 0), "0.0.0.0 is no identifier of a server (option 54)"},
		{"another exchange", dhcpv4.WithTransactionID(dhcpv4.TransactionID{1, 2, 3, 4}), ""},
		{"another client", with(dhcpv4.OptionClientIdentifier, 0, 'x'), ""},
		{"another hardware address", dhcpv4.WithHwAddr(serverMAC[:]), ""},
		{"a long hardware address", dhcpv4.WithHwAddr(make(net.HardwareAddr, 16)), ""},
		{"a request", func(p *dhcpv4.DHCPv4) { p.OpCode = dhcpv4.OpcodeBootRequest }, ""},
		{"no kind", without(dhcpv4.OptionDHCPMessageType), ""},
		{"another kind", dhcpv4.WithMessageType(dhcpv4.MessageTypeInform), ""},
		{"a kind too early", dhcpv4.WithMessageType(dhcpv4.MessageTypeAck), ""},
		{"a refusal too early", dhcpv4.WithMessageType(dhcpv4.MessageTypeNak), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			simulate(t, func(w *world) {
				w.server(func(m sent) { w.answer(m, dhcpv4.MessageTypeOffer, serverA, addrA, tt.change) })
				w.Set([]Client{web})
				w.pass(time.Second)
				require.Len(t, w.sent(), 1, "not requested")
				if err := w.Current()[webID].Err; tt.want == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, "the answer of DHCP server ")
					require.ErrorContains(t, err, " is unusable: "+tt.want)
				}
				w.server(w.grants())
				w.pass(10 * time.Second)
				require.NoError(t, w.Current()[webID].Err)
				require.NotNil(t, w.Current()[webID].Lease)
			})
		})
	}
}

// The ACK counts, and must be what was asked for.
func TestAcknowledgements(t *testing.T) {
	t.Parallel()
	hours := func(h uint32) []byte { return []byte{0, byte(h * 3600 >> 16), byte(h * 3600 >> 8), byte(h * 3600)} }
	T1 := func(h uint32) dhcpv4.Modifier { return with(dhcpv4.OptionRenewTimeValue, hours(h)...) }
	T2 := func(h uint32) dhcpv4.Modifier { return with(dhcpv4.OptionRebindingTimeValue, hours(h)...) }
	lease := with(dhcpv4.OptionIPAddressLeaseTime, hours(16)...)
	tests := []struct {
		name          string
		changes       []dhcpv4.Modifier
		renew, rebind float64 // hours; 0: no lease
	}{
		{"times by default", []dhcpv4.Modifier{lease}, 8, 14},
		{"times of the server", []dhcpv4.Modifier{lease, T1(2), T2(10)}, 2, 10},
		{"T2 before T1", []dhcpv4.Modifier{lease, T1(10), T2(2)}, 2, 2},
		{"T1 after T2", []dhcpv4.Modifier{lease, T1(12), T2(10)}, 8, 10},
		{"T2 after the end", []dhcpv4.Modifier{lease, T1(4), T2(17)}, 4, 14},
		{"without a mask", []dhcpv4.Modifier{lease, without(dhcpv4.OptionSubnetMask)}, 8, 14},
		{"another address", []dhcpv4.Modifier{lease, yiaddr("198.18.0.200")}, 0, 0},
		{"another server", []dhcpv4.Modifier{lease, with(dhcpv4.OptionServerIdentifier, serverB.AsSlice()...)}, 0, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			simulate(t, func(w *world) {
				w.server(func(m sent) {
					if m.MessageType() == dhcpv4.MessageTypeDiscover {
						w.answer(m, dhcpv4.MessageTypeOffer, serverA, addrA)
					} else {
						w.answer(m, dhcpv4.MessageTypeAck, serverA, addrA, tt.changes...)
					}
				})
				w.Set([]Client{web})
				w.pass(time.Second)
				l := w.Current()[webID].Lease
				if tt.rebind == 0 {
					require.Nil(t, l)
					return
				}
				require.InDelta(t, tt.renew*(1-fuzz/2), l.Renew.Sub(l.Acquired).Hours(), tt.renew*fuzz/2+0.001)
				require.InDelta(t, tt.rebind, l.Rebind.Sub(l.Acquired).Hours(), 0.001)
				require.Equal(t, 16*time.Hour, l.Expires.Sub(l.Acquired))
			})
		})
	}
}

// phases makes machines with one client in each phase, which all wait for an
// answer with the given xid.
func phases(now time.Time, xid dhcpv4.TransactionID) []*machine {
	var all []*machine
	for _, p := range []phase{rebooting, selecting, requesting, renewing, rebinding} {
		t := newMachine("eth0", discard)
		t.set(now, []Client{{ID: webID, Last: addrA}})
		s := t.byID[webID]
		t.begin(s, p, now)
		delete(t.byXID, s.xid)
		s.xid, t.byXID[xid] = xid, s
		if p != selecting {
			s.asked = now
		}
		if p == renewing || p == rebinding {
			s.lease = &Lease{Addr: addrA, Server: serverA, Acquired: now, Renew: now, Rebind: now.Add(time.Hour), Expires: now.Add(2 * time.Hour)}
		}
		s.offer = &answer{addr: addrA, server: serverA}
		all = append(all, t)
	}
	return all
}

// FuzzFrame feeds frames to the parser.
func FuzzFrame(f *testing.F) {
	for _, payload := range answers(f) {
		frame := frameOf(payload)
		f.Add(frame)
		f.Add(frame[:len(frame)-30])
		f.Add(slices.Concat(frame[:offIP], []byte{0x46}, frame[offIP+1:]))
		f.Add(slices.Concat(frame, make([]byte, 18)))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, frame []byte) {
		if a, ok := parse(frame); ok && a.err == nil && !unicast(a.server) {
			t.Errorf("%+v", a)
		}
	})
}

// FuzzAnswer feeds servers' answers to clients in every phase.
func FuzzAnswer(f *testing.F) {
	for _, payload := range answers(f) {
		f.Add(payload)
	}
	now := time.Now()
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > 1400 {
			return
		}
		a, ok := parse(frameOf(payload))
		if !ok {
			return
		}
		for _, table := range phases(now, a.xid) {
			table.receive(now, a)
			table.states(nil)
			s := table.byID[webID]
			if s.due.IsZero() || s.phase == idle {
				t.Errorf("%+v: waits for nothing", s)
			}
			if s.phase != bound {
				continue
			}
			l := s.lease
			if l.Renew.Before(now) || l.Rebind.Before(l.Renew) || !l.Expires.After(l.Rebind) {
				t.Errorf("times %+v", l)
			}
			if !unicast(l.Addr) || !unicast(l.Server) || l.Subnet.IsValid() && !l.Subnet.Contains(l.Addr) {
				t.Errorf("lease %+v", l)
			}
		}
	})
}

// answers are one of each kind.
func answers(f *testing.F) (payloads [][]byte) {
	request, err := dhcpv4.New(dhcpv4.WithHwAddr(self[:]), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest))
	if err != nil {
		f.Fatal(err)
	}
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeOffer, dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak} {
		payloads = append(payloads, reply(request, kind, serverA, addrA, with(dhcpv4.OptionClientIdentifier, clientID(webID)...),
			with(dhcpv4.OptionRenewTimeValue, 0, 0, 0, 9), dhcpv4.WithOption(dhcpv4.OptMessage("no"))).ToBytes())
	}
	return payloads
}

func TestParsesWhatTheWireAdds(t *testing.T) {
	t.Parallel()
	request, err := dhcpv4.New(dhcpv4.WithHwAddr(self[:]))
	require.NoError(t, err)
	frame := answerFrame(reply(request, dhcpv4.MessageTypeAck, serverA, addrA))
	_, ok := parse(frame)
	require.True(t, ok)
	_, ok = parse(append(slices.Clone(frame), make([]byte, 46)...))
	require.True(t, ok, "padding of the Ethernet frame")
	for _, at := range []int{12, 14, offIP + 6, offIP + 9, offIP + 10, offIP + 16, 37} {
		bad := slices.Clone(frame)
		bad[at] ^= 0x40
		_, ok = parse(bad)
		require.False(t, ok, "byte %d", at)
	}
	for _, length := range []byte{0, 7} {
		bad := slices.Clone(frame)
		bad[38], bad[39] = 0, length
		_, ok = parse(bad)
		require.False(t, ok, "UDP length %d", length)
	}
	for n := range len(frame) - 60 { // BOOTP pads behind the options
		_, ok := parse(frame[:n])
		require.False(t, ok, "%d bytes of %d", n, len(frame))
	}
}

func TestUnicast(t *testing.T) {
	t.Parallel()
	for a, want := range map[string]bool{"1.0.0.1": true, "223.255.255.255": true, "198.18.0.1": true,
		"0.0.0.1": false, "127.0.0.1": false, "224.0.0.1": false, "240.0.0.1": false, "2001:db8::1": false} {
		require.Equal(t, want, unicast(netip.MustParseAddr(a)), a)
	}
	require.False(t, unicast(netip.Addr{}))
}

// What a renewal costs this process among 500 leases: to find who is due, to
// make the REQUEST, to read the ACK.
func BenchmarkRenewal(b *testing.B) {
	t, now := newMachine("eth0", discard), time.Now()
	all, next := clients(500), addrA
	for i := range all {
		all[i].Last, next = next, next.Next()
	}
	t.set(now, all)
	renew := func() {
		m, again := t.act(now)
		for ; m == nil; m, again = t.act(now) {
			now = again
		}
		frame, err := m.frame(self[:])
		if err != nil {
			b.Fatal(err)
		}
		request, err := dhcpv4.FromBytes(frame[42:])
		if err != nil {
			b.Fatal(err)
		}
		a, ok := parse(answerFrame(reply(request, dhcpv4.MessageTypeAck, serverA, m.requested, dhcpv4.WithNetmask(net.CIDRMask(16, 32)))))
		if !ok {
			b.Fatal("no answer")
		}
		t.receive(now, a)
	}
	for leased(t.states(nil)) < len(all) {
		renew()
	}
	b.ReportAllocs()
	for b.Loop() {
		renew()
	}
	if n := leased(t.states(nil)); n != len(all) {
		b.Fatalf("%d leases", n)
	}
}
