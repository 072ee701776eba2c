package membership

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/hashicorp/memberlist"
)

// An attacker with the key can invent speakers, each of which costs memory and packets. A node cannot
// invent Leases, so only a few speakers without a Lease count. The Leases that were read stay known while
// the API server is away.
const (
	// maxUnlisted is how many speakers may have no Lease. A starting speaker writes its Lease and meets
	// the others at the same time. If it is refused, it is met when its Lease is there.
	maxUnlisted = 32
	// unlistedTime is how long a speaker without a Lease keeps its place at least.
	unlistedTime = time.Minute
	// unlistedWarning is the shortest time between two warnings about refused speakers.
	unlistedWarning = 10 * time.Minute
)

// accept returns an error if the speaker has another address than its Lease, or if it has no Lease and too many others
// have none. listed is the method of leases.
//
// A speaker can write only its own Lease. So an attacker with the key cannot use the name of a lost speaker, which would then
// count as alive and could not come back. A speaker with a new address is met once its Lease has that address.
func (t *table) accept(n *memberlist.Node, listed func(node string) (netip.AddrPort, bool)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n.Name == t.options.Node {
		return nil
	}
	if at, has := listed(n.Name); has {
		if elsewhere(n, at) {
			return fmt.Errorf("it is not at %s, which its Lease has", at)
		}
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
			t.log.Warn("too many speakers without a Lease: the others do not count; has a node with the membership key been taken over?",
				"node", n.Name, "address", n.Address(), "most", maxUnlisted)
		}
		return fmt.Errorf("%d speakers have no Lease, at most %d", unlisted+1, maxUnlisted)
	}
	t.peers.at(n.Name).unlisted = time.Now()
	return nil
}

// elsewhere reports whether memberlist has another address of the speaker than its Lease.
func elsewhere(n *memberlist.Node, lease netip.AddrPort) bool {
	return lease.IsValid() && addressIn(n) != lease
}

// addressIn returns the address of a speaker that memberlist has.
func addressIn(n *memberlist.Node) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(n.Addr)
	return netip.AddrPortFrom(addr.Unmap(), n.Port)
}

// forgetUnlisted frees the places of speakers that have a Lease now or are gone, and returns how many it
// has freed.
func (all peers) forgetUnlisted(listed func(node string) (netip.AddrPort, bool)) (freed int) {
	for node, p := range all {
		_, has := listed(node)
		switch {
		case !p.isUnlisted():
		case has:
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
