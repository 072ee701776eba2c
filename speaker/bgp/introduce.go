package bgp

import (
	"net"
	"net/netip"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// arrival is a connection that the router opened. open is the body of its OPEN,
// nil: neither side has sent one.
type arrival struct {
	conn *net.TCPConn
	open []byte
}

// introduction is a connection that the router opened while there is another one. It replaces
// the other one only with a valid OPEN (RFC 4271 section 6.8), because anybody can open a
// connection. It spares a router that has lost the old connection the wait for the hold time.
//
// A session has one at most, and one more connection that waits in accepted. Of several
// connections only the last is one that the router still knows of.
type introduction struct {
	conn   *net.TCPConn
	result chan []byte // the OPEN's body; nil: the connection is closed
}

// introduce begins an introduction in place of any before it. Only run calls it, and all other
// methods in this file except greet.
func (s *session) introduce(t target, conn *net.TCPConn) {
	s.dismiss()
	i := &introduction{conn: conn, result: make(chan []byte, 1)}
	s.introduction = i
	ours, err := s.ourOpen(&t)
	s.introductions.Go(func() {
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
		i.result <- open
	})
}

// introduced returns the channel for the result of the introduction; nil: there is no
// introduction.
func (s *session) introduced() <-chan []byte {
	if s.introduction == nil {
		return nil
	}
	return s.introduction.result
}

// dismiss ends the introduction, if there is one.
func (s *session) dismiss() {
	if s.introduction != nil {
		s.introduction.conn.Close()
		s.introduction = nil
	}
}

// conclude takes the result of the introduction, and reports whether the next session uses its
// connection.
func (s *session) conclude(open []byte) bool {
	conn := s.introduction.conn
	s.introduction = nil
	if open == nil {
		return false
	}
	if s.next != nil {
		s.next.conn.Close()
	}
	s.next = &arrival{conn, open}
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
	return openOf(t, t.Peer.Address.Is6() || t.Peer.Interface != "", s.announcer.options.Restarting && !s.was,
		s.announcer.options.Restarting || s.was)
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
