package diagnosis

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// clusterOf returns what was read from the API server, for package diagnose.
func clusterOf(o *cluster.Objects) *diagnose.Cluster {
	c := &diagnose.Cluster{Namespace: o.Namespace, Unread: o.Unread(), Segments: map[string][]report.Segment{},
		Passive: map[string][]string{}}
	s, n := status.Of(o), o.Network()
	notices(c, s)
	for node, r := range n.Reports {
		c.Segments[node] = r.Segments
	}
	if o.Has(cluster.ForSessions...) && o.Unclear() == nil {
		sessions(c, o, n)
	} else {
		c.Undecided = append(c.Undecided, diagnose.BGP, diagnose.BFD)
	}
	if s.VIPs != nil {
		vips(c, o, n, s.VIPs)
	} else {
		c.Undecided = append(c.Undecided, diagnose.Announced, diagnose.OnSegment, diagnose.Reach)
	}
	c.NetAdmin = netAdmin(o)
	for what, id := range map[string]diagnose.ID{
		cluster.ConfigMaps: diagnose.Configuration, cluster.Election: diagnose.Controller, cluster.Leases: diagnose.Conflict,
		cluster.Services: diagnose.Implementations,
	} {
		if !o.Has(what) {
			c.Undecided = append(c.Undecided, id)
		}
	}
	if !o.Has(cluster.Pods, cluster.Nodes) {
		c.Undecided = append(c.Undecided, diagnose.Controller, diagnose.Speakers, diagnose.Versions)
	}
	return c
}

// about are the warnings of the status that are checks here.
var about = map[string]diagnose.Notice{
	"configuration": {Check: diagnose.Configuration, Severity: diagnose.Warning, Hint: "lodestone validate; kubectl describe configmap"},
	"controller":    {Check: diagnose.Controller, Severity: diagnose.Error, Hint: "kubectl get pods, and the log of the controller"},
	"speaker":       {Check: diagnose.Speakers, Severity: diagnose.Error, Hint: "kubectl get pods -o wide, and the log of the speaker"},
	"version":       {Check: diagnose.Versions, Severity: diagnose.Warning, Hint: "kubectl rollout status daemonset/lodestone-speaker"},
	"conflict": {Check: diagnose.Conflict, Severity: diagnose.Error,
		Hint: "find the machine by its hardware address in the switches' tables, and give it another address"},
}

func notices(c *diagnose.Cluster, s *status.Status) {
	for _, w := range s.Warnings {
		if n, ok := about[w.About]; ok {
			n.Message = w.Message
			n.Hint = strings.Replace(n.Hint, "kubectl ", "kubectl -n "+c.Namespace+" ", 1)
			c.Notices = append(c.Notices, n)
		}
	}
}

func sessions(c *diagnose.Cluster, o *cluster.Objects, n *simulation.Network) {
	for _, s := range bgp.Peers(n, o.Now, "", "").Sessions {
		c.Sessions = append(c.Sessions, diagnose.Session{
			Node: s.Node, Peer: s.Peer, Up: s.Up(), Leftover: s.State == bgp.Leftover, Message: s.Message, BFD: s.BFD,
		})
	}
	for node := range n.Nodes {
		due, _ := n.Sessions(node)
		for _, name := range slices.Sorted(maps.Keys(due)) {
			if due[name].Peer.Passive {
				c.Passive[node] = append(c.Passive[node], name)
			}
		}
	}
}

func vips(c *diagnose.Cluster, o *cluster.Objects, n *simulation.Network, announced *status.VIPs) {
	off := map[netip.Addr]string{}
	for _, s := range announced.Silent {
		if s.Reason == plan.NotOnSegment || s.Reason == plan.LinkDown {
			for _, vip := range s.VIPs {
				off[vip] = string(s.Reason) + ": " + announced.Messages[vip]
			}
			continue
		}
		names := output.Strings(s.VIPs)
		c.Notices = append(c.Notices, diagnose.Notice{
			Check: diagnose.Announced, Severity: diagnose.Error, Hint: "lodestone explain vip " + names[0],
			Message: "nobody announces " + output.List(names, 3) + ": " + string(s.Reason) + ": " + s.Message,
		})
	}
	ports := portsOf(o)
	who := n.Who()
	for _, vip := range slices.SortedFunc(maps.Keys(who), netip.Addr.Compare) {
		c.VIPs = append(c.VIPs, diagnose.VIP{Addr: vip, Owner: who[vip].Owner, Port: ports[vip], OffSegment: off[vip]})
	}
}

// portsOf returns, for VIPs that have one, a TCP port that answers whoever asks:
// the lowest of a Service that does not choose its clients.
func portsOf(o *cluster.Objects) map[netip.Addr]uint16 {
	lowest := map[netip.Addr]uint16{}
	for _, svc := range o.Services {
		if len(svc.Spec.LoadBalancerSourceRanges) > 0 || svc.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey] != "" {
			continue
		}
		for _, p := range svc.Spec.Ports {
			if p.Protocol != corev1.ProtocolTCP && p.Protocol != "" {
				continue
			}
			for _, vip := range kube.VIPs(svc) {
				lowest[vip] = min(cmp.Or(lowest[vip], uint16(p.Port)), uint16(p.Port))
			}
		}
	}
	return lowest
}

// netAdmin returns what of the cluster takes the capability NET_ADMIN.
func netAdmin(o *cluster.Objects) string {
	var all []string
	if o.Config != nil && o.Config.Routes != nil && o.Config.Routes.Mode == config.RoutesKernel {
		all = append(all, "routes to pods")
	}
	if slices.ContainsFunc(o.Services, func(s *corev1.Service) bool {
		return s.Annotations[annotation.ConnectionRateLimit] != "" && o.Scope.Covers(s)
	}) {
		all = append(all, "connection rate limits")
	}
	if o.Config != nil && slices.ContainsFunc(o.Config.Advertisements, func(a config.Advertisement) bool {
		return a.Layer2 != nil && a.Layer2.Direct
	}) {
		all = append(all, "direct forwarding")
	}
	return strings.Join(all, " and ")
}
