// Package nft opens netlink connections to nftables, the kernel's packet filter, each with a deadline. It
// knows no rules: those of packages limit and direct use it.
package nft

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
)

const (
	// timeout bounds how long the kernel takes for a transaction, or for one answer. The largest transaction needs some
	// seconds of a processor.
	timeout = 30 * time.Second
	// buffer holds a transaction and its acknowledgements, which the kernel sends before we can read one.
	buffer = 64 << 20
)

// Conn is a conversation with nftables.
type Conn struct {
	*nftables.Conn
	// Socket carries it.
	Socket *netlink.Conn
}

// Dial opens a conversation. The end of it waits for the kernel to free what it was to remove, some 10 ms: see Line.
func Dial() (c Conn, err error) {
	c.Conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(s *netlink.Conn) error {
		c.Socket = s
		return errors.Join(s.SetReadBuffer(buffer), s.SetWriteBuffer(buffer), s.SetDeadline(time.Now().Add(timeout)))
	}))
	if err != nil {
		return Conn{}, fmt.Errorf("open a netlink socket to nftables: %w", err)
	}
	return c, nil
}

// InTime gives the kernel its time for the next request: what was done before, as encoding, does not count.
func (c Conn) InTime() *nftables.Conn {
	c.Socket.SetDeadline(time.Now().Add(timeout)) //nolint:errcheck // it fails for a closed socket, as the request does
	return c.Conn
}

// Close ends the conversation.
func (c Conn) Close() { c.CloseLasting() } //nolint:errcheck // nothing is lost with it

// Line is a conversation that lasts until something fails: then answers to that may still come. Its zero value is ready
// for use, by one goroutine.
type Line struct{ conn Conn }

// Open returns the conversation. It begins another one if there is none, or if its socket was closed.
func (l *Line) Open() (c Conn, err error) {
	if l.conn.Conn != nil && l.conn.Socket.SetDeadline(time.Now().Add(timeout)) != nil {
		l.End()
	}
	if l.conn.Conn == nil {
		l.conn, err = Dial()
	}
	return l.conn, err
}

// End ends the conversation, and forgets what was to be sent.
func (l *Line) End() {
	if l.conn.Conn != nil {
		l.conn.Close()
	}
	l.conn = Conn{}
}
