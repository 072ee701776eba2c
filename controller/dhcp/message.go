package dhcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

const (
	clientPort = 68
	serverPort = 67
	bootReply  = 2

	offEtherType    = 12
	offIP           = 14
	offHardwareAddr = 28 // in a message (RFC 2131 section 2)
	udpLength       = 8
	fragmentBits    = 0x3fff // more fragments, offset (RFC 791 section 3.1)

	maxID       = 254 // option 61 holds 255 bytes, the first is the type
	maxHostname = 63  // a label (RFC 1035 section 2.3.4)
)

// message is a message to servers.
type message struct {
	kind dhcpv4.MessageType
	xid  dhcpv4.TransactionID
	// elapsed is how long the exchange has been going on.
	elapsed time.Duration
	client  Client
	// requested and server are options 50 and 54, if they are valid.
	requested, server netip.Addr
	// release is set in a DHCPRELEASE. All others are broadcast.
	release *release
}

// release is what only a DHCPRELEASE has.
type release struct {
	addr netip.Addr // given back
	via  mac        // of the server or its relay
}

type mac [6]byte

var broadcast = mac{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// clientID is option 61. Type 0 is an identifier that is no hardware address
// (RFC 2132 section 9.14).
func clientID(id string) []byte { return append([]byte{0}, id...) }

// frame returns the Ethernet frame that carries the message.
func (m *message) frame(self net.HardwareAddr) ([]byte, error) {
	p := &dhcpv4.DHCPv4{
		OpCode:        dhcpv4.OpcodeBootRequest,
		HWType:        iana.HWTypeEthernet,
		TransactionID: m.xid,
		ClientHWAddr:  self,
		NumSeconds:    uint16(min(m.elapsed/time.Second, 1<<16-1)),
		Options:       dhcpv4.Options{},
	}
	p.UpdateOption(dhcpv4.OptMessageType(m.kind))
	p.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionClientIdentifier, clientID(m.client.ID)))
	if m.server.IsValid() {
		p.UpdateOption(dhcpv4.OptServerIdentifier(m.server.AsSlice()))
	}
	if r := m.release; r != nil { // RFC 2131 table 5: it has fewer fields
		p.ClientIPAddr = r.addr.AsSlice()
		return encapsulate(p.ToBytes(), self, r.via, r.addr, m.server)
	}
	p.SetBroadcast()
	if m.requested.IsValid() {
		p.UpdateOption(dhcpv4.OptRequestedIPAddress(m.requested.AsSlice()))
	}
	if m.client.Hostname != "" {
		p.UpdateOption(dhcpv4.OptHostName(m.client.Hostname[:min(len(m.client.Hostname), maxHostname)]))
	}
	p.UpdateOption(dhcpv4.OptParameterRequestList(
		dhcpv4.OptionSubnetMask, dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue))
	return encapsulate(p.ToBytes(), self, broadcast, netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{255, 255, 255, 255}))
}

// encapsulate puts a message for a server into UDP, IPv4 and Ethernet.
func encapsulate(payload []byte, self net.HardwareAddr, to mac, src, dst netip.Addr) ([]byte, error) {
	header, err := (&ipv4.Header{
		Version:  ipv4.Version,
		Len:      ipv4.HeaderLen,
		TotalLen: ipv4.HeaderLen + udpLength + len(payload),
		TTL:      64,
		Protocol: unix.IPPROTO_UDP,
		Src:      src.AsSlice(),
		Dst:      dst.AsSlice(),
	}).Marshal()
	if err != nil {
		return nil, fmt.Errorf("make an IPv4 header from %v to %v: %w", src, dst, err)
	}
	binary.BigEndian.PutUint16(header[10:], checksum(header))

	frame := append(to[:], self...)
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP)
	frame = append(frame, header...)
	frame = binary.BigEndian.AppendUint16(frame, clientPort)
	frame = binary.BigEndian.AppendUint16(frame, serverPort)
	frame = binary.BigEndian.AppendUint16(frame, uint16(udpLength+len(payload)))
	// No UDP checksum (RFC 768: zero): the frame check sequence guards the
	// way to the server or its relay.
	frame = append(frame, 0, 0)
	return append(frame, payload...), nil
}

// checksum is that of an IPv4 header (RFC 1071), zero if it contains its own.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// answer is a message from a server.
type answer struct {
	kind     dhcpv4.MessageType // OFFER, ACK or NAK
	xid      dhcpv4.TransactionID
	hardware mac    // that the answer is for, chaddr
	clientID []byte // as in option 61, nil if the server does not repeat it
	server   netip.Addr
	via      mac // the sender of the frame: the server or its relay
	// What follows is not in a NAK.
	addr   netip.Addr
	subnet netip.Prefix // the zero Prefix: the server gives none
	// lease is from now on; renew and rebind are 0 if the server gives none.
	lease, renew, rebind time.Duration
	text                 string // the server's message: why not, in a NAK
	// err is why the answer is unusable. Only xid, hardware, clientID and
	// server are right then.
	err error
}

// parse reads a frame. It reports false if that is not an answer to a DHCP
// client.
func parse(frame []byte) (answer, bool) {
	payload, ok := decapsulate(frame)
	if !ok {
		return answer{}, false
	}
	p, err := dhcpv4.FromBytes(payload)
	if err != nil || p.OpCode != dhcpv4.OpcodeBootReply || p.HWType != iana.HWTypeEthernet || len(p.ClientHWAddr) != 6 {
		return answer{}, false
	}
	a := answer{
		kind:     p.MessageType(),
		xid:      p.TransactionID,
		hardware: mac(p.ClientHWAddr),
		clientID: p.Options.Get(dhcpv4.OptionClientIdentifier),
		via:      mac(frame[6:]),
		text:     p.Message(),
	}
	a.server, _ = netip.AddrFromSlice(p.ServerIdentifier().To4())
	switch a.kind {
	case dhcpv4.MessageTypeOffer, dhcpv4.MessageTypeAck:
		a.err = a.terms(p)
	case dhcpv4.MessageTypeNak:
	default:
		return answer{}, false
	}
	if !unicast(a.server) {
		a.err = fmt.Errorf("%v is no identifier of a server (option 54)", p.ServerIdentifier())
	}
	return a, true
}

// decapsulate returns what an Ethernet frame has for a DHCP client. The UDP
// checksum is not looked at: the kernel leaves it to the hardware, so it is
// not in a frame that never left the machine.
func decapsulate(frame []byte) (payload []byte, ok bool) {
	if len(frame) < offIP+ipv4.HeaderLen+udpLength || binary.BigEndian.Uint16(frame[offEtherType:]) != unix.ETH_P_IP {
		return nil, false
	}
	ip := frame[offIP:]
	header, total := int(ip[0]&0xf)*4, int(binary.BigEndian.Uint16(ip[2:]))
	if ip[0]>>4 != ipv4.Version || header < ipv4.HeaderLen || total > len(ip) || total < header+udpLength ||
		ip[9] != unix.IPPROTO_UDP || binary.BigEndian.Uint16(ip[6:])&fragmentBits != 0 || checksum(ip[:header]) != 0 {
		return nil, false
	}
	udp := ip[header:total]
	length := int(binary.BigEndian.Uint16(udp[4:]))
	if length < udpLength || length > len(udp) || binary.BigEndian.Uint16(udp[2:]) != clientPort {
		return nil, false
	}
	return udp[udpLength:length], true
}

// terms reads what an OFFER or an ACK grants. The error is why it is unusable.
func (a *answer) terms(p *dhcpv4.DHCPv4) error {
	a.addr, _ = netip.AddrFromSlice(p.YourIPAddr.To4())
	a.lease = p.IPAddressLeaseTime(0)
	a.renew, a.rebind = p.IPAddressRenewalTime(0), p.IPAddressRebindingTime(0)
	switch {
	case !unicast(a.addr) || a.addr.IsLinkLocalUnicast(): // nodes have services of their own at 169.254.0.0/16
		return fmt.Errorf("%v is no address of a host", a.addr)
	case a.addr == a.server:
		return fmt.Errorf("%v is the server itself", a.addr)
	case a.lease <= 0:
		return errors.New("it has no valid lease time (option 51)")
	}
	if !p.Options.Has(dhcpv4.OptionSubnetMask) {
		return nil
	}
	value := p.Options.Get(dhcpv4.OptionSubnetMask)
	if len(value) != 4 {
		return fmt.Errorf("a subnet mask (option 1) of %d bytes", len(value))
	}
	mask := binary.BigEndian.Uint32(value)
	length := bits.LeadingZeros32(^mask)
	host := binary.BigEndian.Uint32(a.addr.AsSlice()) &^ mask
	switch {
	case mask<<length != 0 || length == 0:
		return fmt.Errorf("%v is no subnet mask (option 1)", net.IP(value))
	case length < 31 && (host == 0 || host == ^mask): // RFC 3021
		return fmt.Errorf("%v is the first or last address of its subnet, a /%d", a.addr, length)
	}
	a.subnet = netip.PrefixFrom(a.addr, length).Masked()
	return nil
}

// unicast reports whether a host can have the address.
func unicast(a netip.Addr) bool {
	if !a.Is4() {
		return false
	}
	b := a.As4()
	return b[0] != 0 && b[0] < 224 && !a.IsLoopback() // 224/4 multicast, 240/4 reserved (RFC 1112)
}
