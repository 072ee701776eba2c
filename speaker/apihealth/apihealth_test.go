package apihealth

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// cluster is the Checker's API server and its peers, and records what the Checker publishes.
type cluster struct {
	*testing.T
	mu              sync.Mutex
	answer          error // of the API server to this node
	others          bool  // it answers them
	another         bool  // there is another API server, which answers who asks over a new connection
	answered, blind bool  // what this speaker has published
	log             strings.Builder
}

// Write takes what the Checker logs.
func (c *cluster) Write(line []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.log.Write(line)
}

// logged returns what the Checker has logged.
func (c *cluster) logged() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.log.String()
}

func (c *cluster) See(answered, blind bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answered, c.blind = answered, blind
}

func (c *cluster) OthersSee() (seeing, unsure int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.others {
		return 1, 0
	}
	return 0, 1
}

func (c *cluster) Ask(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answer
}

func (c *cluster) Renew(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.another {
		c.answer = nil
	}
	return c.answer
}

// answers sets what the API server does from now on.
func (c *cluster) answers(us error, others bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answer, c.others = us, others
}

var errCut = errors.New("no route to host")

// simulated runs a story in simulated time.
func simulated(t *testing.T, story func(*cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{T: t, others: true}
		s := New(c, c, slog.New(slog.NewTextHandler(c, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		go s.Run(ctx) //nolint:errcheck // it returns nil
		c.after(time.Second, true, false)
		story(c)
		cancel()
		synctest.Wait()
	})
}

// after checks what this speaker publishes some time later.
func (c *cluster) after(d time.Duration, answered, blind bool) {
	c.Helper()
	time.Sleep(d)
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Equal(c, [2]bool{answered, blind}, [2]bool{c.answered, c.blind}, "answered, blind")
}

// A node that alone is cut off gives up after a minute, for good; when it is answered
// again, it has to know what it missed.
func TestCutOff(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		c.answers(errCut, true)
		c.after(misses*interval, false, false)
		c.after(blindAfter-(misses+1)*interval, false, false)
		c.after(2*interval, false, true)
		c.answers(errCut, false) // they have what was this node's
		c.after(time.Hour, false, true)
		c.answers(nil, true)
		c.after(interval, true, true)
		c.after(seeingAfter-interval, true, true)
		c.after(interval, true, false)
	})
}

// An API server that is down moves nobody, however long, and nobody when it is back, though
// others hear of that first.
func TestDown(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		c.answers(errCut, true)
		time.Sleep(blindAfter / 2) // the others find out, too
		c.answers(errCut, false)
		c.after(time.Hour, false, false)
		c.answers(errCut, true)
		c.after(sureAfter-interval, false, false)
		c.answers(nil, true)
		c.after(interval, true, false)
	})
}

// The log has when the API server ceases to answer and why, and when it answers again, each once.
func TestSilenceIsLogged(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		c.answers(errCut, false)
		c.after(interval, true, false)
		assert.Empty(t, c.logged(), "one question may get lost")
		c.after(time.Hour, false, false)
		c.answers(nil, false)
		c.after(time.Hour, true, false)
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(c.logged()), "\n")
		if assert.Len(t, lines, 2) {
			assert.Regexp(t, `level=WARN msg="the API server does not answer: .* err="no route to host"`, lines[0])
			assert.Contains(t, lines[1], `level=INFO msg="the API server answers" after=1h0m5s`)
		}
	})
}

// One question that gets lost is nothing, nor is an answer among many that do.
func TestFlaky(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		for range 20 {
			c.answers(errCut, true)
			c.after(interval, true, false)
			c.answers(nil, true)
			c.after(interval, true, false)
		}
		for range 20 {
			c.answers(errCut, true)
			c.after(blindAfter-2*interval, false, false)
			c.answers(nil, true)
			c.after(interval, true, false)
		}
	})
}

// One of several API servers is gone, or hangs. A speaker that was connected to it connects to another
// one before it publishes anything.
func TestOneOfSeveralIsGone(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		c.mu.Lock()
		c.another = true
		c.mu.Unlock()
		for range 10 {
			c.answers(errCut, true)
			c.after(interval+askTimeout, true, false)
		}
	})
}

// crowd are the nodes of a large cluster, each with a Checker.
type crowd struct {
	mu    sync.Mutex
	size  int
	down  bool // the API server
	cut   *one // from it, alone
	asked int
	see   int // how many publish that it answers them
	blind int
}

// one of the crowd.
type one struct {
	*crowd
	answered, isBlind bool
}

func (o *one) See(answered, blind bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.see += number(answered) - number(o.answered)
	o.blind += number(blind) - number(o.isBlind)
	o.answered, o.isBlind = answered, blind
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (o *one) OthersSee() (seeing, unsure int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	seeing = o.see - number(o.answered)
	return seeing, o.size - 1 - seeing - o.blind + number(o.isBlind)
}

// Renew leads to the same API server: there is no other one.
func (o *one) Renew(ctx context.Context) error { return o.Ask(ctx) }

// Ask takes as long as it may where packets are dropped.
func (o *one) Ask(ctx context.Context) error {
	o.mu.Lock()
	o.asked++
	silent := o.down || o.cut == o
	o.mu.Unlock()
	if !silent {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// set changes the world, and returns how many questions the API server got since that
// happened last.
func (c *crowd) set(down bool, cut *one) (asked int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	asked = c.asked
	c.down, c.cut, c.asked = down, cut, 0
	return asked
}

func (c *crowd) blindNow() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.blind
}

// A thousand nodes ask twenty times a second together while all are answered. An API
// server that goes and comes back blinds none of them, and who is cut off alone is
// noticed.
func TestCrowd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &crowd{size: 1000}
		ctx, cancel := context.WithCancel(t.Context())
		all := make([]*one, c.size)
		for i := range all {
			all[i] = &one{crowd: c}
			s := New(all[i], all[i], slog.New(slog.DiscardHandler))
			go s.Run(ctx) //nolint:errcheck // it returns nil
			time.Sleep(share)
		}
		time.Sleep(2 * time.Minute)
		for range 5 {
			c.set(false, nil)
			time.Sleep(100 * time.Second)
			assert.InDelta(t, 2*c.size, c.set(true, nil), float64(c.size)/4, "questions in 100 s")
			time.Sleep(rand.N(3 * time.Minute))
			assert.Zero(t, c.blindNow(), "the API server is down")
			c.set(false, nil)
			time.Sleep(2 * time.Minute)
			assert.Zero(t, c.blindNow(), "the API server is back")
		}
		c.set(false, all[rand.N(c.size)])
		time.Sleep(longest + blindAfter + 3*interval)
		assert.Equal(t, 1, c.blindNow())
		time.Sleep(longest)
		c.set(false, c.cut)
		time.Sleep(100 * time.Second)
		assert.InDelta(t, 2*c.size, c.set(false, nil), float64(c.size)/4, "questions in 100 s, with one that is blind")
		cancel()
		synctest.Wait()
	})
}
