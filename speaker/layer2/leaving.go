package layer2

import (
	"sync"
	"sync/atomic"
	"time"
)

// leaving is what an ownership knows of its end when its VIP moves to another
// node: on which ports that node has claimed it. A port answers until then, so
// that at every moment one of the two does, and not after, so that both never
// do for longer than a frame takes.
//
// The next owner may be faster than this node hears that it is the next one.
// Claims are therefore noted all the time.
type leaving struct {
	begun  atomic.Bool
	mu     sync.Mutex
	claims map[portKey]time.Time // the last one
	told   map[portKey]time.Time // the last announcement of this node
}

// begin says that the VIP leaves. Claims so old that they were contradicted
// are not the next owner's.
func (l *leaving) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun.Load() {
		return
	}
	for key, at := range l.claims {
		if time.Since(at) > defence {
			delete(l.claims, key)
		}
	}
	l.begun.Store(true)
}

// is reports whether the VIP leaves.
func (l *leaving) is() bool { return l.begun.Load() }

// crossing is how long frames may take that cross on the wire.
const crossing = 20 * time.Millisecond

// claimed notes that another host claims the VIP on the port and reports
// whether the VIP leaves. A claim that may have crossed our announcement does not
// count: who made it yields, perhaps, and repeats it otherwise.
func (l *leaving) claimed(on portKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.claims == nil {
		l.claims = map[portKey]time.Time{}
	}
	if time.Since(l.told[on]) > crossing {
		l.claims[on] = time.Now()
	}
	return l.begun.Load()
}

// contradicted notes that this node has announced the VIP on the port: clients
// do not believe who claimed it before.
func (l *leaving) contradicted(on portKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, on)
	if l.told == nil {
		l.told = map[portKey]time.Time{}
	}
	l.told[on] = time.Now()
}

// left reports whether the VIP has gone from the port to another host.
func (l *leaving) left(on portKey) bool {
	if !l.begun.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, claimed := l.claims[on]
	return claimed
}
