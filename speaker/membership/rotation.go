package membership

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// DefaultKeyInterval is how often the key is read again, and the Leases are looked at
// for who understands it. Kubelets take a minute until a new one is there to be read.
const DefaultKeyInterval = 2 * time.Second

// ring is the keys that this speaker understands; keepKeys alone changes it.
type ring struct {
	mu            sync.Mutex
	keys          keys.Ring
	gossip, seals [][]byte
	// refused is why the Secret's content is none. Empty: it is one.
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

// refuse records why the Secret's content is no key, or that it is one, and reports
// whether that is news.
func (r *ring) refuse(why string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	news := r.refused != why
	r.refused = why
	return news
}

// isRefused returns 1 if it is no key.
func (r *ring) isRefused() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return float64(min(1, len(r.refused)))
}

// SealKeys returns the keys of seals that this speaker believes. It seals with the first
// one. There is none before the speaker knows its cluster's ID.
func (t *Task) SealKeys() [][]byte {
	t.ring.mu.Lock()
	defer t.ring.mu.Unlock()
	return t.ring.seals
}

// gossipKeys returns the keys of messages that this speaker understands. It uses the first
// one.
func (t *Task) gossipKeys() [][]byte {
	t.ring.mu.Lock()
	defer t.ring.mu.Unlock()
	return t.ring.gossip
}

// keepKeys has the speaker change to the key that follows from the Secret and the
// clusterID, until ctx ends. It forgets a key one interval after it may: packets are on
// their way.
func (t *Task) keepKeys(ctx context.Context, leases cache.Store) {
	now, tick := t.readKey(t.ring.current()[0]), time.NewTicker(t.options.KeyInterval)
	defer tick.Stop()
	var before keys.Ring
	for {
		ring := t.ring.current()
		next := ring.Next(now, t.saidByOthers(leases.List()))
		if len(next) >= len(ring) || slices.Equal(next, before) {
			t.turn(next)
		}
		before = next
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			now = t.readKey(now)
		}
	}
}

// readKey returns the key of the Secret and the clusterID, or the one before if there is
// none now.
func (t *Task) readKey(before keys.Key) keys.Key {
	if c, _ := t.options.Config.Current(); c != nil {
		t.clusterID = c.ClusterID
	}
	secret, err := t.options.Secret, error(nil)
	if t.options.ReadSecret != nil {
		secret, err = t.options.ReadSecret()
	}
	key := before
	if err == nil {
		key, err = secret.Of(t.clusterID)
	}
	if err != nil {
		if t.ring.refuse(err.Error()) {
			t.log.Error("membership key not taken: the one before stays in force, and no speaker can start; write another one into the Secret", "err", err)
		}
		return before
	}
	t.ring.refuse("")
	return key
}

// turn changes to another ring, if it is one. Others hear of it by our Lease.
func (t *Task) turn(to keys.Ring) {
	from := t.ring.current()
	if slices.Equal(from, to) {
		return
	}
	t.ring.set(to)
	t.log.Info("membership keys changed: one is used when all speakers understand it, and the others are forgotten when all use it",
		"used", to[0].Mark(), "understood", to.String(), "before", from.String())
	wake(t.rewrite)
	wake(t.seek) // somebody may understand us now
}

// saidByOthers returns what the other speakers say of their keys: all that have a Lease,
// and all that live.
func (t *Task) saidByOthers(leases []any) (said [][]string) {
	alive := t.Speakers()
	delete(alive, t.options.Node)
	for _, l := range leases {
		p := l.(*peer)
		_, lives := alive[p.node]
		if p.node != "" && p.node != t.options.Node && (lives || p.holder != "") {
			said = append(said, p.Keys)
			delete(alive, p.node)
		}
	}
	for range alive {
		said = append(said, nil)
	}
	return said
}

// awaitKey returns when we and all speakers that live understand each other. While the
// key is replaced, some may not have read it yet: who went on without them would claim
// what they announce.
func (t *Task) awaitKey(ctx context.Context, leases cache.Store) {
	for waited := false; ctx.Err() == nil; waited = true {
		nodes := t.strangers(ctx, leases.List())
		if len(nodes) == 0 {
			return
		}
		t.say("waiting for %d speakers that use another membership key, one on node %s: each changes when all have read the Secret and the clusterID, within two minutes", len(nodes), nodes[0])
		if !waited {
			t.log.Warn("not joining speakers that use another membership key, until they change to that of the Secret and the clusterID", "nodes", nodes)
		}
		select {
		case <-ctx.Done():
		case <-time.After(t.options.KeyInterval):
		}
	}
}

// strangers returns the nodes of speakers that live and do not understand us, or we them.
func (t *Task) strangers(ctx context.Context, leases []any) []string {
	ours := t.ring.current()
	others := t.others(slices.DeleteFunc(leases, func(l any) bool {
		return ours.Meets(l.(*peer).Keys)
	}))
	nodes := slices.Sorted(maps.Keys(others))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i, node := range nodes {
		group.Go(func() error {
			if connect(ctx, others[node]) != nil {
				nodes[i] = ""
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	return slices.DeleteFunc(nodes, func(node string) bool { return node == "" })
}
