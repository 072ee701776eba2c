package detector

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

const (
	// childOptions is the variable with the speaker that a process is, see TestMain.
	childOptions = "LODESTONE_DETECTOR"
	speakers     = 3
)

var (
	trials = flag.Int("trials", 3, "how often TestProcesses loses a speaker")
	busy   = flag.Int("busy", 0, "how many loops run beside the speakers of TestProcesses")
	rt     = flag.Bool("realtime", false, "whether the speakers of TestProcesses may have real-time priority")
	quiet  = flag.Duration("quiet", 2*time.Second, "how long TestProcesses watches that nobody is taken for lost")
)

var timing = watch.Timing{Interval: 25 * time.Millisecond, Missed: 3}

// TestMain makes the test program a speaker, when it was started as one.
func TestMain(m *testing.M) {
	if options := os.Getenv(childOptions); options != "" {
		if options == "busy" {
			for { //nolint:revive // it is killed
			}
		}
		if err := runChild(options); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// child is a speaker that is a process.
type child struct {
	Self    watch.Member
	Members []watch.Member
}

// noted is what a child prints: a verdict, and how much the process has used until now.
type noted struct {
	Lost    string
	At      time.Time
	CPU     time.Duration
	Late    time.Duration
	Refused int64
}

// runChild runs the detector until the process is killed.
func runChild(options string) error {
	var c child
	if err := json.Unmarshal([]byte(options), &c); err != nil {
		return err
	}
	if _, err := shared(c.Self.Addr); err != nil {
		return err
	}
	var refused atomic.Int64
	task, err := Listen(Options{Self: c.Self, Want: Want{c.Members, timing, [][]byte{make([]byte, 32)}},
		Log: slog.New(slog.DiscardHandler), Refused: func() { refused.Add(1) }})
	if err != nil {
		return err
	}
	go func() {
		in := bufio.NewScanner(os.Stdin)
		for out := json.NewEncoder(os.Stdout); in.Scan(); {
			var used unix.Rusage
			_ = unix.Getrusage(unix.RUSAGE_SELF, &used)
			cpu := time.Duration(used.Utime.Nano() + used.Stime.Nano())
			_ = out.Encode(noted{At: time.Now(), CPU: cpu, Late: task.Status().Lately, Refused: refused.Load()})
		}
	}()
	go func() {
		out := json.NewEncoder(os.Stdout)
		for v := range task.Verdicts() {
			_ = out.Encode(noted{Lost: v.Name, At: time.Now()})
		}
	}()
	return task.Run(context.Background())
}

// shared opens a socket in the place of memberlist's.
func shared(at netip.AddrPort) (net.PacketConn, error) {
	return (&net.ListenConfig{Control: Share}).ListenPacket(context.Background(), "udp", at.String())
}

// process is a running child.
type process struct {
	*exec.Cmd
	in    io.Writer
	notes chan noted
}

// start runs the speakers, each on a host of its own.
func start(t *testing.T, s *testnet.Segment) (all []*process) {
	t.Helper()
	var members []watch.Member
	for i := range s.Hosts {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, 0, byte(i + 1)}), 9744)
		members = append(members, watch.Member{Name: fmt.Sprint("n", i), Session: uint64(time.Now().UnixNano()), Addr: addr})
	}
	for i, h := range s.Hosts {
		options, err := json.Marshal(child{members[i], members})
		require.NoError(t, err)
		run := []string{"setpriv", "--bounding-set=-sys_nice", os.Args[0]}
		if *rt {
			run = run[2:]
		}
		p := &process{Cmd: h.Command(t.Context(), run[0], run[1:]...), notes: make(chan noted, 100)}
		p.Env, p.Stderr = append(os.Environ(), childOptions+"="+string(options)), os.Stderr
		p.in, err = p.StdinPipe()
		require.NoError(t, err)
		out, err := p.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, p.Start())
		go func() {
			defer close(p.notes)
			for d := json.NewDecoder(out); ; {
				var n noted
				if d.Decode(&n) != nil {
					return
				}
				p.notes <- n
			}
		}()
		t.Cleanup(func() {
			_ = p.Process.Kill()
			_ = p.Wait()
		})
		all = append(all, p)
	}
	return all
}

// ask returns what the process has used until now, and who it has taken for lost before.
func (p *process) ask(t *testing.T) (n noted, lost []string) {
	t.Helper()
	_, err := p.in.Write([]byte("\n"))
	require.NoError(t, err)
	for n = range p.notes {
		if n.Lost == "" {
			break
		}
		lost = append(lost, n.Lost)
	}
	return n, lost
}

// allRun reports whether the speakers have run all the time. Who is taken for lost had not: it did not run until nearly all heartbeats
// that may be missed were, or what it sent was on its way through a processor that the machine was not given meanwhile.
func allRun(t *testing.T, all []*process, lost []string, away time.Duration) bool {
	t.Helper()
	needed := time.Duration(timing.Missed-1) * timing.Interval
	if away >= needed {
		t.Logf("lost %v; the processors were away for %s", lost, away)
		return len(lost) == 0
	}
	for i, p := range all {
		if slices.Contains(lost, fmt.Sprint("n", i)) {
			n, _ := p.ask(t)
			t.Logf("n%d was %s late", i, n.Late)
			require.GreaterOrEqual(t, n.Late, needed, "n%d is alive, and was not late, and the processors were away for %s", i, away)
		}
	}
	return len(lost) == 0
}

// stolen returns for how long the machine's processors were those of other machines (proc_stat(5)).
func stolen(t *testing.T) time.Duration {
	t.Helper()
	const column, tick = 8, 10 * time.Millisecond // sysconf(_SC_CLK_TCK) is 100 on all machines on which these tests run
	text, err := os.ReadFile("/proc/stat")
	require.NoError(t, err)
	ticks, err := strconv.Atoi(strings.Fields(string(text))[column])
	require.NoError(t, err)
	return time.Duration(ticks) * tick
}

// Three processes in network namespaces. Nobody is taken for lost for a while; then one is killed.
func TestProcesses(t *testing.T) {
	for range *busy {
		loop := exec.CommandContext(t.Context(), os.Args[0])
		loop.Env = append(os.Environ(), childOptions+"=busy")
		require.NoError(t, loop.Start())
		t.Cleanup(func() {
			_ = loop.Process.Kill()
			_ = loop.Wait()
		})
	}
	for lost, tries := 0, 0; lost < *trials; tries++ {
		require.Less(t, tries, 10**trials, "the machine gives the speakers no processor time")
		all, taken := start(t, testnet.NewSegment(t, speakers)), stolen(t)
		time.Sleep(1500 * time.Millisecond)
		before, early := all[0].ask(t)
		time.Sleep(*quiet)
		after, missed := all[0].ask(t)
		_, elsewhere := all[1].ask(t)
		if !allRun(t, all, slices.Concat(early, missed, elsewhere), stolen(t)-taken) {
			continue
		}
		lost++
		used := 100 * float64(after.CPU-before.CPU) / float64(after.At.Sub(before.At))
		require.NoError(t, all[2].Process.Kill())
		killed := time.Now()
		_ = all[2].Wait()
		for _, p := range all[:2] {
			select {
			case n := <-p.notes:
				assert.Equal(t, "n2", n.Lost)
				took := n.At.Sub(killed)
				t.Logf("known after %s; %.2f %% of a core in %s, loops up to %s late", took, used, *quiet, after.Late)
				assert.Less(t, took, 5*time.Second)
			case <-time.After(testTimeout):
				t.Error("nobody knows")
			}
		}
		assert.Zero(t, after.Refused)
	}
}
