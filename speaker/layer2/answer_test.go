package layer2

import (
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	arppacket "github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// stage is a node with one interface and a client next to it, simulated or
// real: the same story is played on both.
type stage struct {
	node, client mac
	set          func(map[netip.Addr]plan.Layer2)
	// exchange sends a frame from the client and returns the ARP frames that
	// the node then sends.
	exchange func([]byte) []frame
}

// answers checks the answer to each request.
func answers(t *testing.T, s stage) {
	request := func(to mac, sender, target netip.Addr) []byte {
		return arpFrame(arppacket.OperationRequest, to, s.client, sender, mac{}, target)
	}
	expect := func(what string, f []byte, want bool) {
		t.Helper()
		got := s.exchange(f)
		if want != (len(got) > 0) || len(got) > 1 {
			t.Errorf("%s: %d answers, want one: %v", what, len(got), want)
			return
		}
		if !want {
			return
		}
		e, p := got[0].packet(t)
		_, q := frame{bytes: f}.packet(t)
		if p.Operation != arppacket.OperationReply || hardwareAddr(p.SenderHardwareAddr) != s.node || p.SenderIP != q.TargetIP ||
			hardwareAddr(p.TargetHardwareAddr) != s.client || p.TargetIP != q.SenderIP {
			t.Errorf("%s: answered %+v", what, p)
		}
		if hardwareAddr(e.Destination) != s.client || hardwareAddr(e.Source) != s.node {
			t.Errorf("%s: answered from %v to %v, want unicast", what, e.Source, e.Destination)
		}
	}
	other := mac{2, 0, 0, 0, 0, 0xee}
	probe := netip.IPv4Unspecified()

	expect("nothing is owned yet", request(broadcast, clientIP, vipA), false)
	s.set(everywhere(vipA))
	s.exchange(request(broadcast, clientIP, vipB)) // lets the announcement pass
	expect("a broadcast request", request(broadcast, clientIP, vipA), true)
	expect("a unicast request (NUD)", request(s.node, clientIP, vipA), true)
	expect("a probe (RFC 5227)", request(broadcast, probe, vipA), true)
	expect("a request from another subnet", request(broadcast, netip.MustParseAddr("192.0.2.7"), vipA), true)
	expect("a request to somebody else", request(other, clientIP, vipA), false)
	expect("a VIP that is not ours", request(broadcast, clientIP, vipB), false)
	expect("a reply", arpFrame(arppacket.OperationReply, s.node, s.client, clientIP, s.node, vipA), false)
	expect("a foreign claim in request form", request(broadcast, vipA, vipA), false)
	expect("a foreign claim in reply form", arpFrame(arppacket.OperationReply, broadcast, s.client, vipA, s.client, vipA), false)
	expect("a sender who is everybody", arpFrame(arppacket.OperationRequest, broadcast, broadcast, clientIP, mac{}, vipA), false)
	expect("a sender who is nobody", arpFrame(arppacket.OperationRequest, broadcast, mac{}, clientIP, mac{}, vipA), false)
	expect("a sender who is the node itself", arpFrame(arppacket.OperationRequest, broadcast, s.node, clientIP, mac{}, vipA), false)
	for what, at := range map[string]int{"hardware type": 15, "protocol type": 16, "hardware length": 18, "protocol length": 19,
		"operation": 20} {
		f := request(broadcast, clientIP, vipA)
		f[at]++
		expect("a foreign "+what, f, false)
	}
	expect("a frame cut short", request(broadcast, clientIP, vipA)[:arpLength-1], false)
	s.set(everywhere(vipB))
	expect("withdrawn", request(broadcast, clientIP, vipA), false)
	s.set(nil)
	expect("the other withdrawn too", request(broadcast, clientIP, vipB), false)
}

func TestAnswersSimulated(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		answers(t, stage{
			node:   hardwareAddr(eth(1, "eth0").HardwareAddr),
			client: clientMAC,
			set:    w.set,
			exchange: func(f []byte) []frame {
				synctest.Wait()
				w.take()
				if c := w.conn("eth0"); c != nil {
					c.in <- f
				}
				return w.after(0)
			},
		})
		assert.EqualValues(t, 8, testutil.ToFloat64(w.metrics.malformed.WithLabelValues("eth0", "IPv4")), "packets that break the protocol")
	}, eth(1, "eth0"))
}

// FuzzARP feeds frames as they may arrive past any kernel filter.
func FuzzARP(f *testing.F) {
	good := ask(vipA, clientIP, broadcast)
	for n := range good {
		f.Add(good[:n])
	}
	f.Add(good)
	for at, b := range map[int]byte{offFormat: 0xff, offLengths: 0xff, offLengths + 1: 16, offOperation: 9, offEtherType: 0x81,
		offSender: 0xff} {
		bad := append([]byte(nil), good...)
		bad[at] = b
		f.Add(bad)
	}
	f.Add(append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xa8, 0, 1, 0x81, 0, 0, 2}, good[12:]...))
	f.Add(make([]byte, 128))
	f.Add(wire.ARP{}.Announce(claimOf(clientMAC, vipA), true)[0])
	f.Add(wire.ARP{}.Probe(claimOf(clientMAC, vipA), mac{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, ok := wire.ARP{}.Parse(b)
		if !ok {
			return
		}
		if m.From.Group() || m.Asks.IsValid() && !m.Asks.Is4() || m.Claims.IsValid() && !m.Claims.Is4() {
			t.Errorf("parsed %+v", m)
		}
		if m.Asks.IsValid() {
			if reply, ok := (wire.ARP{}).Parse(wire.ARP{}.Answer(claimOf(nodeMAC, m.Asks), m)); !ok || reply.To != m.From || reply.From != nodeMAC {
				t.Errorf("the answer to %+v is %+v", m, reply)
			}
		}
	})
}

// BenchmarkAnswer measures the answer to a request, without the kernel.
func BenchmarkAnswer(b *testing.B) {
	w, stop := newWorld(b, nil, eth(1, "eth0"))
	defer stop()
	want := everywhere(vipA)
	for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
		want[vip] = plan.Layer2{}
	}
	want[vip6] = plan.Layer2{}
	w.set(want)
	for name, c := range map[string]struct {
		protocol wire.Protocol
		frame    []byte
	}{
		"ARP, ours":      {wire.ARP{}, ask(vipA, clientIP, broadcast)},
		"ARP, another's": {wire.ARP{}, ask(clientIP, vipB, broadcast)},
		"NDP, ours":      {wire.NDP{}, coldQuery(clientMAC, vip6).frame()},
		"NDP, another's": {wire.NDP{}, coldQuery(clientMAC, vip6B).frame()},
	} {
		p := w.newSocket(socketKey{protocol: c.protocol, name: "eth0", mac: nodeMAC}, blackHole{})
		vips := map[netip.Addr]segment.VIP{}
		for vip := range want {
			vips[vip] = segment.VIP{}
		}
		p.set(vips)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.handle(c.frame)
			}
		})
	}
}

// BenchmarkSet measures Set with 5,000 VIPs, when none and when one has changed.
func BenchmarkSet(b *testing.B) {
	w, stop := newWorld(b, func(o *Options) { o.Log = slog.New(slog.DiscardHandler) }, eth(1, "eth0"))
	defer stop()
	want := map[netip.Addr]plan.Layer2{}
	for vip := netip.MustParseAddr("198.19.0.0"); len(want) < 5000; vip = vip.Next() {
		want[vip] = plan.Layer2{}
	}
	b.Run("same", func(b *testing.B) {
		for b.Loop() {
			w.set(want)
		}
	})
	b.Run("one", func(b *testing.B) {
		for b.Loop() {
			if _, ok := want[vipA]; ok {
				delete(want, vipA)
			} else {
				want[vipA] = plan.Layer2{}
			}
			w.set(want)
		}
	})
}

type blackHole struct{ net.PacketConn }

func (blackHole) WriteTo(b []byte, _ net.Addr) (int, error) { return len(b), nil }

// Whoever has the key, and has a speaker yield and resume without an end, does not fill the log.
func TestYieldsWithoutEnd(t *testing.T) {
	t.Parallel()
	inWorld(t, func(t *testing.T, w *world) {
		for range 15_000 {
			w.note(socketKey{}, segment.Note{Kind: segment.Yields, VIP: vipA})
			w.note(socketKey{}, segment.Note{Kind: segment.Resumes, VIP: vipA})
		}
		assert.Equal(t, 20_000, strings.Count(w.log.String(), "\n"))
	})
}
