package config

import (
	"errors"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
)

// Bounds and defaults of the document.
const (
	// DefaultClusterID names a cluster whose operator did not.
	DefaultClusterID = "kubernetes"
	// DefaultAdvertisement is the name of the advertisement that a document
	// without any gets.
	DefaultAdvertisement = "default"

	maxQuarantine = 24 * time.Hour
	minPriority   = -1000
	maxPriority   = 1000
)

// compile turns what is written into what it means.
func (d *decoder) compile(raw *rawConfig) *Config {
	oneOf(d, raw.APIVersion, []string{APIVersion})
	oneOf(d, raw.Kind, []string{Kind})
	c := &Config{
		ClusterID:      DefaultClusterID,
		Quarantine:     d.duration(raw.Quarantine, DefaultQuarantine, maxQuarantine),
		Pools:          d.pools(raw),
		Advertisements: d.advertisements(raw.Advertisements),
		Nodes:          d.nodes(raw.Nodes),
	}
	if id, ok := d.text(raw.ClusterID, checkName); ok {
		c.ClusterID = id
	}
	return c
}

// uniqueName returns the name of an item and refuses the name of another one.
func (d *decoder) uniqueName(v value, what string, seen map[string]value) string {
	name, ok := d.text(v, checkName)
	if first, dup := seen[name]; ok && dup {
		d.errorf(v, "another %s named %s is in line %d", what, quote(name), d.lineOf(first))
	} else if ok {
		seen[name] = v
	}
	return name
}

func (d *decoder) pools(raw *rawConfig) []Pool {
	var (
		pools  []Pool
		blocks []block
		seen   = map[string]value{}
	)
	for _, r := range raw.Pools {
		own := d.addresses(r)
		blocks = append(blocks, own...)
		p := Pool{
			Name:       d.uniqueName(r.Name, "pool", seen),
			AutoAssign: d.flag(r.AutoAssign, true),
			Priority:   d.integer(r.Priority, minPriority, maxPriority),
			Namespaces: d.texts(r.Namespaces, checkName),
			Advertise:  d.references(r.Advertise, raw.Advertisements),
		}
		p.Free, p.Withheld = d.split(r, own)
		pools = append(pools, p)
	}
	d.refuseOverlaps(blocks)
	return pools
}

// addresses returns the entries of a pool that make sense.
func (d *decoder) addresses(r rawPool) []block {
	var blocks []block
	for _, v := range r.Addresses {
		v.path = r.At.path // an entry speaks for itself
		b, ok := d.block(v)
		if !ok {
			continue
		}
		if err := b.checkUsable(); err != nil {
			d.errorf(v, "%v", err)
			continue
		}
		b.pool = r.Name.text()
		blocks = append(blocks, b)
	}
	return blocks
}

func (d *decoder) block(v value) (block, bool) {
	b, err := parseBlock(v.Value)
	if err != nil {
		d.errorf(v, "%v", err)
	}
	b.at = v
	return b, err == nil
}

// split divides a pool's addresses into those it hands out and the others.
func (d *decoder) split(r rawPool, blocks []block) (free, withheld *netipx.IPSet) {
	var all, give, keep netipx.IPSetBuilder
	for _, b := range blocks {
		all.AddRange(b.IPRange)
	}
	whole, _ := all.IPSet() // only valid ranges go in, here and below
	give.AddSet(whole)
	if !d.flag(r.UseFirstAndLast, false) {
		removeFirstAndLast(&give, blocks)
	}
	d.exclude(r, &give, whole.Ranges())
	free, _ = give.IPSet()
	keep.AddSet(whole)
	keep.RemoveSet(free)
	withheld, _ = keep.IPSet()
	if len(blocks) > 0 && len(free.Ranges()) == 0 {
		d.errorf(r.At, "has no address to give: all of them are excluded, or the first or last of a prefix")
	}
	return free, withheld
}

func removeFirstAndLast(set *netipx.IPSetBuilder, blocks []block) {
	for _, b := range blocks {
		if b.prefix.IsValid() && b.prefix.Addr().Is4() && b.prefix.Bits() < 31 {
			set.Remove(b.From())
			set.Remove(b.To())
		}
	}
}

func (d *decoder) exclude(r rawPool, set *netipx.IPSetBuilder, pool []netipx.IPRange) {
	for _, v := range r.Exclude {
		b, ok := d.block(v)
		if ok && len(pool) > 0 && !touches(pool, b.IPRange) {
			d.errorf(v, "%s excludes nothing: no address of the pool lies in it", b.text)
		}
		if ok {
			set.RemoveRange(b.IPRange)
		}
	}
}

func (d *decoder) refuseOverlaps(blocks []block) {
	for _, o := range overlaps(blocks) {
		a, b := blocks[o.first], blocks[o.second]
		if a.pool == b.pool {
			d.errorf(b.at, "%s overlaps %s in line %d of the same pool", b.text, a.text, d.lineOf(a.at))
		} else {
			d.errorf(b.at, "%s overlaps pool %s (%s in line %d)", b.text, quote(a.pool), a.text, d.lineOf(a.at))
		}
	}
}

// references returns the names of advertisements, which must exist.
func (d *decoder) references(list []value, to []rawAdvertisement) []string {
	var names []string
	for _, a := range to {
		names = append(names, a.Name.text())
	}
	return d.texts(list, func(s string) error {
		switch {
		case slices.Contains(names, s):
			return nil
		case len(names) == 0:
			return errors.New("is not an advertisement: the document defines none")
		default:
			return errors.New("is not an advertisement: the document defines " + clip(strings.Join(names, ", ")))
		}
	})
}

func (d *decoder) advertisements(raw []rawAdvertisement) []Advertisement {
	if len(raw) == 0 {
		return []Advertisement{{Name: DefaultAdvertisement, Layer2: &Layer2{}}}
	}
	seen := map[string]value{}
	var all []Advertisement
	for _, r := range raw {
		a := Advertisement{Name: d.uniqueName(r.Name, "advertisement", seen)}
		if r.Layer2 != nil {
			a.NodeSelector = d.selector(r.Layer2.NodeSelector)
			a.Layer2 = &Layer2{Interfaces: d.texts(r.Layer2.Interfaces, checkInterface)}
		}
		all = append(all, a)
	}
	return all
}

func (d *decoder) selector(raw *rawSelector) Selector {
	if raw == nil {
		return nil
	}
	var s Selector
	for _, p := range raw.MatchLabels {
		key, _ := d.text(p.Key, checkLabelKey)
		val, _ := d.text(p.Value, checkLabelValue)
		s = append(s, Requirement{Key: key, Operator: In, Values: []string{val}})
	}
	for _, r := range raw.MatchExpressions {
		s = append(s, d.requirement(r))
	}
	return s
}

var operators = []Operator{In, NotIn, Exists, DoesNotExist}

func (d *decoder) requirement(raw rawRequirement) Requirement {
	key, _ := d.text(raw.Key, checkLabelKey)
	r := Requirement{Key: key, Operator: Operator(raw.Operator.text()), Values: d.texts(raw.Values, checkLabelValue)}
	switch r.Operator {
	case In, NotIn:
		if raw.Values == nil {
			d.errorf(raw.At, "operator %s needs values", r.Operator)
		}
	case Exists, DoesNotExist:
		if raw.Values != nil {
			d.errorf(raw.At, "operator %s takes no values: remove them", r.Operator)
		}
	default:
		oneOf(d, raw.Operator, operators)
	}
	return r
}

func (d *decoder) nodes(raw []rawNode) []NodeRule {
	var rules []NodeRule
	seen := map[string]value{}
	for _, r := range raw {
		rule := NodeRule{Names: d.texts(r.Names, checkNode), Gone: d.flag(r.Gone, false)}
		rule.Region, _ = d.text(r.Region, checkTopology)
		rule.Zone, _ = d.text(r.Zone, checkTopology)
		if !r.Region.present() && !r.Zone.present() && !r.Gone.present() {
			d.errorf(r.At, "says nothing about its nodes: set region, zone or gone")
		}
		d.refuseShadowed(r.Names, seen)
		rules = append(rules, rule)
	}
	return rules
}

// refuseShadowed refuses patterns that an earlier entry has already.
func (d *decoder) refuseShadowed(names []value, seen map[string]value) {
	for _, v := range names {
		if first, dup := seen[v.Value]; dup {
			d.errorf(v, "%s never applies here: the entry in line %d has it too, and the first one counts", quote(v.Value), d.lineOf(first))
		}
	}
	for _, v := range names {
		if _, dup := seen[v.Value]; !dup {
			seen[v.Value] = v
		}
	}
}
