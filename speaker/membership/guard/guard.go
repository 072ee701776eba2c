// Package guard is memberlist's transport without what memberlist must not see.
//
// memberlist reads a packet as its first byte says: 1 is plain AES-GCM, 0 an older
// form with padding. That byte is not authenticated. Whoever repeats a speaker's
// packet with a 0 there has its last byte taken for the length of the padding, and
// if that is more than the packet has, memberlist panics (security.go, pkcs7decode).
// So nothing passes here that is not of the form in which speakers send: no key is
// needed to tell.
package guard

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// The form in which memberlist 0.7 sends with a label and a key.
const (
	hasLabel  = 244 // net.go, hasLabelMsg; then a byte for its length, and the label
	encrypted = 10  // net.go, encryptMsg, of a stream: then four bytes for its length
	version   = 1   // security.go, maxEncryptionVersion
)

var errForm = errors.New("not of the form in which speakers send")

// Transport passes on what has the form.
type Transport struct {
	*memberlist.NetTransport
	label   []byte
	refused func()
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

// portTries is how often a port is looked for that is free for TCP and UDP.
const portTries = 10

// New listens as the configuration says, whose port it sets if that is 0. refused is
// called for each packet that does not have the form. Shutdown ends it.
func New(c *memberlist.Config, refused func()) (*Transport, error) {
	t := &Transport{
		label:   append([]byte{hasLabel, byte(len(c.Label))}, c.Label...),
		refused: refused,
		packets: make(chan *memberlist.Packet),
		streams: make(chan net.Conn),
		done:    make(chan struct{}),
	}
	var err error
	for range portTries {
		t.NetTransport, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{c.BindAddr}, BindPort: c.BindPort, Logger: c.Logger})
		if err == nil || c.BindPort != 0 {
			break
		}
	}
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the address
	}
	if c.BindPort == 0 {
		c.BindPort = t.GetAutoBindPort()
		c.AdvertisePort = c.BindPort
	}
	t.running.Go(t.pass)
	return t, nil
}

// pass passes on what comes in until Shutdown.
func (t *Transport) pass() {
	for {
		select {
		case p := <-t.NetTransport.PacketCh():
			if !bytes.HasPrefix(p.Buf, append(t.label[:len(t.label):len(t.label)], version)) {
				t.refused()
				continue
			}
			select {
			case t.packets <- p:
			case <-t.done:
			}
		case c := <-t.NetTransport.StreamCh():
			select {
			case t.streams <- &stream{Conn: c, label: t.label}:
			case <-t.done:
				c.Close()
			}
		case <-t.done:
			return
		}
	}
}

// PacketCh implements memberlist.Transport.
func (t *Transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *Transport) StreamCh() <-chan net.Conn { return t.streams }

// DialTimeout implements memberlist.Transport.
func (t *Transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout implements memberlist.NodeAwareTransport. Answers have no label.
func (t *Transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	c, err := t.NetTransport.DialAddressTimeout(addr, timeout)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the address
	}
	return &stream{Conn: c}, nil
}

// Shutdown implements memberlist.Transport.
func (t *Transport) Shutdown() error {
	err := t.NetTransport.Shutdown() // which waits until somebody has taken what it has
	t.once.Do(func() { close(t.done) })
	t.running.Wait()
	return err //nolint:wrapcheck // it is nil
}

// stream is a connection from which nothing is read that does not have the form.
type stream struct {
	net.Conn
	label []byte
	rest  io.Reader // once the beginning has been seen
}

func (s *stream) Read(b []byte) (int, error) {
	if s.rest == nil {
		if err := s.begin(); err != nil {
			return 0, err
		}
	}
	return s.rest.Read(b) //nolint:wrapcheck // io.EOF is one
}

// begin reads the beginning.
func (s *stream) begin() error {
	head := make([]byte, len(s.label)+6) // type, length, version
	n, err := io.ReadFull(s.Conn, head)
	switch {
	case err == nil && bytes.HasPrefix(head, s.label) && head[len(s.label)] == encrypted && head[n-1] == version:
		s.rest = io.MultiReader(bytes.NewReader(head), s.Conn)
		return nil
	case err == nil, errors.Is(err, io.ErrUnexpectedEOF):
		return errForm
	}
	return err //nolint:wrapcheck // io.EOF is one: nothing was said
}
