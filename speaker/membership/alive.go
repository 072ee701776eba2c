package membership

import (
	"cmp"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// table has one record per speaker. Its exported methods are the Task's.
type table struct {
	*base
	mu      sync.Mutex
	peers   peers
	apart   apart     // whether this speaker has lost others with its link
	overrun time.Time // when refused speakers without a Lease were logged last
	listed  bool      // this node has a Lease
	joins   int       // how often speakers began to count
	// down are the interfaces of this node that are published as down. This node's record has those
	// that count as down here.
	down string
}

// Speakers returns the speakers that are alive, this one included; the value is whether the speaker is
// ready to own VIPs.
func (t *table) Speakers() map[string]bool {
	speakers, _ := t.All()
	return speakers
}

// All returns Speakers, and the Networks of the same moment.
func (t *table) All() (speakers map[string]bool, networks map[string]report.Network) {
	t.mu.Lock()
	defer t.mu.Unlock()
	speakers, networks = make(map[string]bool, len(t.peers)), make(map[string]report.Network, len(t.peers))
	for node, p := range t.peers {
		if p.alive {
			speakers[node] = p.ready
		}
		if p.network == nil {
			continue
		}
		n := withLinks(*p.network, p.down)
		n.Blind, n.Sick, n.Claims = p.view.blind, p.view.sick, p.claims
		if node == t.options.Node {
			n.Apart = t.apart.from()
		}
		networks[node] = n
	}
	return speakers, networks
}

// alive returns how many speakers are alive, this one included.
func (t *table) alive() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.peers.count((*peer).isAlive)
}

// summary returns how many speakers are alive, and whether this one is apart and its link down.
func (t *table) summary() (alive int, apart, down bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.peers.count((*peer).isAlive), t.apart.from() != "", !t.apart.down.IsZero()
}

// othersReady reports whether another speaker is ready to own VIPs.
func (t *table) othersReady() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for node, p := range t.peers {
		if p.ready && node != t.options.Node {
			return true
		}
	}
	return false
}

// Networks returns the networks on the Leases of all speakers, alive or not, with the links, claims and
// views that the alive ones publish. A speaker that has joined knows all Leases.
func (t *table) Networks() map[string]report.Network {
	_, networks := t.All()
	return networks
}

// withLinks returns the network with the interfaces marked that are down.
func withLinks(n report.Network, down string) report.Network {
	if down == "" {
		return n
	}
	names := strings.Split(down, ",")
	n.Segments = slices.Clone(n.Segments)
	for i, s := range n.Segments {
		n.Segments[i].Down = slices.Contains(names, s.Interface) ||
			s.Subnet.Addr().Is6() && slices.Contains(names, s.Interface+onIPv6)
	}
	return n
}

// setNetwork records the network of a node that has a Lease.
func (t *table) setNetwork(node string, network report.Network) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.peers.at(node); p.network == nil || p.orphaned || !reflect.DeepEqual(*p.network, network) {
		p.network, p.orphaned = &network, false
		t.changed.Notify()
	}
}

// setListed records whether this node has a Lease.
func (t *table) setListed(listed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listed != listed {
		t.listed = listed
		t.changed.Notify()
	}
}

// forgetLease records that the node has no Lease any more. What was on it counts as long as the speaker is alive.
func (t *table) forgetLease(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers.at(node)
	p.found()
	if p.orphaned = p.alive && p.network != nil; !p.orphaned {
		p.network = nil
	}
	t.peers.tidy(node)
	t.changed.Notify()
}

// Changed returns a channel that is closed when Speakers, Networks, Joined or Whole return something else.
// Take the channel first, then ask, and no change is missed.
func (t *table) Changed() <-chan struct{} { return t.changed.Next() }

// crowdSize is the number of speakers up to which intervals are not lengthened. Of more speakers each
// waits longer, so that all together cost the segment and the API server no more.
const crowdSize = 50

// Crowd returns the factor by which speakers lengthen intervals.
func (t *table) Crowd() int { return max(1, t.alive()/crowdSize) }

// record records that the speaker is alive, with that metadata. It reports whether anything but its claims
// and its view has changed.
func (t *table) record(p *peer, m metadata) (changed bool) {
	before := p.metadata
	changed = !p.alive || before.ready != m.ready || before.down != m.down
	if !p.alive {
		t.joins++
		p.joined = t.joins
	}
	p.alive, p.metadata = true, m
	if changed || before.session != m.session || before.claims != m.claims ||
		before.view.blind != m.view.blind || before.view.sick != m.view.sick {
		t.changed.Notify()
	}
	return changed
}

// OthersSee returns to how many of the other ready speakers the API server answers, and how many more have
// not given up on it.
func (t *table) OthersSee() (seeing, unsure int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for node, p := range t.peers {
		switch {
		case !p.ready || node == t.options.Node:
		case p.view.answered:
			seeing++
		case !p.view.blind:
			unsure++
		}
	}
	return seeing, unsure
}

// arrive records that memberlist has met a speaker. The speaker counts as alive, unless it was lost
// before: then it has to answer a packet first.
//
// A firewall at that node or ours may let packets out, but only answers of TCP in. Then each connection
// makes the speaker known again, and a moment later it is lost again because it does not answer packets.
// VIPs must not move each time.
func (t *table) arrive(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers.at(n.Name)
	if p.isUnlisted() {
		notify.Wake(t.rejoin) // its Lease may have arrived in this moment
	}
	switch {
	case p.trust(), p.questioned():
		p.held = nil
		t.meet(p, n)
		t.log.Debug("speaker was slow to answer", "node", n.Name)
	case p.lost:
		p.held = &held{node: *n, since: time.Now()}
		notify.Wake(t.verify)
	default:
		t.join(n)
	}
}

// join records that the speaker is alive. The caller holds mu.
func (t *table) join(n *memberlist.Node) {
	t.meet(t.peers.at(n.Name), n)
	t.log.Info("speaker joined", "node", n.Name)
}

// meet records the speaker as memberlist has it now. It reports what record does. memberlist may change the
// node later.
//
// A speaker that counts keeps its session until it answers a packet. If it has started anew, some speakers may have noticed that, while
// others have met it again with its last session, so that no two agree that this one is lost. A new session is not accepted
// before the answer: an attacker with the key could publish sessions in the name of a dead speaker again and again. After each, its
// first heartbeat would still be awaited, and its loss would not be noticed.
func (t *table) meet(p *peer, n *memberlist.Node) (changed bool) {
	p.met = new(*n)
	m := decode(n.Meta)
	switch {
	case p.session != 0 && m.session != p.session:
		m.session, p.held = p.session, &held{node: *n, since: time.Now(), anew: true}
		notify.Wake(t.verify)
	case p.startedAnew():
		p.held = nil
	}
	return t.record(p, m)
}

// update records what a speaker publishes now.
func (t *table) update(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers.at(n.Name)
	if p.held != nil && !p.held.anew {
		p.held.node = *n
		return
	}
	if t.meet(p, n) {
		t.metrics.changes.WithLabelValues("update").Inc()
		t.log.Info("speaker changed", "node", n.Name, "ready", p.ready, "links_down", p.down)
	}
}

// suspect removes the speaker unless memberlist meets it again within the grace period. If this process
// did not run for a while, memberlist's timers fire before it reads the answers that wait in the socket.
//
// A ready speaker that takes part in the failure detection goes on counting as long as it answers packets. Its heartbeats
// would show its loss, and an attacker with the key can make memberlist take it for dead.
func (t *table) suspect(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers.at(node)
	switch {
	case p.held != nil && !p.held.anew:
		if !p.held.silent { // otherwise it was counted before
			t.metrics.changes.WithLabelValues("leave").Inc()
		}
		p.held = nil
		t.peers.tidy(node)
	case !p.alive: // it was expelled
	case p.ready && p.takesPart():
		p.held = &held{node: *p.met, since: time.Now()}
		notify.Wake(t.verify)
	default:
		p.held = nil
		t.metrics.changes.WithLabelValues("leave").Inc()
		p.doubt = time.AfterFunc(t.settings.GracePeriod, func() { t.remove(node) })
	}
}

// remove records that the speaker is lost, if it is still in doubt.
func (t *table) remove(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, known := t.peers[node]; known && p.doubt != nil { // else the speaker objected at the last moment
		t.lose(node, p)
	}
}

// declare records that the failure detector takes the speaker for lost. memberlist does not know that yet:
// the speaker counts again when it answers a packet.
func (t *table) declare(v watch.Verdict) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, known := t.peers[v.Name]
	switch {
	case !known || !p.alive || p.member(v.Name, v.Addr) != v.Member:
		return
	case p.trust(): // memberlist takes it for dead, too
	case p.questioned(): // the same
		p.held = nil
		t.metrics.changes.WithLabelValues("leave").Inc()
	default:
		t.metrics.changes.WithLabelValues("leave").Inc()
		p.held = &held{node: *p.met, since: time.Now(), silent: true}
		t.askLater(p.held, firstVerify)
		notify.Wake(t.verify)
	}
	t.log.Info("speaker sends no heartbeats", "node", v.Name, "silent", v.Silence, "alone", v.Alone)
	t.lose(v.Name, p)
}

// askLater delays the next question to a silent speaker by about that time for each crowdSize of speakers. In a small
// cluster there is no delay. The caller holds mu.
func (t *table) askLater(h *held, after time.Duration) {
	if crowd := t.peers.count((*peer).isAlive) / crowdSize; crowd > 1 {
		h.next = time.Now().Add(spread(after * time.Duration(crowd)))
	}
}

// lose records that the speaker does not count any more. The caller holds mu.
func (t *table) lose(node string, p *peer) {
	p.beats = p.beats || p.session != 0
	p.alive, p.joined, p.metadata, p.met, p.doubt = false, 0, metadata{}, nil, nil
	p.lost, p.unanswered = true, 0
	if p.orphaned {
		p.network, p.orphaned = nil, false
	}
	t.apart.lose(time.Now())
	notify.Wake(t.send)
	t.changed.Notify()
	t.log.Info("speaker gone", "node", node)
	notify.Wake(t.rejoin)
}

// held returns the speakers that are asked for an answer.
func (t *table) held() map[string]held {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]held{}
	for node, p := range t.peers {
		if p.held != nil {
			all[node] = *p.held
		}
	}
	return all
}

// admit records that the speaker has answered: it is alive, if it is still held.
func (t *table) admit(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch p, known := t.peers[node]; {
	case !known || p.held == nil:
	case p.startedAnew():
		n := p.held.node
		t.joins++
		p.held, p.unanswered, p.session, p.joined = nil, 0, 0, t.joins
		t.meet(p, &n)
		t.log.Info("speaker has started anew", "node", node)
	case p.alive:
		p.unanswered, p.held.next = 0, time.Now().Add(lastVerify)
	default:
		p.found()
		t.readmit(p)
	}
}

// readmit records that a held speaker is alive. The caller holds mu.
func (t *table) readmit(p *peer) {
	n := p.held.node
	if p.held.silent {
		t.metrics.changes.WithLabelValues("join").Inc()
	}
	p.held, p.lost, p.unanswered = nil, false, 0
	t.join(&n)
}

// unanswered records that the speaker has not answered a packet, if it is still held, and logs it once.
func (t *table) unanswered(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, known := t.peers[node]
	if !known || p.held == nil {
		return
	}
	if p.alive {
		if p.unanswered++; p.unanswered == questions {
			if p.held.anew { // memberlist has not lost it
				p.held = &held{node: p.held.node, since: time.Now(), silent: true}
			} else {
				p.held = nil
			}
			t.metrics.changes.WithLabelValues("leave").Inc()
			t.lose(node, p)
		}
		return
	}
	if p.believable(heldTime + heldProbes*t.settings.ProbeInterval) {
		p.unproven++
		t.readmit(p)
		return
	}
	p.lost = true
	if p.held.silent {
		t.askLater(p.held, lastVerify)
		return
	}
	if p.unanswered++; p.unanswered == unansweredMost {
		t.log.Warn("speaker answers connections, but no packets: it does not count as alive until it answers packets", "node", node,
			"help", "open the membership port between all nodes, in both directions, for UDP and TCP; "+
				"lodestone diagnose --active shows where it is closed")
	}
}

// checkLink records the interface with the speaker's address, empty if there is none, and whether it is
// up. It returns whether this speaker is apart, and when to check again even if nothing changes. Zero:
// never.
func (t *table) checkLink(link string, up bool, now time.Time) (apart bool, next time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.apart.link = cmp.Or(link, t.apart.link)
	before := t.apart.is
	next = t.apart.check(up || t.apart.link == "", t.peers.count((*peer).isAlive) > 1, now)
	if t.apart.is != before {
		notify.Wake(t.send)
		t.changed.Notify()
	}
	return t.apart.is, next
}

// reunited records that this speaker is not apart any more.
func (t *table) reunited() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.apart = apart{link: t.apart.link, lost: t.apart.lost}
	notify.Wake(t.send)
	t.changed.Notify()
}
