package migrate

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// LegacyKey is the key of the ConfigMap that MetalLB was configured by before
// v0.13.
const LegacyKey = "config"

// ExtrasConfigMap is the ConfigMap whose key extras has more configuration for
// FRR, in its own language.
const ExtrasConfigMap = "bgpextras"

// legacyConfig is the document in that ConfigMap.
type legacyConfig struct {
	Peers []struct {
		MyASN         uint32           `json:"my-asn"`
		PeerASN       uint32           `json:"peer-asn"`
		PeerAddress   string           `json:"peer-address"`
		SourceAddress string           `json:"source-address"`
		PeerPort      uint16           `json:"peer-port"`
		HoldTime      *string          `json:"hold-time"`
		KeepaliveTime *string          `json:"keepalive-time"`
		RouterID      string           `json:"router-id"`
		NodeSelectors []legacySelector `json:"node-selectors"`
		Password      string           `json:"password"`
		BFDProfile    string           `json:"bfd-profile"`
		EBGPMultiHop  bool             `json:"ebgp-multihop"`
	} `json:"peers"`
	Communities  map[string]string `json:"bgp-communities"`
	AddressPools []struct {
		Name           string                `json:"name"`
		Protocol       string                `json:"protocol"`
		Addresses      []string              `json:"addresses"`
		AvoidBuggyIPs  bool                  `json:"avoid-buggy-ips"`
		AutoAssign     *bool                 `json:"auto-assign"`
		Advertisements []legacyAdvertisement `json:"bgp-advertisements"`
	} `json:"address-pools"`
	Profiles []struct {
		Name      string `json:"name"`
		legacyBFD `json:",inline"`
	} `json:"bfd-profiles"`
}

// The fields of legacyBFD, legacySelector and legacyAdvertisement are those of the types that they are
// converted to. Only the keys differ.
type legacyBFD struct {
	ReceiveInterval  *uint32 `json:"receive-interval"`
	TransmitInterval *uint32 `json:"transmit-interval"`
	DetectMultiplier *uint32 `json:"detect-multiplier"`
	EchoInterval     *uint32 `json:"echo-interval"`
	EchoMode         bool    `json:"echo-mode"`
	PassiveMode      bool    `json:"passive-mode"`
	MinimumTTL       *uint32 `json:"minimum-ttl"`
}

type legacySelector struct {
	MatchLabels      map[string]string                 `json:"match-labels"`
	MatchExpressions []metav1.LabelSelectorRequirement `json:"match-expressions"`
}

type legacyAdvertisement struct {
	AggregationLength   *int32   `json:"aggregation-length"`
	AggregationLengthV6 *int32   `json:"aggregation-length-v6"`
	LocalPref           uint32   `json:"localpref"`
	Communities         []string `json:"communities"`
}

// readLegacy reads the ConfigMap of versions before v0.13. It ignores other ConfigMaps.
func (m *metalLB) readLegacy(o *Object) {
	var cm corev1.ConfigMap
	err := json.Unmarshal(o.JSON, &cm)
	if err == nil && o.Name == ExtrasConfigMap && cm.Data["extras"] != "" {
		m.decidef(o, "data.extras", "is in the language of FRR, which Lodestone does not have: look up what it does, and whether peers "+
			"and advertisements have it")
	}
	if err != nil || cm.Data[LegacyKey] == "" {
		return
	}
	const field = "data." + LegacyKey
	body, err := yaml.YAMLToJSONStrict([]byte(cm.Data[LegacyKey]))
	if err != nil {
		m.errorf(o, field, "is not YAML: %s", cut(err.Error()))
		return
	}
	var c legacyConfig
	unknown, err := kjson.UnmarshalStrict(body, &c)
	if !m.decoded(o, field, unknown, err) {
		return
	}
	for _, name := range sortedKeys(c.Communities) {
		m.alias(o, field+".bgp-communities", name, c.Communities[name])
	}
	m.legacyProfiles(o, &c)
	m.legacyPeers(o, &c)
	for i, p := range c.AddressPools {
		at := m.part(o, fmt.Sprintf("%s.address-pools[%d]", field, i), p.Name)
		r := resource[poolSpec]{object: at}
		r.Spec.Addresses, r.Spec.AutoAssign, r.Spec.AvoidBuggyIPs = p.Addresses, p.AutoAssign, p.AvoidBuggyIPs
		m.pools = append(m.pools, r)
		var list []bgpAttributes
		for _, a := range p.Advertisements {
			list = append(list, bgpAttributes(a))
		}
		m.legacyAdvertisements(at, p.Protocol, list)
	}
}

// part is an object for a part of another one.
func (m *metalLB) part(of *Object, field, name string) *Object {
	if name == "" {
		m.errorf(of, field+".name", "is missing")
	}
	return &Object{From: of.From, Kind: of.String() + ": " + field, Name: name}
}

func (m *metalLB) legacyPeers(o *Object, c *legacyConfig) {
	for i, p := range c.Peers {
		r := resource[peerSpec]{object: m.part(o, fmt.Sprintf("data.%s.peers[%d]", LegacyKey, i), fmt.Sprintf("peer-%d", i+1))}
		r.Spec = peerSpec{
			MyASN: p.MyASN, PeerASN: p.PeerASN, PeerAddress: p.PeerAddress, SourceAddress: p.SourceAddress, PeerPort: p.PeerPort,
			HoldTime: p.HoldTime, KeepaliveTime: p.KeepaliveTime, RouterID: p.RouterID, Password: p.Password, BFDProfile: p.BFDProfile,
			EBGPMultiHop: p.EBGPMultiHop,
		}
		for _, s := range p.NodeSelectors {
			r.Spec.NodeSelectors = append(r.Spec.NodeSelectors, metav1.LabelSelector(s))
		}
		m.peers = append(m.peers, r)
	}
}

func (m *metalLB) legacyProfiles(o *Object, c *legacyConfig) {
	for i, p := range c.Profiles {
		m.profiles = append(m.profiles, resource[bfdSpec]{
			object: m.part(o, fmt.Sprintf("data.%s.bfd-profiles[%d]", LegacyKey, i), p.Name), Spec: bfdSpec(p.legacyBFD),
		})
	}
}

// legacyAdvertisements writes the advertisements of a pool by its protocol.
func (m *metalLB) legacyAdvertisements(pool *Object, protocol string, list []bgpAttributes) {
	only := reach{IPAddressPools: []string{pool.Name}}
	switch protocol {
	case "layer2":
		m.l2 = append(m.l2, resource[l2Spec]{object: pool, Spec: l2Spec{reach: only}})
	case "bgp":
		if len(list) == 0 {
			list = []bgpAttributes{{}}
		}
		for i, a := range list {
			at := *pool
			at.Name = numbered(pool.Name, i, len(list))
			m.bgp = append(m.bgp, resource[bgpSpec]{object: &at, Spec: bgpSpec{reach: only, bgpAttributes: a}})
		}
	default:
		m.errorf(pool, "protocol", "%s is neither layer2 nor bgp", config.Quote(protocol))
	}
}

// addressPoolSpec is that of an AddressPool, which MetalLB v0.13 still had.
type addressPoolSpec struct {
	Protocol       string          `json:"protocol"`
	Addresses      []string        `json:"addresses"`
	AutoAssign     *bool           `json:"autoAssign"`
	Advertisements []bgpAttributes `json:"bgpAdvertisements"`
}

func (m *metalLB) readAddressPool(o *Object) {
	var all []resource[addressPoolSpec]
	add(m, o, &all)
	for _, a := range all {
		r := resource[poolSpec]{object: o}
		r.Spec.Addresses, r.Spec.AutoAssign = a.Spec.Addresses, a.Spec.AutoAssign
		m.pools = append(m.pools, r)
		m.legacyAdvertisements(o, a.Spec.Protocol, a.Spec.Advertisements)
	}
}
