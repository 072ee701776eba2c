package bgp

import (
	"bytes"
	"encoding/binary"
	"io"

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
