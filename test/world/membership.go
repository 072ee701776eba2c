package world

import (
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
)

// The times of package membership and of memberlist with its default settings.
const (
	lossMin, lossMax   = 150 * time.Millisecond, 400 * time.Millisecond
	spread             = 150 * time.Millisecond
	lastRejoin         = 4 * time.Second
	settleTime         = 2 * time.Second
	joinTimeout        = 3 * time.Second
	downDelay, upDelay = 200 * time.Millisecond, 3 * time.Second
)

// membership is what one speaker knows of the others, and what it publishes about itself. Speakers learn of changes late, each at
// another time, and may be wrong for a while.
type membership struct {
	view      []peer // by node; that of the node itself is not used
	whole     bool   // no speaker is lost
	joined    bool
	apart     bool // others were lost while the link was down
	metadata       // its own
	published metadata
}

// peer is what is known of another speaker.
type peer struct {
	alive bool
	metadata
}

// metadata is what a speaker publishes.
type metadata struct {
	ready  bool
	claims report.Claims
	down   [2]bool // by segment, the link to it
	sick   bool
	blind  bool
}

// participates reports whether the speaker takes part in the membership.
func (n *node) participates() bool { return n.running && !n.paused && !n.waits }

// hears reports whether packets of the membership go both ways.
func (n *node) hears(o *node) bool {
	if !n.participates() || !o.participates() || !n.ring.Meets(o.ring.Marks()) {
		return false
	}
	if n.Separate {
		return n.lan.backbone[n.id] == 0 && n.lan.backbone[o.id] == 0
	}
	return n.home().open(n.id, o.id) && n.home().open(o.id, n.id)
}

// meets reports whether the two speakers should take each other for alive: they hear each other, or a third speaker
// hears both.
func (n *node) meets(o *node) bool {
	if n.hears(o) {
		return true
	}
	for _, third := range n.nodes {
		if third != n && third != o && n.hears(third) && third.hears(o) {
			return true
		}
	}
	return false
}

// reach lets all speakers find out, some time later, who is alive. It is called whenever that may have changed.
func (w *World) reach() {
	loss, join := w.between(lossMin, lossMax), w.between(50*time.Millisecond, lastRejoin)
	for _, n := range w.nodes {
		for _, o := range w.nodes {
			if n == o || !n.participates() || n.meets(o) == n.view[o.id].alive {
				continue
			}
			delay, life := loss, n.life
			if n.Detector {
				delay = w.data.between(gossipMin, gossipMax)
			}
			if !n.view[o.id].alive {
				delay = join
			}
			w.after(delay+w.upTo(spread), func() {
				if n.life != life || !n.participates() || n.meets(o) == n.view[o.id].alive {
					return
				}
				n.see(o, !n.view[o.id].alive)
				n.contradict(o)
			})
		}
	}
}

// see records that another speaker is alive or lost.
func (n *node) see(o *node, alive bool) {
	n.record("%s: takes %s for alive: %t", n.name, o.name, alive)
	n.checks.disturb()
	n.view[o.id] = peer{}
	if alive {
		n.view[o.id] = peer{true, o.published}
	} else if n.linkDown() {
		n.apart = true
		n.publish()
	}
	if alive {
		n.meet(o)
	} else {
		n.meet(nil)
	}
	n.lookAround()
	n.membersChanged()
}

func (n *node) membersChanged() {
	n.dirty["members"] = true
	n.wake()
}

// lost reports whether a speaker that has a Lease is lost.
func (n *node) lost() bool {
	for _, name := range named(n.watch.seen, "lease") {
		for _, o := range n.nodes {
			if o != n && o.name == name && !n.view[o.id].alive {
				return true
			}
		}
	}
	return !n.watch.synced
}

// lookAround finds out whether speakers are lost. It finds out late that none is.
func (n *node) lookAround() {
	life := n.life
	switch lost := n.lost(); {
	case lost && n.whole:
		n.setWhole(false)
	case !lost && !n.whole:
		n.after(n.upTo(lastRejoin), func() {
			if n.life == life && !n.lost() && !n.whole {
				n.setWhole(true)
			}
		})
	}
	if n.apart && !n.linkDown() && !n.lost() {
		n.reunite()
	}
}

func (n *node) setWhole(whole bool) {
	n.whole = whole
	n.surround(segment.Surroundings{Whole: whole, Crowd: max(1, n.Nodes/50)})
}

// enter joins the speaker to the others, as package membership does.
func (n *node) enter() {
	life := n.life
	n.surround(segment.Surroundings{Whole: false, Crowd: 1})
	n.publish()
	var join func()
	join = func() {
		if n.life != life {
			return
		}
		if n.waits = n.Has(Rekey.String()) && (!n.watch.synced || !n.understands()); n.waits {
			n.reach()
			n.after(keyInterval, join)
			return
		}
		for _, o := range n.nodes {
			if o == n || !n.meets(o) && !n.learnsOf(o) {
				continue
			}
			n.see(o, true)
			n.deliver(o, life) // they may not have noticed that it was gone
			n.after(n.upTo(spread), func() {
				switch {
				case n.life != life || !o.participates() || !o.meets(n):
				case o.view[n.id].alive:
					o.meet(n)
				default:
					o.see(n, true)
				}
			})
		}
		wait := settleTime
		if n.lost() {
			wait = joinTimeout
		}
		n.after(wait, func() {
			if n.life == life {
				n.joined = true
				n.wake()
			}
		})
		n.reach()
	}
	n.after(n.between(20*time.Millisecond, 300*time.Millisecond), join)
}

// learnsOf reports whether a speaker that joins takes another one for alive because those that it meets do.
func (n *node) learnsOf(o *node) bool {
	return n.Detector && slices.ContainsFunc(n.nodes, func(third *node) bool {
		return third != n && n.hears(third) && third.view[o.id].alive && o.sessionIs(third)
	})
}

// publish sends the speaker's metadata to the others. While the speaker is apart, it is not ready in them.
func (n *node) publish() {
	n.metadata.sick = n.sick > 0
	if n.lies {
		n.metadata.claims = all()
	}
	now := n.metadata
	now.ready = now.ready && !n.apart
	if now == n.published {
		return
	}
	n.published = now
	for _, o := range n.nodes {
		if o != n {
			n.deliver(o, n.life)
		}
	}
}

// contradict sends the metadata to a speaker that was paused or cut off and has those of an earlier life of this node.
func (n *node) contradict(o *node) {
	if p := o.view[n.id]; n.participates() && p.alive && p.metadata != n.published {
		n.deliver(o, n.life)
	}
}

// deliver delivers the metadata to another speaker, late if packets are lost, because they are repeated.
func (n *node) deliver(o *node, life int) {
	n.after(n.between(2*time.Millisecond, spread), func() {
		p := &o.view[n.id]
		switch {
		case n.life != life || o.running && !p.alive || p.metadata == n.published:
		case o.participates() && o.meets(n):
			p.metadata = n.published
			o.membersChanged()
		default:
			n.after(time.Second, func() { n.deliver(o, life) })
		}
	})
}

// speakers returns who is alive, and who of these is ready.
func (n *node) speakers() map[string]bool {
	speakers := map[string]bool{n.name: n.ready}
	for _, o := range n.nodes {
		if n.view[o.id].alive {
			speakers[o.name] = n.view[o.id].ready
		}
	}
	return speakers
}

// networks returns what is known of the nodes' networks, by their Leases and from themselves.
func (n *node) networks() map[string]report.Network {
	networks := map[string]report.Network{}
	for _, o := range n.nodes {
		network, ok := n.watch.seen["lease/"+o.name].(report.Network)
		if !ok {
			continue
		}
		m := n.view[o.id].metadata
		if o == n {
			m = n.metadata
		}
		if m.down != [2]bool{} {
			network.Segments = o.segments()
			for i, s := range network.Segments {
				network.Segments[i].Down = m.down[n.lanOf(s.Subnet.Addr()).number]
			}
		}
		network.Claims, network.Sick, network.Blind = m.claims, m.sick, m.blind
		if o == n && n.apart {
			if network.Apart = n.home().nic(); n.Separate {
				network.Apart = "backbone"
			}
		}
		networks[o.name] = network
	}
	return networks
}

// linkDown reports whether the link to the others is down.
func (n *node) linkDown() bool {
	if n.Separate {
		return n.lan.backbone[n.id] > 0
	}
	return n.home().unplugged[n.id] > 0
}

// linkChanged is called when a link of the node goes down or comes back.
func (n *node) linkChanged() {
	life := n.life
	for i, l := range n.lans {
		down, delay := l.unplugged[n.id] > 0, downDelay
		switch {
		case !n.isOn(n.id, i):
			continue
		case !down && (n.Separate || l != n.home()):
			delay = upDelay
		case !down:
			delay = 0
		}
		n.after(delay, func() {
			if n.life == life && n.running && l.unplugged[n.id] > 0 == down && n.down[i] != down {
				n.down[i] = down
				n.publish()
				n.membersChanged()
			}
		})
	}
	if n.apart && !n.linkDown() {
		n.after(joinTimeout+settleTime, func() {
			if n.life == life && n.apart && !n.linkDown() {
				n.reunite()
			}
		})
	}
	n.reach()
}

// reunite records that the speaker has met the others again.
func (n *node) reunite() {
	n.apart = false
	n.publish()
	n.membersChanged()
}
