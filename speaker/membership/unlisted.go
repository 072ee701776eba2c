package membership

import (
	"fmt"
	"time"

	"github.com/hashicorp/memberlist"
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

// accept refuses a speaker by an error if too many others have no Lease. listed reports
// whether a node has one.
func (t *table) accept(n *memberlist.Node, listed func(node string) bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n.Name == t.options.Node || listed(n.Name) {
		return nil
	}
	if p, known := t.peers[n.Name]; known && p.isUnlisted() {
		return nil
	}
	unlisted := t.peers.count((*peer).isUnlisted)
	if unlisted >= maxUnlisted {
		unlisted -= t.peers.forgetUnlisted(listed)
	}
	if unlisted >= maxUnlisted {
		if time.Since(t.overrun) > unlistedWarning {
			t.overrun = time.Now()
			t.log.Warn("more speakers without a Lease than can be: those beyond do not count; has a node with the membership key been taken over?",
				"node", n.Name, "address", n.Address(), "most", maxUnlisted)
		}
		return fmt.Errorf("%d speakers have no Lease, at most %d", unlisted+1, maxUnlisted)
	}
	t.peers.at(n.Name).unlisted = time.Now()
	return nil
}

// forgetUnlisted makes room: those that have a Lease now, and those that are gone. It
// returns how many places are free now that were not before.
func (all peers) forgetUnlisted(listed func(node string) bool) (freed int) {
	for node, p := range all {
		switch {
		case !p.isUnlisted():
		case listed(node):
			p.unlisted = time.Time{}
			freed++
		case !p.alive && p.held == nil && time.Since(p.unlisted) > unlistedTime:
			p.unlisted = time.Time{}
			p.found()
			freed++
			all.tidy(node)
		}
	}
	return freed
}
