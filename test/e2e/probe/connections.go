package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// Connections are TCP connections that a client holds open. On each it sends a
// request, reads the answer, waits for the interval, and goes on until the
// connection breaks.
type Connections struct {
	options Options
	cancel  context.CancelFunc
	workers sync.WaitGroup

	mu     sync.Mutex
	record ConnectionRecord
	// round counts how often all were to ask at once. hurry is closed when a round begins,
	// and done is the last one that each connection has ended.
	round int
	hurry chan struct{}
	done  []int
}

// ConnectionRecord is what became of connections.
type ConnectionRecord struct {
	// Opened is how many were opened, all at the beginning, and Requests how many
	// requests were answered on them.
	Opened, Requests int
	// Broken are the errors of those that ended before they were stopped: a reset,
	// an end of the stream, or no answer within the timeout.
	Broken []Break
	// WorstPause is the longest time between a request and its answer.
	WorstPause time.Duration
	// By is the pod that answers on each, by the client's address and port.
	By map[string]echo.Answer
}

// Nodes counts the connections by the node of the pod that holds them.
func (r ConnectionRecord) Nodes() map[string]int {
	nodes := map[string]int{}
	for _, by := range r.By {
		nodes[by.Node]++
	}
	return nodes
}

// Break is the end of a connection that nobody wanted. It is an error.
type Break struct {
	From string // the client's address
	By   echo.Answer
	Err  error
}

func (b Break) Error() string {
	return fmt.Sprintf("connection from %s to %s: %s", b.From, nameOf(b.By), b.Err)
}

// Connect opens so many connections, and returns when the first request was
// answered on each. The timeout of the options bounds one request; zero means 30 s,
// in which TCP's retransmissions outlive a move of the VIP.
func Connect(ctx context.Context, options Options, count int) (*Connections, error) {
	if options.Timeout == 0 {
		options.Timeout = 30 * time.Second
	}
	options.complete()
	ctx, cancel := context.WithCancel(ctx)
	c := &Connections{options: options, cancel: cancel, hurry: make(chan struct{}), done: make([]int, count),
		record: ConnectionRecord{Opened: count, By: map[string]echo.Answer{}}}
	answered := make(chan error, count)
	for i := range count {
		c.workers.Go(func() { c.hold(ctx, i, answered) })
	}
	var failed error
	for range count {
		failed = errors.Join(failed, <-answered)
	}
	if failed != nil {
		_ = c.Stop()
		return nil, fmt.Errorf("open %d connections to %s: %w", count, options.Target, failed)
	}
	return c, nil
}

// Stop closes the connections and returns what became of them.
func (c *Connections) Stop() ConnectionRecord {
	c.cancel()
	c.workers.Wait()
	return c.record
}

// Snapshot returns what became of the connections so far.
func (c *Connections) Snapshot() ConnectionRecord {
	c.mu.Lock()
	defer c.mu.Unlock()
	snapshot := c.record
	snapshot.Broken, snapshot.By = slices.Clone(snapshot.Broken), maps.Clone(snapshot.By)
	return snapshot
}

// AskAll sends one more request on each connection at once, and returns when each was answered
// or the connection has broken. It is called by one goroutine at a time.
func (c *Connections) AskAll(ctx context.Context) error {
	c.mu.Lock()
	c.round++
	close(c.hurry)
	c.hurry = make(chan struct{})
	c.mu.Unlock()
	for {
		c.mu.Lock()
		last := slices.Min(c.done)
		c.mu.Unlock()
		if last >= c.round {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not all connections to %s have asked: %w", c.options.Target, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// progress returns the round, whether the connection is behind it, and what is closed when the
// next one begins.
func (c *Connections) progress(i int) (round int, behind bool, hurry <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.round, c.done[i] < c.round, c.hurry
}

// hold opens one connection, sends the result of the first request to answered,
// and asks until the connection breaks or ctx ends.
func (c *Connections) hold(ctx context.Context, i int, answered chan<- error) {
	dialing, cancel := context.WithTimeout(ctx, c.options.Timeout)
	defer cancel()
	conn, err := netns.Dialer(c.options.Namespace)(dialing, "tcp", c.options.Target.String())
	if err != nil {
		answered <- err
		return
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	answers := bufio.NewReader(conn)
	by, err := c.ask(conn, answers)
	if err == nil {
		c.mu.Lock()
		c.record.By[conn.LocalAddr().String()] = by
		c.mu.Unlock()
	}
	answered <- err // Connect's caller may ask for the record at once
	for err == nil {
		round, behind, hurry := c.progress(i)
		if !behind {
			select {
			case <-ctx.Done():
				return
			case <-time.After(c.options.Interval):
			case <-hurry:
				continue
			}
		}
		if _, err = c.ask(conn, answers); err == nil {
			c.mu.Lock()
			c.done[i] = round
			c.mu.Unlock()
		}
	}
	if ctx.Err() == nil {
		c.mu.Lock()
		c.done[i] = math.MaxInt
		c.record.Broken = append(c.record.Broken, Break{conn.LocalAddr().String(), by, err})
		c.mu.Unlock()
	}
}

// ask sends one request and returns the answer.
func (c *Connections) ask(conn net.Conn, answers *bufio.Reader) (by echo.Answer, err error) {
	sent := time.Now()
	if err := conn.SetDeadline(sent.Add(c.options.Timeout)); err != nil {
		return by, err
	}
	if _, err := fmt.Fprintf(conn, "GET /?padding=%d HTTP/1.1\r\nHost: %s\r\n\r\n", c.options.Padding, c.options.Target); err != nil {
		return by, err
	}
	response, err := http.ReadResponse(answers, nil)
	if err != nil {
		return by, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&by); err != nil {
		return by, fmt.Errorf("read the answer, %s: %w", response.Status, err)
	}
	if _, err := io.Copy(io.Discard, response.Body); err != nil { // the next answer begins where this one ends
		return by, fmt.Errorf("read the rest of the answer: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.Requests++
	c.record.WorstPause = max(c.record.WorstPause, time.Since(sent))
	return by, nil
}
