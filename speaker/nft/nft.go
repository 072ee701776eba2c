// Package nft opens netlink connections to nftables, the kernel's packet filter, each with a deadline. It
// knows no rules: those of packages limit and direct use it.
package nft

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// timeout bounds how long the kernel takes for a transaction, or for one answer. The largest transaction needs some
	// seconds of a processor.
	timeout = 30 * time.Second
	// buffer holds a transaction and its acknowledgements, which the kernel sends before we can read one.
	buffer = 64 << 20
)

// Conn is a netlink connection to nftables.
type Conn struct {
	*nftables.Conn
	// Socket is its socket.
	Socket *netlink.Conn
}

// Dial opens a connection. Close takes some 10 ms, until the kernel has freed what was removed; see Line.
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

// InTime returns the connection with a new deadline for the next request. The time since Dial, such as that of encoding,
// does not count.
func (c Conn) InTime() *nftables.Conn {
	c.Socket.SetDeadline(time.Now().Add(timeout)) //nolint:errcheck // it fails for a closed socket, as the request does
	return c.Conn
}

// Close closes the connection.
func (c Conn) Close() { c.CloseLasting() } //nolint:errcheck // nothing is lost with it

// Line is a connection that stays open until a request fails. After a failure it must be closed by End, because answers to
// the failed request may still arrive. The zero value is ready for use, by one goroutine.
type Line struct{ conn Conn }

// Open returns the connection. It opens a new one if there is none, or if its socket was closed.
func (l *Line) Open() (c Conn, err error) {
	if l.conn.Conn != nil && l.conn.Socket.SetDeadline(time.Now().Add(timeout)) != nil {
		l.End()
	}
	if l.conn.Conn == nil {
		l.conn, err = Dial()
	}
	return l.conn, err
}

// End closes the connection. Messages that were not flushed are lost.
func (l *Line) End() {
	if l.conn.Conn != nil {
		l.conn.Close()
	}
	l.conn = Conn{}
}

// ChainOf returns the chain in an encoded verdict. Empty: there is none.
func ChainOf(verdict []byte) string {
	attributes, err := netlink.UnmarshalAttributes(verdict)
	if err != nil {
		return ""
	}
	for _, a := range attributes {
		if a.Type == unix.NFTA_VERDICT_CHAIN {
			return strings.TrimRight(string(a.Data), "\x00")
		}
	}
	return ""
}
