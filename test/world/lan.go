package world

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// lan is a segment. Nodes, hosts and routers are stations on it, by number, in this order.
type lan struct {
	*World
	number    int
	hosts     []*host
	received  []uint64       // by station: the number of frames
	unplugged []int          // by station: how many faults have unplugged it; at least one if a node is not on the segment
	cut       map[[2]int]int // by sender and receiver: how many faults cut the path
	backbone  []int          // by node: how many faults have taken down its link to the membership's own network
	noise     int            // how many faults make the segment lossy
	// heard are the last claims of each speaker for each VIP, for the host that repeats them.
	heard map[string][]byte
}

func newLAN(w *World, number int) *lan {
	l := &lan{World: w, number: number, received: make([]uint64, w.Nodes+hosts), unplugged: make([]int, w.Nodes+hosts+w.Routers),
		backbone: make([]int, w.Nodes), cut: map[[2]int]int{}, heard: map[string][]byte{}}
	for i := range w.Nodes {
		if !w.isOn(i, number) {
			l.unplugged[i]++
		}
	}
	return l
}

// home returns the segment of the membership, unless it has a network of its own.
func (w *World) home() *lan { return w.lans[w.Home] }

// lanOf returns the segment of an address.
func (w *World) lanOf(a netip.Addr) *lan {
	for _, l := range w.lans[1:] {
		if slices.ContainsFunc(subnets[l.number], func(p netip.Prefix) bool { return p.Contains(a) }) {
			return l
		}
	}
	return w.lan
}

// nic is the name of the nodes' interfaces on the segment.
func (l *lan) nic() string { return fmt.Sprintf("eth%d", l.number) }

// station is what is on a segment.
type station interface {
	receive(on *lan, frame []byte)
}

func (l *lan) station(i int) station {
	if i < len(l.nodes) {
		return l.nodes[i]
	}
	return l.hosts[i-len(l.nodes)]
}

// hardware returns a station's address, on the first segment.
func hardware(i int) wire.MAC { return wire.MAC{2, 0, 0, 0, 0, byte(i + 1)} }

func (l *lan) hardware(i int) wire.MAC { return wire.MAC{2, 0, 0, 0, byte(l.number), byte(i + 1)} }

// open reports whether frames go from one station to another.
func (l *lan) open(from, to int) bool {
	return l.unplugged[from] == 0 && l.unplugged[to] == 0 && l.cut[[2]int{from, to}] == 0
}

// send sends a frame to its destination, or to all.
func (l *lan) send(from int, frame []byte) {
	to := wire.MAC(frame[:6])
	for i := range len(l.nodes) + len(l.hosts) {
		if i == from || !to.Group() && l.hardware(i) != to || !l.open(from, i) {
			continue
		}
		copies := 1
		if l.noise > 0 && l.chance(20) {
			copies = 2 * l.random.IntN(2)
		}
		for range copies {
			delay := l.between(20*time.Microsecond, 300*time.Microsecond)
			if l.noise > 0 && l.chance(20) {
				delay += l.upTo(60 * time.Millisecond)
			}
			l.after(delay, func() {
				if l.open(from, i) {
					l.received[i]++
					l.station(i).receive(l, frame)
				}
			})
		}
	}
	if m, _ := parse(frame); to.Group() && from < len(l.nodes) && m.Claims.IsValid() {
		l.heard[nodeName(from)+m.Claims.String()] = frame
	}
}

// claims returns what speakers have claimed so far.
func (l *lan) claims() (frames [][]byte) {
	for _, key := range slices.Sorted(maps.Keys(l.heard)) {
		frames = append(frames, l.heard[key])
	}
	return frames
}

// sound reports whether all frames arrive.
func (w *World) sound() bool {
	for _, l := range w.lans {
		for i, faults := range l.unplugged {
			if faults > 0 && (i >= w.Nodes || w.isOn(i, l.number)) {
				return false
			}
		}
		if len(l.cut) > 0 || l.noise > 0 {
			return false
		}
	}
	return true
}

// cutOff cuts the path between all pairs for which apart is true, and returns the function that ends that.
func (l *lan) cutOff(apart func(from, to int) bool) (mend func()) {
	var pairs [][2]int
	for from := range l.unplugged {
		for to := range l.unplugged {
			if from != to && apart(from, to) {
				pairs = append(pairs, [2]int{from, to})
				l.cut[[2]int{from, to}]++
			}
		}
	}
	return func() {
		for _, p := range pairs {
			if l.cut[p]--; l.cut[p] == 0 {
				delete(l.cut, p)
			}
		}
	}
}

// describe describes a speaker's frame, for the story.
func (w *World) describe(frame []byte) string {
	m, _ := parse(frame)
	to, question := "all", ""
	if !m.To.Group() {
		to = w.who(m.To)
	}
	if m.Seal.Nonce() != (seal.Nonce{}) {
		question = ", numbered"
	}
	if m.Probes() {
		return fmt.Sprintf("asks %s for %s%s", to, m.Asks, question)
	}
	return fmt.Sprintf("claims %s to %s%s", m.Claims, to, question)
}
