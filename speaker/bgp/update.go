package bgp

import (
	"fmt"
	"net"
	"net/netip"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

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
