package bfd

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// patience is how long a test waits for what has no bound of its own.
const patience = 20 * time.Second

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
	deadline := time.After(patience)
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

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// daemon runs a program on a host until the test ends.
func daemon(t testing.TB, h *testnet.Host, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := h.Command(context.Background(), name, args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s: %s", name, out.String())
		}
	})
	return cmd
}

// router is somebody else's implementation.
type router interface {
	// configure replaces the sessions, by the address of the peer.
	configure(sessions ...Session)
	// up reports whether a session is Up there.
	up(peer netip.Addr) bool
	// switchOff sets a session AdminDown.
	switchOff(s Session)
}

// frr is bfdd of FRR, with the zebra that it needs to know interfaces.
type frr struct {
	t   testing.TB
	h   *testnet.Host
	dir string
}

// ownProcessor runs a program as if it had its router's processor for itself,
// whatever other tests do.
var ownProcessor = []string{"chrt", "--rr", "1"}

func startFRR(t testing.TB, h *testnet.Host) router { return newFRR(t, h, ownProcessor...) }

// newFRR starts FRR, its bfdd through another program if one is given.
func newFRR(t testing.TB, h *testnet.Host, through ...string) *frr {
	t.Helper()
	const programs = "/usr/lib/frr"
	dir, err := os.MkdirTemp("", "ls-frr") // t.TempDir is closed to other users
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	owner, err := user.Lookup("frr")
	require.NoError(t, err, "install the package frr")
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, os.Chown(dir, uid, gid))
	f := &frr{t, h, dir}
	file := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"zebra.conf", "bfdd.conf"} {
		require.NoError(t, os.WriteFile(file(name), nil, 0o644))
	}
	daemon(t, h, programs+"/zebra", "-f", file("zebra.conf"), "-z", file("zserv"), "--vty_socket", dir, "-i", file("zebra.pid"))
	f.wait("zebra", "show version")
	bfdd := append(slices.Clone(through), programs+"/bfdd", "-f", file("bfdd.conf"), "-z", file("zserv"), "--vty_socket", dir, "-i", file("bfdd.pid"), "--bfdctl", file("bfdd.sock"))
	daemon(t, h, bfdd[0], bfdd[1:]...)
	f.wait("bfdd", "show bfd peers")
	return f
}

// wait waits until a daemon answers.
func (f *frr) wait(name, command string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		return f.h.Command(context.Background(), "vtysh", "--vty_socket", f.dir, "-d", name, "-c", command).Run() == nil
	}, patience, 50*time.Millisecond, "%s does not answer", name)
}

func (f *frr) vtysh(commands ...string) string {
	f.t.Helper()
	args := []string{"--vty_socket", f.dir, "-d", "bfdd"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	return f.h.Run("vtysh", args...)
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
	t            testing.TB
	h            *testnet.Host
	conf, socket string
	runs         bool
}

func startBIRD(t testing.TB, h *testnet.Host) router {
	t.Helper()
	dir := t.TempDir()
	return &bird{t: t, h: h, conf: filepath.Join(dir, "bird.conf"), socket: filepath.Join(dir, "bird.ctl")}
}

// write writes the configuration.
func (b *bird) write(sessions ...Session) {
	b.t.Helper()
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
	require.NoError(b.t, os.WriteFile(b.conf, []byte(text+"}\n"), 0o644))
}

func (b *bird) birdc(command ...string) string {
	b.t.Helper()
	return b.h.Run("birdc", append([]string{"-s", b.socket}, command...)...)
}

func (b *bird) configure(sessions ...Session) {
	b.t.Helper()
	b.write(sessions...)
	if !b.runs { // sessions that come with a new configuration have the old one's intervals
		b.runs = true
		command := append(slices.Clone(ownProcessor), "bird", "-f", "-c", b.conf, "-s", b.socket)
		daemon(b.t, b.h, command[0], command[1:]...)
		require.Eventually(b.t, func() bool {
			return b.h.Command(context.Background(), "birdc", "-s", b.socket, "show", "status").Run() == nil
		}, patience, 50*time.Millisecond, "bird does not answer")
		return
	}
	require.Contains(b.t, b.birdc("configure"), "econfigured")
	b.birdc("enable", "bfd1")
}

// switchOff ends all sessions.
func (b *bird) switchOff(Session) { b.birdc("disable", "bfd1") }

func (b *bird) up(peer netip.Addr) bool {
	for line := range strings.Lines(b.birdc("show", "bfd", "sessions")) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == peer.WithZone("").String() {
			return fields[2] == "Up"
		}
	}
	return false
}
