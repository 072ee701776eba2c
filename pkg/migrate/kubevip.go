package migrate

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/btree"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// KubeVIPConfigMap is the ConfigMap of kube-vip's cloud provider, as it is
// called by default.
const KubeVIPConfigMap = "kubevip"

// kubeVIP has the objects of kube-vip and its cloud provider.
type kubeVIP struct {
	migration
	settings []settings
	ranges   *Object
	data     map[string]string
}

// KubeVIP returns the configuration that does what kube-vip and its cloud provider do by their
// objects: a DaemonSet or Pods, and the ConfigMap. It ignores objects of other kinds, and
// translates the annotations of Services.
func KubeVIP(objects []Object) (*Result, error) {
	m := &kubeVIP{migration: newMigration()}
	for i := range objects {
		m.read(&objects[i])
	}
	if len(m.errs) == 0 && m.ranges == nil && len(m.settings) == 0 {
		m.errs = Errors{{Message: "there is nothing of kube-vip here: neither the DaemonSet or Pods of kube-vip, nor the ConfigMap of " +
			"its cloud provider with a key such as cidr-global or range-global"}}
	}
	m.convertSettings()
	if m.ranges != nil && len(m.settings) == 0 {
		m.decidef(&Object{Kind: "DaemonSet", Name: "kube-vip"}, "",
			"is not among the objects with svc_enable=true, nor are Pods of it, so that it is not known how it announces: give it, or add "+
				"advertisements; without, Lodestone announces by layer 2 on all interfaces, whatever the keys interface-... name")
	}
	if m.ranges != nil {
		m.convertRanges()
	} else if len(m.errs) == 0 {
		m.decidef(&Object{Kind: "ConfigMap", Name: KubeVIPConfigMap}, "",
			"is not among the objects, so that there are no pools: add those with the addresses that Services have")
	}
	return m.finish(config.KubeVIP)
}

// read reads one object.
func (m *kubeVIP) read(o *Object) {
	switch {
	case o.Kind == "Service" && o.Group == "":
		m.service(o, config.KubeVIP)
	case o.Kind == "ConfigMap" && o.Group == "":
		m.readRanges(o)
	case o.Kind == "DaemonSet" && o.Group == "apps":
		var ds workload
		if m.decoded(o, "", nil, json.Unmarshal(o.JSON, &ds)) {
			m.readPod(o, &ds.Spec.Template.Spec, "spec.template.spec")
		}
	case o.Kind == "Pod" && o.Group == "":
		var pod corev1.Pod
		if m.decoded(o, "", nil, json.Unmarshal(o.JSON, &pod)) {
			m.readPod(o, &pod.Spec, "spec")
		}
	}
}

// workload has the fields that are read of a DaemonSet or a Deployment.
type workload struct {
	Spec struct {
		Template struct {
			Spec corev1.PodSpec `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
}

// The keys of the ConfigMap, before "-" and a namespace or "global".
const (
	keyCIDR       = "cidr"
	keyRange      = "range"
	keyInterface  = "interface"
	keyAllowShare = "allow-share"
	keySkipEnds   = "skip-end-ips-in-cidr"
	keyOrder      = "search-order"
	global        = "global"
)

// readRanges reads a ConfigMap, if it is that of the cloud provider.
func (m *kubeVIP) readRanges(o *Object) {
	var cm corev1.ConfigMap
	if err := json.Unmarshal(o.JSON, &cm); err != nil {
		if o.Name == KubeVIPConfigMap {
			m.decoded(o, "", nil, err)
		}
		return
	}
	ours := func(key string) bool {
		return strings.HasPrefix(key, keyCIDR+"-") || strings.HasPrefix(key, keyRange+"-")
	}
	switch {
	case !slices.ContainsFunc(sortedKeys(cm.Data), ours):
	case m.ranges != nil:
		m.errorf(o, "", "is a second ConfigMap with addresses, the first is %s at %s: give one", m.ranges, m.ranges.From)
	default:
		m.ranges, m.data = o, cm.Data
	}
}

// convertRanges writes a pool for each namespace that has addresses, and one for
// the others.
func (m *kubeVIP) convertRanges() {
	names := map[string]bool{}
	for _, key := range sortedKeys(m.data) {
		kind, of := m.split(key)
		switch kind {
		case keyCIDR, keyRange:
			names[of] = true
		case keyAllowShare:
			if share, _ := strconv.ParseBool(m.data[key]); share {
				m.decideShared(m.ranges, "data."+key)
			}
		case keyOrder:
			if m.data[key] == "desc" {
				m.notef(m.ranges, "data."+key, "Lodestone gives the lowest free address first")
			}
		case "":
			m.decidef(m.ranges, "data."+key, "is not known here: look up what it does, and whether Lodestone has it")
		}
	}
	taken := ranges{btree.NewG(32, func(a, b netipx.IPRange) bool { return a.From().Less(b.From()) })}
	leases := map[string]bool{}
	for _, name := range append(slices.DeleteFunc(sortedKeys(names), func(n string) bool { return n == global }), global) {
		if names[name] {
			m.convertRange(name, taken, leases)
		}
	}
	if len(m.doc.Pools) > 1 && names[global] {
		m.notef(m.ranges, "", "a Service draws from the pool of its namespace, and when that is full from the global one, which "+
			"kube-vip does not allow: give the global pool namespaces if it should not")
	}
	m.routePools()
}

// split takes a key apart.
func (m *kubeVIP) split(key string) (kind, of string) {
	if key == keySkipEnds || key == keyOrder {
		return key, ""
	}
	for _, kind := range []string{keyCIDR, keyRange, keyInterface, keyAllowShare} {
		if of, ok := strings.CutPrefix(key, kind+"-"); ok {
			return kind, of
		}
	}
	return "", ""
}

// convertRange writes the pool of a namespace, or the global one. The cloud
// provider looks for cidr-<namespace>, cidr-global, range-<namespace> and
// range-global, in this order.
func (m *kubeVIP) convertRange(name string, taken ranges, leases map[string]bool) {
	text, isCIDR := m.data[keyCIDR+"-"+name]
	key := keyCIDR + "-" + name
	_, globalCIDR := m.data[keyCIDR+"-"+global]
	switch unused, both := m.data[keyRange+"-"+name]; {
	case isCIDR && both:
		m.notef(m.ranges, "data."+keyRange+"-"+name, "kube-vip goes by %s and does not use %s: it is left out", key, config.Quote(unused))
	case !isCIDR && globalCIDR:
		m.decidef(m.ranges, "data."+keyRange+"-"+name, "kube-vip goes by cidr-global and does not use it: it is left out; add a pool "+
			"with namespaces: [%s] if it was meant to count", name)
		return
	case !isCIDR:
		text, key = unused, keyRange+"-"+name
	}
	p := pool{Name: names{}.unique(name, "")}
	if name != global {
		p.Namespaces, p.Priority = []string{name}, -1
	}
	if strings.TrimSpace(text) == "0.0.0.0/32" {
		m.leasePool(&p, key, name, leases)
		return
	}
	if m.addresses(&p, key, text, taken) {
		m.doc.Pools = append(m.doc.Pools, p)
	}
}

// leasePool writes a pool that leases its addresses.
func (m *kubeVIP) leasePool(p *pool, key, name string, leases map[string]bool) {
	on := m.data[keyInterface+"-"+name]
	if on == "" && len(m.settings) > 0 {
		on = m.settings[0].servicesInterface()
	}
	if on == "" || leases[on] {
		m.decidef(m.ranges, "data."+key, "asks for addresses from DHCP, and no interface is known for it, or another pool leases on "+
			"it: add a pool with dhcp and its interface")
		return
	}
	leases[on] = true
	p.DHCP = &dhcp{on}
	m.decidef(m.ranges, "data."+key, "asks for addresses from DHCP: Lodestone leases them on %s by itself, as another client of the "+
		"server, so that Services get other addresses than they have, unless the server reserves them; set controller.dhcp.enabled "+
		"of the chart before you apply the configuration", on)
	m.doc.Pools = append(m.doc.Pools, *p)
}

// addresses writes the addresses of the pool, without those that earlier pools have, which are
// in taken.
func (m *kubeVIP) addresses(p *pool, key, text string, taken ranges) bool {
	var blocks []netipx.IPRange
	var own, ends netipx.IPSetBuilder
	failed, skip := false, m.data[keySkipEnds] == "true"
	for i, entry := range strings.Split(text, ",") {
		b, err := parseBlock(entry)
		if err != nil {
			m.errorf(m.ranges, fmt.Sprintf("data.%s[%d]", key, i), "%s", err)
			failed = true
			continue
		}
		if b.loose {
			m.notef(m.ranges, "data."+key, "%s has bits set beyond its length: kube-vip takes it for %s, which is written",
				config.Quote(strings.TrimSpace(entry)), b.text)
		}
		blocks = append(blocks, b.IPRange)
		own.AddRange(b.IPRange)
		if skip && b.subnet() {
			ends.Add(b.From())
			ends.Add(b.To())
		}
		p.Addresses = append(p.Addresses, b.text)
		p.UseFirstAndLast = p.UseFirstAndLast || !skip && b.subnet()
	}
	if failed {
		return false
	}
	whole, _ := own.IPSet() // only valid ranges go in, here and below
	edges, _ := ends.IPSet()
	own.RemoveSet(edges)
	apart := !overlapThemselves(blocks)
	for _, r := range whole.Ranges() {
		for _, t := range taken.overlapping(r) {
			own.RemoveRange(t)
			apart = false
		}
	}
	left, _ := own.IPSet()
	for _, r := range left.Ranges() {
		taken.ReplaceOrInsert(r)
	}
	switch {
	case len(left.Ranges()) == 0:
		m.decidef(m.ranges, "data."+key, "other pools have all of its addresses: it is left out")
		return false
	case !apart:
		p.Addresses, p.UseFirstAndLast = nil, false
		for _, r := range left.Ranges() {
			p.Addresses = append(p.Addresses, rangeText(r))
		}
		m.decidef(m.ranges, "data."+key, "has addresses twice, or in common with another pool, which no two pools of Lodestone have: "+
			"this one has what is left; see that Services keep what they have (lodestone plan)")
	}
	return true
}

// overlapThemselves reports whether two of the ranges, which it sorts, share an
// address.
func overlapThemselves(ranges []netipx.IPRange) bool {
	slices.SortFunc(ranges, func(a, b netipx.IPRange) int { return a.From().Compare(b.From()) })
	for i := 1; i < len(ranges); i++ {
		if ranges[i].From().Compare(ranges[i-1].To()) <= 0 {
			return true
		}
	}
	return false
}

// ranges are disjoint ranges by their first address.
type ranges struct{ *btree.BTreeG[netipx.IPRange] }

// overlapping returns those that share an address with r.
func (rs ranges) overlapping(r netipx.IPRange) (all []netipx.IPRange) {
	rs.DescendLessOrEqual(r, func(before netipx.IPRange) bool {
		if before.Overlaps(r) {
			all = append(all, before)
		}
		return false
	})
	rs.AscendGreaterOrEqual(r, func(after netipx.IPRange) bool {
		if after.Overlaps(r) && (len(all) == 0 || all[0] != after) {
			all = append(all, after)
		}
		return after.Overlaps(r)
	})
	return all
}

func rangeText(r netipx.IPRange) string {
	if r.From() == r.To() {
		return r.From().String()
	}
	return r.From().String() + "-" + r.To().String()
}

// routePools writes advertisements for pools with an interface of their own.
func (m *kubeVIP) routePools() {
	general := slices.Clone(m.doc.Advertisements)
	if !m.spend(m.ranges, &m.copies, len(m.doc.Pools)*len(general)) {
		return
	}
	var own []advertisement
	names := names{}
	for i := range m.doc.Pools {
		p := &m.doc.Pools[i]
		of := global
		if len(p.Namespaces) > 0 {
			of = p.Namespaces[0]
		}
		on := cmp.Or(m.data[keyInterface+"-"+of], m.data[keyInterface+"-"+global])
		for _, a := range general {
			if a.Layer2 != nil && on != "" && !slices.Equal(a.Layer2.Interfaces, []string{on}) {
				a.Name, a.Layer2 = names.unique(p.Name+"-"+a.Name, ""), &layer2{Interfaces: []string{on}, NodeSelector: a.Layer2.NodeSelector}
				own = append(own, a)
			}
			p.Advertise = append(p.Advertise, a.Name)
		}
	}
	if len(own) == 0 { // all are for all
		for i := range m.doc.Pools {
			m.doc.Pools[i].Advertise = nil
		}
	}
	m.doc.Advertisements = append(m.doc.Advertisements, own...)
}

// isKubeVIP reports whether the container is kube-vip, and not its cloud
// provider.
func isKubeVIP(c *corev1.Container) bool {
	image := c.Image
	if i := strings.LastIndex(image, "/"); i >= 0 {
		image = image[i+1:]
	}
	image, _, _ = strings.Cut(image, "@")
	image, _, _ = strings.Cut(image, ":")
	return image == "kube-vip" || image == "kube-vip-iptables"
}
