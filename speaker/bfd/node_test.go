package bfd

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
)

// answerTimeout is how long a test waits for what has no bound of its own.
const answerTimeout = 20 * time.Second

// node is a Task on a host, with real sockets.
type node struct {
	*Task
	t        *testing.T
	registry *prometheus.Registry
	stop     func() // ends Run and waits for it
}

func startNode(t *testing.T, h *testnet.Host) *node {
	t.Helper()
	n := &node{t: t, registry: prometheus.NewPedanticRegistry()}
	n.Task = New(Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Registry: n.registry})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Do(func() error { return n.Run(ctx) }) }()
	stopped := false
	n.stop = func() {
		cancel()
		if !stopped {
			stopped = true
			require.NoError(t, <-done)
		}
	}
	t.Cleanup(n.stop)
	return n
}

func (n *node) set(want map[string]Session) {
	n.t.Helper()
	require.NoError(n.t, n.Set(n.t.Context(), want))
}

// await waits until the session of a peer is as it should be, and returns it
// then.
func (n *node) await(peer, what string, right func(Status) bool) Status {
	n.t.Helper()
	deadline := time.After(answerTimeout)
	for {
		changed := n.Changed()
		s := n.States()[peer]
		if right(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline:
			n.t.Fatalf("%s: %s: it is %+v", peer, what, n.States()[peer])
		}
	}
}

// awaitUp waits until the session is Up and both sides go by the intervals
// that were negotiated.
func (n *node) awaitUp(peer string) Status {
	n.t.Helper()
	return n.await(peer, "come up", func(s Status) bool {
		return s.Up() && s.TransmitInterval < slowest && s.ReceiveInterval < slowest
	})
}

func every(interval time.Duration, multiplier int) Timers {
	return Timers{TransmitInterval: interval, ReceiveInterval: interval, DetectMultiplier: multiplier}
}

// detection is a Detection Time that is longer than other tests keep a process from
// running: only silence of the peer ends a session.
const detection = 3 * time.Second

// within are timers with that Detection Time.
func within(interval time.Duration) Timers { return every(interval, int(detection/interval)) }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// other is somebody else's implementation.
type other interface {
	// configure replaces the sessions, by the address of the peer.
	configure(sessions ...Session)
	// up reports whether a session is Up there.
	up(peer netip.Addr) bool
	// restart kills the daemon and starts it with the same sessions.
	restart(sessions ...Session)
	// switchOff sets a session AdminDown.
	switchOff(s Session)
}

// frr is bfdd of FRR, with the zebra that it needs to know interfaces.
type frr struct {
	*router.FRR
	t testing.TB
}

func startFRR(t testing.TB, h *testnet.Host, through ...string) other {
	t.Helper()
	return &frr{router.StartFRR(t, h, router.Options{Daemons: []string{"zebra", "bfdd"}, Through: through}), t}
}

func (f *frr) vtysh(commands ...string) string {
	f.t.Helper()
	return f.AskDaemon("bfdd", commands...)
}

// peer is the command that enters a session.
func (f *frr) peer(s Session) string {
	c := "peer " + s.Remote.WithZone("").String()
	if s.Multihop {
		c += " multihop"
	}
	if s.Local.IsValid() {
		c += " local-address " + s.Local.WithZone("").String()
	}
	if s.Interface != "" {
		c += " interface " + s.Interface
	}
	return c
}

func (f *frr) configure(sessions ...Session) {
	f.t.Helper()
	for _, s := range sessions {
		commands := []string{
			"configure terminal", "bfd", f.peer(s),
			fmt.Sprint("transmit-interval ", s.TransmitInterval.Milliseconds()),
			fmt.Sprint("receive-interval ", s.ReceiveInterval.Milliseconds()),
			fmt.Sprint("detect-multiplier ", s.DetectMultiplier), "no shutdown",
		}
		if s.MinTTL != 0 {
			commands = append(commands, fmt.Sprint("minimum-ttl ", s.MinTTL))
		}
		f.vtysh(commands...)
	}
}

func (f *frr) restart(sessions ...Session) {
	f.t.Helper()
	f.Kill()
	f.Start()
	f.configure(sessions...)
}

func (f *frr) switchOff(s Session) { f.vtysh("configure terminal", "bfd", f.peer(s), "shutdown") }

// frrPeer is what FRR says of a session.
type frrPeer struct {
	Peer, Status, Diagnostic string
	RemoteDiagnostic         string `json:"remote-diagnostic"`
	SessionDown, SessionUp   int
}

func (f *frr) peers() (peers []frrPeer) {
	f.t.Helper()
	require.NoError(f.t, json.Unmarshal([]byte(f.vtysh("show bfd peers json")), &peers))
	return peers
}

func (f *frr) up(peer netip.Addr) bool {
	for _, p := range f.peers() {
		if p.Peer == peer.WithZone("").String() {
			return p.Status == "up"
		}
	}
	return false
}

// bird is BIRD's protocol bfd.
type bird struct {
	*router.BIRD // nil until it is configured: sessions that come with a new configuration have the old one's intervals
	t            testing.TB
	h            *testnet.Host
	through      []string
}

func startBIRD(t testing.TB, h *testnet.Host, through ...string) other {
	return &bird{t: t, h: h, through: through}
}

func birdConfig(sessions []Session) string {
	text := "router id 198.18.0.2;\nprotocol device {}\nprotocol bfd {\n"
	for _, s := range sessions {
		timers := fmt.Sprintf("min rx interval %d us; min tx interval %d us; idle tx interval 1 s; multiplier %d;",
			s.ReceiveInterval.Microseconds(), s.TransmitInterval.Microseconds(), s.DetectMultiplier)
		if s.Multihop {
			text += fmt.Sprintf("\tmultihop { %s };\n\tneighbor %s local %s multihop;\n", timers, s.Remote, s.Local)
			continue
		}
		text += fmt.Sprintf("\tinterface \"%s\" { %s };\n\tneighbor %s", s.Interface, timers, s.Remote.WithZone(""))
		if s.Remote.IsLinkLocalUnicast() {
			text += fmt.Sprintf("%%'%s'", s.Interface)
		}
		if s.Local.IsValid() {
			text += " local " + s.Local.String()
		}
		text += ";\n"
	}
	return text + "}\n"
}

func (b *bird) configure(sessions ...Session) {
	b.t.Helper()
	if b.BIRD == nil {
		b.BIRD = router.StartBIRD(b.t, b.h, router.Options{Config: birdConfig(sessions), Through: b.through})
		return
	}
	b.Configure(birdConfig(sessions))
	b.Ask("enable bfd1")
}

func (b *bird) restart(...Session) { // its configuration is in a file
	b.Kill()
	b.Start()
}

// switchOff ends all sessions.
func (b *bird) switchOff(Session) { b.Ask("disable bfd1") }

func (b *bird) up(peer netip.Addr) bool {
	for line := range strings.Lines(b.Ask("show bfd sessions")) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == peer.WithZone("").String() {
			return fields[2] == "Up"
		}
	}
	return false
}
