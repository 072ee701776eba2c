package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
}

// ConnectionRecord is what became of connections.
type ConnectionRecord struct {
	// Opened is how many were opened, all at the beginning, and Requests how many
	// requests were answered on them.
	Opened, Requests int
	// Broken are the errors of those that ended before they were stopped: a reset,
	// an end of the stream, or no answer within the timeout.
	Broken []error
	// WorstPause is the longest time between a request and its answer.
	WorstPause time.Duration
	// Nodes counts the connections by the node of the pod that holds them.
	Nodes map[string]int
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
	c := &Connections{options: options, cancel: cancel, record: ConnectionRecord{Opened: count, Nodes: map[string]int{}}}
	answered := make(chan error, count)
	for range count {
		c.workers.Go(func() { c.hold(ctx, answered) })
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
	snapshot.Broken, snapshot.Nodes = slices.Clone(snapshot.Broken), maps.Clone(snapshot.Nodes)
	return snapshot
}

// hold opens one connection, sends the result of the first request to answered,
// and asks until the connection breaks or ctx ends.
func (c *Connections) hold(ctx context.Context, answered chan<- error) {
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
	node, err := c.ask(conn, answers)
	answered <- err
	c.mu.Lock()
	c.record.Nodes[node]++
	c.mu.Unlock()
	for err == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(c.options.Interval):
		}
		_, err = c.ask(conn, answers)
	}
	if ctx.Err() == nil {
		c.mu.Lock()
		c.record.Broken = append(c.record.Broken, fmt.Errorf("connection from %s: %w", conn.LocalAddr(), err))
		c.mu.Unlock()
	}
}

// ask sends one request and returns the node of the pod that answers.
func (c *Connections) ask(conn net.Conn, answers *bufio.Reader) (node string, err error) {
	sent := time.Now()
	if err := conn.SetDeadline(sent.Add(c.options.Timeout)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", c.options.Target); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(answers, nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close() // reads what is left, so that the next answer begins where this one ends
	var answer echo.Answer
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return "", fmt.Errorf("read the answer, %s: %w", response.Status, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.Requests++
	c.record.WorstPause = max(c.record.WorstPause, time.Since(sent))
	return answer.Node, nil
}
