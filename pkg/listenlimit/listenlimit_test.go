package listenlimit

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

// fake is a connection from an address.
type fake struct {
	net.Conn
	from, to string
	closed   bool
}

func (f *fake) Close() error { f.closed = true; return nil }

func (f *fake) RemoteAddr() net.Addr { return tcp(f.from) }

func (f *fake) LocalAddr() net.Addr { return tcp(f.to) }

func tcp(a string) net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(a), 1))
}

// port is a Limiter and its connections.
type port struct {
	*Limiter
	to string
}

func (p port) from(address string) (*fake, *Conn) {
	f := &fake{from: address, to: p.to}
	return f, p.Admit(f)
}

func TestOneSourceHasItsShare(t *testing.T) {
	t.Parallel()
	p := port{New(Limits{All: 10, OfSource: 2}), "192.0.2.1"}
	other, _ := p.from("198.51.100.1")
	first, _ := p.from("192.0.2.2")
	second, c := p.from("::ffff:192.0.2.2")
	third, _ := p.from("192.0.2.2")
	assert.True(t, first.closed, "the oldest loses its place")
	assert.False(t, second.closed || third.closed || other.closed)
	assert.Equal(t, 3, p.Count())
	assert.NoError(t, c.Close())
	assert.NoError(t, c.Close())
	fourth, _ := p.from("192.0.2.2")
	assert.False(t, third.closed || fourth.closed, "a place was free")
	assert.Equal(t, 3, p.Count())
}

func TestWhoHasMostMakesRoom(t *testing.T) {
	t.Parallel()
	p := port{New(Limits{All: 4, OfSource: 3}), "192.0.2.1"}
	alone, _ := p.from("198.51.100.1")
	first, _ := p.from("192.0.2.2")
	p.from("192.0.2.2")
	p.from("192.0.2.2")
	p.from("198.51.100.9")
	assert.True(t, first.closed)
	assert.False(t, alone.closed)
	assert.Equal(t, 4, p.Count())
}

// An authenticated connection keeps its place while there are unauthenticated ones, and so does one from the
// listener's own host.
func TestTrustedGoLast(t *testing.T) {
	t.Parallel()
	p := port{New(Limits{All: 4, OfSource: 2}), "192.0.2.1"}
	kubelet, _ := p.from("192.0.2.1")
	scraper, c := p.from("198.51.100.1")
	c.Trust()
	for i := range 100 {
		p.from(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}).String())
		assert.LessOrEqual(t, p.Count(), 4)
	}
	assert.False(t, kubelet.closed || scraper.closed)
	for range 3 {
		_, c := p.from("192.0.2.7")
		c.Trust()
	}
	assert.False(t, scraper.closed, "one source has no more than its share, trusted or not")
}

// A host has a /64 of addresses, and all that nobody knows share one place.
func TestManyAddressesAreOneSource(t *testing.T) {
	t.Parallel()
	p := port{New(Limits{All: 10, OfSource: 2}), "2001:db8::1"}
	for _, a := range []string{"2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::3", "2001:db8:1::4"} {
		p.from(a)
	}
	assert.Equal(t, 2, p.Count())

	known := port{New(Limits{All: 10, OfSource: 2, Known: func(a netip.Addr) bool { return a.As4()[3] < 10 }}), "192.0.2.1"}
	for i := range byte(5) {
		known.from(netip.AddrFrom4([4]byte{203, 0, 113, i}).String())
		known.from(netip.AddrFrom4([4]byte{203, 0, 113, 100 + i}).String())
	}
	assert.Equal(t, 7, known.Count())

	// Nodes have their addresses in one subnet, and each is a source of its own.
	nodes := port{New(Limits{All: 10, OfSource: 2, Known: func(netip.Addr) bool { return true }}), "2001:db8::1"}
	for range 3 {
		for _, a := range []string{"2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::3"} {
			nodes.from(a)
		}
	}
	assert.Equal(t, 6, nodes.Count())
}
