package config

import (
	"errors"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds and defaults of the document.
const (
	// MaxServiceAddresses is how many addresses one Service may ask for, or
	// have reserved.
	MaxServiceAddresses = 8
	// MaxName is the length of the longest name of a pool, a peer or a namespace.
	MaxName = 63
	// maxExcludeTaints is how many kinds of taints may take nodes out.
	maxExcludeTaints = 16
	// DefaultClusterID names a cluster whose operator did not.
	DefaultClusterID = "kubernetes"
	// DefaultAdvertisement is the name of the advertisement that a document
	// without any gets.
	DefaultAdvertisement = "default"

	// LongestQuarantine is the most that a pool's keepFor may be, which is more than quarantine may be.
	LongestQuarantine = maxKeepFor

	maxQuarantine = 24 * time.Hour
	maxKeepFor    = 30 * 24 * time.Hour
	maxQuota      = 1_000_000
	minPriority   = -1000
	maxPriority   = 1000
	maxWeight     = 100 // as of a Pod's preferred node affinity

	minRefresh, maxRefresh = 10 * time.Second, time.Hour

	minProbeInterval, maxProbeInterval             = 10 * time.Millisecond, 10 * time.Second
	minProbeTimeout                                = 5 * time.Millisecond
	minSuspicionMultiplier, maxSuspicionMultiplier = 2, 10
	minGossipInterval, maxGossipInterval           = 5 * time.Millisecond, time.Second
	maxGracePeriod                                 = 10 * time.Second
)

// compiler turns the document as written into a Config. Pools and BGP have compilers of their
// own.
type compiler struct{ values }

// compile returns the Config of the document. It adds errors to the report.
func compile(raw *rawConfig, r *report) *Config {
	c := compiler{values{r}}
	pools, bgp := poolCompiler{c.values}, bgpCompiler{c.values}
	oneOf(r, raw.APIVersion, []string{APIVersion})
	oneOf(r, raw.Kind, []string{Kind})
	find := pools.pools(raw)
	compiled := &Config{
		ClusterID:      DefaultClusterID,
		Quarantine:     c.duration(raw.Quarantine, DefaultQuarantine, maxQuarantine),
		Membership:     c.membership(raw.Failover, raw.Membership),
		Pools:          find.pools,
		Reservations:   pools.reservations(raw.Reservations, find),
		Advertisements: c.advertisements(raw),
		Peers:          bgp.peers(raw.Peers),
		Permit:         bgp.permit(raw.BGPPermit),
		Routes:         bgp.routes(raw.Routes, raw.peerNames()),
		Compatibility:  manyOf(c.values, raw.Compatibility, []Compatibility{MetalLB, KubeVIP}),
		Nodes:          c.nodes(raw.Nodes),

		IgnoreExcludeLabel: c.flag(raw.IgnoreExclude, false),
		ExcludeTaints:      c.texts(raw.ExcludeTaints, checkTaint),
	}
	if n := len(raw.ExcludeTaints); n > maxExcludeTaints {
		c.errorf(raw.ExcludeTaints[maxExcludeTaints], "%d taints are too many: list at most %d", n, maxExcludeTaints)
	}
	(&crossCheck{report: r, raw: raw, Config: compiled}).run()
	if id, ok := c.text(raw.ClusterID, checkName); ok {
		compiled.ClusterID = id
	}
	return compiled
}

// uniqueName returns the name of an item and refuses the name of another one.
func (vs values) uniqueName(v value, what string, seen map[string]value) string {
	name, ok := vs.text(v, checkName)
	if ok {
		once(vs.report, seen, name, v, "another %s named %s is in line %d", what, Quote(name))
	}
	return name
}

// names are the names in a list that other parts of the document refer to.
type names struct {
	all   map[string]bool
	shown string // the first of the names, for an error
}

// namesOf returns the names of a list.
func namesOf[T any](list []T, nameOf func(T) value) names {
	n := names{all: map[string]bool{}}
	for _, item := range list {
		name := nameOf(item).text()
		n.all[name] = true
		if len(n.shown) <= maxQuoted*utf8.UTFMax {
			n.shown += ", " + clip(name)
		}
	}
	n.shown = clip(strings.TrimPrefix(n.shown, ", "))
	return n
}

func (r *rawConfig) advertisementNames() names {
	return namesOf(r.Advertisements, func(a rawAdvertisement) value { return a.Name })
}

func (r *rawConfig) peerNames() names {
	return namesOf(r.Peers, func(p rawPeer) value { return p.Name })
}

// references returns the names in a list, which must be among those that the document defines.
func (vs values) references(list []value, what string, defined names) []string {
	return vs.texts(list, func(s string) error {
		switch {
		case defined.all[s]:
			return nil
		case len(defined.all) == 0:
			return errors.New("is not " + what + ": the document defines none")
		default:
			return errors.New("is not " + what + ": the document defines " + defined.shown)
		}
	})
}

func (c compiler) advertisements(raw *rawConfig) []Advertisement {
	if raw.Advertisements == nil { // [] is nobody
		return []Advertisement{{Name: DefaultAdvertisement, Layer2: &Layer2{}}}
	}
	seen, peers := map[string]value{}, raw.peerNames()
	var all []Advertisement
	for _, r := range raw.Advertisements {
		a := Advertisement{Name: c.uniqueName(r.Name, "advertisement", seen), ServiceSelector: c.selector(r.ServiceSelector)}
		switch {
		case r.Layer2 == nil && r.BGP == nil:
			c.errorf(r.At, "announces nothing: set layer2, bgp, or both")
		case r.BGP != nil && len(raw.Peers) == 0:
			c.errorf(r.At, "announces by BGP to nobody: the document defines no peers")
		}
		if r.Layer2 != nil {
			a.Layer2 = c.layer2(r.Layer2)
		}
		if r.BGP != nil {
			a.BGP = bgpCompiler{c.values}.bgp(r.BGP, peers)
		}
		all = append(all, a)
	}
	return all
}

func (c compiler) layer2(r *rawLayer2) *Layer2 {
	const direct = "direct"
	oneOf(c.report, r.Forwarding, []string{"owner", direct})
	return &Layer2{
		NodeSelector:   c.selector(r.NodeSelector),
		Interfaces:     c.texts(r.Interfaces, checkInterface),
		PreferredNodes: c.preferences(r.PreferredNodes),
		AnySegment:     c.flag(r.AnySegment, false),
		Refresh:        c.durationFrom(r.Refresh, 0, minRefresh, maxRefresh),
		KeepOwner:      c.flag(r.KeepOwner, false),
		Direct:         r.Forwarding.text() == direct,
	}
}

func (c compiler) preferences(raw []rawPreference) []Preference {
	var all []Preference
	for _, r := range raw {
		all = append(all, Preference{Weight: c.integer(r.Weight, 1, maxWeight), NodeSelector: c.selector(r.NodeSelector)})
	}
	return all
}

// membership returns the settings: the document's own, else those of failover.
func (c compiler) membership(failover value, raw rawMembership) Membership {
	oneOf(c.report, failover, []Failover{FailoverFast, FailoverNormal, FailoverConservative})
	m := Failover(failover.text()).Membership()
	m.ProbeInterval = c.durationFrom(raw.ProbeInterval, m.ProbeInterval, minProbeInterval, maxProbeInterval)
	if raw.ProbeInterval.present() {
		m.ProbeTimeout = m.ProbeInterval / 2
	}
	m.ProbeTimeout = c.durationFrom(raw.ProbeTimeout, m.ProbeTimeout, minProbeTimeout, maxProbeInterval)
	if m.ProbeTimeout >= m.ProbeInterval {
		c.errorf(raw.ProbeTimeout, "%s is not shorter than probeInterval, which is %s", m.ProbeTimeout, m.ProbeInterval)
	}
	if raw.SuspicionMultiplier.present() {
		m.SuspicionMultiplier = c.integer(raw.SuspicionMultiplier, minSuspicionMultiplier, maxSuspicionMultiplier)
	}
	m.GossipInterval = c.durationFrom(raw.GossipInterval, m.GossipInterval, minGossipInterval, maxGossipInterval)
	m.GracePeriod = c.duration(raw.GracePeriod, m.GracePeriod, maxGracePeriod)
	return m
}

func (c compiler) nodes(raw []rawNode) []NodeRule {
	var rules []NodeRule
	seen := map[string]value{}
	for _, r := range raw {
		rule := NodeRule{Names: c.texts(r.Names, checkNode), Gone: c.flag(r.Gone, false)}
		rule.Region, _ = c.text(r.Region, checkTopology)
		rule.Zone, _ = c.text(r.Zone, checkTopology)
		rule.SystemUUID, _ = c.text(r.UUID, checkUUID)
		switch {
		case !r.Region.present() && !r.Zone.present() && !r.Gone.present():
			c.errorf(r.At, "changes nothing for its nodes: set region, zone or gone")
		case rule.Gone && !r.UUID.present():
			c.errorf(r.Gone, "set systemUUID, too, since another machine may get the name: it is "+
				"status.nodeInfo.systemUUID of the Node")
		case !rule.Gone && r.UUID.present():
			c.errorf(r.UUID, "is for machines that are gone: set gone: true, or remove it")
		}
		if !rule.Gone {
			c.refuseShadowed(r.Names, seen)
		}
		rules = append(rules, rule)
	}
	return rules
}

// refuseShadowed refuses patterns that an earlier entry has already.
func (c compiler) refuseShadowed(names []value, seen map[string]value) {
	for _, v := range names {
		if first, dup := seen[v.Value]; dup {
			c.errorf(v, "%s never applies here: the entry in line %d has it too, and the first one counts", Quote(v.Value), c.lineOf(first))
		}
	}
	for _, v := range names {
		if _, dup := seen[v.Value]; !dup {
			seen[v.Value] = v
		}
	}
}
