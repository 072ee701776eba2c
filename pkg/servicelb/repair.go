package servicelb

import (
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// promptRepairs is how many times in a row what others did to a Service's
	// object is undone at once.
	promptRepairs = 5
	// firstDelay and lastDelay bound the time between repairs after that.
	firstDelay = time.Second
	lastDelay  = time.Minute
	// calm is how long nobody has to touch the object until it is forgotten.
	calm = 10 * time.Minute
)

// eventContested is the reason of the Event on a Service that somebody else
// writes to again and again.
const eventContested = "StatusContested"

// repairs bounds the repairs of each Service's object: two load balancers
// that both believe a Service to be theirs must not fight at full speed.
type repairs struct {
	mu sync.Mutex
	of map[string]repair
}

type repair struct {
	count      int
	last, next time.Time
}

// take asks for a repair now. It returns how long to wait instead, and how
// many repairs in a row this one is.
func (r *repairs) take(name string, now time.Time) (wait time.Duration, count int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.of[name]
	if now.Sub(f.last) > calm {
		f = repair{}
	}
	if now.Before(f.next) {
		return f.next.Sub(now), f.count
	}
	f.count++
	f.last = now
	if over := f.count - promptRepairs; over >= 0 {
		f.next = now.Add(min(lastDelay, firstDelay<<min(over, 10)))
	}
	if r.of == nil {
		r.of = map[string]repair{}
	}
	r.of[name] = f
	return 0, f.count
}

func (r *repairs) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, name)
}

// mayRepair reports whether the Service's object may be repaired now; if not,
// the Service comes up again when it may.
func (c *Controller) mayRepair(svc *corev1.Service) bool {
	name := NameOf(svc)
	wait, count := c.repairs.take(name, c.now())
	if wait > 0 {
		c.queue.AddAfter(name, wait)
		return false
	}
	if count == promptRepairs+1 {
		message := fmt.Sprintf("Lodestone has restored the status of this Service %d times in a row. "+
			"Does another load balancer serve it, too? Lodestone now restores it less often.", count)
		c.Log.Warn("service contested", "service", name)
		c.Events.Event(svc, corev1.EventTypeWarning, eventContested, message)
	}
	return true
}
