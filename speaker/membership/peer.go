package membership

import (
	"net/netip"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// peer is all that is known of one node's speaker. This speaker has a record of itself, too.
type peer struct {
	// alive is set while the speaker counts as alive. metadata is what it publishes, and is empty
	// while it does not count.
	alive bool
	// joined is the number of the time that it counts, zero while it does not.
	joined int
	metadata
	// met is the speaker as memberlist has met it. Nil: it does not count, or is this one.
	met *memberlist.Node
	// doubt runs while memberlist takes the speaker for dead, but it still counts. When the timer
	// fires, the speaker is removed.
	doubt *time.Timer
	// held is set while memberlist takes the speaker for alive, but it does not count yet; while memberlist takes it for
	// dead, but it counts and answers; and while it counts, but publishes another session. In all cases it is asked.
	held *held
	// lost is set from the loss of the speaker until it answers a packet. unanswered is how many
	// packets it has not answered in that time.
	lost       bool
	unanswered int
	// beats is set if the speaker took part in the failure detection when it was lost. unproven is how often it has counted since,
	// because others take it for alive. Both are reset when it answers a packet.
	beats    bool
	unproven int
	// unlisted is since when the speaker counts without a Lease. Zero: it has a Lease, or
	// memberlist does not know it.
	unlisted time.Time
	// network is the network on the speaker's Lease. Nil: there is no Lease.
	network *report.Network
	// orphaned is set while the Lease is gone, but the speaker is alive. It writes its Lease anew, so its network stays: other
	// speakers hand connections to it and leave it the VIPs that it keeps.
	orphaned bool
}

// held is a speaker that memberlist has met again or lost. It is asked for an answer, to verify that.
type held struct {
	node  memberlist.Node // with its last metadata
	since time.Time
	// silent is set if memberlist has not lost the speaker, but it has sent no heartbeats. All others know that at the
	// same time, and most likely it is dead. So in a large cluster each asks it later, from next on.
	silent bool
	next   time.Time
	// anew is set if the speaker counts, memberlist has not lost it, and it publishes another session.
	anew bool
}

// trust ends the doubt, and reports whether it ended before the speaker was removed.
func (p *peer) trust() bool {
	timer := p.doubt
	p.doubt = nil
	return timer != nil && timer.Stop()
}

// questioned reports whether memberlist takes the speaker for dead, but it counts and is asked.
func (p *peer) questioned() bool { return p.alive && p.held != nil && !p.held.anew }

// startedAnew reports whether the speaker counts, but publishes another session, and is asked.
func (p *peer) startedAnew() bool { return p.alive && p.held != nil && p.held.anew }

// found records that the speaker is not lost any more.
func (p *peer) found() { p.lost, p.unanswered, p.beats, p.unproven = false, 0, false, 0 }

// believable reports whether a held speaker that was lost counts although it does not answer. It does once memberlist has taken it for
// alive for that time, doubled each time that it counted in this way. An attacker with the key can keep memberlist in
// that state. So a speaker whose loss heartbeats have shown must publish that it takes part in the failure detection,
// which soon shows its loss again.
func (p *peer) believable(after time.Duration) bool {
	return time.Since(p.held.since) > after<<min(p.unproven, mostUnproven) &&
		(!p.beats || decode(p.held.node.Meta).session != 0)
}

// peers are the records by node.
type peers map[string]*peer

// at returns the node's record. It adds one if there is none.
func (all peers) at(node string) *peer {
	p, ok := all[node]
	if !ok {
		p = &peer{}
		all[node] = p
	}
	return p
}

// tidy deletes the node's record if the record is empty.
func (all peers) tidy(node string) {
	if p, ok := all[node]; ok && *p == (peer{}) {
		delete(all, node)
	}
}

// count returns how many of the records have the property.
func (all peers) count(property func(*peer) bool) (n int) {
	for _, p := range all {
		if property(p) {
			n++
		}
	}
	return n
}

// member returns the speaker of the node as the failure detector knows it.
func (p *peer) member(node string, at netip.AddrPort) watch.Member {
	m := watch.NewMember(node, p.session, at)
	m.Joined = p.joined
	return m
}

// takesPart reports whether the speaker takes part in the failure detection. One without a Lease does not: an attacker with the
// key could invent two, which would agree that any other speaker is lost.
func (p *peer) takesPart() bool {
	return p.alive && p.session != 0 && p.met != nil && p.network != nil && !p.orphaned
}

func (p *peer) isAlive() bool    { return p.alive }
func (p *peer) isUnlisted() bool { return !p.unlisted.IsZero() }
