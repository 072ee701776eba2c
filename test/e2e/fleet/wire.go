package fleet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// Claim is an announcement that was seen on the segment.
type Claim struct {
	At   time.Time
	VIP  netip.Addr
	Node string
}

// Traffic counts the frames that nodes have sent, each once.
type Traffic struct {
	// VIPs are ARP packets about VIPs: questions, answers and announcements.
	VIPs int
	// Membership are packets from speaker to speaker.
	Membership int
}

// wire sees every frame that a node sends, as the switch's ports take it in.
type wire struct {
	socket  int
	ports   map[int]string // the nodes' ports by index
	vips    netip.Prefix
	reading sync.WaitGroup

	mu      sync.Mutex
	traffic Traffic
	claims  []Claim
	owners  map[netip.Addr]string
	moves   int
}

// receiveBuffer holds the frames of a takeover of thousands of VIPs.
const receiveBuffer = 32 << 20

// tap listens on all interfaces of the namespace.
func tap(namespace string, ports map[int]string, vips netip.Prefix) (*wire, error) {
	w := &wire{ports: ports, vips: vips, owners: map[netip.Addr]string{}}
	err := netns.Do(namespace, func() (err error) {
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network byte order
		if w.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(w.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer),
			unix.SetsockoptInt(w.socket, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1), // a busy reader is late
			// So that the end is noticed.
			unix.SetsockoptTimeval(w.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	})
	if err != nil {
		return nil, fmt.Errorf("listen on the switch: %w", err)
	}
	return w, nil
}

// read reads until done is closed.
func (w *wire) read(done <-chan struct{}) {
	buf, control := make([]byte, 2048), make([]byte, 128)
	for {
		select {
		case <-done:
			return
		default:
		}
		n, k, _, from, err := unix.Recvmsg(w.socket, buf, control, 0)
		if link, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && link.Pkttype != unix.PACKET_OUTGOING {
			if node, ok := w.ports[link.Ifindex]; ok {
				w.take(node, buf[:n], arrival(control[:k]))
			}
		}
	}
}

// arrival returns when the kernel got the frame.
func arrival(control []byte) time.Time {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 || messages[0].Header.Type != unix.SCM_TIMESTAMPNS {
		return time.Now()
	}
	at := messages[0].Data // a timespec
	return time.Unix(int64(binary.NativeEndian.Uint64(at)), int64(binary.NativeEndian.Uint64(at[8:])))
}

// Offsets in an Ethernet frame with ARP (RFC 826), and with IPv4 and UDP or TCP.
const (
	offEtherType, offARPOperation, offARPSender, offARPTarget = 12, 20, 28, 38
	offIPProtocol, offSourcePort                              = 23, 34
	arpLength, ipv4Length                                     = 42, 38
	membershipPort                                            = 9744
)

// take counts a frame of a node.
func (w *wire) take(node string, frame []byte, at time.Time) {
	if len(frame) < arpLength {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch binary.BigEndian.Uint16(frame[offEtherType:]) {
	case unix.ETH_P_ARP:
		sender, target := netip.AddrFrom4([4]byte(frame[offARPSender:])), netip.AddrFrom4([4]byte(frame[offARPTarget:]))
		if w.vips.Contains(sender) || w.vips.Contains(target) {
			w.traffic.VIPs++
		}
		if w.vips.Contains(sender) && net.HardwareAddr(frame[:6]).String() == "ff:ff:ff:ff:ff:ff" {
			w.note(Claim{at, sender, node})
		}
	case unix.ETH_P_IP:
		source, target := binary.BigEndian.Uint16(frame[offSourcePort:]), binary.BigEndian.Uint16(frame[offSourcePort+2:])
		if p := frame[offIPProtocol]; (p == unix.IPPROTO_UDP || p == unix.IPPROTO_TCP) && (source == membershipPort || target == membershipPort) {
			w.traffic.Membership++
		}
	}
}

func (w *wire) note(c Claim) {
	w.claims = append(w.claims, c)
	if owner := w.owners[c.VIP]; owner != c.Node {
		w.owners[c.VIP] = c.Node
		if owner != "" {
			w.moves++
		}
	}
}
