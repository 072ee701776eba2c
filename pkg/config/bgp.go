package config

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
)

// bgpCompiler reads peers, and what is announced to them.
type bgpCompiler struct{ values }

// Bounds and defaults of BGP.
const (
	bgpPort = 179

	maxBGPAdvertisements = 1000
	maxCommunities       = 32 // far below what a message of 4096 bytes takes
	maxPrepend           = 10

	minMultihop, maxMultihop = 2, 255 // 1 is what a session without it has
	maxTTL                   = 255
	maxHops                  = 254 // RFC 5082: a TTL of 255 less one for each router

	defaultHoldTime, minHoldTime, maxHoldTime             = 90 * time.Second, 3 * time.Second, math.MaxUint16 * time.Second
	defaultConnectRetry, minConnectRetry, maxConnectRetry = 5 * time.Second, time.Second, time.Hour
	defaultRestartTime, maxRestartTime                    = 120 * time.Second, 4095 * time.Second // RFC 4724, section 3: 12 bits

	defaultBFDInterval, minBFDInterval, maxBFDInterval = 300 * time.Millisecond, 10 * time.Millisecond, time.Minute
	defaultDetectMultiplier, maxDetectMultiplier       = 3, 255 // RFC 5880, section 4.1: 8 bits
)

func (c bgpCompiler) asn(v value) uint32 {
	if !v.present() {
		return 0
	}
	n, err := ParseASN(v.Value)
	if err == nil && v.ShortTag() == "!!str" {
		err = errors.New("has quotes: write the number without")
	}
	if err != nil {
		c.errorf(v, "%s %v", clip(v.Value), err)
	}
	return n
}

func (c bgpCompiler) peerASN(v value) ASN {
	switch s := v.text(); {
	case s == "internal":
		return ASN{Internal: true}
	case s == "external":
		return ASN{External: true}
	case decimal.MatchString(strings.TrimPrefix(strings.ToUpper(s), "AS")) && !decimal.MatchString(s):
		c.errorf(v, "%s has letters before the number: write %s", Quote(s), ascii(clip(s[2:])))
		return ASN{}
	case v.present() && !decimal.MatchString(s):
		c.errorf(v, "%s is not known here: write the router's AS number, internal (the same as the node's) or external (any other)",
			Quote(s))
		return ASN{}
	}
	return ASN{Number: c.asn(v)}
}

// kind reports whether a peer is certain to be internal or external. Without localASN that
// depends on the nodes.
func (p *Peer) kind() (internal, external bool) {
	known := p.PeerASN.Number != 0 && p.LocalASN != 0
	same := p.PeerASN.Number == p.LocalASN
	return p.PeerASN.Internal || known && same, p.PeerASN.External || known && !same
}

func (c bgpCompiler) peers(raw []rawPeer) []Peer {
	var all []Peer
	names, routers := map[string]value{}, map[string]value{}
	for _, r := range raw {
		p := Peer{
			Name:         c.uniqueName(r.Name, "peer", names),
			NodeSelector: c.selector(r.NodeSelector),
			Port:         uint16(cmp.Or(c.integer(r.Port, 1, math.MaxUint16), bgpPort)),
			LocalASN:     c.asn(r.LocalASN),
			PeerASN:      c.peerASN(r.PeerASN),
			RouterID:     c.routerID(r.RouterID),
			Passive:      c.flag(r.Passive, false),
			Password:     c.password(r.Password),
			ConnectRetry: c.seconds(r.ConnectRetry, defaultConnectRetry, minConnectRetry, maxConnectRetry),
			BFD:          c.bfd(r.BFD),
		}
		c.endpoints(r, &p)
		c.refuseSameRouter(r, &p, routers)
		c.distance(r, &p)
		c.minimumTTL(r.BFD, &p)
		c.timers(r, &p)
		all = append(all, p)
	}
	return all
}

// endpoints reads the addresses of the two ends of the connection.
func (c bgpCompiler) endpoints(r rawPeer, p *Peer) {
	p.Address, p.SourceAddress = c.host(r.Address), c.host(r.SourceAddress)
	p.Interface, _ = c.text(r.Interface, checkInterfaceName)
	switch {
	case r.Address.present() && r.Interface.present():
		c.errorf(r.Interface, "the peer has an address, too: remove one of the two, an interface alone is for routers that advertise "+
			"their address themselves (unnumbered)")
	case !r.Address.present() && !r.Interface.present():
		c.errorf(r.At, "has no address: write the router's, or the interface that it is on (unnumbered)")
	}
	switch a := p.Address; {
	case !a.IsValid():
	case a.Zone() != "" && !a.IsLinkLocalUnicast():
		c.errorf(r.Address, "%s has a zone, which only link-local addresses have: write %s", a, a.WithZone(""))
	case a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "":
		c.errorf(r.Address, "%s is link-local, so that it may be on every interface: write the interface behind it, as in %s%%eth0, or "+
			"interface in place of address", a, a)
	}
	if p.Passive && r.Interface.present() {
		c.errorf(r.Passive, "a passive peer is identified by its address, and an unnumbered peer has none: remove it, or write "+
			"address in place of interface")
	}
	source := p.SourceAddress
	switch {
	case !source.IsValid():
	case source.Zone() != "":
		c.errorf(r.SourceAddress, "%s has a zone: write %s, the interface is that of the peer's address", source, source.WithZone(""))
	case r.Interface.present():
		c.errorf(r.SourceAddress, "an unnumbered session is between link-local addresses: remove sourceAddress")
	case p.Address.IsValid() && source.Is4() != p.Address.Is4():
		c.errorf(r.SourceAddress, "%s cannot reach %s: one is IPv4 and one IPv6", source, p.Address)
	case source == p.Address:
		c.errorf(r.SourceAddress, "%s is the router's own address", source)
	}
}

// host returns an address that a single machine can have.
func (c bgpCompiler) host(v value) netip.Addr {
	if !v.present() {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(v.Value)
	switch {
	case err != nil:
		err = fmt.Errorf("%s is not an IP address: write one such as 203.0.113.254, without prefix length and port", Quote(v.Value))
	case a.Is4In6():
		err = fmt.Errorf("%s is an IPv4 address in IPv6 form: write %s", v.Value, a.Unmap())
	case a.IsUnspecified() || a.IsMulticast() || a.Is4() &&
		(a.As4()[0] == 0 || a.As4()[0] >= 240): // RFC 1122, section 3.2.1.3; RFC 1112, section 4
		err = fmt.Errorf("%s names no one machine: write an address that one has", v.Value)
	case a.Zone() != "" && checkInterfaceName(a.Zone()) != nil:
		err = fmt.Errorf("%s %w", Quote(a.Zone()), checkInterfaceName(a.Zone()))
	}
	if err != nil {
		c.errorf(v, "%v", err)
		return netip.Addr{}
	}
	return a
}

func (c bgpCompiler) routerID(v value) netip.Addr {
	if !v.present() {
		return netip.Addr{}
	}
	id, err := netip.ParseAddr(v.Value)
	if err != nil || !id.Is4() || id.IsUnspecified() {
		c.errorf(v, "%s is not a router ID: write one in the form of an IPv4 address, other than 0.0.0.0", Quote(v.Value))
	}
	return id
}

// refuseSameRouter refuses a second session of a node with one router, because both ends
// identify a session by the addresses.
func (c bgpCompiler) refuseSameRouter(r rawPeer, p *Peer, seen map[string]value) {
	at, where, nodes := r.Address, p.Address.String(), p.NodeSelector.String()
	if p.Interface != "" {
		at, where = r.Interface, "interface "+p.Interface
	} else if !p.Address.IsValid() {
		return
	}
	const every = "*" // no selector is written like this
	overlapping := []string{where + " " + nodes, where + " "}
	if nodes == "" {
		overlapping = []string{where + " " + every}
	}
	for _, other := range overlapping {
		if first, dup := seen[other]; dup {
			c.errorf(at, "the peer in line %d is there, too, for nodes that this one selects as well: separate their nodes by "+
				"nodeSelector, or remove one", c.lineOf(first))
			return
		}
	}
	seen[where+" "+nodes] = at
	if _, dup := seen[where+" "+every]; !dup {
		seen[where+" "+every] = at
	}
}

// distance reads how far away the router may be.
func (c bgpCompiler) distance(r rawPeer, p *Peer) {
	p.Multihop = c.integer(r.Multihop, minMultihop, maxMultihop)
	p.TTLSecurity = c.integer(r.TTLSecurity, 1, maxHops)
	internal, _ := p.kind()
	switch {
	case !r.Multihop.present():
	case r.TTLSecurity.present():
		c.errorf(r.Multihop, "ttlSecurity sets how far away the router may be, and allows for more than one hop: remove multihop")
	case p.Interface != "" || p.Address.IsLinkLocalUnicast():
		c.errorf(r.Multihop, "the router is on the segment, since its address is link-local: remove multihop")
	case internal:
		c.errorf(r.Multihop, "internal peers may be any number of hops away: remove multihop, and write bfd.minimumTTL if BFD has to "+
			"pass routers")
	}
}

// timers reads after which time the session counts as lost, and what happens then.
func (c bgpCompiler) timers(r rawPeer, p *Peer) {
	p.HoldTime = c.seconds(r.HoldTime, defaultHoldTime, 0, maxHoldTime)
	if p.HoldTime > 0 && p.HoldTime < minHoldTime {
		c.errorf(r.HoldTime, "%s is too short: at least %s, or 0s for none (RFC 4271, section 4.2)", p.HoldTime, minHoldTime)
	}
	if p.HoldTime == 0 && p.BFD == nil {
		c.errorf(r.HoldTime, "without hold time and without bfd nobody notices that the router is gone: write at least %s, or set bfd",
			minHoldTime)
	}
	longest := (p.HoldTime / 3).Truncate(time.Second)
	p.KeepaliveInterval = longest
	switch {
	case !r.KeepaliveInterval.present():
	case p.HoldTime == 0:
		c.errorf(r.KeepaliveInterval, "there are no keepalives with holdTime: 0s: remove it")
	default:
		p.KeepaliveInterval = c.seconds(r.KeepaliveInterval, longest, time.Second, maxHoldTime)
		if p.KeepaliveInterval > longest && p.HoldTime >= minHoldTime {
			c.errorf(r.KeepaliveInterval, "%s is longer than a third of holdTime, which is %s: at most %s", p.KeepaliveInterval,
				p.HoldTime, longest)
		}
	}
	if r.GracefulRestart != nil {
		p.GracefulRestart = c.seconds(r.GracefulRestart.RestartTime, defaultRestartTime, time.Second, maxRestartTime)
	}
}

func (c bgpCompiler) password(r *rawSecretKey) *SecretKey {
	if r == nil {
		return nil
	}
	s := &SecretKey{Key: "password"}
	s.Name, _ = c.text(r.Name, checkSecretName)
	if key, ok := c.text(r.Key, checkSecretKey); ok {
		s.Key = key
	}
	return s
}

func (c bgpCompiler) bfd(r *rawBFD) *BFD {
	if r == nil {
		return nil
	}
	return &BFD{
		TransmitInterval: c.durationFrom(r.TransmitInterval, defaultBFDInterval, minBFDInterval, maxBFDInterval),
		ReceiveInterval:  c.durationFrom(r.ReceiveInterval, defaultBFDInterval, minBFDInterval, maxBFDInterval),
		DetectMultiplier: cmp.Or(c.integer(r.DetectMultiplier, 1, maxDetectMultiplier), defaultDetectMultiplier),
		MinimumTTL:       c.integer(r.MinimumTTL, 1, maxTTL),
		Strict:           c.flag(r.Strict, false),
	}
}

// minimumTTL completes and checks the least TTL of BFD packets, by the distance
// that BGP is configured for.
func (c bgpCompiler) minimumTTL(r *rawBFD, p *Peer) {
	if r == nil {
		return
	}
	internal, _ := p.kind()
	switch hops := max(p.Multihop, p.TTLSecurity); {
	case hops > 1:
		p.BFD.MinimumTTL = cmp.Or(p.BFD.MinimumTTL, maxTTL+1-hops)
	case internal && hops == 0 && p.Interface == "" && !p.Address.IsLinkLocalUnicast(): // only this says that it is beyond the segment
	case p.BFD.MinimumTTL != 0:
		c.errorf(r.MinimumTTL, "the router is on the segment, and its packets have to arrive with a TTL of %d: remove it, or write how "+
			"far away the router is, with multihop or ttlSecurity", maxTTL)
		p.BFD.MinimumTTL = 0
	}
}

// bgp reads a BGP advertisement.
func (c bgpCompiler) bgp(r *rawBGP, peers names) *BGP {
	b := &BGP{
		NodeSelector:        c.selector(r.NodeSelector),
		Peers:               c.references(r.Peers, "a peer", peers),
		LocalPreference:     c.uint32(r.LocalPreference),
		MED:                 c.uint32(r.MED),
		Prepend:             c.integer(r.ASPathPrepend, 1, maxPrepend),
		AggregationLength:   cmp.Or(c.integer(r.AggregationLength, minPrefix4, 32), 32),
		AggregationLengthV6: cmp.Or(c.integer(r.AggregationLengthV6, minPrefix6, 128), 128),
		AggregatePartly:     c.flag(r.AggregatePartly, false),
	}
	c.communities(r.Communities, b)
	return b
}

// communities reads the communities of all kinds.
func (c bgpCompiler) communities(list []value, b *BGP) {
	if len(list) > maxCommunities {
		c.errorf(list[maxCommunities], "%s is one too many: an advertisement has at most %d communities",
			Quote(list[maxCommunities].Value), maxCommunities)
		list = list[:maxCommunities]
	}
	for _, v := range list {
		if err := b.attach(v.Value); err != nil {
			c.errorf(v, "%s %v", Quote(v.Value), err)
		}
	}
	slices.Sort(b.Communities)
	slices.SortFunc(b.LargeCommunities, LargeCommunity.Compare)
}

// permit returns all that may be announced by BGP, nil if the document has no such list.
func (c bgpCompiler) permit(raw []value) *netipx.IPSet {
	if raw == nil {
		return nil
	}
	var b netipx.IPSetBuilder
	prefixes := c.prefixes(raw, "write one that contains all that may be announced, such as 203.0.113.0/24")
	if len(prefixes) < len(raw) {
		return nil // its own errors come first: what it permits is not known
	}
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	set, _ := b.IPSet() // only valid prefixes go in
	return set
}

// routes returns how nodes reach each other's pods, nil if the document has nothing about it.
func (c bgpCompiler) routes(raw *rawRoutes, peers names) *Routes {
	if raw == nil {
		return nil
	}
	oneOf(c.report, raw.Mode, []RouteMode{RoutesKernel, RoutesBGP})
	r := &Routes{Mode: RouteMode(raw.Mode.text()), Peers: c.references(raw.Peers, "a peer", peers)}
	switch {
	case r.Mode == RoutesBGP && len(peers.all) == 0:
		c.errorf(raw.Mode, "announces pods to nobody: the document defines no peers")
	case r.Mode == RoutesKernel && len(raw.Peers) > 0:
		c.errorf(raw.Peers[0], "mode kernel announces no pods to peers: remove peers, or write mode: bgp")
	}
	r.CIDRs = c.prefixes(raw.CIDRs, podsHint)
	for _, v := range raw.CIDRs {
		if cidr, err := parsePrefix(v.Value); err == nil {
			c.refuseUnroutable(v, cidr)
		}
	}
	return r
}

const podsHint = "write one that contains the pods of all nodes, such as 10.244.0.0/16"

// refuseUnroutable refuses a prefix with addresses that pods cannot have.
func (c bgpCompiler) refuseUnroutable(v value, cidr netip.Prefix) {
	if cidr.Bits() == 0 {
		c.errorf(v, "%s contains every address: %s", cidr, podsHint)
		return
	}
	for _, s := range special {
		if cidr.Overlaps(s.prefix) {
			c.errorf(v, "%s cannot be used: %s %s", cidr, s.prefix, s.why)
			return
		}
	}
}
