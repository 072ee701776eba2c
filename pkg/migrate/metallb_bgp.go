package migrate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// convertBGP writes an advertisement, or several where MetalLB has alternatives.
func (m *metalLB) convertBGP(r *resource[bgpSpec], taken names) {
	spec := &r.Spec
	b := bgp{LocalPreference: spec.LocalPref, Peers: m.namesOf(r.object, spec.Peers)}
	if len(spec.Peers) > 0 && len(b.Peers) == 0 {
		m.decidef(r.object, "spec.peers", "none of these peers exists, so that MetalLB announces nothing by this "+
			"advertisement: it is left out")
		return
	}
	if len(m.doc.Peers) == 0 {
		m.decidef(r.object, "", "there is no BGPPeer, so that MetalLB announces nothing by this advertisement: it is left out")
		return
	}
	toInternal := slices.ContainsFunc(b.Peers, func(name string) bool { return m.internal[name] })
	if b.LocalPreference != 0 && !toInternal && (len(b.Peers) > 0 || len(m.internal) == 0) {
		m.notef(r.object, "spec.localPref", "it is sent to internal peers only, and these are all external: it is left out")
		b.LocalPreference = 0
	}
	seen := map[string]bool{} // an alias may stand for another one
	for i, text := range spec.Communities {
		for _, c := range m.community(r.object, fmt.Sprintf("spec.communities[%d]", i), text) {
			if !seen[c] {
				b.Communities = append(b.Communities, c)
			}
			seen[c] = true
		}
	}
	if n := spec.AggregationLength; n != nil && *n != 32 {
		b.AggregationLength, b.AggregatePartly = *n, true
	}
	if n := spec.AggregationLengthV6; n != nil && *n != 128 {
		b.AggregationLengthV6, b.AggregatePartly = *n, true
	}
	m.each(r.object, spec.reach, "-bgp", taken, func(name string, nodes, services *selector) {
		one := b
		one.NodeSelector = nodes
		m.doc.Advertisements = append(m.doc.Advertisements, advertisement{Name: name, ServiceSelector: services, BGP: &one})
	})
}

// community returns a community as we write it: MetalLB has aliases for them,
// and puts "large:" before large ones.
func (m *metalLB) community(o *Object, field, text string) []string {
	value := text
	if c, found := m.communities[text]; found {
		value, c.used = c.value, true
	}
	if !strings.Contains(value, ":") {
		m.errorf(o, field, "%s is no community, nor the alias of one that a Community has", config.Quote(text))
		return nil
	}
	return []string{strings.TrimPrefix(value, "large:")}
}

// namesOf returns our names of MetalLB's peers. It leaves out peers that do not exist.
func (m *metalLB) namesOf(o *Object, peers []string) (names []string) {
	for i, p := range peers {
		if m.peerNames[p] == nil {
			m.notef(o, fmt.Sprintf("spec.peers[%d]", i), "there is no BGPPeer %s", config.Quote(p))
		}
		if m.spend(o, &m.copies, len(m.peerNames[p])) {
			names = append(names, m.peerNames[p]...)
		}
	}
	return names
}

func (m *metalLB) convertPeers() {
	taken := names{}
	for i := range m.peers {
		r := &m.peers[i]
		out := m.peer(r)
		nodes := anyOf(r.Spec.NodeSelectors)
		for i, n := range nodes {
			one := out
			one.Name, one.NodeSelector = taken.unique(numbered(r.object.Name, i, len(nodes)), "-peer"), n
			m.peerNames[r.object.Name] = append(m.peerNames[r.object.Name], one.Name)
			m.doc.Peers = append(m.doc.Peers, one)
			if one.PeerASN == "internal" || one.PeerASN == one.LocalASN {
				m.internal[one.Name] = true
			}
		}
		if len(nodes) > 1 {
			m.decidef(r.object, "spec.nodeSelectors", "has %d selectors of which one has to match, and becomes the peers %s: see that "+
				"no node matches two of them, it would have two sessions with one router",
				len(nodes), strings.Join(m.peerNames[r.object.Name], ", "))
		}
	}
}

// peer returns the peer without name and nodes.
func (m *metalLB) peer(r *resource[peerSpec]) peer {
	o, spec := r.object, &r.Spec
	p := peer{
		Address: unmapped(spec.PeerAddress), Interface: spec.Interface, SourceAddress: unmapped(spec.SourceAddress),
		RouterID: spec.RouterID,
		LocalASN: cmp.Or(spec.LocalASN, spec.MyASN), PeerASN: spec.PeerASN,
	}
	switch {
	case spec.DynamicASN == "internal", spec.DynamicASN == "external":
		p.PeerASN = spec.DynamicASN
	case spec.DynamicASN != "":
		m.errorf(o, "spec.dynamicASN", "%s is neither internal nor external", config.Quote(spec.DynamicASN))
	case spec.PeerASN == 0:
		m.errorf(o, "spec.peerASN", "is missing, and so is dynamicASN")
	}
	if p.LocalASN == 0 {
		m.errorf(o, "spec.myASN", "is missing")
	}
	if (spec.PeerAddress == "") == (spec.Interface == "") {
		m.errorf(o, "spec.peerAddress", "a peer has either an address or an interface")
	}
	if spec.PeerPort != 179 {
		p.Port = spec.PeerPort
	}
	if spec.EBGPMultiHop {
		p.Multihop = anyHops
	}
	if spec.EnableGracefulRestart {
		p.GracefulRestart = &gracefulRestart{}
	}
	m.timers(o, spec, &p)
	m.password(o, spec, &p)
	p.BFD = m.bfd(o, spec.BFDProfile, p.Multihop > 0)
	m.withoutCounterpart(o, spec)
	return p
}

func (m *metalLB) withoutCounterpart(o *Object, spec *peerSpec) {
	if spec.VRF != "" {
		m.decidef(o, "spec.vrf", "Lodestone has its sessions in the default VRF: give the nodes a route to the router there, or "+
			"remove the peer")
	}
	if spec.DisableMP {
		m.notef(o, "spec.disableMP", "a session carries the families that both ends offer; what the router does not offer is not "+
			"announced to it")
	}
}

// timers reads the peer's times.
func (m *metalLB) timers(o *Object, spec *peerSpec, p *peer) {
	hold := m.time(o, "spec.holdTime", spec.HoldTime)
	keepalive := m.time(o, "spec.keepaliveTime", spec.KeepaliveTime)
	connect := m.time(o, "spec.connectTime", spec.ConnectTime)
	if spec.HoldTime != nil {
		p.HoldTime = brief(hold)
	}
	const defaultHold = 90 * time.Second
	switch effective := cmp.Or(hold, defaultHold); {
	case spec.KeepaliveTime == nil || keepalive == 0:
	case keepalive > effective/3:
		m.notef(o, "spec.keepaliveTime", "%s is longer than a third of the hold time: that third is used", brief(keepalive))
	default:
		p.KeepaliveInterval = brief(keepalive)
	}
	if connect > 0 {
		p.ConnectRetry = brief(connect)
	}
}

// time reads a duration, 0 if there is none.
func (m *metalLB) time(o *Object, field string, text *string) time.Duration {
	if text == nil || *text == "" {
		return 0
	}
	d, err := time.ParseDuration(*text)
	if err != nil || d < 0 {
		m.errorf(o, field, "%s is not a duration", config.Quote(*text))
		return 0
	}
	if whole := d.Truncate(time.Second); whole != d {
		m.notef(o, field, "BGP counts in seconds: %s becomes %s", d, whole)
		d = whole
	}
	return d
}

// brief writes a duration in the largest unit of which it is a multiple.
func brief(d time.Duration) string {
	switch {
	case d%time.Hour == 0 && d > 0:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d%time.Minute == 0 && d > 0:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d%time.Second == 0:
		return fmt.Sprintf("%ds", d/time.Second)
	default:
		return fmt.Sprintf("%dms", d/time.Millisecond)
	}
}

// password makes the peer read its password from a Secret in our namespace.
func (m *metalLB) password(o *Object, spec *peerSpec, p *peer) {
	switch {
	case spec.PasswordSecret.Name != "":
		p.Password = &secret{spec.PasswordSecret.Name}
		m.decidef(o, "spec.passwordSecret", "copy the Secret %s into Lodestone's namespace, and list it in the chart's "+
			"speaker.bgp.passwordSecrets, before you apply the configuration", spec.PasswordSecret.Name)
	case spec.Password != "":
		p.Password = m.newSecret(o, "spec.password", o.Name)
	}
}

// newSecret names the Secret for a password that is in plain text in an object.
func (m *migration) newSecret(o *Object, field, name string) *secret {
	s := &secret{names{}.unique(name, "") + "-password"}
	m.decidef(o, field, "Lodestone reads passwords from Secrets alone: kubectl -n lodestone-system create secret generic %s "+
		"--from-literal=password=..., and list it in the chart's speaker.bgp.passwordSecrets, before you apply the configuration", s.Name)
	return s
}

// bfd returns the settings of a profile. Nil: there is none.
func (m *metalLB) bfd(o *Object, name string, multihop bool) *bfd {
	if name == "" {
		return nil
	}
	i, found := m.profileOf[name]
	if !found {
		m.errorf(o, "spec.bfdProfile", "there is no BFDProfile %s", config.Quote(name))
		return nil
	}
	spec, out := &m.profiles[i].Spec, &bfd{}
	out.TransmitInterval, out.ReceiveInterval = milliseconds(spec.TransmitInterval), milliseconds(spec.ReceiveInterval)
	if spec.DetectMultiplier != nil {
		out.DetectMultiplier = *spec.DetectMultiplier
	}
	profile := m.profiles[i].object
	if spec.EchoMode {
		m.decidef(profile, "spec.echoMode", "Lodestone has no BFD echo: it detects by the intervals (%s) alone; shorten them if "+
			"that is too slow", intervals(out))
	}
	if spec.PassiveMode {
		m.notef(profile, "spec.passiveMode", "Lodestone begins BFD itself, which routers that wait for it allow, too")
	}
	switch {
	case spec.MinimumTTL == nil:
	case multihop:
		out.MinimumTTL = *spec.MinimumTTL
	default:
		m.notef(profile, "spec.minimumTtl", "BFD with a router on the segment takes packets with a TTL of 255 alone")
	}
	return out
}

func intervals(b *bfd) string {
	const standard = "300ms"
	return "send " + cmp.Or(b.TransmitInterval, standard) + ", receive " + cmp.Or(b.ReceiveInterval, standard)
}

func milliseconds(n *uint32) string {
	if n == nil {
		return ""
	}
	return fmt.Sprintf("%dms", *n)
}
