package bgp

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"unique"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// gracefulShutdown is the community GRACEFUL_SHUTDOWN (RFC 8326 section 5).
const gracefulShutdown config.Community = 0xFFFF0000

// attributes are plan.Attributes in a form that can be compared, and of which
// there is one copy for all routes and peers.
type attributes = unique.Handle[attributeSet]

type attributeSet struct {
	communities      string // of 4 bytes each
	largeCommunities string // of 12 bytes each
	localPreference  uint32
	hasPreference    bool
	med              uint32
	hasMED           bool
	prepend          int
}

func intern(a plan.Attributes) attributes {
	var s attributeSet
	var b []byte
	for _, c := range a.Communities {
		b = binary.BigEndian.AppendUint32(b, uint32(c))
	}
	s.communities, b = string(b), nil
	for _, c := range a.LargeCommunities {
		for _, v := range []uint32{c.GlobalAdmin, c.Data1, c.Data2} {
			b = binary.BigEndian.AppendUint32(b, v)
		}
	}
	s.largeCommunities, s.prepend = string(b), a.Prepend
	if a.LocalPreference != nil {
		s.localPreference, s.hasPreference = *a.LocalPreference, true
	}
	if a.MED != nil {
		s.med, s.hasMED = *a.MED, true
	}
	return unique.Make(s)
}

// attributes returns the set as it was given to intern.
func (s attributeSet) attributes() plan.Attributes {
	a := plan.Attributes{Prepend: s.prepend}
	for b := []byte(s.communities); len(b) > 0; b = b[4:] {
		a.Communities = append(a.Communities, config.Community(binary.BigEndian.Uint32(b)))
	}
	for b := []byte(s.largeCommunities); len(b) > 0; b = b[12:] {
		a.LargeCommunities = append(a.LargeCommunities, config.LargeCommunity{
			GlobalAdmin: binary.BigEndian.Uint32(b), Data1: binary.BigEndian.Uint32(b[4:]), Data2: binary.BigEndian.Uint32(b[8:])})
	}
	if s.hasPreference {
		a.LocalPreference = &s.localPreference
	}
	if s.hasMED {
		a.MED = &s.med
	}
	return a
}

// drained returns the attributes while the node drains. Only internal peers are sent a local
// preference.
func drained(h attributes) attributes {
	a := h.Value().attributes()
	lowest := uint32(0)
	a.Communities, a.LocalPreference = append(a.Communities, gracefulShutdown), &lowest
	return intern(a)
}

// rib is the adj-RIB-out of a peer: the wanted routes and the ones that were sent.
type rib struct {
	peer string
	// wake has a token when there is something to send.
	wake chan struct{}
	// asked4 and asked6 have a token while the router waits to be sent all routes of the family again. Set by start.
	asked4, asked6 chan struct{}

	mu       sync.Mutex
	want     map[netip.Prefix]attributes
	sent     map[netip.Prefix]attributes
	pending  map[netip.Prefix]bool // what may have to be sent; true: even if it is unchanged
	permit   *netipx.IPSet         // see plan.BGP
	draining bool
	open     bool // whether there is a session
	// withheld has the wanted prefixes that cannot be sent, with the reason. It is empty while
	// there is no session.
	withheld map[netip.Prefix]Withholding
}

func newRIB(peer string) *rib {
	return &rib{peer: peer, wake: make(chan struct{}, 1), want: map[netip.Prefix]attributes{}}
}

// set replaces a route; nil is none. What changes is sent after flush.
func (r *rib) set(prefix netip.Prefix, route plan.Route) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, was := r.want[prefix]
	a, is := route[r.peer]
	if !is {
		if was {
			delete(r.want, prefix)
			r.markLocked(prefix)
		}
		return
	}
	if now := intern(a); !was || now != before {
		r.want[prefix] = now
		r.markLocked(prefix)
	}
}

func (r *rib) markLocked(prefix netip.Prefix) {
	if r.open {
		r.pending[prefix] = r.pending[prefix] // as it was, or false
	}
}

// flush wakes the session to send what has changed.
func (r *rib) flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flushLocked()
}

func (r *rib) flushLocked() {
	if len(r.pending) > 0 {
		notify.Wake(r.wake)
	}
}

// drain sets whether routers are asked to prefer other paths to all routes.
func (r *rib) drain(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining == on {
		return
	}
	r.draining = on
	r.markAllLocked()
}

// limit sets what may be sent at all; nil: everything.
func (r *rib) limit(permit *netipx.IPSet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.permit = permit
	r.markAllLocked()
}

// markAllLocked marks all routes, and wakes the session.
func (r *rib) markAllLocked() {
	for prefix := range r.want {
		r.markLocked(prefix)
	}
	r.flushLocked()
}

// start is called when a session is up: the router has nothing.
func (r *rib) start() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open, r.sent, r.withheld = true, map[netip.Prefix]attributes{}, map[netip.Prefix]Withholding{}
	r.asked4, r.asked6 = make(chan struct{}, 1), make(chan struct{}, 1)
	r.pending = make(map[netip.Prefix]bool, len(r.want))
	for prefix := range r.want {
		r.pending[prefix] = false
	}
}

// stop is called when the session is down.
func (r *rib) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open, r.sent, r.pending, r.withheld = false, nil, nil, nil
}

// ask notes that the router wants all routes of a family again (RFC 2918). A request that comes while another one waits changes
// nothing: the answer is for both.
func (r *rib) ask(is4 bool) {
	if is4 {
		notify.Wake(r.asked4)
	} else {
		notify.Wake(r.asked6)
	}
}

// refresh marks all routes of a family to be sent again.
func (r *rib) refresh(is4 bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for prefix := range r.want {
		if prefix.Addr().Is4() == is4 && r.open {
			r.pending[prefix] = true
		}
	}
	r.flushLocked()
}

// batch is what is to be sent at once.
type batch struct {
	withdraw []netip.Prefix
	announce map[attributes][]netip.Prefix
	// forbidden are the wanted prefixes that are not permitted, and were not withheld for that before.
	forbidden []netip.Prefix
	// tooLong are those to announce that could not be announced before.
	tooLong map[netip.Prefix]bool
}

// take returns what has to be sent now, and records it as sent. deny returns why the session
// cannot announce a prefix; "": it can.
func (r *rib) take(deny func(netip.Prefix) Withholding) batch {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := batch{announce: map[attributes][]netip.Prefix{}, tooLong: map[netip.Prefix]bool{}}
	for prefix, again := range r.pending {
		before, was := r.sent[prefix]
		now, is := r.offerLocked(prefix, deny, &b)
		switch {
		case is && (!was || again || now != before):
			r.sent[prefix] = now
			b.announce[now] = append(b.announce[now], prefix)
		case !is && was:
			delete(r.sent, prefix)
			b.withdraw = append(b.withdraw, prefix)
		}
	}
	clear(r.pending)
	return b
}

// offerLocked returns with which attributes the router is to have a prefix, if it is to have it. It records why a wanted
// one is withheld.
func (r *rib) offerLocked(prefix netip.Prefix, deny func(netip.Prefix) Withholding, b *batch) (a attributes, is bool) {
	before := r.withheld[prefix]
	delete(r.withheld, prefix)
	if a, is = r.want[prefix]; !is {
		return a, false
	}
	why := deny(prefix)
	if r.permit != nil && !r.permit.ContainsPrefix(prefix) {
		why = withheldForbidden
		if before != why {
			b.forbidden = append(b.forbidden, prefix)
		}
	}
	if before == withheldTooLong {
		b.tooLong[prefix] = true
	}
	switch {
	case why != "":
		r.withheld[prefix] = why
		return a, false
	case r.draining:
		return drained(a), true
	}
	return a, true
}

// reject records that prefixes were not sent after all.
func (r *rib) reject(prefixes []netip.Prefix, why Withholding) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, prefix := range prefixes {
		delete(r.sent, prefix)
		r.withheld[prefix] = why
	}
}

// count returns how many prefixes were sent to the router, and how many cannot be, by reason.
func (r *rib) count() (advertised int, withheld map[Withholding]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	withheld = map[Withholding]int{}
	for _, why := range r.withheld {
		withheld[why]++
	}
	return len(r.sent), withheld
}
