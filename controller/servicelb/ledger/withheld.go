package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
)

const (
	// withholdFor is how long an address that another host has is not drawn. Speakers ask only
	// for what Services hold, so nobody hears that the host is gone: the next Service that
	// draws the address finds out. That takes some 6 s, during which that Service has no
	// address that works.
	withholdFor = 24 * time.Hour
	// maxWithheld is how many addresses of a family are withheld of a pool, and never more
	// than half of them, so that false reports cannot exhaust the pool. Because of one node
	// half of that number is withheld, rounded up, so that it leaves room for other nodes.
	maxWithheld = 64
	// maxWithheldByNode is how many addresses of all pools are withheld because of what one node
	// reports. A report has no more at a time, but a node that lies could name others next.
	maxWithheldByNode = 32
)

// withheld are the addresses that no Service draws, because other hosts have them.
type withheld struct {
	held  *holdings
	addrs map[netip.Addr]withholding
	// counts are how many there are, by each bound on them. Nil: they are counted when they are
	// needed next.
	counts map[bound]int
	// full are the bounds because of which an address was not withheld, with the most that they allow.
	full map[bound]int
}

// withholding is why and how long an address is not drawn.
type withholding struct {
	// node is the one whose report is the reason. Its bounds count the address.
	node  string
	until time.Time
}

// bound names what is bounded: a family of a pool, because of one node or (node "") of all;
// or all pools (pool "") because of one node.
type bound struct {
	pool   string
	family ipam.Family
	node   string
}

func newWithheld(held *holdings) withheld {
	return withheld{held: held, addrs: map[netip.Addr]withholding{}, full: map[bound]int{}}
}

// add withholds the addresses of these conflicts, as far as there is room. It reports whether
// it has withheld any.
func (w *withheld) add(found []clusterfacts.Conflict, now time.Time) (added bool) {
	for _, d := range found {
		if _, done := w.addrs[d.VIP]; done {
			continue
		}
		if node, ok := w.findRoom(d, now); ok {
			w.addrs[d.VIP] = withholding{node, now.Add(withholdFor)}
			w.count(d.VIP, node, now)
			added = true
		}
	}
	return added
}

// remove ends the withholding of an address, and reports whether it was withheld.
func (w *withheld) remove(addr netip.Addr) bool {
	if _, is := w.addrs[addr]; !is {
		return false
	}
	delete(w.addrs, addr)
	w.countAgain()
	return true
}

// expire ends the withholding of addresses whose time is over and that nobody reports any
// more, and reports whether there are any.
func (w *withheld) expire(reported map[netip.Addr]clusterfacts.Conflict, now time.Time) (ended bool) {
	var over []netip.Addr
	for addr, h := range w.addrs {
		if !now.Before(h.until) {
			over = append(over, addr)
		}
	}
	if len(over) == 0 {
		return false
	}
	slices.SortFunc(over, netip.Addr.Compare)
	var others []clusterfacts.Conflict // those that only other nodes report now
	for _, addr := range over {
		d, still := reported[addr]
		if node := w.addrs[addr].node; slices.Contains(d.Nodes, node) {
			w.addrs[addr] = withholding{node, now.Add(withholdFor)}
			continue
		}
		delete(w.addrs, addr)
		ended = true
		if still {
			others = append(others, d)
		}
	}
	w.countAgain()
	w.add(others, now)
	return ended
}

// lapse returns when the first address may be drawn again. The zero time: none is withheld.
func (w *withheld) lapse() (first time.Time) {
	for _, h := range w.addrs {
		if first.IsZero() || h.until.Before(first) {
			first = h.until
		}
	}
	return first
}

// findRoom reports whether the address of the conflict is withheld or may be, and because of which of the
// nodes that report it. It notes the bounds that are in the way, of which the operator is warned: ask only for
// an address that is to be withheld.
func (w *withheld) findRoom(d clusterfacts.Conflict, now time.Time) (node string, ok bool) {
	if h, done := w.addrs[d.VIP]; done {
		return h.node, true
	}
	s, ok := w.held.StatsOf(d.VIP, now)
	if !ok {
		return "", false
	}
	most := int(min(s.Size/2, maxWithheld))
	if !w.allowsOrNotes(bound{s.Pool, s.Family, ""}, most, now) {
		return "", false
	}
	for _, n := range d.Nodes {
		if w.allowsOrNotes(bound{node: n}, maxWithheldByNode, now) && w.allowsOrNotes(bound{s.Pool, s.Family, n}, (most+1)/2, now) {
			return n, true
		}
	}
	return "", false
}

// allowsOrNotes reports whether less is withheld than the bound allows. If not, it notes that the bound is full.
func (w *withheld) allowsOrNotes(b bound, most int, now time.Time) bool {
	if w.counts == nil {
		w.counts = map[bound]int{}
		for addr, h := range w.addrs {
			w.count(addr, h.node, now)
		}
	}
	if w.counts[b] < most {
		return true
	}
	w.full[b] = most
	return false
}

// count counts an address that is withheld because of the node.
func (w *withheld) count(addr netip.Addr, node string, now time.Time) {
	w.counts[bound{node: node}]++
	if s, ok := w.held.StatsOf(addr, now); ok {
		w.counts[bound{s.Pool, s.Family, ""}]++
		w.counts[bound{s.Pool, s.Family, node}]++
	}
}

// countAgain is called when there may be room again: addresses have other pools, or are not
// withheld any more.
func (w *withheld) countAgain() {
	w.counts = nil
	clear(w.full)
}

// Overrun returns sentences about pools of which other hosts have more addresses than may be
// withheld, and about nodes that report more.
func (l *Ledger) Overrun() (sentences []string) {
	for b, most := range l.conflicts.withheld.full {
		sentences = append(sentences, fmt.Sprintf("%s, which is at most %d; "+
			"exclude what other hosts use (conflicts in the annotation %s of the speakers' Leases lists it)", b.excess(), most, annotation.Report))
	}
	slices.Sort(sentences)
	return sentences
}

// excess is the sentence about a bound that is full.
func (b bound) excess() string {
	const withheld, ofNode = "in use by other hosts than are withheld from Services", " because of one node"
	switch {
	case b.node == "":
		return fmt.Sprintf("pool %q: speakers report more %s addresses of it %s", b.pool, b.family, withheld)
	case b.pool == "":
		return fmt.Sprintf("the speaker of node %q reports more addresses %s%s", b.node, withheld, ofNode)
	}
	return fmt.Sprintf("pool %q: the speaker of node %q reports more %s addresses of it %s%s", b.pool, b.node, b.family, withheld, ofNode)
}
