package bgp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

const (
	headerLength = packet.BGP_HEADER_LENGTH
	maxLength    = packet.BGP_MAX_MESSAGE_LENGTH // RFC 4271 section 4.1
)

// message is a received message without its header.
type message struct {
	kind uint8
	body []byte
}

var marker = bytes.Repeat([]byte{0xff}, 16)

// readMessage reads one message. Its errors of form are *failure.
func readMessage(r io.Reader) (message, error) {
	var header [headerLength]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return message{}, err
	}
	length, kind := int(binary.BigEndian.Uint16(header[16:])), header[18]
	least := map[uint8]int{
		packet.BGP_MSG_OPEN: 29, packet.BGP_MSG_UPDATE: 23, packet.BGP_MSG_NOTIFICATION: 21,
		packet.BGP_MSG_KEEPALIVE: headerLength, packet.BGP_MSG_ROUTE_REFRESH: 23,
	}[kind]
	switch {
	case !bytes.Equal(header[:16], marker):
		return message{}, refuse(packet.BGP_ERROR_MESSAGE_HEADER_ERROR, packet.BGP_ERROR_SUB_CONNECTION_NOT_SYNCHRONIZED, nil,
			"the router sends what is not BGP: a header without the marker")
	case least == 0:
		return message{}, refuse(packet.BGP_ERROR_MESSAGE_HEADER_ERROR, packet.BGP_ERROR_SUB_BAD_MESSAGE_TYPE, header[18:19],
			"the router sent a message of unknown type %d", kind)
	case length < least, length > maxLength, kind == packet.BGP_MSG_KEEPALIVE && length != headerLength:
		return message{}, refuse(packet.BGP_ERROR_MESSAGE_HEADER_ERROR, packet.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH, header[16:18],
			"the router sent a message of type %d and %d bytes, which has at least %d and at most %d", kind, length, least, maxLength)
	}
	m := message{kind, make([]byte, length-headerLength)}
	if _, err := io.ReadFull(r, m.body); err != nil {
		return message{}, err
	}
	return m, nil
}

// keepalive is the message KEEPALIVE.
var keepalive = append(append([]byte{}, marker...), 0, headerLength, packet.BGP_MSG_KEEPALIVE)

// expect reads a message of the kind. Another one is a failure with the subcode (RFC 6608).
func expect(r io.Reader, kind, subcode uint8) (message, error) {
	m, err := readMessage(r)
	switch {
	case err != nil:
		return m, err
	case m.kind == packet.BGP_MSG_NOTIFICATION:
		return m, notified(m.body)
	case m.kind != kind:
		return m, refuse(packet.BGP_ERROR_FSM_ERROR, subcode, []byte{m.kind},
			"the router sent a message of type %d where one of type %d was due", m.kind, kind)
	}
	return m, nil
}

// countPrefixes returns how many prefixes an UPDATE announces. It fails if it cannot find the
// prefixes. Other errors in routes do not matter, because all routes are dropped (RFC 7606
// section 3).
func countPrefixes(update []byte) (int, error) {
	_, rest, ok := cut(update, 2)
	attributes, nlri, ok2 := cut(rest, 2)
	if !ok || !ok2 {
		return 0, malformed(packet.BGP_ERROR_SUB_MALFORMED_ATTRIBUTE_LIST, "lengths beyond its end")
	}
	n, ok := countNLRI(nlri)
	if !ok {
		return 0, malformed(packet.BGP_ERROR_SUB_INVALID_NETWORK_FIELD, "a prefix beyond its end")
	}
	for len(attributes) > 0 {
		if len(attributes) < 3 {
			return 0, malformed(packet.BGP_ERROR_SUB_MALFORMED_ATTRIBUTE_LIST, "an attribute beyond its end")
		}
		kind, width := packet.BGPAttrType(attributes[1]), 1
		if packet.BGPAttrFlag(attributes[0])&packet.BGP_ATTR_FLAG_EXTENDED_LENGTH != 0 {
			width = 2
		}
		var value []byte
		if value, attributes, ok = cut(attributes[2:], width); !ok {
			return 0, malformed(packet.BGP_ERROR_SUB_MALFORMED_ATTRIBUTE_LIST, "an attribute beyond its end")
		}
		if kind == packet.BGP_ATTR_TYPE_MP_REACH_NLRI {
			m, ok := countReachable(value)
			if !ok {
				return 0, malformed(packet.BGP_ERROR_SUB_INVALID_NETWORK_FIELD, "a prefix beyond its end")
			}
			n += m
		}
	}
	return n, nil
}

func malformed(subcode uint8, what string) error {
	return refuse(packet.BGP_ERROR_UPDATE_MESSAGE_ERROR, subcode, nil, "the router sent a malformed UPDATE: it has %s", what)
}

// cut reads a length of width bytes from b, and returns as many bytes and what follows them.
func cut(b []byte, width int) (counted, rest []byte, ok bool) {
	if len(b) < width {
		return nil, nil, false
	}
	n := int(b[0])
	if width == 2 {
		n = int(binary.BigEndian.Uint16(b))
	}
	if b = b[width:]; n > len(b) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}

// countReachable counts the prefixes of MP_REACH_NLRI (RFC 4760 section 3) of
// the families that we negotiate.
func countReachable(value []byte) (int, bool) {
	if len(value) < 3 {
		return 0, false
	}
	_, rest, ok := cut(value[3:], 1) // behind AFI and SAFI is the next hop
	if !ok || len(rest) < 1 {
		return 0, false
	}
	return countNLRI(rest[1:])
}

func countNLRI(b []byte) (n int, ok bool) {
	for len(b) > 0 {
		size := 1 + (int(b[0])+7)/8
		if size > len(b) {
			return 0, false
		}
		b = b[size:]
		n++
	}
	return n, true
}

// encoding is what the form of UPDATEs in a session depends on.
type encoding struct {
	internal  bool
	localASN  uint32
	fourOctet bool // whether the router knows AS numbers of four (RFC 6793)
	next4     netip.Addr
	next6     netip.Addr
	link6     netip.Addr // link-local next hop beside next6 (RFC 2545 section 3)
}

// maxPath is how many AS numbers a path segment can have (RFC 4271 section
// 4.3).
const maxPath = 255

// defaultPreference is the local preference that routers use for routes without one. Internal
// peers must be sent one (RFC 4271 section 5.1.5).
const defaultPreference = 100

// announcements returns the UPDATEs that announce prefixes of one family with
// the attributes.
func (e encoding) announcements(s attributeSet, prefixes []netip.Prefix) ([][]byte, error) {
	switch {
	case len(prefixes) == 0:
		return nil, nil
	case s.prepend >= maxPath:
		return nil, fmt.Errorf("%d times the AS number and once more are too much for a path segment of %d", s.prepend, maxPath)
	}
	attributes := e.attributes(s)
	is4 := prefixes[0].Addr().Is4()
	next := e.next6
	if is4 {
		next = e.next4
	}
	classic := is4 && next.Is4()
	if classic {
		attributes = append(attributes, packet.NewPathAttributeNextHop(next.String()))
	}
	room := maxLength - headerLength - 4
	for _, a := range attributes {
		b, err := a.Serialize()
		if err != nil {
			return nil, err
		}
		room -= len(b)
	}
	if !classic {
		room -= 9 + 32 // head and next hops of MP_REACH_NLRI
	}
	var all [][]byte
	for chunk := range chunks(prefixes, room) {
		m := packet.NewBGPUpdateMessage(nil, attributes, nil)
		if classic {
			m = packet.NewBGPUpdateMessage(nil, attributes, nlri4(chunk))
		} else {
			reach := packet.NewPathAttributeMpReachNLRI(next.String(), nlri(chunk))
			if !is4 && e.link6.IsValid() {
				reach.LinkLocalNexthop = net.IP(e.link6.AsSlice())
			}
			m = packet.NewBGPUpdateMessage(nil, append(attributes[:len(attributes):len(attributes)], reach), nil)
		}
		b, err := m.Serialize()
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	if all == nil {
		return nil, fmt.Errorf("the attributes leave no room in a message of %d bytes", maxLength)
	}
	return all, nil
}

// attributes returns the path attributes in order of their types, without those of the next
// hop.
func (e encoding) attributes(s attributeSet) []packet.PathAttributeInterface {
	a := s.attributes()
	all := append([]packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP)}, e.path(s.prepend)...)
	if a.MED != nil {
		all = append(all, packet.NewPathAttributeMultiExitDisc(*a.MED))
	}
	if e.internal {
		preference := uint32(defaultPreference)
		if a.LocalPreference != nil {
			preference = *a.LocalPreference
		}
		all = append(all, packet.NewPathAttributeLocalPref(preference))
	}
	if len(a.Communities) > 0 {
		var values []uint32
		for _, c := range a.Communities {
			values = append(values, uint32(c))
		}
		all = append(all, packet.NewPathAttributeCommunities(values))
	}
	if len(a.LargeCommunities) > 0 {
		var values []*packet.LargeCommunity
		for _, c := range a.LargeCommunities {
			values = append(values, packet.NewLargeCommunity(c.GlobalAdmin, c.Data1, c.Data2))
		}
		all = append(all, packet.NewPathAttributeLargeCommunities(values))
	}
	return all
}

// path returns AS_PATH: empty to internal peers, else the local AS number once
// and as often again as wanted. A router that knows only numbers of two bytes
// gets AS_TRANS in it, and AS4_PATH for those behind it (RFC 6793 section 4.2.2).
func (e encoding) path(prepend int) []packet.PathAttributeInterface {
	if e.internal {
		return []packet.PathAttributeInterface{packet.NewPathAttributeAsPath(nil)}
	}
	long := make([]uint32, 1+prepend)
	short := make([]uint16, 1+prepend)
	for i := range long {
		long[i], short[i] = e.localASN, shortASN(e.localASN)
	}
	whole := packet.NewAs4PathParam(packet.BGP_ASPATH_ATTR_TYPE_SEQ, long)
	if e.fourOctet {
		return []packet.PathAttributeInterface{packet.NewPathAttributeAsPath([]packet.AsPathParamInterface{whole})}
	}
	path := packet.NewPathAttributeAsPath([]packet.AsPathParamInterface{packet.NewAsPathParam(packet.BGP_ASPATH_ATTR_TYPE_SEQ, short)})
	if e.localASN <= 0xffff {
		return []packet.PathAttributeInterface{path}
	}
	return []packet.PathAttributeInterface{path, packet.NewPathAttributeAs4Path([]*packet.As4PathParam{whole})}
}

// shortASN returns the AS number in two bytes.
func shortASN(asn uint32) uint16 {
	if asn > 0xffff {
		return packet.AS_TRANS
	}
	return uint16(asn)
}

// withdrawals returns the UPDATEs that withdraw prefixes of one family.
func (e encoding) withdrawals(prefixes []netip.Prefix) ([][]byte, error) {
	var all [][]byte
	for chunk := range chunks(prefixes, maxLength-headerLength-4-7) {
		var m *packet.BGPMessage
		if prefixes[0].Addr().Is4() && e.next4.Is4() {
			m = packet.NewBGPUpdateMessage(nlri4(chunk), nil, nil)
		} else {
			m = packet.NewBGPUpdateMessage(nil, []packet.PathAttributeInterface{packet.NewPathAttributeMpUnreachNLRI(nlri(chunk))}, nil)
		}
		b, err := m.Serialize()
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return all, nil
}

// chunks yields pieces of the prefixes that fit into so many bytes.
func chunks(prefixes []netip.Prefix, room int) func(func([]netip.Prefix) bool) {
	return func(yield func([]netip.Prefix) bool) {
		from, used := 0, 0
		for i, p := range prefixes {
			size := 1 + (p.Bits()+7)/8
			if size > room {
				return
			}
			if used+size > room {
				if !yield(prefixes[from:i]) {
					return
				}
				from, used = i, 0
			}
			used += size
		}
		if len(prefixes) > 0 {
			yield(prefixes[from:])
		}
	}
}

func nlri4(prefixes []netip.Prefix) []*packet.IPAddrPrefix {
	all := make([]*packet.IPAddrPrefix, len(prefixes))
	for i, p := range prefixes {
		all[i] = packet.NewIPAddrPrefix(uint8(p.Bits()), p.Addr().String())
	}
	return all
}

func nlri(prefixes []netip.Prefix) []packet.AddrPrefixInterface {
	all := make([]packet.AddrPrefixInterface, len(prefixes))
	for i, p := range prefixes {
		if p.Addr().Is4() {
			all[i] = packet.NewIPAddrPrefix(uint8(p.Bits()), p.Addr().String())
		} else {
			all[i] = packet.NewIPv6AddrPrefix(uint8(p.Bits()), p.Addr().String())
		}
	}
	return all
}
