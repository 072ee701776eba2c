package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// The capability of graceful restart: the bit for NOTIFICATIONs (RFC 8538 section 2), and the longest restart in seconds
// (RFC 4724 section 3).
const (
	restartNotification = 0x04
	maxRestart          = 1<<12 - 1
)

// negotiated is what follows from the router's OPEN and ours.
type negotiated struct {
	peerASN      uint32
	peerID       netip.Addr
	internal     bool
	holdTime     time.Duration // 0: neither side expects keepalives
	ipv4, ipv6   bool
	fourOctet    bool
	refresh      bool
	ipv4OverIPv6 bool // RFC 8950
	// restart is set if the router keeps the routes for a restart (RFC 4724);
	// notify if it does after a NOTIFICATION, too (RFC 8538).
	restart, notify bool
}

// openOf returns our OPEN. restarting is set when the router may still have our routes from before
// a restart, and kept when their traffic was served meanwhile.
func openOf(t *target, overIPv6, restarting, kept bool) ([]byte, error) {
	v4, v6 := packet.RF_IPv4_UC, packet.RF_IPv6_UC
	capabilities := []packet.ParameterCapabilityInterface{
		packet.NewCapMultiProtocol(v4), packet.NewCapMultiProtocol(v6),
		packet.NewCapRouteRefresh(), packet.NewCapFourOctetASNumber(t.LocalASN),
	}
	if overIPv6 {
		capabilities = append(capabilities, packet.NewCapExtendedNexthop([]*packet.CapExtendedNexthopTuple{
			packet.NewCapExtendedNexthopTuple(v4, packet.AFI_IP6)}))
	}
	if restart := t.Peer.GracefulRestart; restart > 0 {
		capabilities = append(capabilities, packet.NewCapGracefulRestart(restarting, true, uint16(min(restart/time.Second, maxRestart)),
			[]*packet.CapGracefulRestartTuple{packet.NewCapGracefulRestartTuple(v4, kept), packet.NewCapGracefulRestartTuple(v6, kept)}))
	}
	return packet.NewBGPOpenMessage(shortASN(t.LocalASN), uint16(t.Peer.HoldTime/time.Second), t.RouterID.String(),
		[]packet.OptionParameterInterface{packet.NewOptionParameterCapability(capabilities)}).Serialize()
}

// parseOpen decodes an OPEN and its capabilities. The library's decoder has ended whole processes
// before (gobgp issues 2007, 2326); here a panic of it is an error.
func parseOpen(body []byte) (open *packet.BGPOpen, capabilities []packet.ParameterCapabilityInterface, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	open = &packet.BGPOpen{}
	if err = open.DecodeFromBytes(body); err != nil {
		return open, nil, err
	}
	return open, readCapabilities(body), nil
}

// readCapabilities returns the capabilities of an OPEN, which may be in several optional parameters, without those that cannot be
// read. For the library's decoder, all capabilities of a parameter end at one of those.
func readCapabilities(body []byte) (all []packet.ParameterCapabilityInterface) {
	const before = 9 // bytes before the length of the optional parameters (RFC 4271 section 4.2)
	parameters, _, ok := cut(body[before:], 1)
	for ok && len(parameters) > 0 {
		kind := parameters[0]
		var value []byte
		value, parameters, ok = cut(parameters[1:], 1)
		for kind == packet.BGP_OPT_CAPABILITY && len(value) > 0 {
			_, rest, whole := cut(value[1:], 1)
			if !whole {
				break
			}
			if c, err := packet.DecodeCapability(value[:len(value)-len(rest)]); err == nil {
				all = append(all, c)
			}
			value = rest
		}
	}
	return all
}

// negotiate checks the router's OPEN. Its errors are *failure.
func negotiate(t *target, body []byte) (negotiated, error) {
	open, capabilities, err := parseOpen(body)
	if err != nil {
		return negotiated{}, refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, 0, nil, "the router sent an OPEN that cannot be read: %v", err)
	}
	if open.Version != 4 {
		return negotiated{}, refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER, []byte{0, 4},
			"the router speaks version %d of BGP, not 4", open.Version)
	}
	id, _ := netip.AddrFromSlice(open.ID)
	n := negotiated{peerASN: uint32(open.MyAS), peerID: id, ipv4: true}
	n.take(capabilities)
	n.internal = n.peerASN == t.LocalASN
	n.restart = n.restart && t.Peer.GracefulRestart > 0
	n.notify = n.notify && n.restart
	offered := time.Duration(open.HoldTime) * time.Second
	n.holdTime = min(t.Peer.HoldTime, offered)
	switch {
	case !fits(n.peerASN, t.LocalASN, t.Peer.PeerASN):
		err = refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_BAD_PEER_AS, nil,
			"the router is in AS %d, and its peerASN is configured as %s, where the node is in AS %d", n.peerASN,
			expected(t.Peer.PeerASN), t.LocalASN)
	case id.IsUnspecified(), n.internal && id == t.RouterID: // RFC 6286 section 2.2
		err = refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER, nil,
			"the router's BGP identifier is %s, and the node's %s", id, t.RouterID)
	case offered != 0 && offered < 3*time.Second: // RFC 4271 section 4.2
		err = refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil,
			"the router offers a hold time of %s, at least 3 s or 0 is valid", offered)
	case !n.ipv4 && !n.ipv6:
		err = refuse(packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, nil,
			"the router has neither IPv4 nor IPv6 unicast enabled for this session")
	}
	return n, err
}

// take takes over the capabilities of the OPEN.
func (n *negotiated) take(capabilities []packet.ParameterCapabilityInterface) {
	multiProtocol := false
	for _, c := range capabilities {
		switch c := c.(type) {
		case *packet.CapMultiProtocol:
			if !multiProtocol { // a router that names one family names all
				multiProtocol, n.ipv4 = true, false
			}
			n.ipv4 = n.ipv4 || c.CapValue == packet.RF_IPv4_UC
			n.ipv6 = n.ipv6 || c.CapValue == packet.RF_IPv6_UC
		case *packet.CapFourOctetASNumber:
			n.peerASN, n.fourOctet = c.CapValue, true
		case *packet.CapRouteRefresh:
			n.refresh = true
		case *packet.CapExtendedNexthop:
			n.ipv4OverIPv6 = n.ipv4OverIPv6 || slices.ContainsFunc(c.Tuples, func(t *packet.CapExtendedNexthopTuple) bool {
				return *t == packet.CapExtendedNexthopTuple{NLRIAFI: packet.AFI_IP, NLRISAFI: packet.SAFI_UNICAST, NexthopAFI: packet.AFI_IP6}
			})
		case *packet.CapGracefulRestart:
			n.restart, n.notify = true, c.Flags&restartNotification != 0
		}
	}
}

// fits reports whether the router's AS number is what it has to be.
func fits(peer, local uint32, want config.ASN) bool {
	switch {
	case peer == 0: // RFC 7607
		return false
	case want.Internal:
		return peer == local
	case want.External:
		return peer != local
	}
	return want.Number == 0 || peer == want.Number
}

func expected(want config.ASN) string {
	switch {
	case want.Internal:
		return "internal"
	case want.External:
		return "external"
	}
	return strconv.FormatUint(uint64(want.Number), 10)
}

// keepalive returns the interval of our keepalives: the configured one, or a shorter one if
// the agreed hold time needs it (RFC 4271 section 4.4).
func (n negotiated) keepalive(configured time.Duration) time.Duration {
	third := n.holdTime / 3
	if configured == 0 {
		return third
	}
	return min(configured, third)
}

// capabilities names what was agreed on.
func (n negotiated) capabilities() []string {
	var names []string
	for _, c := range []struct {
		agreed bool
		name   string
	}{
		{n.fourOctet, "four-octet AS numbers"},
		{n.refresh, "route refresh"},
		{n.ipv4OverIPv6, "IPv4 over IPv6 next hops"},
		{n.restart, "graceful restart"},
		{n.notify, "graceful restart after notifications"},
	} {
		if c.agreed {
			names = append(names, c.name)
		}
	}
	return names
}

func (n negotiated) families() []string {
	var names []string
	if n.ipv4 {
		names = append(names, "IPv4")
	}
	if n.ipv6 {
		names = append(names, "IPv6")
	}
	return names
}
