package bgp

import (
	"net"
	"net/netip"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// incoming is a connection that the router opened. open is the body of its OPEN,
// nil: neither side has sent one.
type incoming struct {
	conn *net.TCPConn
	open []byte
}

// collision is a connection that the router opened while there is another one. It replaces
// the other one only with a valid OPEN (RFC 4271 section 6.8), because anybody can open a
// connection. It spares a router that has lost the old connection the wait for the hold time.
//
// A session has one at most, and one more connection that waits in accepted. Of several
// connections only the last is one that the router still knows of.
type collision struct {
	conn   *net.TCPConn
	result chan []byte // the OPEN's body; nil: the connection is closed
}

// collide begins a collision in place of any before it. Only run calls it and the other methods
// of this file, except greet.
func (s *session) collide(t target, conn *net.TCPConn) {
	s.dismiss()
	c := &collision{conn: conn, result: make(chan []byte, 1)}
	s.collision = c
	ours, err := s.ourOpen(&t)
	s.collisions.Go(func() {
		var n negotiated
		var open []byte
		if err == nil {
			open, n, err = s.greet(&t, conn, ours)
		}
		if err != nil {
			s.sendNotification(conn, err, n)
			conn.Close()
			open = nil
		}
		c.result <- open
	})
}

// collided returns the channel for the result of the collision; nil: there is none.
func (s *session) collided() <-chan []byte {
	if s.collision == nil {
		return nil
	}
	return s.collision.result
}

// dismiss ends the collision, if there is one.
func (s *session) dismiss() {
	if s.collision != nil {
		s.collision.conn.Close()
		s.collision = nil
	}
}

// conclude takes the result of the collision, and reports whether the next session uses its
// connection.
func (s *session) conclude(open []byte) bool {
	conn := s.collision.conn
	s.collision = nil
	if open == nil {
		return false
	}
	if s.next != nil {
		s.next.conn.Close()
	}
	s.next = &incoming{conn, open}
	return true
}

// forgetConnections closes the connections that the router opened for the session as it was
// before a change.
func (s *session) forgetConnections() {
	s.dismiss()
	if s.next != nil {
		s.next.conn.Close()
		s.next = nil
	}
}

// ourOpen is the OPEN that the router is sent.
func (s *session) ourOpen(t *target) ([]byte, error) {
	restarting, kept := s.Restarts()
	return openOf(t, t.Peer.Address.Is6() || t.Peer.Interface != "", restarting, kept)
}

// greet exchanges OPENs and checks the router's.
func (s *session) greet(t *target, conn *net.TCPConn, ours []byte) (open []byte, n negotiated, err error) {
	if err = setTTLOf(conn, t.Peer.Address, t); err != nil {
		return nil, n, err
	}
	if err = conn.SetDeadline(time.Now().Add(openTimeout)); err != nil {
		return nil, n, err
	}
	if _, err = conn.Write(ours); err != nil {
		return nil, n, err
	}
	m, err := expect(conn, packet.BGP_MSG_OPEN, packet.BGP_ERROR_SUB_RECEIVE_UNEXPECTED_MESSAGE_IN_OPENSENT_STATE)
	if err != nil {
		return nil, n, err
	}
	n, err = negotiate(t, m.body)
	return m.body, n, err
}

// setTTLOf sets the TTL of a connection that the router opened.
func setTTLOf(conn *net.TCPConn, router netip.Addr, t *target) error {
	c, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	return onSocket(c, func(fd int) error { return setTTL(fd, router, t) })
}
