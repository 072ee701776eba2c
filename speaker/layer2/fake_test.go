package layer2

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	arppacket "github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

var (
	nodeMAC   = mac{2, 0, 0, 0, 0, 1}
	clientMAC = mac{2, 0, 0, 0, 0, 0xc}
	clientIP  = netip.MustParseAddr("198.18.0.2")
	vipA      = netip.MustParseAddr("198.18.0.100")
	vipB      = netip.MustParseAddr("198.18.0.101")
	vip6      = netip.MustParseAddr("2001:db8::100")
	linkLocal = netip.MustParsePrefix("fe80::1/64")
)

// everywhere is a set of VIPs announced on every suitable interface.
func everywhere(vips ...netip.Addr) map[netip.Addr]plan.Layer2 { return each(plan.Layer2{}, vips) }

// claimed is a set of VIPs, at home or not.
func claimed(home bool, vips ...netip.Addr) map[netip.Addr]plan.Layer2 {
	return each(plan.Layer2{Home: home}, vips)
}

// fresh is a set of VIPs that nobody announced before.
func fresh(vips ...netip.Addr) map[netip.Addr]plan.Layer2 { return each(plan.Layer2{New: true}, vips) }

func each(l plan.Layer2, vips []netip.Addr) map[netip.Addr]plan.Layer2 {
	want := map[netip.Addr]plan.Layer2{}
	for _, vip := range vips {
		want[vip] = l
	}
	return want
}

// eth returns a suitable interface.
func eth(index int, name string) netstate.Interface {
	m := nodeMAC
	m[4] = byte(index)
	return netstate.Interface{Index: index, Name: name, Kind: "device", HardwareAddr: m[:], Up: true, Ethernet: true,
		Addrs: []netip.Prefix{linkLocal}}
}

// world is a simulated node on a segment: interfaces, sockets and a record of
// the frames sent.
type world struct {
	t        testing.TB
	start    time.Time
	log      bytes.Buffer
	registry *prometheus.Registry
	*Announcer

	mu         sync.Mutex
	interfaces []netstate.Interface
	changed    chan struct{}
	ready      chan struct{}
	conns      map[string]*conn
	opens      atomic.Int64
	openErr    map[string]error
	sent       []frame
	joined     map[string]bool // groups, by interface
	groupErr   error
	listErr    error                           // why the kernel does not list its groups
	wire       func(name string, frame []byte) // to others; nil: nobody is there
}

// frame is a frame that was sent.
type frame struct {
	at    time.Duration
	on    string
	to    net.Addr
	bytes []byte
}

// packet reads a frame with the library alone.
func (f frame) packet(t testing.TB) (ethernet.Frame, arppacket.Packet) {
	t.Helper()
	var e ethernet.Frame
	var p arppacket.Packet
	if err := e.UnmarshalBinary(f.bytes); err != nil {
		t.Fatal(err)
	}
	if err := p.UnmarshalBinary(e.Payload); err != nil {
		t.Fatal(err)
	}
	return e, p
}

func (f frame) vip(t testing.TB) netip.Addr { _, p := f.packet(t); return p.SenderIP }

// newWorld returns a world with these interfaces whose announcer runs until
// stop is called.
func newWorld(t testing.TB, change func(*Options), interfaces ...netstate.Interface) (w *world, stop func() error) {
	w = &world{t: t, start: time.Now(), interfaces: interfaces, registry: prometheus.NewPedanticRegistry(),
		changed: make(chan struct{}), ready: make(chan struct{}), conns: map[string]*conn{}, openErr: map[string]error{},
		joined: map[string]bool{}}
	close(w.ready)
	o := Options{
		Interfaces: view{w},
		Log:        slog.New(slog.NewTextHandler(&w.log, nil)),
		Registry:   w.registry,
		Listen:     w.listen,
		Groups:     func() (GroupSocket, error) { return &groups{w: w, joined: map[string]bool{}}, nil },
		Joined:     w.joinedOn,
		Keys:       keys("the cluster's"),
	}
	if change != nil {
		change(&o)
	}
	w.Announcer = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	<-w.Announcer.Ready()
	return w, func() error { cancel(); return <-done }
}

// inWorld runs a story in simulated time.
func inWorld(t *testing.T, story func(*testing.T, *world), interfaces ...netstate.Interface) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w, stop := newWorld(t, nil, interfaces...)
		story(t, w)
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

type view struct{ w *world }

func (v view) Ready() <-chan struct{} { return v.w.ready }

func (v view) Changed() <-chan struct{} {
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	return v.w.changed
}

func (v view) Interfaces() []netstate.Interface {
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	return v.w.interfaces
}

// become replaces the interfaces and waits until that had its effect.
func (w *world) become(interfaces ...netstate.Interface) {
	w.restart()
	w.mu.Lock()
	w.interfaces = interfaces
	close(w.changed)
	w.changed = make(chan struct{})
	w.mu.Unlock()
	synctest.Wait()
}

func (w *world) set(want map[netip.Addr]plan.Layer2) {
	w.t.Helper()
	if err := w.Set(context.Background(), want); err != nil {
		w.t.Error(err)
	}
}

// after lets time pass and returns what was sent since the last call.
func (w *world) after(d time.Duration) []frame {
	time.Sleep(d)
	synctest.Wait()
	return w.take()
}

func (w *world) take() []frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	sent := w.sent
	w.sent = nil
	return sent
}

// restart makes now the time from which frames are dated.
func (w *world) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.start = time.Now()
}

// receive puts a frame on the wire in front of an interface: "eth0" for its
// ARP socket, "eth0 IPv6" for the one of NDP.
func (w *world) receive(name string, frame []byte) {
	w.conn(name).in <- frame
}

// onWire has carry be called for each frame that is sent from now on.
func (w *world) onWire(carry func(name string, frame []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wire = carry
}

// carrier returns what is called for each frame, nil for nothing.
func (w *world) carrier() func(name string, frame []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wire
}

// conn returns the open socket of an interface.
func (w *world) conn(name string) *conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conns[name]
}

// fail makes opening sockets on an interface fail. Nil: no longer.
func (w *world) fail(name string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.openErr[name] = err
}

func (w *world) listen(i *net.Interface, etherType int, filter []bpf.RawInstruction) (net.PacketConn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opens.Add(1)
	if err := w.openErr[i.Name]; err != nil {
		return nil, err
	}
	if len(filter) == 0 {
		w.t.Error("a socket without a filter")
	}
	c := &conn{w: w, name: i.Name, in: make(chan []byte), broken: make(chan error), closed: make(chan struct{})}
	if etherType == unix.ETH_P_IPV6 {
		c.name += " IPv6"
	}
	w.conns[c.name] = c
	return c, nil
}

// groups is a simulated GroupSocket, with room for few.
type groups struct {
	w      *world
	joined map[string]bool
}

const roomForGroups = 3

func (g *groups) Join(index int, group netip.Addr) error {
	key := fmt.Sprint(index, " ", group)
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	switch {
	case g.w.groupErr != nil:
		return g.w.groupErr
	case len(g.joined) == roomForGroups:
		return unix.ENOMEM
	case g.w.joined[key]:
		g.w.t.Errorf("joined twice: %s", key)
	}
	g.joined[key], g.w.joined[key] = true, true
	return nil
}

func (g *groups) Leave(index int, group netip.Addr) error {
	key := fmt.Sprint(index, " ", group)
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	if !g.joined[key] {
		return unix.EADDRNOTAVAIL
	}
	delete(g.joined, key)
	delete(g.w.joined, key)
	return nil
}

func (g *groups) Close() error {
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	for key := range g.joined {
		delete(g.w.joined, key)
	}
	return nil
}

// joinedOn returns the groups that are joined on an interface.
func (w *world) joinedOn(index int) (map[netip.Addr]bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	groups := map[netip.Addr]bool{}
	for key := range w.joined {
		if group, ok := strings.CutPrefix(key, fmt.Sprint(index, " ")); ok {
			groups[netip.MustParseAddr(group)] = true
		}
	}
	return groups, w.listErr
}

// groups returns the groups that are joined, each after the index of its
// interface.
func (w *world) groups() []string {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.joined))
}

// conn is a simulated packet socket.
type conn struct {
	w      *world
	name   string
	in     chan []byte
	broken chan error
	closed chan struct{}
	// stuck, when set, is closed by a write deadline.
	stuck atomic.Pointer[chan struct{}]
}

func (c *conn) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case f := <-c.in:
		return copy(b, f), &packet.Addr{}, nil
	case err := <-c.broken:
		return 0, nil, err
	case <-c.closed:
		return 0, nil, net.ErrClosed
	}
}

func (c *conn) WriteTo(b []byte, to net.Addr) (int, error) {
	if stuck := c.stuck.Load(); stuck != nil {
		<-*stuck
		return 0, os.ErrDeadlineExceeded
	}
	select {
	case <-c.closed:
		return 0, net.ErrClosed
	default:
	}
	c.w.mu.Lock()
	c.w.sent = append(c.w.sent, frame{time.Since(c.w.start), c.name, to, slices.Clone(b)})
	c.w.mu.Unlock()
	if carry := c.w.carrier(); carry != nil {
		carry(c.name, slices.Clone(b))
	}
	return len(b), nil
}

func (c *conn) Close() error {
	close(c.closed)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.w.conns[c.name] == c {
		delete(c.w.conns, c.name)
	}
	return nil
}

func (c *conn) SetWriteDeadline(d time.Time) error {
	if !d.IsZero() {
		if stuck := c.stuck.Swap(nil); stuck != nil {
			close(*stuck)
		}
	}
	return nil
}

func (c *conn) LocalAddr() net.Addr             { return &packet.Addr{} }
func (c *conn) SetDeadline(time.Time) error     { return nil }
func (c *conn) SetReadDeadline(time.Time) error { return nil }

// claimOf is the claim of a VIP by a speaker of the cluster.
func claimOf(hw mac, vip netip.Addr) statement {
	return statement{Self: hw, VIP: vip, Seal: seal.Key("the cluster's").Seal(vip, hw, false)}
}

// ask is a request for a VIP by sender, sent to a hardware address.
func ask(vip netip.Addr, sender netip.Addr, to mac) []byte {
	return arpFrame(arppacket.OperationRequest, to, clientMAC, sender, mac{}, vip)
}

// keys are the keys of a speaker. The first one makes seals.
func keys(all ...string) seal.Keys {
	var secrets [][]byte
	for _, k := range all {
		secrets = append(secrets, []byte(k))
	}
	return func() [][]byte { return secrets }
}
