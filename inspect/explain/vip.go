package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// VIP explains an address.
type VIP struct {
	VIP netip.Addr `json:"vip"`
	// Pool contains it; empty: none does.
	Pool string `json:"pool,omitempty"`
	// Standing are sentences about an address that is no Service's, or should
	// not be.
	Standing []string  `json:"standing,omitempty"`
	Services []Sharer  `json:"services"`
	Nodes    []VIPNode `json:"nodes,omitempty"`
	// Owner announces it by layer 2, Routers announce it by BGP.
	Owner   string   `json:"owner,omitempty"`
	Routers []string `json:"routers,omitempty"`
	// Connections are where those are that the owner hands over (forwarding: direct).
	Connections []Forwarding `json:"connections,omitempty"`
	Silence     string       `json:"silence,omitempty"`
	// ByOthers: something else announces it.
	ByOthers bool `json:"byOthers,omitempty"`
	// Help has advice if nobody announces it.
	Help
	Routes    []bgp.Route       `json:"routes,omitempty"`
	Conflicts []status.Conflict `json:"conflicts,omitempty"`
}

// Sharer is a Service that has the VIP.
type Sharer struct {
	Service string `json:"service"`
	// Policy is its externalTrafficPolicy.
	Policy string `json:"policy"`
	// Serving is set if an endpoint takes traffic; with policy Local, Nodes are
	// those that have one.
	Serving bool     `json:"serving"`
	Nodes   []string `json:"nodes,omitempty"`
}

// VIPNode is what a node does with the VIP.
type VIPNode struct {
	Node string `json:"node"`
	// Owns is set if it announces the VIP by layer 2. It announces the VIP to Peers by BGP.
	Owns  bool     `json:"owns"`
	Peers []string `json:"peers,omitempty"`
	// Reason and Message are why it does not own the VIP, or why it announces it
	// by neither.
	Reason  plan.Reason `json:"reason,omitempty"`
	Message string      `json:"message,omitempty"`
}

// OfVIP explains an address.
func OfVIP(o *cluster.Objects, addr netip.Addr) VIP { return ofVIP(o, o.Network(), addr) }

func ofVIP(o *cluster.Objects, n *simulation.Network, addr netip.Addr) VIP {
	v := VIP{VIP: addr, Services: []Sharer{}}
	if p := n.PoolOf(addr); p != nil {
		v.Pool = p.Name
	}
	for _, s := range n.SharersOf(addr) {
		endpoints := s.EndpointsAt(addr)
		of := Sharer{Service: s.Name, Policy: "Cluster", Serving: endpoints.Serving}
		if s.Local {
			of.Policy, of.Nodes = "Local", endpoints.ServingNodes()
		}
		v.Services = append(v.Services, of)
	}
	v.stands(o)
	v.Conflicts = slices.DeleteFunc(status.ConflictsOf(n), func(c status.Conflict) bool { return c.VIP != addr })
	if len(v.Services) == 0 {
		return v
	}
	v.announced(n.Of(addr))
	v.Connections = forwardingOf(n.Of(addr), addr, v.Owner)
	v.Routes = bgp.RoutesOf(n, bgp.Filter{Within: netip.PrefixFrom(addr, addr.BitLen())}).Routes
	return v
}

// announced notes what each node does with the VIP.
func (v *VIP) announced(n *simulation.Network) {
	for _, name := range slices.Sorted(maps.Keys(n.Nodes)) {
		verdict := n.View(name).Verdicts[v.VIP]
		if forRoutersOnly(verdict) {
			verdict.Silence = plan.Silence{}
		}
		v.Nodes = append(v.Nodes, VIPNode{name, verdict.Owned, verdict.Peers, verdict.Silence.Reason, verdict.Silence.Message})
		if verdict.Owned {
			v.Owner = name
		}
		if len(verdict.Peers) > 0 {
			v.Routers = append(v.Routers, name)
		}
	}
	switch {
	case n.Config.AnnouncedByOthers():
		v.ByOthers = true
	case v.Owner == "" && len(v.Routers) == 0:
		v.Silence = spelled(n.Silence(v.VIP))
	}
	v.help()
}

// help collects the keys that the nodes' reasons follow from and, if nobody announces the VIP, what helps
// against the reasons.
func (v *VIP) help() {
	texts, reasons := plan.Reasons(), map[plan.Reason]bool{}
	for _, n := range v.Nodes {
		reasons[n.Reason] = true
	}
	for _, r := range slices.Sorted(maps.Keys(reasons)) {
		v.Help.add(nil, texts[r].Keys)
		if cure := texts[r].Cure; cure != "" && v.Silence != "" {
			v.Help.add([]string{string(r) + ": " + cure}, nil)
		}
	}
}

// forRoutersOnly reports whether no advertisement by layer 2 is for the VIP while the node announces it by BGP.
// Then there is nothing to explain.
func forRoutersOnly(v plan.Verdict) bool {
	return len(v.Peers) > 0 && v.Silence.Reason == plan.NoAdvertisement
}

// stands notes what is particular about the address, with the keys that it follows from.
func (v *VIP) stands(o *cluster.Objects) {
	texts, c, assigned := ipam.Reasons(), o.Cluster(), len(v.Services) > 0
	note := func(r ipam.Reason, format string, args ...any) {
		v.Standing = append(v.Standing, fmt.Sprintf(format, args...))
		v.Help.add(nil, texts[r].Keys)
	}
	if o.Config != nil {
		switch p, listed := o.Config.PoolOf(v.VIP); {
		case !listed:
			note(ipam.AddressOutsidePools, "no pool lists it: it is stranded, leased, or not Lodestone's")
		case p.Withheld.Contains(v.VIP):
			note(ipam.AddressWithheld, "pool %q never hands it out: it is excluded, or the first or last of its prefix", p.Name)
		}
		for _, r := range o.Config.Reservations {
			if slices.Contains(r.Addresses, v.VIP) {
				note(ipam.AddressReserved, "it is reserved for Service %s", r.Service)
			}
		}
	}
	for _, f := range clusterfacts.Forbid(o.Config, c.Facts) {
		if f.Range.Contains(v.VIP) {
			note(ipam.AddressForbidden, "it is %s: it is never handed out", f.Why)
		}
	}
	if !assigned {
		for _, q := range c.InQuarantine() {
			if q.Addr == v.VIP {
				note(ipam.AddressQuarantined, "Service %s released it; it is in quarantine for another %s", q.Name, output.Age(q.Until.Sub(o.Now)))
			}
		}
	}
	for _, svc := range o.Services {
		if slices.Contains(kube.StatusAddresses(svc), v.VIP) && !slices.Contains(kube.VIPs(svc), v.VIP) {
			note("", "the status of Service %s shows it, but Lodestone has not assigned it, or the Service is being deleted", ledger.NameOf(svc))
		}
	}
	if !assigned {
		note("", "Lodestone has assigned it to no Service")
	}
}

// Troubled implements Story.
func (v VIP) Troubled() bool { return v.Silence != "" || len(v.Conflicts) > 0 }

// Show implements output.Page.
func (v VIP) Show(c *output.Canvas) {
	var f facts
	f.add("VIP", v.VIP.String())
	if v.Pool != "" {
		f.add("Pool", v.Pool)
	}
	f.add("Standing", v.Standing...)
	f.add("Services", output.Strings(v.Services)...)
	if v.Owner != "" {
		f.add("Layer 2", "node "+v.Owner+" owns it, by the plan")
	}
	for i, c := range v.Connections {
		c.show(&f, [...]string{"Connections", ""}[min(i, 1)], v.Owner)
	}
	if len(v.Routers) > 0 {
		f.add("BGP", "announced by "+output.List(v.Routers, 5)+", by the plan")
	}
	if v.ByOthers {
		f.add("Announced by", byOthers)
	}
	if v.Silence != "" {
		f.bad("Silent", "nobody announces it: "+v.Silence)
	}
	f.bad("Conflict", output.Strings(v.Conflicts)...)
	v.Help.show(&f)
	c.Rows(nil, f)
	v.showNodes(c)
	if len(v.Routes) > 0 {
		c.Blank()
		bgp.Routes{Routes: v.Routes}.Show(c)
	}
}

func (v VIP) showNodes(c *output.Canvas) {
	var rows [][]any
	for _, n := range v.Nodes {
		owns, peers := output.Cell{Text: "no"}, "no"
		if n.Owns {
			owns = output.Cell{Text: "owns it", Tone: output.Good}
		}
		if len(n.Peers) > 0 {
			peers = "announces it to " + strings.Join(n.Peers, ", ")
		}
		why := ""
		if n.Reason != "" {
			why = string(n.Reason) + ": " + n.Message
		}
		rows = append(rows, []any{n.Node, owns, peers, why})
	}
	c.Table([]string{"NODE", "LAYER 2", "BGP", "WHY NOT"}, rows)
}

// String describes the Service for people.
func (s Sharer) String() string {
	text := s.Service + ", externalTrafficPolicy " + s.Policy
	switch {
	case !s.Serving:
		return text + ", no endpoint takes traffic"
	case s.Policy == "Local":
		return text + ", endpoints on " + output.List(s.Nodes, 5)
	}
	return text + ", endpoints take traffic"
}
