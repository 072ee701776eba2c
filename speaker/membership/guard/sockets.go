package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/listenlimit"
	"github.com/lodestone-lb/lodestone/speaker/detector"
)

const (
	// MaxStreams is how many connections opened by others may exist at a time. A starting speaker opens
	// eight.
	MaxStreams = 32
	// MaxOfSource is how many of them one address may have. A speaker needs two.
	MaxOfSource = 4
	// streamTime bounds the life of a connection opened by others. memberlist takes a second to read,
	// and another one to answer.
	streamTime = 3 * time.Second

	// receiveBuffer is the size of the kernel's buffer for packets, if the kernel allows it.
	receiveBuffer = 2 << 20
	// firstDelay and lastDelay bound the wait after an error of the sockets.
	firstDelay, lastDelay = 5 * time.Millisecond, time.Second
	// portTries is how often a port is tried that has to be free for both TCP and UDP.
	portTries = 10
)

// Sockets are the TCP and UDP sockets of a port, with bounds for what others may use.
//
// All addresses that belong to no speaker share the connections of one address. So a joining node, which
// is not known yet, can connect, and an attacker with many addresses has no more connections than with one.
type Sockets struct {
	tcp     *net.TCPListener
	udp     *net.UDPConn
	limiter *listenlimit.Limiter
	refused func()
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

// Listen opens the port, or any free one if it is 0. known reports whether a speaker has the address.
// refused is called for each packet that is too long. Shutdown closes the sockets. The failure detector
// shares the port for UDP.
func Listen(at netip.AddrPort, known func(netip.Addr) bool, refused func()) (*Sockets, error) {
	s := &Sockets{
		limiter: listenlimit.New(listenlimit.Limits{All: MaxStreams, OfSource: MaxOfSource, Known: known}),
		refused: refused,
		packets: make(chan *memberlist.Packet),
		streams: make(chan net.Conn),
		done:    make(chan struct{}),
	}
	var err error
	for range portTries {
		if err = s.listen(at); err == nil || at.Port() != 0 {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	s.running.Go(s.accept)
	s.running.Go(s.read)
	return s, nil
}

// listen opens the sockets.
func (s *Sockets) listen(at netip.AddrPort) (err error) {
	if s.tcp, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)); err != nil {
		return err //nolint:wrapcheck // it names the address
	}
	udp, err := (&net.ListenConfig{Control: detector.Share}).ListenPacket(context.Background(), "udp", s.Address().String())
	if err != nil {
		s.tcp.Close()
		return err //nolint:wrapcheck // it names the address
	}
	s.udp = udp.(*net.UDPConn)
	for size := receiveBuffer; size > 0 && s.udp.SetReadBuffer(size) != nil; size /= 2 {
	}
	return nil
}

// Address returns the address and port of the sockets.
func (s *Sockets) Address() netip.AddrPort { return s.tcp.Addr().(*net.TCPAddr).AddrPort() }

// read passes packets on until Shutdown.
func (s *Sockets) read() {
	var buf [MaxPacket + 1]byte
	for failures := 0; ; {
		n, from, err := s.udp.ReadFromUDP(buf[:])
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			failures++
			s.pause(failures)
			continue
		case n == 0 || n > MaxPacket:
			s.refused()
			continue
		}
		failures = 0
		p := &memberlist.Packet{Buf: slices.Clone(buf[:n]), From: from, Timestamp: time.Now()}
		select {
		case s.packets <- p:
		case <-s.done:
		}
	}
}

// accept passes connections on until Shutdown.
func (s *Sockets) accept() {
	for failures := 0; ; {
		c, err := s.tcp.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			failures++
			s.pause(failures)
			continue
		}
		failures = 0
		admitted := &accepted{s.limiter.Admit(c), time.Now().Add(streamTime)}
		select {
		case s.streams <- admitted:
		case <-s.done:
			admitted.Close()
		}
	}
}

// pause waits after an error, longer each time: the process may have run out of file descriptors.
func (s *Sockets) pause(failures int) {
	select {
	case <-time.After(min(firstDelay<<min(failures, 10), lastDelay)):
	case <-s.done:
	}
}

// accepted is a connection opened by others. It ends at end at the latest.
type accepted struct {
	net.Conn
	end time.Time
}

// SetDeadline sets a deadline that is not after the connection's end.
func (a *accepted) SetDeadline(t time.Time) error {
	if t.After(a.end) {
		t = a.end
	}
	return a.Conn.SetDeadline(t) //nolint:wrapcheck // it names the connection
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (s *Sockets) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	at := s.Address()
	return at.Addr().Unmap().AsSlice(), int(at.Port()), nil
}

// WriteTo implements memberlist.Transport.
func (s *Sockets) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, fmt.Errorf("send a packet: %w", err)
	}
	_, err = s.udp.WriteToUDPAddrPort(b, to)
	return time.Now(), err //nolint:wrapcheck // it names the address
}

// PacketCh implements memberlist.Transport.
func (s *Sockets) PacketCh() <-chan *memberlist.Packet { return s.packets }

// DialTimeout implements memberlist.Transport. The connection comes from the address of this speaker.
func (s *Sockets) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: s.Address().Addr().AsSlice(), Zone: s.Address().Addr().Zone()}}
	return d.Dial("tcp", addr) //nolint:wrapcheck // it names the address
}

// StreamCh implements memberlist.Transport.
func (s *Sockets) StreamCh() <-chan net.Conn { return s.streams }

// Shutdown implements memberlist.Transport.
func (s *Sockets) Shutdown() error {
	s.once.Do(func() {
		close(s.done)
		s.tcp.Close()
		s.udp.Close()
	})
	s.running.Wait()
	return nil
}
