package bfd

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
)

// childSessions is the variable with the sessions of a process that is a node,
// see TestMain.
const childSessions = "LODESTONE_BFD_SESSIONS"

// TestMain makes the test program a node, when it was started as one.
func TestMain(m *testing.M) {
	if sessions := os.Getenv(childSessions); sessions != "" {
		if err := runChild(sessions); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// runChild runs sessions until the standard input ends, and prints what became
// of them.
func runChild(sessions string) error {
	var want map[string]Session
	if err := json.Unmarshal([]byte(sessions), &want); err != nil {
		return err
	}
	signal.Ignore(unix.SIGPIPE)
	task := New(Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Registry: prometheus.NewRegistry()})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- task.Run(ctx) }()
	if err := task.Set(ctx, want); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := json.NewEncoder(os.Stdout).Encode(task.States()); err != nil {
		return err
	}
	cancel()
	return <-done
}

// child is a process that is a node.
type child struct {
	t      testing.TB
	cmd    *exec.Cmd
	input  io.Closer
	output *bufio.Reader
	log    strings.Builder
}

// normalPriority takes away what real-time priority needs from the program
// that follows.
var normalPriority = []string{"setpriv", "--bounding-set=-sys_nice"}

// startChild starts a node, through another program if one is given.
func startChild(t testing.TB, h *testnet.Host, sessions map[string]Session, through ...string) *child {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	text, err := json.Marshal(sessions)
	require.NoError(t, err)
	args := append(slices.Clone(through), program)
	c := &child{t: t, cmd: h.Command(context.Background(), args[0], args[1:]...)}
	c.cmd.Env = append(os.Environ(), childSessions+"="+string(text))
	c.cmd.Stderr = &c.log
	c.input, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	output, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	c.output = bufio.NewReader(output)
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
		if t.Failed() {
			t.Log(c.log.String())
		}
	})
	return c
}

// end ends the process and returns the last states of its sessions, by name:
// how often each came up or went down.
func (c *child) end() map[string]uint64 {
	c.t.Helper()
	require.NoError(c.t, c.input.Close())
	var states map[string]struct{ Transitions uint64 }
	require.NoError(c.t, json.NewDecoder(c.output).Decode(&states))
	require.NoError(c.t, c.cmd.Wait())
	transitions := map[string]uint64{}
	for name, s := range states {
		transitions[name] = s.Transitions
	}
	return transitions
}

// signal sends a signal to the node; nsenter has become it.
func (c *child) signal(s os.Signal) { require.NoError(c.t, c.cmd.Process.Signal(s)) }

var (
	timingDuration = flag.Duration("bfd.duration", 60*time.Second, "how long BenchmarkTiming measures each case")
	timingBusy     = flag.Int("bfd.busy", 4, "busy processes beside BenchmarkTiming")
)

// BenchmarkTiming measures a session with a process that keeps to it by itself,
// ours, FRR's or BIRD's, beside others that keep all processors busy. Each case
// takes -bfd.duration, whatever b.N is. A packet's jitter is how much later it
// came than the interval allows.
func BenchmarkTiming(b *testing.B) {
	short, defaults := []time.Duration{100, 50}, []time.Duration{300} // defaults: of the configuration and the chart
	for _, test := range []struct {
		name          string
		priority      []string
		peer          func(t testing.TB, h *testnet.Host, s Session, through []string)
		theirPriority []string
		intervals     []time.Duration
	}{
		{"peer=lodestone/priority=realtime/peer_priority=realtime", nil, childAs, nil, short},
		{"peer=lodestone/priority=normal/peer_priority=normal", normalPriority, childAs, normalPriority, short},
		{"peer=frr/priority=realtime/peer_priority=normal", nil, otherAs(startFRR), nil, short},
		{"peer=frr/priority=realtime/peer_priority=realtime", nil, otherAs(startFRR), router.OwnProcessor, short},
		{"peer=bird/priority=realtime/peer_priority=normal", nil, otherAs(startBIRD), nil, short},
		{"peer=bird/priority=realtime/peer_priority=realtime", nil, otherAs(startBIRD), router.OwnProcessor, short},
		{"peer=frr/priority=normal/peer_priority=realtime", normalPriority, otherAs(startFRR), router.OwnProcessor, defaults},
		{"peer=bird/priority=normal/peer_priority=realtime", normalPriority, otherAs(startBIRD), router.OwnProcessor, defaults},
	} {
		for _, interval := range test.intervals {
			b.Run(fmt.Sprintf("%s/interval_ms=%d", test.name, interval), func(b *testing.B) {
				s, timers := testnet.NewSegment(b, 2), every(interval*ms, 3)
				test.peer(b, s.Hosts[1], Session{Remote: addr("198.18.0.1"), Local: addr("198.18.0.2"), Interface: "eth0", Timers: timers},
					test.theirPriority)
				measure(b, s, timers, test.priority)
			})
		}
	}
}

// childAs starts a node of ours as the peer.
func childAs(t testing.TB, h *testnet.Host, s Session, through []string) {
	t.Helper()
	startChild(t, h, map[string]Session{"peer": s}, through...)
}

// otherAs returns what starts somebody else's implementation as the peer.
func otherAs(start func(testing.TB, *testnet.Host, ...string) other) func(testing.TB, *testnet.Host, Session, []string) {
	return func(t testing.TB, h *testnet.Host, s Session, through []string) {
		t.Helper()
		start(t, h, through...).configure(s)
	}
}

// measure measures against what runs on the second host.
func measure(b *testing.B, s *testnet.Segment, timers Timers, through []string) {
	c := startCapture(b, s.Hosts[0], "eth0")
	node := startChild(b, s.Hosts[0], map[string]Session{"peer": {Remote: addr("198.18.0.2"), Timers: timers}}, through...)
	isUp := func(p captured) bool { return p.state == Up && p.desiredMinTx == timers.TransmitInterval && !p.poll }
	require.Eventually(b, func() bool {
		return len(c.since(time.Time{}, func(p captured) bool { return p.outgoing && isUp(p) })) > 0
	}, answerTimeout, 100*ms)
	keepBusy(b, *timingBusy)
	start := time.Now()
	time.Sleep(*timingDuration)
	for name, outgoing := range map[string]bool{"node": true, "peer": false} {
		packets := c.since(start, func(p captured) bool { return p.outgoing == outgoing && !p.final })
		late := lateness(packets, timers.TransmitInterval)
		b.ReportMetric(float64(late[len(late)*99/100].Microseconds())/1000, name+"_p99_jitter_ms")
		b.ReportMetric(float64(late[len(late)-1].Microseconds())/1000, name+"_max_jitter_ms")
	}
	b.ReportMetric(float64(node.end()["peer"]/2), "false_downs") // up, and then down and up for each
}

// lateness returns, in order of size, how much more time than the interval was
// between packets of a session that is Up.
func lateness(packets []captured, interval time.Duration) []time.Duration {
	late := []time.Duration{0}
	for i := 1; i < len(packets); i++ {
		if packets[i-1].state == Up && packets[i].state == Up {
			late = append(late, max(0, packets[i].at.Sub(packets[i-1].at)-interval))
		}
	}
	slices.Sort(late)
	return late
}

// keepBusy runs processes that do nothing but that.
func keepBusy(b *testing.B, n int) {
	for range n {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		require.NoError(b, cmd.Start())
		b.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
}
