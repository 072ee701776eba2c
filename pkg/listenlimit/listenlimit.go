// Package listenlimit bounds how many connections a listener has, and how many of them one source
// has. Nobody can then keep others out by holding connections.
//
// No connection is refused. A new one takes the place of the oldest connection of the same
// source, or, when all places are taken, of the source that has the most. An honest request is
// answered within moments, so that only a connection that waits loses its place. A connection
// that has authenticated loses its place last.
package listenlimit

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// bitsOfSource is the length of the prefix of an IPv6 address that identifies a source,
// because each host has a /64.
const bitsOfSource = 64

// Limits are the bounds.
type Limits struct {
	// All is how many connections there are.
	All int
	// OfSource is how many of them come from one source.
	OfSource int
	// Known reports whether an address has a share of its own. All other addresses share one.
	// Nil: each has its own.
	Known func(netip.Addr) bool
}

// Limiter holds the connections that are open.
type Limiter struct {
	limits Limits
	mu     sync.Mutex
	open   map[netip.Prefix][]*Conn // by source, the oldest first
	count  int                      // of them all
}

// New returns a Limiter without connections.
func New(l Limits) *Limiter {
	return &Limiter{limits: l, open: map[netip.Prefix][]*Conn{}}
}

// Bound returns a listener whose connections are bounded.
func (l *Limiter) Bound(of net.Listener) net.Listener { return &bounded{of, l} }

type bounded struct {
	net.Listener
	*Limiter
}

func (l *bounded) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err //nolint:wrapcheck // http.Server looks at it
	}
	return l.Admit(c), nil
}

// Conn is a connection that has a place until it is closed.
type Conn struct {
	net.Conn
	limiter *Limiter
	source  netip.Prefix
	trusted bool
}

// Trust makes the connection lose its place only when all others are trusted, too.
func (c *Conn) Trust() {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.trusted = true
}

// Close gives the place free.
func (c *Conn) Close() error {
	c.limiter.mu.Lock()
	c.limiter.forget(c)
	c.limiter.mu.Unlock()
	return c.Conn.Close() //nolint:wrapcheck // it names the connection
}

// Admit gives the connection a place. A connection from this host is trusted, because the
// kubelet asks from there.
func (l *Limiter) Admit(c net.Conn) *Conn {
	from := addrOf(c.RemoteAddr())
	admitted := &Conn{Conn: c, limiter: l, source: l.sourceOf(from), trusted: from.IsValid() && from == addrOf(c.LocalAddr())}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case len(l.open[admitted.source]) >= l.limits.OfSource:
		l.closeOldest(l.open[admitted.source])
	case l.count >= l.limits.All:
		l.closeOldest(l.greediest())
	}
	l.open[admitted.source] = append(l.open[admitted.source], admitted)
	l.count++
	return admitted
}

// Count returns how many connections there are.
func (l *Limiter) Count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// sourceOf returns the source that a connection from the address counts for.
func (l *Limiter) sourceOf(from netip.Addr) netip.Prefix {
	known := l.limits.Known != nil
	switch {
	case known && !l.limits.Known(from):
		return netip.Prefix{}
	case from.Is6() && !known: // a stranger has a whole one
		p, _ := from.Prefix(bitsOfSource)
		return p
	}
	return netip.PrefixFrom(from, from.BitLen())
}

// greediest returns the connections of the source that has the most untrusted ones. If all are
// trusted, it is the source with the most.
func (l *Limiter) greediest() (most []*Conn) {
	mostUntrusted := -1
	for _, open := range l.open {
		n := untrusted(open)
		if n > mostUntrusted || n == mostUntrusted && len(open) > len(most) {
			most, mostUntrusted = open, n
		}
	}
	return most
}

func untrusted(open []*Conn) (n int) {
	for _, c := range open {
		if !c.trusted {
			n++
		}
	}
	return n
}

// closeOldest closes the oldest untrusted connection, or the oldest one if all are trusted.
func (l *Limiter) closeOldest(open []*Conn) {
	i := slices.IndexFunc(open, func(c *Conn) bool { return !c.trusted })
	oldest := open[max(i, 0)]
	l.forget(oldest)
	oldest.Conn.Close()
}

// forget frees the connection's place, if it still has one.
func (l *Limiter) forget(c *Conn) {
	open := l.open[c.source]
	i := slices.Index(open, c)
	if i < 0 {
		return
	}
	l.count--
	if open = slices.Delete(open, i, i+1); len(open) > 0 {
		l.open[c.source] = open
	} else {
		delete(l.open, c.source)
	}
}

// addrOf returns the address without its port and zone.
func addrOf(a net.Addr) netip.Addr {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return tcp.AddrPort().Addr().Unmap().WithZone("")
}
