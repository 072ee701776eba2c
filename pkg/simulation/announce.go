package simulation

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/servicelb"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/snapshot"
)

// announced puts into words who announces the addresses that the Service holds,
// as long as every speaker is ready and there are endpoints everywhere. It is
// what the speakers' own code says.
func (c *Cluster) announced(svc *corev1.Service, v servicelb.Verdict) []string {
	if len(v.Held) == 0 || len(c.Nodes) == 0 {
		return nil
	}
	s := c.snapshot(svc, v)
	plans := map[string]plan.Plan{}
	for node := range s.Nodes {
		plans[node] = plan.Make(node, s)
	}
	owners, sharers := plan.Owners(s), plan.Sharers(s)
	var said []string
	for _, held := range v.Held {
		routed, silent := map[string][]string{}, map[string][]string{} // nodes by what they say
		for _, node := range slices.Sorted(maps.Keys(plans)) {
			p := plans[node]
			if peers := p.BGP.VIPs[held.Addr]; peers != nil {
				key := strings.Join(peers, ", ")
				routed[key] = append(routed[key], node)
			} else if why, ok := p.Silent[held.Addr]; ok {
				key := string(why.Reason) + ": " + why.Message
				silent[key] = append(silent[key], node)
			}
		}
		switch {
		case sharers[held.Addr] != nil:
			said = append(said, fmt.Sprintf("%s by layer 2 from %s, each to a part of the clients", held.Addr, enumerate(sharers[held.Addr])))
		case owners[held.Addr] != "":
			said = append(said, fmt.Sprintf("%s by layer 2 from one node", held.Addr))
		}
		for _, peers := range slices.Sorted(maps.Keys(routed)) {
			said = append(said, fmt.Sprintf("%s by BGP from %s to %s", held.Addr, enumerate(routed[peers]), peers))
		}
		if owners[held.Addr] != "" || len(routed) > 0 {
			continue
		}
		for _, why := range slices.Sorted(maps.Keys(silent)) {
			said = append(said, fmt.Sprintf("%s not from %s: %s", held.Addr, enumerate(silent[why]), why))
		}
	}
	return said
}

// snapshot is of the Service and of those that share its addresses.
func (c *Cluster) snapshot(svc *corev1.Service, v servicelb.Verdict) plan.Snapshot {
	s := plan.Snapshot{Config: c.Config, Nodes: map[string]plan.Node{}, Speakers: map[string]bool{}}
	for _, n := range c.Nodes {
		s.Nodes[n.Name], s.Speakers[n.Name] = snapshot.Node(n), true
	}
	own := plan.Service{Name: servicelb.NameOf(svc), Labels: svc.Labels, Leases: v.Leases, Serving: true}
	for _, h := range v.Held {
		own.VIPs = append(own.VIPs, h.Addr)
	}
	s.Services = append(s.Services, own)
	for _, other := range c.Services {
		shares := slices.ContainsFunc(kube.VIPs(other), func(a netip.Addr) bool { return slices.Contains(own.VIPs, a) })
		if name := servicelb.NameOf(other); shares && name != own.Name {
			s.Services = append(s.Services, plan.Service{Name: name, Labels: other.Labels, VIPs: kube.VIPs(other), Serving: true})
		}
	}
	return s
}

// maxListed is how many nodes a sentence lists.
const maxListed = 5

func enumerate(nodes []string) string {
	text := strings.Join(nodes[:min(len(nodes), maxListed)], ", ")
	if more := len(nodes) - maxListed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
