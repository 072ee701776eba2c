// Package guard stands between memberlist and the network: memberlist receives only what an honest
// speaker would send, and everything that it sends is encrypted.
//
// memberlist can encrypt itself, but checks too late: it reads up to 20 MiB from a connection before it
// needs the key, allocates memory by unchecked lengths, unpacks 40 MiB from some kilobytes, and panics at
// an empty message. So the guard has the key, and memberlist has none. The guard opens what arrives, and
// passes it on if the plaintext is one of the few messages that speakers exchange, within bounds
// (form.go). Sockets bounds the number of connections and their duration.
//
// A packet is one sealed message. On a connection the sealed length comes before the message, so that
// somebody without the key cannot make a speaker keep more than that.
//
//	guard.go    Transport: what memberlist sends and receives, sealed and checked
//	form.go     the messages that pass
//	seal.go     encryption
//	sockets.go  Sockets: the socket, the listener, and how many connections it has
package guard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	// Overhead is what sealing adds to a packet: nonce and tag.
	Overhead = 24 + 16
	// MaxPacket is the longest packet: memberlist sends 1,400 bytes, and 5 for a checksum.
	MaxPacket = 1500
	// MaxMessage is the longest message on a connection: the state of 1,000 speakers
	// with the longest names and metadata is 0.83 MiB. With usual ones, 4,000 speakers fit.
	MaxMessage = 1 << 20

	// headerSize is the size of a sealed length.
	headerSize = 4 + Overhead
	// firstRead is how much room a message gets before its bytes are here.
	firstRead = 4 << 10
)

// The purposes of what is sealed, so that a part of a stream cannot be passed off as a packet.
var forPacket, forHeader = []byte("lodestone packet"), []byte("lodestone stream")

var errKey = errors.New("not sealed with a membership key")

// Transport is memberlist's transport over another one.
type Transport struct {
	memberlist.Transport
	keys    func() [][]byte
	refused func()
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

// New returns a guard of the transport. Shutdown ends both. keys returns the keys that open; the first one
// seals. refused is called for each packet and connection that is dropped.
func New(of memberlist.Transport, keys func() [][]byte, refused func()) *Transport {
	t := &Transport{
		Transport: of,
		keys:      keys,
		refused:   refused,
		packets:   make(chan *memberlist.Packet),
		streams:   make(chan net.Conn),
		done:      make(chan struct{}),
	}
	t.running.Go(t.pass)
	return t
}

// pass passes on what comes in until Shutdown.
func (t *Transport) pass() {
	for {
		select {
		case p := <-t.Transport.PacketCh():
			var err error
			if p.Buf, err = open(t.keys(), p.Buf, forPacket); err == nil {
				err = checkPacket(p.Buf)
			}
			if err == nil {
				t.deliver(p)
			} else {
				t.refused()
			}
		case c := <-t.Transport.StreamCh():
			select {
			case t.streams <- &stream{Conn: c, keys: t.keys, refused: t.refused}:
			case <-t.done:
				c.Close()
			}
		case <-t.done:
			return
		}
	}
}

// Forget has memberlist take the speaker for one that has left, so that it can be met at another address.
func (t *Transport) Forget(node string) {
	t.deliver(&memberlist.Packet{Buf: left(node), From: &net.UDPAddr{}, Timestamp: time.Now()})
}

// deliver gives a packet to memberlist, which takes none after Shutdown.
func (t *Transport) deliver(p *memberlist.Packet) {
	select {
	case t.packets <- p:
	case <-t.done:
	}
}

// PacketCh implements memberlist.Transport.
func (t *Transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *Transport) StreamCh() <-chan net.Conn { return t.streams }

// WriteTo implements memberlist.Transport.
func (t *Transport) WriteTo(b []byte, addr string) (time.Time, error) {
	sealed, err := seal(nil, t.keys(), b, forPacket)
	if err != nil {
		return time.Time{}, err
	}
	return t.Transport.WriteTo(sealed, addr) //nolint:wrapcheck // it names the address
}

// DialTimeout implements memberlist.Transport.
func (t *Transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	c, err := t.Transport.DialTimeout(addr, timeout)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the address
	}
	return &stream{Conn: c, keys: t.keys, refused: t.refused}, nil
}

// Shutdown implements memberlist.Transport.
func (t *Transport) Shutdown() error {
	t.once.Do(func() { close(t.done) })
	t.running.Wait()
	return t.Transport.Shutdown() //nolint:wrapcheck // it is nil
}

// stream is a connection that carries one message each way.
type stream struct {
	net.Conn
	keys    func() [][]byte
	refused func()
	message *bytes.Reader // nil until the message is here
}

// Read waits for the message, then reads from it.
func (s *stream) Read(b []byte) (int, error) {
	if s.message == nil {
		plain, err := s.receive()
		if err != nil {
			s.refused()
			return 0, err
		}
		s.message = bytes.NewReader(plain)
	}
	return s.message.Read(b) //nolint:wrapcheck // io.EOF is one
}

// receive waits for the message, checks it and returns it.
func (s *stream) receive() ([]byte, error) {
	header := make([]byte, headerSize)
	if _, err := io.ReadFull(s.Conn, header); err != nil {
		return nil, fmt.Errorf("receive the length of a message: %w", err)
	}
	keys := s.keys()
	length, err := open(keys, header, forHeader)
	if err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(length))
	if n < Overhead || n > MaxMessage+Overhead {
		return nil, fmt.Errorf("message of %d bytes, at most %d", n-Overhead, MaxMessage)
	}
	sealed := bytes.NewBuffer(make([]byte, 0, min(n, firstRead)))
	if _, err := io.CopyN(sealed, s.Conn, int64(n)); err != nil {
		return nil, fmt.Errorf("receive a message: %w", err)
	}
	plain, err := open(keys, sealed.Bytes(), header)
	if err != nil {
		return nil, err
	}
	return plain, checkMessage(plain)
}

// Write sends b, which is a message: memberlist writes each with one call.
func (s *stream) Write(b []byte) (int, error) {
	if len(b) > MaxMessage {
		return 0, fmt.Errorf("message of %d bytes, at most %d: too many speakers", len(b), MaxMessage)
	}
	keys := s.keys()
	sealed, err := seal(nil, keys, binary.BigEndian.AppendUint32(nil, uint32(len(b)+Overhead)), forHeader)
	if err != nil {
		return 0, err
	}
	if sealed, err = seal(sealed, keys, b, sealed[:headerSize:headerSize]); err != nil {
		return 0, err
	}
	if _, err := s.Conn.Write(sealed); err != nil {
		return 0, err //nolint:wrapcheck // it names the address
	}
	return len(b), nil
}
