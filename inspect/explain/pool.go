package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Pool explains a pool.
type Pool struct {
	Name string `json:"name"`
	// Addresses are the ranges that it hands out.
	Addresses []string `json:"addresses,omitempty"`
	// Draws are sentences about who may draw from it.
	Draws []string `json:"draws"`
	// Shadows are the pools that come before it: a Service that names no pool gets an address of them as long as
	// they have some.
	Shadows []string `json:"shadows,omitempty"`
	// Advertisements announce its addresses.
	Advertisements []string `json:"advertisements"`
	// ByOthers: something else announces all pools.
	ByOthers bool          `json:"byOthers,omitempty"`
	Usage    []status.Pool `json:"usage"`
	// Holders counts the addresses that the Services of a namespace hold.
	Holders []Holder `json:"holders,omitempty"`
	// Warnings are what makes no sense in this cluster.
	Warnings []string `json:"warnings,omitempty"`
}

// Holder is how many addresses of a pool a namespace holds.
type Holder struct {
	Namespace string `json:"namespace"`
	Addresses int    `json:"addresses"`
}

// OfPool explains a pool of the configuration.
func OfPool(o *cluster.Objects, of *config.Pool) Pool {
	p := Pool{Name: of.Name, Draws: draws(of), Advertisements: advertisements(o.Config, of), ByOthers: o.Config.AnnouncedByOthers()}
	for _, r := range of.Free.Ranges() {
		p.Addresses = append(p.Addresses, config.RangeText(r))
	}
	if of.AutoAssign {
		p.Shadows = shadows(o.Config, of)
	}
	allocation := o.Cluster().Allocation()
	for _, u := range status.PoolsOf(o, allocation) {
		if u.Name == of.Name {
			p.Usage = append(p.Usage, u)
		}
	}
	holds := map[string]int{}
	for name, v := range allocation.Verdicts {
		namespace, _, _ := strings.Cut(name, "/")
		for _, h := range v.Held {
			if h.Pool == of.Name {
				holds[namespace]++
			}
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(holds)) {
		p.Holders = append(p.Holders, Holder{namespace, holds[namespace]})
	}
	alone := *o.Config
	alone.Pools = []config.Pool{*of}
	p.Warnings = clusterfacts.PoolWarnings(&alone, o.Cluster().Facts)
	return p
}

// draws describes who may draw from the pool.
func draws(p *config.Pool) []string {
	if p.Draining {
		return []string{"nobody: it is draining and gives no new addresses"}
	}
	var lines []string
	switch {
	case len(p.Namespaces) > 0 && p.NamespaceSelector != nil:
		lines = append(lines, fmt.Sprintf("Services of the namespaces %s, and of those with labels %s", strings.Join(p.Namespaces, ", "),
			p.NamespaceSelector))
	case len(p.Namespaces) > 0:
		lines = append(lines, "Services of the namespaces "+strings.Join(p.Namespaces, ", "))
	case p.NamespaceSelector != nil:
		lines = append(lines, "Services of namespaces with labels "+p.NamespaceSelector.String())
	default:
		lines = append(lines, "Services of every namespace")
	}
	if len(p.ServiceSelector) > 0 {
		lines = append(lines, "only Services with labels "+p.ServiceSelector.String())
	}
	if !p.AutoAssign {
		lines = append(lines, "only Services that name it (autoAssign is false)")
	}
	if p.NamespaceQuota > 0 {
		lines = append(lines, fmt.Sprintf("at most %d addresses of each family for a namespace", p.NamespaceQuota))
	}
	if p.Requesters != nil {
		lines = append(lines, "particular addresses only for the namespaces "+cmp.Or(strings.Join(p.Requesters, ", "), "(none)"))
	}
	if p.DHCP != nil {
		lines = append(lines, "each address is leased from the DHCP server on interface "+p.DHCP.Interface)
	}
	return lines
}

// shadows returns the pools that come before p in the order of allocation, each with the reason.
func shadows(c *config.Config, p *config.Pool) []string {
	var lines []string
	own := slices.IndexFunc(c.Pools, func(q config.Pool) bool { return q.Name == p.Name })
	for i := range c.Pools {
		q := &c.Pools[i]
		switch {
		case !q.AutoAssign || q.Draining || i == own:
		case q.Priority < p.Priority:
			lines = append(lines, fmt.Sprintf("pool %s, as long as it is open to the Service and has addresses: its priority is %d, this one's %d",
				q.Name, q.Priority, p.Priority))
		case q.Priority == p.Priority && i < own:
			lines = append(lines, fmt.Sprintf("pool %s, as long as it is open to the Service and has addresses: it has the same priority and is "+
				"earlier in the document", q.Name))
		}
	}
	return lines
}

// advertisements returns the names of those that announce the pool, and how.
func advertisements(c *config.Config, p *config.Pool) []string {
	lines := []string{}
	for _, a := range c.Advertisements {
		if !p.AdvertisedBy(a.Name) {
			continue
		}
		var by []string
		if a.Layer2 != nil {
			by = append(by, "layer 2")
		}
		if a.BGP != nil {
			by = append(by, "BGP to "+cmp.Or(strings.Join(a.BGP.Peers, ", "), "all peers"))
		}
		lines = append(lines, a.Name+": "+strings.Join(by, " and "))
	}
	return lines
}

// byOthers is who announces where the configuration leaves it to something else.
const byOthers = "others: the configuration has advertisements: []"

// Troubled implements Story.
func (p Pool) Troubled() bool {
	return len(p.Warnings) > 0 || len(p.Advertisements) == 0 && !p.ByOthers || slices.ContainsFunc(p.Usage, status.Pool.Full)
}

// Show implements output.Page.
func (p Pool) Show(c *output.Canvas) {
	var f facts
	f.add("Pool", p.Name)
	f.add("Addresses", p.Addresses...)
	f.add("May draw", p.Draws...)
	f.add("Asked before", p.Shadows...)
	switch {
	case p.ByOthers:
		f.add("Announced by", byOthers)
	case len(p.Advertisements) == 0:
		f.bad("Announced by", "no advertisement: its addresses are of no use")
	}
	f.add("Announced by", p.Advertisements...)
	f.bad("Warning", p.Warnings...)
	c.Rows(nil, f)
	c.Table(status.PoolHeader, status.PoolRows(p.Usage))
	var rows [][]any
	for _, h := range p.Holders {
		rows = append(rows, []any{h.Namespace, h.Addresses})
	}
	c.Table([]string{"NAMESPACE", "HOLDS"}, rows)
}
