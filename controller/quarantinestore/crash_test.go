package quarantinestore

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"pgregory.net/rapid"
)

// TestNothingAcknowledgedIsLost kills leaders between any two steps, while two
// of them overlap, requests fail and somebody meddles with the ConfigMap: what
// Keep acknowledged, the next leader knows.
func TestNothingAcknowledgedIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// Wrapped: there is no real deadline inside a bubble to ask t for.
		rapid.Check(struct{ rapid.TB }{t}, func(rt *rapid.T) {
			w := &world{T: rt, server: &server{}}
			w.restart(0)
			w.restart(1)
			rt.Repeat(map[string]func(*rapid.T){
				"":         func(*rapid.T) {},
				"keep":     w.keep,
				"crash":    w.crash,
				"wait":     w.wait,
				"delete":   w.delete,
				"scribble": w.scribble,
			})
			w.restart(0)
		})
	})
}

// world is a server and two leaders that overlap.
type world struct {
	*rapid.T
	server  *server
	leaders [2]*leader
	// acknowledged is what must not be lost, by address: the record that Keep
	// acknowledged last.
	acknowledged map[netip.Addr]Record
	// attempted are all records that Keep was called with. What it did not acknowledge may have
	// been saved all the same; and where the ConfigMap was deleted, a leader that did not know
	// the last record of an address writes the one before, which the other one then drops.
	attempted []Record
	// bereft is set, by leader, when somebody deletes the ConfigMap: until its
	// next write, what the leader knows is in its memory alone.
	bereft [2]bool
}

// leader is a process that may die.
type leader struct {
	*Store
	killed context.Context
	kill   context.CancelFunc
	// faults are what becomes of its next requests.
	faults []string
}

var errKilled = errors.New("killed")

// meddle does to a request what is its turn.
func (l *leader) meddle(string) (before, after error) {
	fault := "none"
	if len(l.faults) > 0 {
		fault, l.faults = l.faults[0], l.faults[1:]
	}
	switch {
	case l.killed.Err() != nil:
		return errKilled, nil
	case fault == "refused":
		return apierrors.NewServiceUnavailable("etcd is electing"), nil
	case fault == "answer lost":
		return nil, context.DeadlineExceeded
	case fault == "killed before":
		l.kill()
		return errKilled, nil
	case fault == "killed after":
		l.kill()
		return nil, errKilled
	}
	return nil, nil
}

// restart ends a leader and starts another one, which must know everything.
func (w *world) restart(i int) {
	if w.leaders[i] != nil {
		w.leaders[i].kill()
	}
	l := &leader{}
	l.killed, l.kill = context.WithCancel(context.Background())
	l.Store = w.server.open()
	w.leaders[i] = l
	w.server.meddleWith(nil)
	known, err := l.Load(context.Background())
	require.NoError(w, err)
	if w.bereft == [2]bool{} {
		w.check(known)
	}
	w.acknowledged, w.bereft = map[netip.Addr]Record{}, [2]bool{}
	for _, r := range known {
		w.acknowledged[r.Addr] = r
	}
}

// check demands that of every address what was acknowledged is known, or a
// newer attempt.
func (w *world) check(known []Record) {
	for addr, r := range w.acknowledged {
		possible := []Record{r}
		for _, a := range w.attempted {
			if a.Addr == addr && a.newer(r) {
				possible = append(possible, a)
			}
		}
		isOver := func(r Record) bool { return !r.Until.After(time.Now()) }
		isKnown := func(r Record) bool { return slices.Contains(known, r) }
		if !slices.ContainsFunc(possible, isOver) && !slices.ContainsFunc(possible, isKnown) {
			w.Fatalf("lost: %s\nknown: %v\ntext: %s", r, known, w.server.text())
		}
	}
}

// keep lets a leader release a few addresses, each in a call of its own.
func (w *world) keep(rt *rapid.T) {
	who := rapid.IntRange(0, 1).Draw(rt, "leader")
	l := w.leaders[who]
	l.faults = rapid.SliceOfN(rapid.SampledFrom([]string{"none", "none", "refused", "answer lost", "killed before", "killed after"}), 0,
		6).Draw(rt, "faults")
	hosts := rapid.SliceOfNDistinct(rapid.IntRange(1, 6), 1, 3, rapid.ID[int]).Draw(rt, "addresses")
	lasts := time.Duration(rapid.SampledFrom([]int{0, 5, 30, 3600}).Draw(rt, "lasts")) * time.Second
	w.server.meddleWith(l.meddle)
	ctx, cancel := context.WithTimeout(l.killed, time.Minute)
	defer cancel()
	records, errs := make([]Record, len(hosts)), make([]error, len(hosts))
	var calls sync.WaitGroup
	for i, n := range hosts {
		records[i] = release(netip.AddrFrom4([4]byte{203, 0, 113, byte(n)}).String(),
			rapid.SampledFrom([]string{"default/web", "shop/cart"}).Draw(rt, "service"), lasts).rounded()
		calls.Go(func() { errs[i] = l.Keep(ctx, records[i]) })
	}
	calls.Wait()
	for i, r := range records {
		if errs[i] == nil {
			w.acknowledged[r.Addr] = r
			w.bereft[who] = w.bereft[who] && lasts == 0 // which may need no write
		}
	}
	w.attempted = append(w.attempted, records...)
	w.wait(rt)
}

func (w *world) crash(rt *rapid.T) { w.restart(rapid.IntRange(0, 1).Draw(rt, "who")) }

func (w *world) wait(rt *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 9).Draw(rt, "seconds")) * time.Second)
}

// delete removes the ConfigMap. The next write of a leader brings back what
// that one knows.
func (w *world) delete(*rapid.T) {
	w.server.remove()
	w.bereft = [2]bool{true, true}
}

// scribble adds lines that are no records.
func (w *world) scribble(*rapid.T) {
	w.server.edit(func(text string) string { return "hello\n" + strings.Repeat("x", 300) + "\n" + text })
}
