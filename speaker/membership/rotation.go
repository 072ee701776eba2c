package membership

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// DefaultKeyInterval is how often the key is read again, and the Leases are checked for which speakers
// understand it. A kubelet takes a minute to make a new Secret readable.
const DefaultKeyInterval = 2 * time.Second

// ring has the keys that this speaker understands. Only rotation changes it.
type ring struct {
	mu            sync.Mutex
	keys          keys.Ring
	gossip, seals [][]byte
	// refused is why the Secret's content is not a valid key. Empty: it is valid.
	refused string
}

func (r *ring) current() keys.Ring {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keys
}

// set has the speaker understand these keys and use the first one.
func (r *ring) set(to keys.Ring) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.gossip, r.seals = to, to.Gossip(), to.Seals()
}

// refuse records why the Secret's content is not a valid key, and reports whether that has changed. Empty:
// it is valid.
func (r *ring) refuse(why string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed := r.refused != why
	r.refused = why
	return changed
}

// isRefused returns 1 if the Secret's content is not a valid key.
func (r *ring) isRefused() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return float64(min(1, len(r.refused)))
}

// sealKeys returns the keys of seals that this speaker accepts.
func (r *ring) sealKeys() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seals
}

// gossipKeys returns the keys of messages that this speaker understands. It uses the first one.
func (r *ring) gossipKeys() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gossip
}

// rotation changes the keys of the ring.
type rotation struct {
	*base
	table     *table
	leases    *leases
	clusterID string // the last one of the configuration
}

// start has the speaker use the key of the cluster.
func (r *rotation) start(clusterID string) error {
	r.clusterID = clusterID
	key, err := r.options.Secret.Of(clusterID)
	if err == nil {
		r.ring.set(keys.Ring{key})
	}
	return err //nolint:wrapcheck // it names the membership key
}

// keep changes to the key that follows from the Secret and the clusterID, until ctx ends. It forgets a key
// one interval later than it could, because packets with the old key may still arrive.
func (r *rotation) keep(ctx context.Context, store cache.Store) {
	now, tick := r.readKey(r.ring.current()[0]), time.NewTicker(r.options.KeyInterval)
	defer tick.Stop()
	var before keys.Ring
	began := time.Now() // of the change
	for {
		ring := r.ring.current()
		if slices.Equal(ring, keys.Ring{now}) {
			began = time.Now()
		}
		next := ring.Next(now, r.keysOfOthers(store.List(), time.Since(began) < r.options.keyTimeout))
		if len(next) >= len(ring) || slices.Equal(next, before) {
			r.turn(next)
		}
		before = next
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			now = r.readKey(now)
		}
	}
}

// readKey returns the key of the Secret and the clusterID. If that is not valid, it returns before.
func (r *rotation) readKey(before keys.Key) keys.Key {
	if c, _ := r.options.Config.Current(); c != nil {
		r.clusterID = c.ClusterID
	}
	secret, err := r.options.Secret, error(nil)
	if r.options.ReadSecret != nil {
		secret, err = r.options.ReadSecret()
	}
	key := before
	if err == nil {
		key, err = secret.Of(r.clusterID)
	}
	if err != nil {
		if r.ring.refuse(err.Error()) {
			r.log.Error("membership key is not valid: the previous key stays in force, and no speaker can start; "+
				"write a valid key into the Secret", "err", err)
		}
		return before
	}
	r.ring.refuse("")
	return key
}

// turn changes to the ring, if it is another one. The others read that from our Lease.
func (r *rotation) turn(to keys.Ring) {
	from := r.ring.current()
	if slices.Equal(from, to) {
		return
	}
	r.ring.set(to)
	r.log.Info("membership keys changed: a new key is used when all speakers understand it, and the old ones are forgotten when all use it",
		"used", to[0].Mark(), "understood", to.String(), "before", from.String())
	notify.Wake(r.rewrite)
	r.changed.Notify()    // heartbeats are sealed with another key
	notify.Wake(r.rejoin) // more speakers may understand us now
}

// keysOfOthers returns the marks of each other speaker that has a Lease or is alive. Speakers without a
// Lease have no marks. Who has an old key could invent such speakers, and keep it in use by that: they are left out unless they count.
func (r *rotation) keysOfOthers(all []any, unlistedCount bool) (marks [][]string) {
	alive, networks := r.table.All()
	delete(alive, r.options.Node)
	for _, l := range all {
		p := l.(*lease)
		_, lives := alive[p.node]
		if p.node != "" && p.node != r.options.Node && (lives || p.holder != "") {
			marks = append(marks, p.Keys)
			delete(alive, p.node)
		}
	}
	for node := range alive {
		if _, hadLease := networks[node]; hadLease || unlistedCount {
			marks = append(marks, nil)
		}
	}
	return marks
}

// strangers returns the nodes whose speakers listen, but do not understand our key, or we theirs. A time-out
// counts if there is a second one: the first one may only mean that this process did not run for a while.
func (r *rotation) strangers(ctx context.Context, all []any) []string {
	ours := r.ring.current()
	others := r.leases.others(slices.DeleteFunc(all, func(l any) bool {
		return ours.Meets(l.(*lease).Keys)
	}))
	nodes := slices.Sorted(maps.Keys(others))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i, node := range nodes {
		group.Go(func() error {
			err := connect(ctx, others[node])
			if os.IsTimeout(err) {
				err = connect(ctx, others[node])
			}
			if err != nil {
				nodes[i] = ""
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	return slices.DeleteFunc(nodes, func(node string) bool { return node == "" })
}
