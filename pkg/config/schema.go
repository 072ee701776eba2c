package config

import (
	"reflect"
	"slices"
	"strings"
	"sync"
)

// The raw structs are the schema. Their tags name every key, and the decoder fills them with
// the texts and their positions. compile checks them later, and turns them into a Config.
//
// Options: "required" keys must be there; "nonempty" lists must not be [], because a list that
// is left out does not mean "none".
type rawConfig struct {
	APIVersion     value              `key:"apiVersion,required"`
	Kind           value              `key:"kind,required"`
	ClusterID      value              `key:"clusterID"`
	Quarantine     value              `key:"quarantine"`
	Failover       value              `key:"failover"`
	Membership     rawMembership      `key:"membership"`
	Pools          []rawPool          `key:"pools"`
	Reservations   []rawReservation   `key:"reservations"`
	Advertisements []rawAdvertisement `key:"advertisements"`
	Peers          []rawPeer          `key:"peers"`
	BGPPermit      []value            `key:"bgpPermit,nonempty"`
	Routes         *rawRoutes         `key:"routes"`
	Compatibility  []value            `key:"compatibility"`
	IgnoreExclude  value              `key:"ignoreExcludeLabel"`
	ExcludeTaints  []value            `key:"excludeTaints,nonempty"`
	Nodes          []rawNode          `key:"nodes"`
}

type rawMembership struct {
	ProbeInterval       value `key:"probeInterval"`
	ProbeTimeout        value `key:"probeTimeout"`
	SuspicionMultiplier value `key:"suspicionMultiplier"`
	GossipInterval      value `key:"gossipInterval"`
	GracePeriod         value `key:"gracePeriod"`
}

type rawPool struct {
	At                value
	Name              value        `key:"name,required"`
	Addresses         []value      `key:"addresses,nonempty"`
	DHCP              *rawDHCP     `key:"dhcp"`
	Exclude           []value      `key:"exclude"`
	UseFirstAndLast   value        `key:"useFirstAndLast"`
	AutoAssign        value        `key:"autoAssign"`
	Priority          value        `key:"priority"`
	Namespaces        []value      `key:"namespaces,nonempty"`
	NamespaceSelector *rawSelector `key:"namespaceSelector"`
	ServiceSelector   *rawSelector `key:"serviceSelector"`
	NamespaceQuota    value        `key:"namespaceQuota"`
	Requesters        []value      `key:"requesters"`
	KeepFor           value        `key:"keepFor"`
	State             value        `key:"state"`
	Advertise         []value      `key:"advertise,nonempty"`
}

type rawDHCP struct {
	At        value
	Interface value `key:"interface,required"`
}

type rawReservation struct {
	At        value
	Service   value   `key:"service,required"`
	Addresses []value `key:"addresses,required,nonempty"`
}

type rawAdvertisement struct {
	At              value
	Name            value        `key:"name,required"`
	ServiceSelector *rawSelector `key:"serviceSelector"`
	Layer2          *rawLayer2   `key:"layer2"`
	BGP             *rawBGP      `key:"bgp"`
}

type rawLayer2 struct {
	Interfaces     []value         `key:"interfaces,nonempty"`
	NodeSelector   *rawSelector    `key:"nodeSelector"`
	PreferredNodes []rawPreference `key:"preferredNodes,nonempty"`
	AnySegment     value           `key:"anySegment"`
	Refresh        value           `key:"refreshInterval"`
	KeepOwner      value           `key:"keepOwner"`
	Forwarding     value           `key:"forwarding"`
}

type rawPreference struct {
	Weight       value        `key:"weight,required"`
	NodeSelector *rawSelector `key:"nodeSelector,required"`
}

type rawBGP struct {
	Peers               []value      `key:"peers,nonempty"`
	NodeSelector        *rawSelector `key:"nodeSelector"`
	Communities         []value      `key:"communities"`
	LocalPreference     value        `key:"localPreference"`
	MED                 value        `key:"med"`
	ASPathPrepend       value        `key:"asPathPrepend"`
	AggregationLength   value        `key:"aggregationLength"`
	AggregationLengthV6 value        `key:"aggregationLengthV6"`
	AggregatePartly     value        `key:"aggregatePartly"`
}

type rawPeer struct {
	At                value
	Name              value               `key:"name,required"`
	NodeSelector      *rawSelector        `key:"nodeSelector"`
	Address           value               `key:"address"`
	Interface         value               `key:"interface"`
	Port              value               `key:"port"`
	LocalASN          value               `key:"localASN"`
	PeerASN           value               `key:"peerASN,required"`
	SourceAddress     value               `key:"sourceAddress"`
	RouterID          value               `key:"routerID"`
	Passive           value               `key:"passive"`
	Multihop          value               `key:"multihop"`
	TTLSecurity       value               `key:"ttlSecurity"`
	Password          *rawSecretKey       `key:"passwordSecretRef"`
	HoldTime          value               `key:"holdTime"`
	KeepaliveInterval value               `key:"keepaliveInterval"`
	ConnectRetry      value               `key:"connectRetry"`
	GracefulRestart   *rawGracefulRestart `key:"gracefulRestart"`
	BFD               *rawBFD             `key:"bfd"`
}

type rawSecretKey struct {
	Name value `key:"name,required"`
	Key  value `key:"key"`
}

type rawGracefulRestart struct {
	RestartTime value `key:"restartTime"`
}

type rawBFD struct {
	TransmitInterval value `key:"transmitInterval"`
	ReceiveInterval  value `key:"receiveInterval"`
	DetectMultiplier value `key:"detectMultiplier"`
	MinimumTTL       value `key:"minimumTTL"`
	Strict           value `key:"strict"`
}

type rawRoutes struct {
	At    value
	Mode  value   `key:"mode,required"`
	CIDRs []value `key:"cidrs,nonempty"`
	Peers []value `key:"peers,nonempty"`
}

type rawSelector struct {
	At               value
	MatchLabels      []pair           `key:"matchLabels"`
	MatchExpressions []rawRequirement `key:"matchExpressions"`
}

type rawRequirement struct {
	At       value
	Key      value   `key:"key,required"`
	Operator value   `key:"operator,required"`
	Values   []value `key:"values"`
}

type rawNode struct {
	At     value
	Names  []value `key:"names,required,nonempty"`
	Region value   `key:"region"`
	Zone   value   `key:"zone"`
	Gone   value   `key:"gone"`
	UUID   value   `key:"systemUUID"`
}

// key is one key of a raw struct.
type key struct {
	name               string
	index              int
	required, nonempty bool
}

// keysOf returns the keys of a raw struct, in its order.
func keysOf(t reflect.Type) []key { return allKeys()[t] }

// allKeys has the keys of every raw struct.
var allKeys = sync.OnceValue(func() map[reflect.Type][]key {
	all := map[reflect.Type][]key{}
	addKeys(all, reflect.TypeFor[rawConfig]())
	return all
})

// addKeys adds the keys of the structs that a raw type is made of.
func addKeys(all map[reflect.Type][]key, t reflect.Type) {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == reflect.TypeFor[value]() || t == reflect.TypeFor[pair]() || all[t] != nil {
		return
	}
	all[t] = tagged(t)
	for _, k := range all[t] {
		addKeys(all, t.Field(k.index).Type)
	}
}

// tagged returns the keys that the tags of a struct name.
func tagged(t reflect.Type) []key {
	var keys []key
	for i := range t.NumField() {
		tag := strings.Split(t.Field(i).Tag.Get("key"), ",")
		if tag[0] == "" {
			continue
		}
		keys = append(keys, key{
			name: tag[0], index: i,
			required: slices.Contains(tag, "required"),
			nonempty: slices.Contains(tag, "nonempty"),
		})
	}
	return keys
}

// known returns the path of every key there is below a raw type, such as
// "pools[].name".
func known(t reflect.Type, prefix string) []string {
	switch {
	case t == reflect.TypeFor[value]() || t == reflect.TypeFor[pair]():
		return nil
	case t.Kind() == reflect.Slice:
		return known(t.Elem(), strings.TrimSuffix(prefix, ".")+"[].")
	case t.Kind() == reflect.Pointer:
		return known(t.Elem(), prefix)
	}
	var paths []string
	for _, k := range keysOf(t) {
		path := prefix + k.name
		paths = append(append(paths, path), known(t.Field(k.index).Type, path+".")...)
	}
	return paths
}

// knownKeys returns the path of every key of the document.
var knownKeys = sync.OnceValue(func() []string { return known(reflect.TypeFor[rawConfig](), "") })
