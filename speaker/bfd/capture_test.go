package bfd

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// captured is a BFD packet as an interface saw it.
type captured struct {
	Packet
	at          time.Time // by the kernel
	outgoing    bool
	from, to    netip.AddrPort
	hops, class int
}

// capture records the BFD packets of an interface.
type capture struct {
	fd      int
	mu      sync.Mutex
	packets []captured
}

// startCapture records until the test ends.
func startCapture(t testing.TB, h *testnet.Host, name string) *capture {
	t.Helper()
	c := &capture{}
	require.NoError(t, h.Do(func() (err error) {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		all := binary.BigEndian.Uint16([]byte{unix.ETH_P_ALL & 0xff, unix.ETH_P_ALL >> 8})
		c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(all))
		if err != nil {
			return err
		}
		timeout := unix.NsecToTimeval((50 * time.Millisecond).Nanoseconds())
		return errors.Join(
			unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}),
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	}))
	over := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() { c.read(over) })
	t.Cleanup(func() {
		close(over)
		reader.Wait()
		unix.Close(c.fd)
	})
	return c
}

func (c *capture) read(over <-chan struct{}) {
	buf, control := make([]byte, 2048), make([]byte, 256)
	for {
		select {
		case <-over:
			return
		default:
		}
		n, nc, _, from, err := unix.Recvmsg(c.fd, buf, control, 0)
		if err != nil {
			continue
		}
		p, ok := decode(buf[:n])
		link, isLink := from.(*unix.SockaddrLinklayer)
		messages, err := unix.ParseSocketControlMessage(control[:nc])
		if !ok || !isLink || err != nil || len(messages) == 0 {
			continue
		}
		data := messages[0].Data
		p.at = time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:])))
		p.outgoing = link.Pkttype == unix.PACKET_OUTGOING
		c.mu.Lock()
		c.packets = append(c.packets, p)
		c.mu.Unlock()
	}
}

// decode reads an IP packet that has BFD and no IP options.
func decode(b []byte) (p captured, ok bool) {
	var source, destination netip.Addr
	switch {
	case len(b) >= 28 && b[0] == 0x45 && b[9] == unix.IPPROTO_UDP:
		source, destination = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		p.class, p.hops = int(b[1]), int(b[8])
		b = b[20:]
	case len(b) >= 48 && b[0]>>4 == 6 && b[6] == unix.IPPROTO_UDP:
		source, destination = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		p.class, p.hops = int(binary.BigEndian.Uint16(b)>>4&0xff), int(b[7])
		b = b[40:]
	default:
		return p, false
	}
	p.from = netip.AddrPortFrom(source, binary.BigEndian.Uint16(b))
	p.to = netip.AddrPortFrom(destination, binary.BigEndian.Uint16(b[2:]))
	if port := p.to.Port(); port != singleHopPort && port != multihopPort {
		return p, false
	}
	var why Discard
	p.Packet, why = parse(b[8:])
	return p, why == used
}

// since returns the packets from a moment on that fit.
func (c *capture) since(start time.Time, fits func(captured) bool) (found []captured) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.packets {
		if !p.at.Before(start) && fits(p) {
			found = append(found, p)
		}
	}
	return found
}
