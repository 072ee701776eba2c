package probe

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

var start0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(milliseconds int) time.Time {
	return start0.Add(time.Duration(milliseconds) * time.Millisecond)
}

func from(node string, milliseconds ...int) []Answer {
	var answers []Answer
	for _, ms := range milliseconds {
		answers = append(answers, Answer{Answer: echo.Answer{Node: node, Pod: "p-" + node}, At: at(ms)})
	}
	return answers
}

func TestOutage(t *testing.T) {
	for name, tt := range map[string]struct {
		answers []Answer
		want    string
	}{
		"steady":       {from("n1", 0, 5, 10, 15), "5ms without answers, from p-n1 on n1 to p-n1 on n1"},
		"failover":     {append(from("n1", 0, 5), from("n2", 10, 15)...), "5ms without answers, from p-n1 on n1 to p-n1 on n1"},
		"slow":         {append(from("n1", 0), from("n2", 12, 17)...), "12ms without answers, from p-n1 on n1 to p-n2 on n2"},
		"never again":  {from("n1", 0, 1), "19ms without answers, from p-n1 on n1 to nobody"},
		"never at all": {nil, "20ms without answers, from nobody to nobody"},
	} {
		t.Run(name, func(t *testing.T) {
			record := Record{Started: at(0), Stopped: at(20), Answers: tt.answers}
			if got := record.Outage().String(); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
	record := Record{Started: at(0), Begun: at(9), Stopped: at(20), Answers: append(from("n1", 8, 10), from("n2", 15, 18)...)}
	if got, want := record.Outage().String(), "5ms without answers, from p-n1 on n1 to p-n2 on n2"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestRecordCounts(t *testing.T) {
	record := Record{Sent: 5, Answers: append(from("n1", 0, 5), from("n2", 10)...)}
	if record.Lost() != 2 {
		t.Errorf("lost = %d, want 2", record.Lost())
	}
	if got := fmt.Sprint(record.Nodes()); got != "map[n1:2 n2:1]" {
		t.Errorf("nodes = %s", got)
	}
}

// newEcho runs an echo server on the loopback of a namespace.
func newEcho(t *testing.T) (namespace string, udp, tcp netip.AddrPort) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	namespace = "ls-test-probe"
	_ = netns.Delete(namespace)
	if err := netns.Create(namespace); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Delete(namespace) })
	if output, err := netns.Command(t.Context(), namespace, "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	server := &echo.Server{Pod: "p", Node: "n1"}
	err := netns.Do(namespace, func() error {
		packets, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		t.Cleanup(func() { packets.Close(); listener.Close() })
		udp, tcp = netip.MustParseAddrPort(packets.LocalAddr().String()), netip.MustParseAddrPort(listener.Addr().String())
		go server.ServePackets(packets)
		go http.Serve(listener, server.Handler())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return namespace, udp, tcp
}

func TestProbesAreAnswered(t *testing.T) {
	namespace, udp, tcp := newEcho(t)
	for name, begin := range map[string]func(context.Context) *Probe{
		"UDP, one flow": func(ctx context.Context) *Probe {
			return UDP(ctx, Options{Namespace: namespace, Target: udp})
		},
		"UDP, straight": func(ctx context.Context) *Probe {
			return UDP(ctx, Options{Namespace: namespace, Target: udp, Straight: true})
		},
		"UDP, new flows": func(ctx context.Context) *Probe {
			return UDP(ctx, Options{Namespace: namespace, Target: udp, NewFlows: true})
		},
		"TCP": func(ctx context.Context) *Probe {
			return TCP(ctx, Options{Namespace: namespace, Target: tcp})
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			p := begin(ctx)
			if err := p.WaitAnswers(ctx, 20); err != nil {
				t.Fatal(err)
			}
			record, err := p.Finish()
			if err != nil {
				t.Fatal(err)
			}
			if record.Nodes()["n1"] < 20 || record.Lost() != 0 {
				t.Errorf("sent %d, answers %v", record.Sent, record.Nodes())
			}
		})
	}
}

// If a port were used again while connection tracking remembers it, the probe would
// measure the first flow's path instead of the present one.
func TestNewFlowsComeFromNewPorts(t *testing.T) {
	namespace, udp, _ := newEcho(t)
	seen := map[string]bool{}
	for range 2 {
		p := UDP(t.Context(), Options{Namespace: namespace, Target: udp, NewFlows: true})
		if err := p.WaitAnswers(t.Context(), 100); err != nil {
			t.Fatal(err)
		}
		record, err := p.Finish()
		if err != nil {
			t.Fatal(err)
		}
		for _, answer := range record.Answers {
			if seen[answer.Remote] {
				t.Errorf("two probes came from %s", answer.Remote)
			}
			seen[answer.Remote] = true
		}
	}
}

func TestProbesOutliveRefusals(t *testing.T) {
	namespace, udp, _ := newEcho(t)
	closed := netip.AddrPortFrom(udp.Addr(), 1)
	p := UDP(t.Context(), Options{Namespace: namespace, Target: closed, Interval: time.Millisecond})
	for p.Snapshot().Sent < 5 && t.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
	record, err := p.Stop()
	if err != nil || len(record.Answers) > 0 {
		t.Errorf("sent %d, answers %d, %v", record.Sent, len(record.Answers), err)
	}
}

// Connections that live are distinguished from those that are reset.
func TestConnectionsAreHeldUntilTheyBreak(t *testing.T) {
	namespace, _, tcp := newEcho(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const held = 5
	c, err := Connect(ctx, Options{Namespace: namespace, Target: tcp}, held)
	if err != nil {
		t.Fatal(err)
	}
	until := func(what string, holds func(ConnectionRecord) bool) {
		t.Helper()
		for !holds(c.Snapshot()) {
			select {
			case <-ctx.Done():
				t.Fatalf("waited in vain until %s: %+v", what, c.Snapshot())
			case <-time.After(time.Millisecond):
			}
		}
	}
	until("each has asked ten times", func(r ConnectionRecord) bool { return r.Requests >= 10*held })
	if r := c.Snapshot(); len(r.Broken) > 0 || r.Nodes()["n1"] != held || r.WorstPause <= 0 {
		t.Errorf("%+v", r)
	}
	idle, err := Connect(ctx, Options{Namespace: namespace, Target: tcp, Interval: time.Hour, Padding: 100_000}, held)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		if err := idle.AskAll(ctx); err != nil || idle.Snapshot().Requests != (round+2)*held {
			t.Errorf("asked %d times, %d requests, %v", round+1, idle.Snapshot().Requests, err)
		}
	}
	// Somebody ends them all: ss is the kernel's own tool for it.
	if out, err := netns.Command(ctx, namespace, "ss", "--kill", "state", "established", "dport", "=",
		fmt.Sprint(tcp.Port())).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	until("all are broken", func(r ConnectionRecord) bool { return len(r.Broken) == held })
	if err := idle.AskAll(ctx); err != nil || len(idle.Stop().Broken) != held {
		t.Errorf("of those that were idle %d are broken, %v", len(idle.Snapshot().Broken), err)
	}
	if r := c.Stop(); r.Opened != held || len(r.Broken) != held {
		t.Errorf("%+v", r)
	}
	if _, err := Connect(ctx, Options{Namespace: namespace, Target: netip.AddrPortFrom(tcp.Addr(), 1)}, 1); err == nil {
		t.Error("a connection to a port that nobody has was opened")
	}
}
