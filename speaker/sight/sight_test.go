package sight

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// cluster is what a Sight sees of the world, and says.
type cluster struct {
	*testing.T
	mu             sync.Mutex
	answer         error // of the API server to this node
	others         bool  // it answers them
	sighted, blind bool  // what they are told
}

func (c *cluster) See(sighted, blind bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sighted, c.blind = sighted, blind
}

func (c *cluster) OthersSee() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.others
}

func (c *cluster) ask(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answer
}

// answers sets what the API server does from now on.
func (c *cluster) answers(us error, others bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answer, c.others = us, others
}

var errCut = errors.New("no route to host")

// simulated tells a story in simulated time.
func simulated(t *testing.T, story func(*cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{T: t, others: true}
		s := New(nil, c, slog.New(slog.DiscardHandler))
		s.ask = c.ask
		ctx, cancel := context.WithCancel(t.Context())
		go s.Run(ctx) //nolint:errcheck // it returns nil
		c.after(time.Second, true, false)
		story(c)
		cancel()
		synctest.Wait()
	})
}

// after checks what the others are told some time later.
func (c *cluster) after(d time.Duration, sighted, blind bool) {
	c.Helper()
	time.Sleep(d)
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Equal(c, [2]bool{sighted, blind}, [2]bool{c.sighted, c.blind}, "sighted, blind")
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

// Whoever says no is there.
func TestRefusals(t *testing.T) {
	t.Parallel()
	simulated(t, func(c *cluster) {
		c.answers(apierrors.NewGenericServerResponse(http.StatusTooManyRequests, "get", schema.GroupResource{}, "", "busy", 1, true), true)
		c.after(time.Hour, true, false)
	})
}
