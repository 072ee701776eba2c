package servicelb

import (
	"crypto/sha256"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

const (
	// promptRepairs is how many times in a row the changes of others to a Service's object are
	// undone at once.
	promptRepairs = 5
	// firstDelay and lastDelay bound the time between repairs after that.
	firstDelay = time.Second
	lastDelay  = time.Minute
	// calm is how long the object must stay unchanged until its repairs are forgotten.
	calm = 10 * time.Minute
)

// repairs bounds the repairs of each Service's object, because two load balancers that both
// serve a Service must not overwrite each other at full speed. A repair writes the same as the
// last write, after somebody else changed the object.
type repairs struct {
	mu sync.Mutex
	of map[string]repair
}

type repair struct {
	// uid and sum are of what was written last.
	uid        types.UID
	sum        [sha256.Size]byte
	count      int
	last, next time.Time
}

// wrote reports whether this is what was written last.
func (r *repairs) wrote(svc *corev1.Service, sum [sha256.Size]byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, ok := r.of[ledger.NameOf(svc)]
	return ok && last.uid == svc.UID && last.sum == sum
}

// note notes what was written, or is there already.
func (r *repairs) note(svc *corev1.Service, sum [sha256.Size]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := r.of[ledger.NameOf(svc)]
	if last.uid != svc.UID {
		last = repair{uid: svc.UID}
	}
	last.sum = sum
	if r.of == nil {
		r.of = map[string]repair{}
	}
	r.of[ledger.NameOf(svc)] = last
}

// wait returns how long the Service must not be repaired.
func (r *repairs) wait(name string, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[name].next.Sub(now)
}

// count counts a repair that was made, and returns how many in a row it is.
func (r *repairs) count(name string, now time.Time) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.of[name]
	if now.Sub(f.last) > calm {
		f.count, f.next = 0, time.Time{}
	}
	f.count++
	f.last = now
	if over := f.count - promptRepairs; over >= 0 {
		f.next = now.Add(min(lastDelay, firstDelay<<min(over, 10)))
	}
	r.of[name] = f
	return f.count
}

func (r *repairs) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, name)
}
