package membership

import (
	"bytes"
	"strings"

	"github.com/hashicorp/memberlist"
)

// The metadata that memberlist spreads with a node: a format version, flags, of
// which later versions may know more, the claims if a flag says so, and the
// interfaces that are down.
const (
	metaVersion = 1
	metaReady   = 1 << 0
	metaClaims  = 1 << 1
	metaSighted = 1 << 2
	metaBlind   = 1 << 3
	metaSick    = 1 << 4
)

// delegate gives memberlist our metadata.
type delegate Task

// NodeMeta leaves out the interfaces that limit has no room for: VIPs stay
// there.
func (d *delegate) NodeMeta(limit int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	meta := []byte{metaVersion, 0}
	if d.speakers[d.options.Node] && (*Task)(d).apart() == "" {
		meta[1] |= metaReady
	}
	meta[1] |= d.views[d.options.Node].flags()
	if c := d.claims[d.options.Node]; c != (claims{}) {
		meta[1] |= metaClaims
		meta = append(meta, c[:]...)
	}
	down := d.down[d.options.Node]
	for down != "" && len(meta)+len(down) > limit {
		down = down[:max(0, strings.LastIndexByte(down, ','))]
	}
	return append(meta, down...)
}

// noteSaid records what memberlist tells of us.
func (t *Task) noteSaid(us *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.metadata = us.Meta
}

// isSaid reports whether that is what there is to tell.
func (t *Task) isSaid() bool {
	now := (*delegate)(t).NodeMeta(memberlist.MetaMaxSize)
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Equal(t.metadata, now)
}

func (*delegate) NotifyMsg([]byte)                {}
func (*delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (*delegate) LocalState(bool) []byte          { return nil }
func (*delegate) MergeRemoteState([]byte, bool)   {}

func ready(n *memberlist.Node) bool { return len(n.Meta) >= 2 && n.Meta[1]&metaReady != 0 }

// details returns what the metadata says beside the flags.
func details(n *memberlist.Node) (c claims, down string) {
	if len(n.Meta) < 2 {
		return c, ""
	}
	rest := n.Meta[2:]
	if n.Meta[1]&metaClaims != 0 && len(rest) >= len(c) {
		c, rest = claims(rest[:len(c)]), rest[len(c):]
	}
	return c, string(rest)
}

// view is what a speaker sees of the API server: whether it answers, and whether the
// speaker has given up on it while it answers others; neither: it does not say. And it
// is whether kube-proxy on the node is sick.
type view struct{ sighted, blind, sick bool }

func (v view) flags() (flags byte) {
	if v.sighted {
		flags |= metaSighted
	}
	if v.blind {
		flags |= metaBlind
	}
	if v.sick {
		flags |= metaSick
	}
	return flags
}

func viewOf(n *memberlist.Node) view {
	if len(n.Meta) < 2 {
		return view{}
	}
	return view{n.Meta[1]&metaSighted != 0, n.Meta[1]&metaBlind != 0, n.Meta[1]&metaSick != 0}
}

// See tells all speakers whether the API server answers this one, and whether this one
// has given up on it.
func (t *Task) See(sighted, blind bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.views[t.options.Node]
	v.sighted, v.blind = sighted, blind
	if t.noteView(t.options.Node, v) {
		wake(t.tell)
	}
}

// SetSick tells all speakers whether kube-proxy on this node is not healthy.
func (t *Task) SetSick(sick bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.views[t.options.Node]
	v.sick = sick
	if t.noteView(t.options.Node, v) {
		wake(t.tell)
	}
}

// OthersSee returns how many other speakers that are ready the API server answers, and
// how many more have not given up on it.
func (t *Task) OthersSee() (seeing, unsure int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, ready := range t.speakers {
		switch v := t.views[name]; {
		case !ready || name == t.options.Node:
		case v.sighted:
			seeing++
		case !v.blind:
			unsure++
		}
	}
	return seeing, unsure
}

func (t *Task) noteView(node string, v view) bool {
	if before := t.views[node]; before.blind != v.blind || before.sick != v.sick {
		t.changed.Notify()
	}
	return record(t.views, node, v)
}

// claims are what a speaker owns and keeps, as its plan has it: what they mean
// is nothing to the membership. They travel with the news that the speaker is
// alive and ready: whoever knows that one knows them, and their order is
// memberlist's.
type claims [128]byte

// Claim tells all speakers what this one owns and keeps; see plan.Claims. They
// count here at once, and elsewhere some ten milliseconds later.
func (t *Task) Claim(buckets [128]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.noteClaims(t.options.Node, buckets) {
		wake(t.tell)
	}
}

// setDown records which interfaces of a node are down, their names separated
// by commas, and reports whether that is news.
func (t *Task) setDown(node, names string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.noteDown(node, names)
}

// note records all that a living speaker says, and reports whether anything but its
// claims is news.
func (t *Task) note(n *memberlist.Node) bool {
	c, down := details(n)
	t.noteClaims(n.Name, c)
	t.noteView(n.Name, viewOf(n))
	links := t.noteDown(n.Name, down)
	return t.noteReady(n.Name, ready(n)) || links
}

func (t *Task) noteReady(node string, ready bool) bool {
	before, known := t.speakers[node]
	if known && before == ready {
		return false
	}
	t.speakers[node] = ready
	t.changed.Notify()
	return true
}

func (t *Task) noteClaims(node string, c claims) bool { return t.tellIf(record(t.claims, node, c)) }

func (t *Task) noteDown(node, names string) bool { return t.tellIf(record(t.down, node, names)) }

// tellIf tells who waits for changes, if there is news, and returns whether there is.
func (t *Task) tellIf(news bool) bool {
	if news {
		t.changed.Notify()
	}
	return news
}

// record records what a node says, nothing as no entry, and reports whether it is news.
func record[V comparable](of map[string]V, node string, said V) (news bool) {
	var nothing V
	if of[node] == said {
		return false
	}
	if of[node] = said; said == nothing {
		delete(of, node)
	}
	return true
}
