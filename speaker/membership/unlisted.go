package membership

import (
	"fmt"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// Whoever has the key can make up speakers, and each costs memory, and packets that ask it
// whether it lives. A node cannot make up Leases: so of speakers without one only a few
// count. Leases that were read are there also while the API server is not.
const (
	// maxUnlisted is how many speakers may have no Lease. One that starts writes its Lease
	// and meets the others at the same time, and one that is refused is met when its Lease
	// comes.
	maxUnlisted = 32
	// unlistedTime is how long one of them keeps its place at least.
	unlistedTime = time.Minute
	// unlistedWarning is how long nothing more is logged of those that are refused.
	unlistedWarning = 10 * time.Minute
)

// NotifyAlive implements memberlist.AliveDelegate: it refuses a speaker by an error.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	t := (*Task)(d)
	t.mu.Lock()
	defer t.mu.Unlock()
	if n.Name == t.options.Node || t.listed(n.Name) {
		return nil
	}
	if _, known := t.unlisted[n.Name]; known {
		return nil
	}
	if len(t.unlisted) >= maxUnlisted {
		t.forgetUnlisted()
	}
	if len(t.unlisted) >= maxUnlisted {
		if time.Since(t.overrun) > unlistedWarning {
			t.overrun = time.Now()
			t.log.Warn("more speakers without a Lease than can be: those beyond do not count; has a node with the membership key been taken over?",
				"node", n.Name, "address", n.Address(), "most", maxUnlisted)
		}
		return fmt.Errorf("%d speakers have no Lease, at most %d", len(t.unlisted)+1, maxUnlisted)
	}
	t.unlisted[n.Name] = time.Now()
	return nil
}

// listed reports whether the node has a Lease. The caller holds mu.
func (t *Task) listed(node string) bool {
	if t.leases == nil {
		return false
	}
	_, listed, err := t.leases.GetByKey(t.options.Namespace + "/" + annotation.SpeakerLeasePrefix + node)
	return listed && err == nil
}

// forgetUnlisted makes room: those that have a Lease now, and those that are gone. The
// caller holds mu.
func (t *Task) forgetUnlisted() {
	for name, since := range t.unlisted {
		_, alive := t.speakers[name]
		_, held := t.held[name]
		switch {
		case t.listed(name):
			delete(t.unlisted, name)
		case !alive && !held && time.Since(since) > unlistedTime:
			delete(t.unlisted, name)
			delete(t.unmet, name)
		}
	}
}
