package dhcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

var (
	self      = mac{2, 0, 0, 0, 0, 1}
	serverMAC = mac{2, 0, 0, 0, 0, 2}
	serverA   = netip.MustParseAddr("198.18.0.2")
	serverB   = netip.MustParseAddr("198.18.0.3")
	addrA     = netip.MustParseAddr("198.18.0.100")
	addrB     = netip.MustParseAddr("198.18.0.101")
)

// sent is a message that a Source sent.
type sent struct {
	*dhcpv4.DHCPv4
	at       time.Duration // since the start
	to       mac
	src, dst netip.Addr
}

// world is a simulated segment: an interface, its socket, a record of what
// was sent, and whoever answers. It lives in a bubble of synctest.
type world struct {
	t     *testing.T
	began time.Time
	log   bytes.Buffer
	iface atomic.Pointer[Interface]
	// refuse makes opening a socket fail.
	refuse atomic.Bool
	in     chan []byte

	mu       sync.Mutex
	messages []sent

	serve atomic.Pointer[func(m sent)]
	*Source
	stop context.CancelFunc
}

// simulate runs a story in a bubble.
func simulate(t *testing.T, story func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, began: time.Now()}
		w.server(func(sent) {})
		w.iface.Store(&Interface{
			Interface: net.Interface{Index: 1, Name: "eth0", MTU: 1500, HardwareAddr: self[:], Flags: net.FlagUp | net.FlagRunning},
			Addrs:     []netip.Prefix{netip.MustParsePrefix("198.18.0.1/24")},
		})
		w.Source = New(Options{Interface: "eth0", Network: w, Log: slog.New(slog.NewTextHandler(&w.log, nil))})
		ctx, cancel := context.WithCancel(context.Background())
		w.stop = cancel
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		defer func() {
			cancel()
			require.NoError(t, <-done)
		}()
		story(w)
	})
}

func (w *world) Interface(string) (Interface, error) { return *w.iface.Load(), nil }

// server replaces whoever is called with each message and may answer.
func (w *world) server(f func(m sent)) { w.serve.Store(&f) }

// setUp brings the interface up or down.
func (w *world) setUp(up bool) {
	i := *w.iface.Load()
	if i.Flags &^= net.FlagUp; up {
		i.Flags |= net.FlagUp
	}
	w.iface.Store(&i)
}

func (w *world) Listen(*net.Interface, int, []bpf.RawInstruction) (net.PacketConn, error) {
	if w.refuse.Load() {
		return nil, unix.EPERM
	}
	w.in = make(chan []byte, 100)
	return &conn{w: w, in: w.in, closed: make(chan struct{})}, nil
}

// conn is the socket.
type conn struct {
	net.PacketConn // what is not used here
	w              *world
	in             chan []byte
	closed         chan struct{}
}

func (c *conn) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case f := <-c.in:
		return copy(b, f), nil, nil
	case <-c.closed:
		return 0, nil, os.ErrClosed
	}
}

func (c *conn) WriteTo(f []byte, _ net.Addr) (int, error) {
	ip, err := ipv4.ParseHeader(f[offIP:])
	require.NoError(c.w.t, err)
	require.Zero(c.w.t, checksum(f[offIP:offIP+ipv4.HeaderLen]))
	require.Equal(c.w.t, len(f)-offIP, ip.TotalLen)
	require.Equal(c.w.t, []byte{0, clientPort, 0, serverPort}, f[34:38])
	p, err := dhcpv4.FromBytes(f[42:])
	require.NoError(c.w.t, err)
	src, _ := netip.AddrFromSlice(ip.Src.To4())
	dst, _ := netip.AddrFromSlice(ip.Dst.To4())
	m := sent{p, time.Since(c.w.began), mac(f), src, dst}
	c.w.mu.Lock()
	c.w.messages = append(c.w.messages, m)
	c.w.mu.Unlock()
	(*c.w.serve.Load())(m)
	return len(f), nil
}

func (c *conn) SetWriteDeadline(time.Time) error { return nil }
func (c *conn) Close() error                     { close(c.closed); return nil }

// answerFrame is a frame from a server.
func answerFrame(p *dhcpv4.DHCPv4) []byte { return frameOf(p.ToBytes()) }

func frameOf(payload []byte) []byte {
	f, err := encapsulate(payload, serverMAC[:], broadcast, serverA, netip.AddrFrom4([4]byte{255, 255, 255, 255}))
	if err != nil {
		panic(err)
	}
	binary.BigEndian.PutUint16(f[34:], serverPort)
	binary.BigEndian.PutUint16(f[36:], clientPort)
	return f
}

// reply makes the answer of a server to a message.
func reply(m *dhcpv4.DHCPv4, kind dhcpv4.MessageType, server, addr netip.Addr, more ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	modifiers := []dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithServerIP(server.AsSlice()),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server.AsSlice()))}
	if kind != dhcpv4.MessageTypeNak {
		modifiers = append(modifiers, dhcpv4.WithYourIP(addr.AsSlice()), dhcpv4.WithLeaseTime(3600), dhcpv4.WithNetmask(net.CIDRMask(24, 32)))
	}
	p, err := dhcpv4.NewReplyFromRequest(m, append(modifiers, more...)...)
	if err != nil {
		panic(err)
	}
	return p
}

// answer sends a server's answer to a message.
func (w *world) answer(m sent, kind dhcpv4.MessageType, server, addr netip.Addr, more ...dhcpv4.Modifier) {
	w.in <- answerFrame(reply(m.DHCPv4, kind, server, addr, more...))
}

// grants is a server that gives every client that asks the next address.
func (w *world) grants() func(sent) {
	next, given := addrA, map[string]netip.Addr{}
	return func(m sent) {
		id := string(m.Options.Get(dhcpv4.OptionClientIdentifier))
		if !given[id].IsValid() {
			given[id], next = next, next.Next()
		}
		switch m.MessageType() {
		case dhcpv4.MessageTypeDiscover:
			w.answer(m, dhcpv4.MessageTypeOffer, serverA, given[id])
		case dhcpv4.MessageTypeRequest:
			w.answer(m, dhcpv4.MessageTypeAck, serverA, given[id])
		}
	}
}

// pass lets time pass.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// sent returns what was sent.
func (w *world) sent() []sent {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.messages)
}

// since returns the messages from the given one on.
func (w *world) since(n int) []sent { return w.sent()[n:] }

// gaps are the times between messages.
func gaps(messages []sent) []time.Duration {
	var g []time.Duration
	for i := 1; i < len(messages); i++ {
		g = append(g, messages[i].at-messages[i-1].at)
	}
	return g
}
