// Package probe measures from a client's side: it asks an address again and
// again, and records when answers stopped, for how long, and who answered
// before and after.
//
//	probe.go        Probe: asks by UDP or TCP, each time anew
//	connections.go  Connections, which stay open
//	record.go       Record: the answers, and the outages between them
package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// Options are the address to ask, from where and how often.
type Options struct {
	Namespace string
	Target    netip.AddrPort
	Interval  time.Duration // zero means 5 ms
	Timeout   time.Duration // of one probe; zero means 10 s

	// NewFlows gives each UDP probe a source port that was not used lately,
	// so that routers and kube-proxy decide anew each time. Otherwise all are one flow.
	NewFlows bool
	// Straight makes the pods answer UDP probes of one flow from their own address, and not through the
	// one that was asked: kube-proxy forgets a flow when its endpoint stops serving, and refuses answers
	// that are on their way.
	Straight bool
	// Padding is how many bytes an answer on a connection has besides the Answer.
	Padding int
}

func (o *Options) complete() {
	if o.Interval == 0 {
		o.Interval = 5 * time.Millisecond
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
}

// Probe is a measurement that goes on until it is stopped.
type Probe struct {
	options Options
	cancel  context.CancelFunc
	workers sync.WaitGroup
	// finish ends the asking alone, which asked is closed after.
	finish context.CancelFunc
	asked  chan struct{}
	port   int // of the last new flow; of the goroutine that asks

	mu     sync.Mutex
	record Record
	failed error
}

// UDP starts to ask with datagrams.
func UDP(ctx context.Context, options Options) *Probe {
	return start(ctx, options, (*Probe).sendDatagrams)
}

// TCP starts to ask over HTTP, with a connection for each question.
func TCP(ctx context.Context, options Options) *Probe {
	return start(ctx, options, (*Probe).sendRequests)
}

func start(ctx context.Context, options Options, send func(p *Probe, ctx, asking context.Context) error) *Probe {
	options.complete()
	ctx, cancel := context.WithCancel(ctx)
	asking, finish := context.WithCancel(ctx)
	p := &Probe{options: options, cancel: cancel, finish: finish, asked: make(chan struct{}), port: portAt(time.Now()),
		record: Record{Started: time.Now()}}
	p.workers.Go(func() {
		defer close(p.asked)
		if err := send(p, ctx, asking); err != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.failed = err
		}
	})
	return p
}

// Stop ends the measurement and returns what was recorded. An error means that
// the probe itself could not work, not that nobody answered.
func (p *Probe) Stop() (Record, error) {
	p.cancel()
	p.workers.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record.Stopped = time.Now()
	return p.record, p.failed
}

// Finish stops asking and gives what was asked last the time to be answered,
// then does what Stop does: what is lost now is lost indeed.
func (p *Probe) Finish() (Record, error) {
	p.finish()
	<-p.asked
	for end := time.Now().Add(p.options.Timeout); p.Snapshot().Lost() > 0 && time.Now().Before(end); {
		time.Sleep(p.options.Interval)
	}
	return p.Stop()
}

// Begin marks the beginning of what is measured: no outage before it counts.
func (p *Probe) Begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record.Begun = time.Now()
}

// Snapshot returns what was recorded so far.
func (p *Probe) Snapshot() Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	snapshot := p.record
	snapshot.unanswered = slices.Clone(snapshot.unanswered)
	snapshot.Stopped = time.Now()
	return snapshot
}

// WaitAnswers waits until that many more probes were answered.
func (p *Probe) WaitAnswers(ctx context.Context, count int) error {
	want := len(p.Snapshot().Answers) + count
	for {
		have := len(p.Snapshot().Answers)
		if have >= want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %d more answers of %s: %d missing: %w", count, p.options.Target, want-have, ctx.Err())
		case <-time.After(p.options.Interval):
		}
	}
}

func (p *Probe) sent() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record.Sent++
	p.record.unanswered = append(p.record.unanswered, time.Now())
}

func (p *Probe) answered(sequence int, a echo.Answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sequence >= 0 && sequence < len(p.record.unanswered) {
		if sent := p.record.unanswered[sequence]; !sent.IsZero() {
			p.record.Slowest = max(p.record.Slowest, time.Since(sent))
		}
		p.record.unanswered[sequence] = time.Time{}
	}
	p.record.Answers = append(p.record.Answers, Answer{Answer: a, At: time.Now()})
}

// every calls ask at each interval until asking ends.
func (p *Probe) every(asking context.Context, ask func(sequence int) error) error {
	ticker := time.NewTicker(p.options.Interval)
	defer ticker.Stop()
	for sequence := 0; ; sequence++ {
		p.sent()
		if err := ask(sequence); err != nil {
			return err
		}
		select {
		case <-asking.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// sendDatagrams works on one thread inside the namespace, where all its
// sockets are made.
func (p *Probe) sendDatagrams(ctx, asking context.Context) error {
	return netns.Do(p.options.Namespace, func() error {
		var conn net.Conn
		var straight string
		return p.every(asking, func(sequence int) (err error) {
			if conn == nil || p.options.NewFlows {
				if conn, straight, err = p.newFlow(ctx); err != nil {
					return err
				}
			}
			// A refusal that an earlier probe met is reported here: it is
			// the wire's answer, and no reason to stop asking.
			_, _ = conn.Write(append(strconv.AppendInt(nil, int64(sequence), 10), straight...))
			return nil
		})
	})
}

// newFlow opens a socket and records what comes back on it until the
// measurement ends or, where each probe has a socket, the timeout. straight is
// the address to which pods are to answer, if it is another one.
func (p *Probe) newFlow(ctx context.Context) (conn *net.UDPConn, straight string, err error) {
	dial, deadline := net.DialUDP, context.WithCancel
	if p.options.NewFlows {
		dial = p.fromNextPort
		deadline = func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, p.options.Timeout)
		}
	}
	conn, err = dial("udp", nil, net.UDPAddrFromAddrPort(p.options.Target))
	answers := conn
	if err == nil {
		err = conn.SetReadBuffer(4 << 20) // a pod without processor time for a second answers all at once after that
	}
	if err == nil && p.options.Straight {
		from := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
		if answers, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))); err == nil {
			straight = "@" + answers.LocalAddr().String()
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("open UDP socket: %w", err)
	}
	ctx, cancel := deadline(ctx)
	context.AfterFunc(ctx, func() { conn.Close(); answers.Close() })
	p.workers.Go(func() {
		defer cancel()
		p.receive(ctx, answers)
	})
	return conn, straight, nil
}

// The source ports of new flows, Linux's ephemeral ones.
const firstPort, ports = 32768, 28232

// portAt is the port that a measurement begins with. It advances with the
// clock, faster than probes take ports: so no port comes again, in this
// measurement or the next, for 56 s. A node's connection tracking
// keeps what a port was sent to, or that it was sent nowhere, for half a minute.
func portAt(t time.Time) int { return int(t.UnixMilli() / 2 % ports) }

// fromNextPort dials from the next port that is free.
func (p *Probe) fromNextPort(network string, _, to *net.UDPAddr) (*net.UDPConn, error) {
	for range ports {
		p.port = (p.port + 1) % ports
		conn, err := net.DialUDP(network, &net.UDPAddr{Port: firstPort + p.port}, to)
		if !errors.Is(err, unix.EADDRINUSE) {
			return conn, err
		}
	}
	return nil, unix.EADDRINUSE
}

func (p *Probe) receive(ctx context.Context, conn net.Conn) {
	buffer := make([]byte, 2048)
	for ctx.Err() == nil {
		n, err := conn.Read(buffer)
		if err != nil {
			runtime.Gosched() // refused meanwhile, or closed and the context ended
			continue
		}
		if payload, answer, err := echo.ParseDatagram(buffer[:n]); err == nil {
			number, _, _ := strings.Cut(string(payload), "@") // what sendDatagrams wrote
			sequence, _ := strconv.Atoi(number)
			p.answered(sequence, answer)
			if p.options.NewFlows {
				return
			}
		}
	}
}

func (p *Probe) sendRequests(ctx, asking context.Context) error {
	client := &http.Client{
		Timeout:   p.options.Timeout,
		Transport: &http.Transport{DialContext: netns.Dialer(p.options.Namespace), DisableKeepAlives: true},
	}
	return p.every(asking, func(sequence int) error {
		p.workers.Go(func() {
			if answer, err := get(ctx, client, p.options.Target); err == nil {
				p.answered(sequence, answer)
			}
		})
		return nil
	})
}

// Get asks once over HTTP, from the namespace.
func Get(ctx context.Context, namespace string, target netip.AddrPort) (echo.Answer, error) {
	transport := &http.Transport{DialContext: netns.Dialer(namespace), DisableKeepAlives: true}
	return get(ctx, &http.Client{Transport: transport}, target)
}

func get(ctx context.Context, client *http.Client, target netip.AddrPort) (answer echo.Answer, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+target.String()+"/", nil)
	if err != nil {
		return answer, err
	}
	response, err := client.Do(request)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("get %s: %s", request.URL, response.Status)
	}
	err = json.NewDecoder(response.Body).Decode(&answer)
	return answer, err
}
