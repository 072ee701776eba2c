package world

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// family is what a speaker does on a segment in one family: the real machine, and what package layer2 does around it.
type family struct {
	*node
	lan      *lan
	protocol wire.Protocol
	machine  *segment.Machine
	messages uint64 // heard
	alarm    time.Duration
}

// protocols returns those of the segments.
func (w *World) protocols() []wire.Protocol {
	if w.Dual {
		return []wire.Protocol{wire.ARP{}, wire.NDP{}}
	}
	return []wire.Protocol{wire.ARP{}}
}

func newFamily(n *node, l *lan, p wire.Protocol) *family {
	secret := fmt.Append(nil, n.Seed, n.id, n.life)
	if p.Family() != (wire.ARP{}).Family() {
		secret = append(secret, p.Family()...)
	}
	if l != n.World.lan {
		secret = append(secret, l.nic()...)
	}
	return &family{node: n, lan: l, protocol: p, machine: segment.New(segment.Config{Protocol: p, Self: l.hardware(n.id),
		Keys: func() [][]byte { return n.seals }, Secret: sha256.Sum256(secret)}, n.clock())}
}

// has reports whether an address is of the family and of the segment.
func (f *family) has(vip netip.Addr) bool { return wire.Of(vip) == f.protocol && f.lanOf(vip) == f.lan }

// familyOf returns the family of a VIP.
func (n *node) familyOf(vip netip.Addr) *family {
	for _, f := range n.families {
		if f.has(vip) {
			return f
		}
	}
	return nil
}

// parse reads a frame of either protocol.
func parse(frame []byte) (wire.Message, bool) { return protocolOf(frame).Parse(frame) }

func protocolOf(frame []byte) wire.Protocol {
	if frame[12] == 0x86 { // EtherType
		return wire.NDP{}
	}
	return wire.ARP{}
}

// hear passes a frame to its family.
func (n *node) hear(on *lan, frame []byte) {
	for _, f := range n.families {
		if f.lan == on && f.protocol == protocolOf(frame) {
			if m, ok := f.protocol.Parse(frame); ok && m.IsFor(on.hardware(n.id)) {
				f.messages++
				f.step(segment.Received{Message: m})
			}
		}
	}
}

// surround gives the machine the facts that it does not see on the segment itself.
func (n *node) surround(s segment.Surroundings) {
	for _, f := range n.families {
		f.step(s)
	}
}

// leaving returns the VIPs that leave and are still answered for.
func (n *node) leaving() (vips []netip.Addr) {
	for _, f := range n.families {
		vips = append(vips, f.machine.Leaving()...)
	}
	return vips
}

// withheld counts the VIPs that are not announced although they should be.
func (n *node) withheld() (count int) {
	for _, f := range n.families {
		count += len(f.machine.Withheld())
	}
	return count
}

// assign sets the VIPs of the family.
func (f *family) assign(vips map[netip.Addr]segment.VIP) {
	own, segments := map[netip.Addr]segment.VIP{}, f.segments()
	maps.DeleteFunc(f.vips, func(vip netip.Addr, _ segment.VIP) bool { return f.has(vip) })
	for vip, v := range vips {
		if f.has(vip) {
			f.vips[vip] = v
		}
		if wire.Of(vip) == f.protocol && plan.Belongs(vip, segments, f.lan.nic()) {
			own[vip] = v
		}
	}
	f.step(segment.Assigned{VIPs: own})
}

// step passes an event to the machine, and executes its effects.
func (f *family) step(e segment.Event) {
	effects := f.machine.Step(e, f.clock())
	for _, frame := range effects.Frames {
		f.checks.sent(f.node, f.lan, frame)
		if f.story != nil {
			f.record("%s: %s", f.name, f.describe(frame))
		}
		f.lan.send(f.id, frame)
	}
	for _, note := range effects.Notes {
		f.checks.noted(f.node, note)
		switch {
		case !note.VIP.IsValid():
			f.record("%s: %s", f.name, kindOfNote[note.Kind])
		case note.Other == (wire.MAC{}):
			f.record("%s: %s %s", f.name, kindOfNote[note.Kind], note.VIP)
		default:
			f.record("%s: %s %s, %s", f.name, kindOfNote[note.Kind], note.VIP, f.who(note.Other))
		}
		if note.Kind == segment.Free {
			delete(f.unprobed, note.VIP)
		}
	}
	f.lookAtAnswers()
	f.setAlarm()
}

var kindOfNote = map[segment.Kind]string{segment.Conflict: "has a conflict over", segment.Free: "found nobody who has",
	segment.Arrived: "finds no other speaker with", segment.Yields: "yields", segment.Resumes: "claims again",
	segment.Deaf: "hears nothing", segment.Hears: "hears again", segment.AllBack: "knows of no loss any more"}

// setAlarm sets the timer for the next event that is due.
func (f *family) setAlarm() {
	at, due := f.machine.Next()
	if !due || f.paused {
		return
	}
	when := f.now + max(f.until(at), 0)
	if f.alarm > f.now && f.alarm <= when {
		return
	}
	f.alarm = when
	life := f.life
	f.after(when-f.now, func() {
		if f.life != life || f.alarm != when || f.paused {
			return
		}
		f.alarm = 0
		counts := f.machine.WantsCount(f.clock())
		f.step(segment.Due{})
		if counts {
			f.step(segment.Counted{Frames: f.lan.received[f.id], Messages: f.messages, Known: true})
		}
	})
}

// address is that of a station.
func address(station int, four bool) netip.Addr {
	if four {
		return addressOf(station)
	}
	a := subnet6.Addr().As16()
	a[15] = byte(10 + station)
	return netip.AddrFrom16(a)
}

// addresses returns those of the node.
func (n *node) addresses() []netip.Addr {
	if n.Dual {
		return []netip.Addr{address(n.id, true), address(n.id, false)}
	}
	return []netip.Addr{address(n.id, true)}
}

// asksFor makes a host's ordinary question out of a probe: it claims the host's own address.
func asksFor(probe []byte, host int) []byte {
	if protocolOf(probe) == (wire.ARP{}) {
		const senderIP = 28 // RFC 826
		own := netip.AddrFrom4([4]byte{203, 0, 113, byte(200 + host)})
		copy(probe[senderIP:], own.AsSlice())
		return probe
	}
	const source, checksum = 22, 56 // RFC 8200, RFC 4443
	own := address(200+host, false).As16()
	copy(probe[source:], own[:])
	sum := uint32(^(uint16(probe[checksum])<<8 | uint16(probe[checksum+1])))
	for i := 0; i < len(own); i += 2 { // it was the sum with a source of zeros
		sum += uint32(own[i])<<8 | uint32(own[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	probe[checksum], probe[checksum+1] = byte(^sum>>8), byte(^sum)
	return probe
}
