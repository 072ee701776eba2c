package world

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/layer2/seal"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// desired are addresses that a tenant tries to get: those of other Services, of a pool for another namespace, of the
// gateway, and one outside all pools.
var desired = []string{"203.0.113.100", "203.0.113.103", "203.0.113.120", "203.0.113.121", "203.0.113.1", "203.0.113.150",
	"203.0.113.105,203.0.113.106", ""}

// temptations are what tenants write on their Services. What docs/explanation/security.md promises about them has to hold.
func temptation(i int) map[string]string {
	address := desired[i/8%len(desired)]
	return [...]map[string]string{
		{annotation.Assigned: address},
		{annotation.Assigned: address, annotation.AssignedPools: "shop"},
		{annotation.Assigned: address, annotation.Leases: address + "=eth0"},
		{annotation.Addresses: address},
		{annotation.AddressPool: "shop"},
		{annotation.SharingKey: "k", annotation.Addresses: address},
		{annotation.Ignore: annotation.Ignored},
		{annotation.Addresses: "poison"},
	}[i%8]
}

// tenant writes hostile annotations on a Service, or creates it anew with them.
func (w *World) tenant(f Fault, name string) {
	written := temptation(f.Other / w.Services)
	if f.Node == 0 {
		w.api.remove(name)
		name = serviceName(w.Services + f.Other%4)
		w.api.tempted = func() map[string]string { return maps.Clone(written) }
		w.api.create(name)
		w.api.tempted = nil
		return
	}
	w.api.edit(name, func(svc *corev1.Service) {
		for key, value := range written {
			metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value)
		}
	})
}

// lie makes a node report falsely, on its Lease and to the other speakers: segments and gateways that it does not have,
// conflicts over the VIPs, and that it owns all VIPs. They are the VIPs of a segment that it is on. With those of another segment
// it would get its share, and nobody would answer for them; see docs/explanation/decisions.md.
func (w *World) lie(f Fault, n *node) (end func()) {
	if n.lies {
		return nil
	}
	n.lies = true
	network, _ := w.api.objects["lease/"+n.name].(report.Network)
	network.Segments = slices.Clone(network.Segments)
	bytes := n.segments()[0].Subnet.Addr().As4()
	for i := range 20 {
		bytes[3] = byte(100 + (i+f.Other)%20)
		addr := netip.AddrFrom4(bytes)
		if i%4 == 3 {
			network.Gateways = append(network.Gateways, addr)
		} else if i < 4 {
			network.Conflicts = append(network.Conflicts, report.Conflict{VIP: addr, HardwareAddr: [6]byte{2, 9}, Announced: f.Node == 0})
		}
		network.Segments = append(network.Segments,
			report.Segment{Subnet: netip.PrefixFrom(addr, 31).Masked(), Interface: fmt.Sprint("eth", i+1)})
	}
	w.api.put("lease/"+n.name, report.Report{Network: network}.Tidy().Network)
	w.checks.book.lies = true
	n.publish()
	n.membersChanged()
	return func() {
		n.lies = false
		lease, _ := w.api.objects["lease/"+n.name].(report.Network)
		w.api.put("lease/"+n.name, report.Network{Segments: n.segments(), KubeProxy: true, Forwards: lease.Forwards})
		n.membersChanged()
	}
}

// all are claims to own every VIP.
func all() (c report.Claims) {
	for i := range c {
		c[i] = 0xff
	}
	return c
}

// forge makes an attacker with the key claim all VIPs each second, with the node's hardware address.
func (w *World) forge(n *node) (end func()) {
	over := false
	vips := slices.Clone(w.checks.inOrder())
	var again func()
	again = func() {
		if over {
			return
		}
		for _, vip := range vips {
			l := w.lanOf(vip)
			seal := seal.Key(n.seals[0]).Seal(vip, l.hardware(n.id), true)
			for _, frame := range wire.Of(vip).Announce(wire.Statement{Self: l.hardware(n.id), VIP: vip, Seal: seal}, true) {
				l.send(n.id, frame)
			}
			w.checks.vip(vip).taken = w.now
		}
		w.after(time.Second, again)
	}
	again()
	return func() { over = true }
}

// factsIn returns the facts about the cluster's addresses of a controller that has seen these objects.
func factsIn(seen map[string]any) *clusterfacts.Facts {
	o := clusterfacts.Objects{}
	holder := "speaker"
	for _, name := range named(seen, "node") {
		o.Nodes = append(o.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	for _, name := range named(seen, "lease") {
		network, _ := seen["lease/"+name].(report.Network)
		o.Leases = append(o.Leases, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + name,
				Annotations: report.Report{Network: network}.Annotations()},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}})
	}
	return clusterfacts.Collect(o)
}

// checkLiar: a node that reports falsely takes no VIP from a node that it hears and that can still serve the VIP, unless it
// should own it. With keepOwner it gets a share of the others' VIPs, like each node that claims them.
func (c *checks) checkLiar(n *node, vip netip.Addr, before uint64) {
	if !n.lies || c.Keep || c.now-c.disturbed < calm || c.now-c.decreed < time.Second { // it may not have seen that yet
		return
	}
	before &= c.couldServe(vip)
	for _, o := range c.nodes {
		if !n.view[o.id].alive {
			before &^= 1 << o.id
		}
	}
	if before == 0 {
		return
	}
	if owner := plan.Owners(c.truth())[vip]; owner != n.name {
		c.fail("lies draw nothing", "%s lies, and answers for %s, which %b could serve, and %s should", n.name, vip, before, owner)
	}
}
