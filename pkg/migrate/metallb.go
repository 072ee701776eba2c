package migrate

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// MetalLBGroup is the API group of MetalLB's objects.
const MetalLBGroup = "metallb.io"

// resource is one of MetalLB's objects.
type resource[Spec any] struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
	Spec            Spec              `json:"spec"`
	Status          any               `json:"status"`

	object *Object
}

type poolSpec struct {
	Addresses         []string `json:"addresses"`
	AutoAssign        *bool    `json:"autoAssign"`
	AvoidBuggyIPs     bool     `json:"avoidBuggyIPs"`
	ServiceAllocation *struct {
		Priority           int                    `json:"priority"`
		Namespaces         []string               `json:"namespaces"`
		NamespaceSelectors []metav1.LabelSelector `json:"namespaceSelectors"`
		ServiceSelectors   []metav1.LabelSelector `json:"serviceSelectors"`
	} `json:"serviceAllocation"`
}

// reach is which pools an advertisement is for, from where, and for whom.
type reach struct {
	IPAddressPools         []string               `json:"ipAddressPools"`
	IPAddressPoolSelectors []metav1.LabelSelector `json:"ipAddressPoolSelectors"`
	NodeSelectors          []metav1.LabelSelector `json:"nodeSelectors"`
	ServiceSelectors       []metav1.LabelSelector `json:"serviceSelectors"`
}

type l2Spec struct {
	reach                  `json:",inline"`
	Interfaces             []string `json:"interfaces"`
	PreferredNodeSelectors []struct {
		Weight     int32                `json:"weight"`
		Preference metav1.LabelSelector `json:"preference"`
	} `json:"preferredNodeSelectors"`
}

type bgpSpec struct {
	reach         `json:",inline"`
	bgpAttributes `json:",inline"`
	Peers         []string `json:"peers"`
}

type bgpAttributes struct {
	AggregationLength   *int32   `json:"aggregationLength"`
	AggregationLengthV6 *int32   `json:"aggregationLengthV6"`
	LocalPref           uint32   `json:"localPref"`
	Communities         []string `json:"communities"`
}

type communitySpec struct {
	Communities []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"communities"`
}

type peerSpec struct {
	MyASN                  uint32                 `json:"myASN"`
	PeerASN                uint32                 `json:"peerASN"`
	LocalASN               uint32                 `json:"localASN"`
	DynamicASN             string                 `json:"dynamicASN"`
	PeerAddress            string                 `json:"peerAddress"`
	Interface              string                 `json:"interface"`
	SourceAddress          string                 `json:"sourceAddress"`
	PeerPort               uint16                 `json:"peerPort"`
	HoldTime               *string                `json:"holdTime"`
	KeepaliveTime          *string                `json:"keepaliveTime"`
	ConnectTime            *string                `json:"connectTime"`
	RouterID               string                 `json:"routerID"`
	NodeSelectors          []metav1.LabelSelector `json:"nodeSelectors"`
	Password               string                 `json:"password"`
	PasswordSecret         secretReference        `json:"passwordSecret"`
	BFDProfile             string                 `json:"bfdProfile"`
	EnableGracefulRestart  bool                   `json:"enableGracefulRestart"`
	EBGPMultiHop           bool                   `json:"ebgpMultiHop"`
	VRF                    string                 `json:"vrf"`
	DisableMP              bool                   `json:"disableMP"`
	DualStackAddressFamily bool                   `json:"dualStackAddressFamily"`
}

type secretReference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

type bfdSpec struct {
	ReceiveInterval  *uint32 `json:"receiveInterval"`
	TransmitInterval *uint32 `json:"transmitInterval"`
	DetectMultiplier *uint32 `json:"detectMultiplier"`
	EchoInterval     *uint32 `json:"echoInterval"`
	EchoMode         bool    `json:"echoMode"`
	PassiveMode      bool    `json:"passiveMode"`
	MinimumTTL       *uint32 `json:"minimumTtl"`
}

// metalLB has the objects of MetalLB.
type metalLB struct {
	migration
	pools       []resource[poolSpec]
	l2          []resource[l2Spec]
	bgp         []resource[bgpSpec]
	peers       []resource[peerSpec]
	profiles    []resource[bfdSpec]
	profileOf   map[string]int // the index of each profile, by its name
	communities map[string]*community
	// advertise are, by the name of a pool, the names of its advertisements.
	advertise map[string][]string
	silenced  bool // the advertisement nobody is written
	// peerNames are our names of MetalLB's peers. internal are those of our names whose
	// routers may have the nodes' AS number.
	peerNames map[string][]string
	internal  map[string]bool
}

// community is what an alias stands for.
type community struct {
	object *Object
	field  string
	value  string
	used   bool
}

// MetalLB returns the configuration that does what MetalLB does by its objects. It ignores
// objects of other kinds, and translates the annotations of Services.
func MetalLB(objects []Object) (*Result, error) {
	m := &metalLB{communities: map[string]*community{}, advertise: map[string][]string{}, peerNames: map[string][]string{},
		internal: map[string]bool{}, migration: newMigration()}
	for i := range objects {
		m.read(&objects[i])
	}
	if len(m.errs) == 0 && len(m.pools)+len(m.peers)+len(m.l2)+len(m.bgp)+len(m.profiles)+len(m.communities) == 0 {
		m.errs = Errors{{Message: "there is nothing of MetalLB here: neither objects of the group metallb.io, nor the ConfigMap with " +
			"the key config that MetalLB had before v0.13"}}
	}
	inOrder(m, m.pools)
	inOrder(m, m.peers)
	inOrder(m, m.l2)
	inOrder(m, m.bgp)
	m.profileOf = map[string]int{}
	for i := range slices.Backward(m.profiles) { // the first one counts
		m.profileOf[m.profiles[i].object.Name] = i
	}
	taken := names{}
	m.convertPeers()
	for i := range m.l2 {
		m.convertL2(&m.l2[i], taken)
	}
	for i := range m.bgp {
		m.convertBGP(&m.bgp[i], taken)
	}
	m.convertPools(taken)
	m.noteUnused()
	return m.finish(config.MetalLB)
}

// read reads one object.
func (m *metalLB) read(o *Object) {
	switch {
	case o.Kind == "Service" && o.Group == "":
		m.service(o, config.MetalLB)
	case o.Kind == "ConfigMap" && o.Group == "":
		m.readLegacy(o)
	case o.Group == "apps" && (o.Kind == "Deployment" || o.Kind == "DaemonSet"):
		m.readFlags(o)
	case o.Group != MetalLBGroup:
	case o.Kind == "IPAddressPool":
		add(m, o, &m.pools)
	case o.Kind == "L2Advertisement":
		add(m, o, &m.l2)
	case o.Kind == "BGPAdvertisement":
		add(m, o, &m.bgp)
	case o.Kind == "BGPPeer":
		add(m, o, &m.peers)
	case o.Kind == "BFDProfile":
		add(m, o, &m.profiles)
	case o.Kind == "Community":
		m.readCommunities(o)
	case o.Kind == "AddressPool":
		m.readAddressPool(o)
	case strings.HasSuffix(o.Kind, "Status"), o.Kind == "ConfigurationState":
		// reports of MetalLB, no configuration
	default:
		m.decidef(o, "", "objects of this kind are not known here, and nothing of it is taken over: look up what it does, and whether "+
			"Lodestone has it")
	}
}

// selects reports whether the selector selects nodes by more than their operating system.
func selects(s metav1.LabelSelector) bool {
	others := maps.Clone(s.MatchLabels)
	delete(others, corev1.LabelOSStable)
	byOther := func(r metav1.LabelSelectorRequirement) bool { return r.Key != corev1.LabelOSStable }
	return len(others) > 0 || slices.ContainsFunc(s.MatchExpressions, byOther)
}

// readFlags reads what MetalLB's programs do by their flags, and where they run, which no object has.
func (m *metalLB) readFlags(o *Object) {
	var w workload
	if !m.decoded(o, "", nil, json.Unmarshal(o.JSON, &w)) {
		return
	}
	for i, c := range w.Spec.Template.Spec.Containers {
		if !strings.Contains(c.Image, "metallb") {
			continue
		}
		if o.Kind == "DaemonSet" && slices.ContainsFunc(nodesOf(&w.Spec.Template.Spec), selects) {
			m.decidef(o, "spec.template.spec", "MetalLB runs on some nodes only: set the chart's value speaker.nodeSelector, or nodeSelector in "+
				"the advertisements, so that the same nodes announce")
		}
		for name, value := range flagsIn(slices.Concat(c.Command, c.Args)) {
			field := fmt.Sprintf("spec.template.spec.containers[%d].args[--%s]", i, name)
			switch name {
			case "lb-class":
				m.decidef(o, field, "set the chart's values controller.handleClassless=false and controller.loadBalancerClasses={%s} to "+
					"serve the same Services", cut(value))
			case "ignore-exclude-lb":
				m.doc.IgnoreExcludeLabel = value != "false"
			}
		}
	}
}

// add decodes an object and adds it.
func add[Spec any](m *metalLB, o *Object, to *[]resource[Spec]) {
	r := resource[Spec]{object: o}
	if !m.into(o, &r) {
		return
	}
	if o.Name == "" {
		m.errorf(o, "metadata.name", "is missing")
		return
	}
	*to = append(*to, r)
}

func (m *metalLB) readCommunities(o *Object) {
	var all []resource[communitySpec]
	add(m, o, &all)
	for _, r := range all {
		for i, c := range r.Spec.Communities {
			m.alias(o, fmt.Sprintf("spec.communities[%d]", i), c.Name, c.Value)
		}
	}
}

// alias notes what a community is called.
func (m *metalLB) alias(o *Object, field, name, value string) {
	if old, dup := m.communities[name]; !dup {
		m.communities[name] = &community{o, field, value, false}
	} else if old.value != value {
		m.errorf(o, field, "%s stands for %s elsewhere, and for %s here", config.Quote(name), config.Quote(old.value), config.Quote(value))
	}
}

// inOrder sorts objects, which come from a cluster in any order, and refuses those that are there
// twice.
func inOrder[Spec any](m *metalLB, all []resource[Spec]) {
	slices.SortStableFunc(all, func(a, b resource[Spec]) int { return cmp.Compare(a.object.Name, b.object.Name) })
	for i := 1; i < len(all); i++ {
		if o, before := all[i].object, all[i-1].object; o.Name == before.Name {
			m.errorf(o, "", "is there twice, also at %s: remove one", before.From)
		}
	}
}

// apply notes that the advertisements announce the pools that the reach names.
func (m *metalLB) apply(o *Object, r reach, names []string) {
	selectors := make([]labels.Selector, 0, len(r.IPAddressPoolSelectors))
	for i, s := range r.IPAddressPoolSelectors {
		parsed, err := metav1.LabelSelectorAsSelector(&s)
		if err != nil {
			m.errorf(o, fmt.Sprintf("spec.ipAddressPoolSelectors[%d]", i), "%s", cut(err.Error()))
			continue
		}
		selectors = append(selectors, parsed)
	}
	named := map[string]bool{}
	for i, name := range r.IPAddressPools {
		if _, found := slices.BinarySearchFunc(m.pools, name,
			func(p resource[poolSpec], name string) int { return cmp.Compare(p.object.Name, name) }); !found {
			m.notef(o, fmt.Sprintf("spec.ipAddressPools[%d]", i), "there is no IPAddressPool %s", config.Quote(name))
		} else if !named[name] {
			m.announce(o, name, names)
		}
		named[name] = true
	}
	all := len(r.IPAddressPools)+len(r.IPAddressPoolSelectors) == 0
	requirements := 0
	for _, s := range selectors {
		list, _ := s.Requirements()
		requirements += 1 + len(list)
	}
	if !all && len(selectors) == 0 || !m.spend(o, &m.comparisons, requirements*len(m.pools)) {
		return
	}
	for i := range m.pools {
		p := &m.pools[i]
		selected := slices.ContainsFunc(selectors, func(s labels.Selector) bool { return s.Matches(labels.Set(p.Metadata.Labels)) })
		if (all || selected) && !named[p.object.Name] && !m.announce(o, p.object.Name, names) {
			return
		}
	}
}

// announce notes that the advertisements announce the pool, and reports whether that can be
// written.
func (m *metalLB) announce(o *Object, pool string, names []string) bool {
	if !m.spend(o, &m.copies, len(names)) {
		return false
	}
	m.advertise[pool] = append(m.advertise[pool], names...)
	return true
}

// each calls write for each pair of selectors that an advertisement needs, with a name for the
// advertisement.
func (m *metalLB) each(o *Object, r reach, suffix string, taken names, write func(name string, nodes, services *selector)) {
	nodes, services := anyOf(r.NodeSelectors), anyOf(r.ServiceSelectors)
	if !m.spend(o, &m.copies, len(nodes)*len(services)) {
		return
	}
	var names []string
	for i, n := range nodes {
		for j, s := range services {
			name := taken.unique(numbered(o.Name, i*len(services)+j, len(nodes)*len(services)), suffix)
			names = append(names, name)
			write(name, n, s)
		}
	}
	if len(names) > 1 {
		m.notef(o, "", "becomes the advertisements %s, since it has several selectors of which one has to match", strings.Join(names, ", "))
	}
	m.apply(o, r, names)
}

func (m *metalLB) convertL2(r *resource[l2Spec], taken names) {
	var preferred []preference
	for _, p := range r.Spec.PreferredNodeSelectors {
		preferred = append(preferred, preference{p.Weight, selectorOf(p.Preference)})
	}
	m.each(r.object, r.Spec.reach, "-l2", taken, func(name string, nodes, services *selector) {
		m.doc.Advertisements = append(m.doc.Advertisements, advertisement{
			Name: name, ServiceSelector: services,
			Layer2: &layer2{Interfaces: r.Spec.Interfaces, NodeSelector: nodes, PreferredNodes: preferred},
		})
	})
}

// nobody is the advertisement of pools that MetalLB does not announce. Its selector
// contradicts itself, so that no node announces them.
const nobody = "nobody"

// convertPools writes the pools; their advertisements are known by now.
func (m *metalLB) convertPools(taken names) {
	pinned := slices.ContainsFunc(m.pools, func(p resource[poolSpec]) bool { return p.Spec.ServiceAllocation != nil })
	names := map[string]bool{}
	for _, p := range m.pools {
		out := pool{Name: compat.PoolName(p.object.Name), AutoAssign: p.Spec.AutoAssign, Advertise: m.advertise[p.object.Name]}
		if names[out.Name] {
			m.errorf(p.object, "metadata.name", "the name becomes %s, which another pool has, too: rename one", config.Quote(out.Name))
		}
		if out.Name != p.object.Name {
			m.notef(p.object, "metadata.name", "the pool is called %s, since names here have at most 63 of a-z, 0-9 and '-'; "+
				"annotations of MetalLB that name it are understood", out.Name)
		}
		names[out.Name] = true
		if out.AutoAssign != nil && *out.AutoAssign {
			out.AutoAssign = nil
		}
		m.addresses(&p, &out)
		m.allocation(&p, &out, pinned)
		if len(out.Advertise) == 0 {
			m.unannounced(&p, &out, taken)
		}
		m.doc.Pools = append(m.doc.Pools, out)
	}
	m.simplify()
}

// unannounced gives a pool that is not announced the advertisement nobody.
func (m *metalLB) unannounced(p *resource[poolSpec], out *pool, taken names) {
	if !m.silenced {
		if taken.has(nobody) {
			m.errorf(p.object, "", "no advertisement is for this pool, and the name %q is taken by one: rename that", nobody)
		}
		m.silenced = true
		m.doc.Advertisements = append(m.doc.Advertisements, advertisement{Name: nobody, Layer2: &layer2{}, ServiceSelector: &selector{
			MatchExpressions: []requirement{{nobody, "Exists", nil}, {nobody, "DoesNotExist", nil}},
		}})
	}
	out.Advertise = []string{nobody}
	m.decidef(p.object, "", "no advertisement of MetalLB is for this pool, so that nobody announces its addresses: it stays so "+
		"(advertise: [%s]); name an advertisement there, or remove the pool", nobody)
}

// noteUnused notes objects that no other names, and a lack of pools.
func (m *metalLB) noteUnused() {
	used := map[string]bool{}
	for _, p := range m.peers {
		used[p.Spec.BFDProfile] = true
	}
	for _, p := range m.profiles {
		if !used[p.object.Name] {
			m.notef(p.object, "", "no peer has this BFD profile: it is left out")
		}
	}
	for _, name := range sortedKeys(m.communities) {
		if c := m.communities[name]; !c.used {
			m.notef(c.object, c.field, "no advertisement has the community %s (%s): it is left out", config.Quote(name), config.Quote(c.value))
		}
	}
	if len(m.pools) == 0 {
		m.decidef(&Object{Kind: "IPAddressPool"}, "", "there is none among the objects, so that there are no pools and no Service is "+
			"given an address: add pools with the addresses that Services have")
	}
}

// simplify removes the list of advertisements from a pool that all of them are for.
func (m *metalLB) simplify() {
	all := len(m.doc.Advertisements)
	for i := range m.doc.Pools {
		if p := &m.doc.Pools[i]; len(p.Advertise) == all {
			p.Advertise = nil
		}
	}
}

// addresses writes what the pool gives: all of it, or all but what ends in .0
// and .255.
func (m *metalLB) addresses(p *resource[poolSpec], out *pool) {
	if len(p.Spec.Addresses) == 0 {
		m.errorf(p.object, "spec.addresses", "is empty: the pool has no addresses")
		return
	}
	var blocks []block
	for i, text := range p.Spec.Addresses {
		b, err := parseBlock(text)
		if err != nil {
			m.errorf(p.object, fmt.Sprintf("spec.addresses[%d]", i), "%s", err)
			continue
		}
		if b.loose {
			m.notef(p.object, fmt.Sprintf("spec.addresses[%d]", i),
				"%s has bits set beyond its length: MetalLB takes it for %s, which is written", config.Quote(text), b.text)
		}
		blocks = append(blocks, b)
		out.Addresses = append(out.Addresses, b.text)
	}
	whole, edges := edges(blocks)
	switch {
	case !p.Spec.AvoidBuggyIPs:
		out.UseFirstAndLast = slices.ContainsFunc(blocks, block.subnet)
	case whole: // exactly what Lodestone withholds anyway
	case len(edges) > maxEdges:
		m.decidef(p.object, "spec.avoidBuggyIPs", "more than %d addresses end in .0 or .255: they are not excluded, but for the first "+
			"and last of each prefix; exclude those that your network needs", maxEdges)
	default:
		out.UseFirstAndLast, out.Exclude = slices.ContainsFunc(blocks, block.subnet), edges
	}
}

// maxEdges is how many ranges a pool excludes at most; a /16 has 257.
const maxEdges = 512

// edges returns the addresses of the blocks that end in .0 or .255, two
// neighbours in one range. whole is set if they are the first and the last of
// each prefix, and no others.
func edges(blocks []block) (whole bool, all []string) {
	whole = true
	for _, b := range blocks {
		if b.From().Is6() {
			continue
		}
		whole = whole && b.prefix.IsValid() && b.prefix.Bits() == 24
		for a := b.From(); a.IsValid() && a.Compare(b.To()) <= 0 && len(all) <= maxEdges; {
			last := a.As4()[3]
			next := a.Next()
			switch {
			case last == 255 && next.IsValid() && next.Compare(b.To()) <= 0:
				all = append(all, a.String()+"-"+next.String())
				next = next.Next()
			case last == 255 || last == 0:
				all = append(all, a.String())
			default:
				end := a.As4()
				end[3] = 255
				next = netip.AddrFrom4(end)
			}
			a = next
		}
	}
	return whole, all
}

// lastPriority is that of pools without one.
const lastPriority = 999

// allocation writes who may draw from the pool, and when it comes to that.
// MetalLB draws from pools with a serviceAllocation first, in the order of their
// priorities, and from those without a priority last of these.
func (m *metalLB) allocation(p *resource[poolSpec], out *pool, pinned bool) {
	s := p.Spec.ServiceAllocation
	switch {
	case s == nil && pinned:
		out.Priority = lastPriority + 1
		return
	case s == nil:
		return
	}
	out.Namespaces = s.Namespaces
	out.NamespaceSelector = m.only(p.object, "spec.serviceAllocation.namespaceSelectors", s.NamespaceSelectors)
	out.ServiceSelector = m.only(p.object, "spec.serviceAllocation.serviceSelectors", s.ServiceSelectors)
	if len(s.NamespaceSelectors) > 0 && out.NamespaceSelector == nil {
		out.Namespaces = nil // one of them selects everything
	}
	switch out.Priority = s.Priority; {
	case s.Priority < 0:
		m.errorf(p.object, "spec.serviceAllocation.priority", "%d is below 0", s.Priority)
	case s.Priority == 0:
		out.Priority = lastPriority
	case s.Priority > lastPriority:
		out.Priority = lastPriority
		m.decidef(p.object, "spec.serviceAllocation.priority",
			"%d is more than %d, which is written: see that the order of such pools is right", s.Priority, lastPriority)
	}
}

// block is one entry of a list of addresses.
type block struct {
	netipx.IPRange
	// prefix is what was written, if it was one.
	prefix netip.Prefix
	text   string
	// loose is set if the prefix had bits set beyond its length.
	loose bool
}

// subnet reports whether Lodestone withholds the first and the last address.
func (b block) subnet() bool {
	return b.prefix.IsValid() && b.prefix.Addr().Is4() && b.prefix.Bits() < 31
}

// mappedBits is the length of ::ffff:0:0/96, which contains the IPv4 addresses
// in IPv6 form.
const mappedBits = 96

// unmapped writes an IPv4 address as IPv4. Other texts stay as they are.
func unmapped(address string) string {
	if a, err := netip.ParseAddr(address); err == nil && a.Is4In6() && a.Zone() == "" {
		return a.Unmap().String()
	}
	return address
}

// parseBlock reads a prefix, a range, or an address as others write them.
func parseBlock(text string) (block, error) {
	text = strings.TrimSpace(text)
	if first, last, ok := strings.Cut(text, "-"); ok {
		from, err := netip.ParseAddr(strings.TrimSpace(first))
		to, err2 := netip.ParseAddr(strings.TrimSpace(last))
		r := netipx.IPRangeFrom(from.Unmap(), to.Unmap())
		if err != nil || err2 != nil || !r.IsValid() {
			return block{}, fmt.Errorf("%s is not a range of addresses", config.Quote(text))
		}
		return block{IPRange: r, text: r.From().String() + "-" + r.To().String()}, nil
	}
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return block{IPRange: netipx.IPRangeFrom(a, a), text: a.String()}, nil
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil || prefix.Addr().Is4In6() && prefix.Bits() < mappedBits {
		return block{}, fmt.Errorf("%s is neither a prefix nor a range of addresses", config.Quote(text))
	}
	if prefix.Addr().Is4In6() {
		prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-mappedBits)
	}
	whole := prefix.Masked()
	return block{IPRange: netipx.RangeOfPrefix(whole), prefix: whole, text: whole.String(), loose: whole != prefix}, nil
}

// sortedKeys returns the keys of a map in order.
func sortedKeys[V any](of map[string]V) []string { return slices.Sorted(maps.Keys(of)) }
