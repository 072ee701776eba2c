package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Service explains a Service.
type Service struct {
	// Name is "namespace/name".
	Name string `json:"service"`
	// LoadBalancer is the name of its load balancer in the cloud provider interface.
	LoadBalancer string `json:"loadBalancer,omitempty"`
	// Foreign is why Lodestone does not serve it; empty: it does.
	Foreign string `json:"foreign,omitempty"`
	// Asks and Has are sentences about what it asks for, and what it holds.
	Asks []string `json:"asks,omitempty"`
	Has  []string `json:"has,omitempty"`
	// VIPs explain the addresses that it has been given.
	VIPs []VIP `json:"vips,omitempty"`
	// Unwritten are sentences about those that nobody announces because the
	// controller has not written them into the Service yet.
	Unwritten []string `json:"unwritten,omitempty"`
	// Refusal is why it does not hold what it asks for.
	Refusal *Refusal `json:"refusal,omitempty"`
	Help
	// Pools are what each pool would answer a new Service like it.
	Pools []Answer `json:"pools,omitempty"`
	// Unread is what could not be read. If there is any, VIPs are missing.
	Unread []string `json:"unread,omitempty"`
}

// Refusal is why a Service does not hold what it asks for.
type Refusal struct {
	Reason  ipam.Reason `json:"reason"`
	Message string      `json:"message"`
}

// Answer is that of a pool about one address family.
type Answer struct {
	Pool   string      `json:"pool"`
	Family ipam.Family `json:"family"`
	// Free is how many addresses of the family it can give.
	Free float64 `json:"free"`
	// Reason and Message are why it would give none; empty: it would give one.
	Reason  ipam.Reason `json:"reason,omitempty"`
	Message string      `json:"message,omitempty"`
}

// OfService explains a Service that is there. cluster.ForAddresses has been read.
func OfService(o *cluster.Objects, svc *corev1.Service) Service {
	story := o.Cluster().Explain(svc)
	s := Service{Name: story.Service, Foreign: story.Foreign, Asks: story.Asks, Has: story.Has, Help: Help{story.Advice, story.Keys}}
	if s.Foreign != "" {
		return s
	}
	if o.Config != nil {
		s.LoadBalancer = ledger.LoadBalancerName(o.Config.ClusterID, svc)
	}
	if r := story.Verdict.Refusal; r != nil {
		s.Refusal = &Refusal{r.Reason, r.Message}
	}
	for _, c := range story.Considered {
		s.Pools = append(s.Pools, Answer{c.Pool, c.Family, c.Free, c.Reason, c.Message})
	}
	if !o.Has(cluster.ForVIPs...) {
		s.Unread = o.Unread()
		return s
	}
	n := o.Network()
	for _, held := range story.Verdict.Held {
		if len(n.SharersOf(held.Addr)) == 0 {
			why := "the controller has not written it into the Service"
			if r := kube.Refused(svc); r != nil {
				why = fmt.Sprintf("the controller refuses the Service, %s: %s", r.Reason, r.Message)
			}
			s.Unwritten = append(s.Unwritten, fmt.Sprintf("%s not yet: %s", held.Addr, why))
			continue
		}
		v := ofVIP(o, n, held.Addr)
		s.VIPs = append(s.VIPs, v)
		if v.Silence != "" {
			s.Help.add(v.Advice, v.Keys)
		}
	}
	return s
}

// Troubled implements Story.
func (s Service) Troubled() bool {
	return len(s.Advice) > 0 || slices.ContainsFunc(s.VIPs, VIP.Troubled)
}

// Show implements output.Page.
func (s Service) Show(c *output.Canvas) {
	var f facts
	f.add("Service", s.Name)
	if s.Foreign != "" {
		f.add("Served", "no: "+s.Foreign)
	}
	if s.LoadBalancer != "" {
		f.add("Named", s.LoadBalancer)
	}
	f.add("Asks for", s.Asks...)
	f.add("Has", s.Has...)
	var announced, silent []string
	for _, v := range s.VIPs {
		announced = append(announced, v.announcement()...)
		silent = append(silent, v.silences()...)
	}
	f.add("Announced", append(announced, s.Unwritten...)...)
	f.bad("Silent", silent...)
	if len(s.Unread) > 0 {
		f.bad("Announced", "not known, for something was not read:")
		f.bad("", s.Unread...)
	}
	if s.Refusal != nil {
		f.bad("Refused", string(s.Refusal.Reason)+": "+s.Refusal.Message)
	}
	s.Help.show(&f)
	c.Rows(nil, f)
	if len(s.Pools) == 0 {
		return
	}
	c.Blank()
	c.Line(output.Plain, "What the pools would answer a new Service like it:")
	var rows [][]any
	for _, p := range s.Pools {
		answer := output.Cell{Text: "yes", Tone: output.Good}
		if p.Reason != "" {
			answer = output.Cell{Text: string(p.Reason) + ": " + p.Message}
		}
		rows = append(rows, []any{p.Pool, p.Family, output.Number(p.Free), answer})
	}
	c.Rows([]string{"POOL", "FAMILY", "FREE", "ANSWER"}, rows)
}

// maxListed is how many nodes a sentence lists.
const maxListed = 5

// announcement are sentences about who announces the VIP.
func (v VIP) announcement() []string {
	var lines []string
	if v.Owner != "" {
		lines = append(lines, fmt.Sprintf("%s by layer 2 from %s", v.VIP, v.Owner))
	}
	for _, g := range v.grouped(func(n VIPNode) string { return strings.Join(n.Peers, ", ") }) {
		lines = append(lines, fmt.Sprintf("%s by BGP from %s to %s", v.VIP, output.List(g.nodes, maxListed), g.by))
	}
	return lines
}

// silences are sentences about why no node announces the VIP.
func (v VIP) silences() []string {
	if v.Silence == "" {
		return nil
	}
	var lines []string
	for _, g := range v.grouped(func(n VIPNode) string { return spelled(plan.Silence{Reason: n.Reason, Message: n.Message}) }) {
		lines = append(lines, fmt.Sprintf("%s not from %s: %s", v.VIP, output.List(g.nodes, maxListed), g.by))
	}
	if len(lines) == 0 {
		lines = append(lines, fmt.Sprintf("%s: %s", v.VIP, v.Silence))
	}
	return lines
}

// group are nodes with the same text.
type group struct {
	by    string
	nodes []string
}

// grouped groups the nodes by their text, without those that have none.
func (v VIP) grouped(by func(VIPNode) string) (groups []group) {
	nodes := map[string][]string{}
	for _, n := range v.Nodes {
		if key := by(n); key != "" {
			nodes[key] = append(nodes[key], n.Node)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(nodes)) {
		groups = append(groups, group{key, nodes[key]})
	}
	return groups
}
