package world

import (
	"fmt"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// keyInterval is how often a speaker reads the Secret and the Leases of others. A kubelet has a new Secret within
// secretDelay.
const keyInterval, secretDelay = 2 * time.Second, 20 * time.Second

// keyring is which keys a speaker understands: the real ring, and what package membership does around it.
type keyring struct {
	ring, before keys.Ring
	seals        [][]byte // those of the ring
	waits        bool     // it has not joined yet, because of others that do not understand it
	secretKey    keys.Key // that of the Secret as the node has it
}

// marks are those of a ring, as a Lease has them.
type marks []string

// keyOf returns the key that follows from the edition of the Secret.
func keyOf(edition int) keys.Key {
	secret, err := keys.Parse(fmt.Appendf(nil, "the cluster's secret, edition %d", edition))
	if err != nil {
		panic(err)
	}
	key, err := secret.Of("")
	if err != nil {
		panic(err)
	}
	return key
}

// rekey replaces the Secret. Each node that reaches the API server has the new one some time later.
func (w *World) rekey() {
	w.secret++
	for _, n := range w.nodes {
		var read func()
		read = func() {
			if w.api.away[n.name] > 0 {
				w.after(time.Second, read)
			} else {
				n.secretKey = keyOf(w.secret)
			}
		}
		w.after(w.upTo(secretDelay), read)
	}
}

// startKeys gives a starting speaker the key that it finds, and no other.
func (n *node) startKeys() {
	n.before, n.waits = nil, false
	n.setKeys(keys.Ring{n.secretKey})
	if n.Has(Rekey.String()) {
		n.keepKeys(n.life)
	}
}

// keepKeys changes to the key of the Secret, as package membership does.
func (n *node) keepKeys(life int) {
	if n.life != life {
		return
	}
	if !n.paused {
		next := n.ring.Next(n.secretKey, n.marksOfOthers())
		if (len(next) >= len(n.ring) || slices.Equal(next, n.before)) && !slices.Equal(next, n.ring) {
			n.setKeys(next)
			n.reach()
		}
		n.before = next
	}
	n.after(keyInterval, func() { n.keepKeys(life) })
}

// setKeys makes the speaker understand these keys and use the first one. It writes their marks on its Lease.
func (n *node) setKeys(to keys.Ring) {
	n.ring, n.seals = to, to.Seals()
	n.record("%s: understands the keys %s", n.name, to)
	n.checks.keysChanged(n)
	var write func()
	write = func() {
		switch {
		case !slices.Equal(n.ring, to):
		case n.api.away[n.name] > 0:
			n.after(time.Second, write)
		default:
			n.api.put("keys/"+n.name, marks(to.Marks()))
		}
	}
	n.after(n.between(time.Millisecond, 30*time.Millisecond), write)
}

// marksOfOthers returns the marks on the Leases of the other speakers.
func (n *node) marksOfOthers() (all [][]string) {
	for _, o := range n.nodes {
		if o == n {
			continue
		}
		of, _ := n.watch.seen["keys/"+o.name].(marks)
		if _, known := n.watch.seen["lease/"+o.name]; known || n.view[o.id].alive {
			all = append(all, of)
		}
	}
	return all
}

// understands reports whether the speaker and all others understand each other, by their Leases.
func (n *node) understands() bool {
	return !slices.ContainsFunc(n.marksOfOthers(), func(marks []string) bool { return !n.ring.Meets(marks) })
}

// keysChanged: while a key is replaced, speakers that have joined understand each other.
func (c *checks) keysChanged(n *node) {
	for _, o := range c.nodes {
		if o != n && n.joined && o.running && o.joined && !(n.ring.Meets(o.ring.Marks()) && o.ring.Meets(n.ring.Marks())) {
			c.fail("speakers understand each other", "%s has %s, and %s has %s", n.name, n.ring, o.name, o.ring)
		}
	}
}
