package migrate

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// settings are the settings of a container of kube-vip, by the names of its environment
// variables.
type settings struct {
	object *Object
	field  string
	values map[string]string
	nodes  []metav1.LabelSelector
	// partial is set if more settings come from elsewhere.
	partial bool
}

// serves reports whether Services are served, as far as that is known: kube-vip does so only if it is asked to.
func (s *settings) serves() bool {
	return s.on("svc_enable") || s.values["svc_enable"] == "" && s.partial
}

func (s *settings) on(name string) bool {
	on, _ := strconv.ParseBool(s.values[name])
	return on
}

// servicesInterface is the interface that VIPs are announced on. Empty: kube-vip finds it.
func (s *settings) servicesInterface() string {
	for _, name := range []string{"vip_servicesinterface", "vip_interface"} {
		if on := s.values[name]; on != "" && on != "lo" {
			return on
		}
	}
	return ""
}

// flags are kube-vip's flags that do the same as an environment variable.
var flags = map[string]string{
	"arp": "vip_arp", "bgp": "bgp_enable", "services": "svc_enable", "controlplane": "cp_enable", "interface": "vip_interface",
	"serviceInterface": "vip_servicesinterface",
	"address":          "address", "vip": "address", "localAS": "bgp_as", "bgpRouterID": "bgp_routerid", "peerAS": "bgp_peeras",
	"peerAddress": "bgp_peeraddress", "peerPass": "bgp_peerpass",
	"bgppeers": "bgp_peers", "multihop": "bgp_multihop", "sourceIP": "bgp_sourceip", "sourceIF": "bgp_sourceif",
	"bgpHoldTimer": "bgp_hold_time", "bgpKeepAliveInterval": "bgp_keepalive_interval",
	"servicesElection": "svc_election", "lbClassOnly": "lb_class_only", "lbClassName": "lb_class_name", "wireguard": "vip_wireguard",
	"table":              "vip_routingtable",
	"enableLoadBalancer": "lb_enable", "ddns": "vip_ddns", "enableUPNP": "enable_upnp", "egressPodCidr": "egress_podcidr",
	"config-file": "config_file",
}

// silent are settings that Lodestone does not need, that are about the control plane, or that
// have no effect on users.
var silent = []string{
	"vip_arprate", "vip_leaderelection", "vip_leasename", "vip_leaseduration", "vip_renewdeadline", "vip_retryperiod",
	"vip_leaseannotations", "vip_loglevel", "vip_interfaceloglobal",
	"vip_subnet", "vip_cidr", "vip_address", "vip_nodename", "vip_singlenode", "vip_startleader", "vip_preserve_on_leadership_loss",
	"port", "address", "annotation", "cp_namespace", "cp_detect", "kubernetes_addr",
	"svc_namespace", "svc_election", "svc_leasename", "lb_port", "lb_fwdmethod", "prometheus_server", "k8s_config_file", "dns_mode",
	"disable_service_updates", "enable_endpoints", "enable_endpointslices",
	"iptables_backend", "backend_health_check_interval", "health_check_port", "egress_clean", "egress_podcidr", "egress_servicecidr",
	"egress_withnftables", "lb_class_legacy_handling", "vip_cleanroutingtable", "vip_routingtableid", "vip_routingtabletype",
	"vip_routingprotocol",
	"bgp_routerinterface", "vip_arp", "bgp_enable", "svc_enable", "vip_interface", "vip_servicesinterface", "bgp_as", "bgp_routerid",
	"bgp_peeras", "bgp_peeraddress", "bgp_peerpass", "bgp_peers", "bgp_multihop", "bgp_sourceip", "bgp_hold_time",
	"bgp_keepalive_interval",
}

// decisions are settings without counterpart, and what to do about each. They count when they
// are on, or not empty.
var decisions = map[string]string{
	"cp_enable": "the address of the control plane is none of Lodestone's business: keep kube-vip for it, with " +
		"svc_enable=false (--services=false)",
	"lb_enable": "Lodestone does not balance the API server: keep kube-vip for the control plane, with svc_enable=false " +
		"(--services=false)",
	"vip_routingtable": "Lodestone installs no routes to VIPs for another routing daemon: announce by BGP (peers), or keep the daemon " +
		"that announces them to your routers",
	"vip_wireguard": "Lodestone has no tunnel for VIPs: reach them by layer 2 or BGP",
	"vip_ddns":      "Lodestone registers no names: give the records in the DNS the addresses",
	"zebra_enable":  "Lodestone speaks BGP itself: give it the peers of the FRR beside kube-vip",
	"enable_service_security": "Lodestone does not drop what is sent to other ports of a VIP; nothing answers there but the node " +
		"itself: see the firewall of the nodes",
	"enable_node_labeling":  "Lodestone does not label nodes: see lodestone explain vip for who announces an address",
	"enable_upnp":           "Lodestone opens no ports of gateways by UPnP: forward the ports there",
	"mirror_dest_interface": "Lodestone does not mirror traffic",
	"bgp_sourceif": "the node's end of a session is an address: annotate the Nodes with lodestone.io/bgp-source-address if " +
		"the one that the kernel chooses is wrong",
	"mpbgp_nexthop": "the next hop is the node's end of the session, or its address of the other family: annotate the Nodes " +
		"with lodestone.io/bgp-source-address if that is wrong",
	"lb_class_only": "set the chart's values controller.handleClassless=false and controller.loadBalancerClasses to serve " +
		"the same Services",
	"lb_class_name": "set the chart's value controller.loadBalancerClasses to serve the same Services",
	"config_file": "kube-vip reads more from this file, which is not looked at: compare it with the configuration that " +
		"is written here",
}

// readPod reads the containers of kube-vip in a pod.
func (m *kubeVIP) readPod(o *Object, pod *corev1.PodSpec, field string) {
	for i := range pod.Containers {
		c := &pod.Containers[i]
		if !isKubeVIP(c) {
			continue
		}
		s := settings{object: o, field: fmt.Sprintf("%s.containers[%d]", field, i), values: map[string]string{}, nodes: nodesOf(pod),
			partial: len(c.EnvFrom) > 0}
		for _, e := range c.Env {
			if s.values[e.Name] = e.Value; e.ValueFrom != nil && e.Name != "vip_nodename" {
				m.decidef(o, s.field+".env["+e.Name+"]", "comes from elsewhere and is not looked at: add its value to the configuration")
				s.partial = s.partial || e.Name == "svc_enable"
			}
		}
		if len(c.EnvFrom) > 0 {
			m.decidef(o, s.field+".envFrom", "its variables come from elsewhere and are not looked at: add what they set to the configuration")
		}
		m.readArgs(&s, append(slices.Clone(c.Command), c.Args...))
		s.partial = s.partial || s.values["config_file"] != ""
		m.settings = append(m.settings, s)
	}
}

// readArgs reads flags. Environment variables override them, as with kube-vip.
func (m *kubeVIP) readArgs(s *settings, args []string) {
	for name, value := range flagsIn(args) {
		variable := flags[name]
		if _, set := s.values[variable]; !set && variable != "" {
			s.values[variable] = value
		}
	}
}

// flagsIn returns the flags among the arguments of a program, with their values. One without a value is true.
func flagsIn(args []string) iter.Seq2[string, string] {
	return func(yield func(name, value string) bool) {
		for i := 0; i < len(args); i++ {
			if !strings.HasPrefix(args[i], "-") {
				continue
			}
			name, value, ok := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
			if !ok {
				value = "true"
				if i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
					i++
					value = args[i]
				}
			}
			if !yield(name, value) {
				return
			}
		}
	}
}

// nodesOf returns the nodes that a pod can be on. It is the one that a pod is on already, as with a static pod.
func nodesOf(pod *corev1.PodSpec) []metav1.LabelSelector {
	if pod.NodeName != "" {
		return []metav1.LabelSelector{{MatchLabels: map[string]string{corev1.LabelHostname: pod.NodeName}}}
	}
	var terms []corev1.NodeSelectorTerm
	if a := pod.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		terms = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	if len(terms) == 0 {
		terms = []corev1.NodeSelectorTerm{{}}
	}
	var all []metav1.LabelSelector
	for _, t := range terms {
		one := metav1.LabelSelector{MatchLabels: pod.NodeSelector}
		for _, e := range t.MatchExpressions {
			one.MatchExpressions = append(one.MatchExpressions,
				metav1.LabelSelectorRequirement{Key: e.Key, Operator: metav1.LabelSelectorOperator(e.Operator), Values: e.Values})
		}
		all = append(all, one)
	}
	return all
}

// convertSettings writes how kube-vip announces VIPs. Pods of one DaemonSet, or
// static ones of several nodes, have the same settings.
func (m *kubeVIP) convertSettings() {
	for i := range m.settings {
		if s := &m.settings[i]; s.serves() {
			m.noteSettings(s)
		} else {
			m.notef(s.object, s.field, "does not serve Services, without svc_enable=true (--services): it is left out, keep it for the "+
				"control plane")
		}
	}
	m.settings = slices.DeleteFunc(m.settings, func(s settings) bool { return !s.serves() })
	serving := m.settings
	if len(serving) == 0 {
		return
	}
	m.doc.IgnoreExcludeLabel = true // kube-vip does not look at the label, which kubeadm puts on its control plane
	s := &serving[0]
	for i := range serving[1:] {
		if other := &serving[i+1]; !same(s, other) {
			m.decidef(other.object, other.field, "has other settings than %s, whose settings are written: compare", s.object)
		}
	}
	if s.on("bgp_enable") {
		m.convertPeers(s)
	}
	byARP := s.on("vip_arp") || !s.on("bgp_enable") && !s.on("vip_routingtable") && !s.on("vip_wireguard")
	nodes := m.nodes()
	for i, n := range nodes {
		if len(m.doc.Peers) > 0 {
			m.doc.Advertisements = append(m.doc.Advertisements,
				advertisement{Name: numbered("bgp", i, len(nodes)), BGP: &bgp{NodeSelector: n}})
		}
		if byARP {
			l := &layer2{NodeSelector: n}
			if on := s.servicesInterface(); on != "" {
				l.Interfaces = []string{on}
			}
			m.doc.Advertisements = append(m.doc.Advertisements, advertisement{Name: numbered("arp", i, len(nodes)), Layer2: l})
		}
	}
	if nodes[0] != nil {
		m.notef(s.object, s.field, "VIPs are announced by the nodes on which kube-vip runs, as now: remove the nodeSelector to have "+
			"all nodes announce")
	} else if i := slices.IndexFunc(serving, func(s settings) bool { return s.object.Kind == "Pod" && anyOf(s.nodes)[0] == nil }); i >= 0 {
		m.decidef(serving[i].object, serving[i].field, "a manifest of a static pod does not have the nodes on which it runs, and now all nodes "+
			"announce: read the Pods from the cluster (lodestone migrate kube-vip without files), or give the advertisements a nodeSelector")
	}
}

// nodes returns selectors of the nodes on which kube-vip serves Services.
func (m *kubeVIP) nodes() []*selector {
	var all []metav1.LabelSelector
	seen := map[string]bool{}
	for i := range m.settings {
		s := &m.settings[i]
		for j := range s.nodes {
			n := &s.nodes[j]
			if text := metav1.FormatLabelSelector(n); !seen[text] {
				seen[text] = true
				all = append(all, *n)
			}
		}
	}
	return anyOf(all)
}

func same(s, t *settings) bool { return maps.Equal(s.values, t.values) }

// noteSettings notes the settings that have no counterpart.
func (m *kubeVIP) noteSettings(s *settings) {
	for _, name := range sortedKeys(s.values) {
		value, remedy := s.values[name], decisions[strings.ToLower(name)]
		off := value == "" || value == "false" || value == "0"
		switch {
		case off:
		case remedy != "":
			m.decidef(s.object, s.field+".env["+name+"]", "%s", remedy)
		case !slices.Contains(silent, strings.ToLower(name)):
			m.notef(s.object, s.field+".env["+name+"]", "is not known here: look up what it does, and whether Lodestone has it")
		}
	}
}

// defaultAS is kube-vip's AS number, for either end.
const defaultAS = 65000

// convertPeers writes the BGP peers.
func (m *kubeVIP) convertPeers(s *settings) {
	local := m.number(s, "bgp_as", defaultAS)
	general := peer{LocalASN: local, RouterID: s.values["bgp_routerid"], SourceAddress: unmapped(s.values["bgp_sourceip"])}
	if hold := m.number(s, "bgp_hold_time", 0); hold > 0 {
		general.HoldTime = fmt.Sprintf("%ds", hold)
		if keepalive := m.number(s, "bgp_keepalive_interval", 0); keepalive > 0 && keepalive <= hold/3 {
			general.KeepaliveInterval = fmt.Sprintf("%ds", keepalive)
		}
	}
	if general.RouterID != "" {
		m.notef(s.object, s.field+".env[bgp_routerid]", "is the same on all nodes: remove routerID for one of its own on each")
	}
	if address := s.values["bgp_peeraddress"]; address != "" {
		p := general
		p.Address, p.PeerASN = unmapped(address), m.number(s, "bgp_peeras", defaultAS)
		m.addPeer(s, p, "bgp_peeraddress", s.values["bgp_peerpass"] != "", s.on("bgp_multihop"))
	}
	for i, text := range strings.Split(s.values["bgp_peers"], ",") {
		if text = strings.TrimSpace(text); text != "" {
			m.convertPeer(s, general, i, text)
		}
	}
	if len(m.doc.Peers) == 0 {
		m.decidef(s.object, s.field+".env[bgp_peers]", "there are no BGP peers: add those of your network")
	}
}

func (m *kubeVIP) number(s *settings, name string, absent uint32) uint32 {
	text := strings.TrimSpace(s.values[name])
	if text == "" {
		return absent
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		m.errorf(s.object, s.field+".env["+name+"]", "%s is not a whole number from 0 to 4294967295", config.Quote(text))
	}
	return uint32(n)
}

// convertPeer writes one of bgp_peers:
// address:AS:password:multihop:port:mpbgp:bfd, with an IPv6 address in brackets,
// or unnumbered:interface in place of one. The text has a password, which no
// message repeats.
func (m *kubeVIP) convertPeer(s *settings, p peer, index int, text string) {
	field := fmt.Sprintf("bgp_peers[%d]", index)
	wrong := func(what string) { m.errorf(s.object, s.field+".env["+field+"]", "%s", what) }
	rest, unnumbered := strings.CutPrefix(text, "unnumbered:")
	var host string
	if inner, ok := strings.CutPrefix(rest, "["); ok {
		host, rest, ok = strings.Cut(inner, "]")
		if !ok {
			wrong("the bracket before the address is not closed")
			return
		}
	} else {
		host, rest, _ = strings.Cut(rest, ":")
		rest = ":" + rest
	}
	parts := append(strings.Split(rest, ":"), make([]string, 7)...)[1:7]
	_, noAddress := netip.ParseAddr(host)
	as, err := strconv.ParseUint(parts[0], 10, 32)
	switch {
	case unnumbered:
		p.Interface = host
	case noAddress != nil:
		wrong("does not begin with an address")
		return
	default:
		p.Address = unmapped(host)
	}
	if err != nil {
		wrong("has no AS number after the address")
		return
	}
	p.PeerASN = uint32(as)
	if port, err := strconv.ParseUint(parts[3], 10, 16); err == nil && port != 179 {
		p.Port = uint16(port)
	}
	if parts[4] != "" {
		m.decidef(s.object, s.field+".env["+field+"]", "%s", decisions["mpbgp_nexthop"])
	}
	p.BFD = bfdOf(parts[5])
	multihop, _ := strconv.ParseBool(parts[2])
	m.addPeer(s, p, field, parts[1] != "", multihop)
}

// bfdOf reads "enabled;receive;transmit;multiplier", in milliseconds.
func bfdOf(text string) *bfd {
	parts := append(strings.Split(text, ";"), "", "", "")
	if on, _ := strconv.ParseBool(parts[0]); !on {
		return nil
	}
	var out bfd
	for i, to := range []*string{&out.ReceiveInterval, &out.TransmitInterval} {
		if n, err := strconv.ParseUint(parts[1+i], 10, 32); err == nil {
			*to = fmt.Sprintf("%dms", n)
		}
	}
	if n, err := strconv.ParseUint(parts[3], 10, 32); err == nil {
		out.DetectMultiplier = uint32(n)
	}
	return &out
}

// addPeer adds a peer of kube-vip, which has no name there. The node's end is of
// the router's family.
func (m *kubeVIP) addPeer(s *settings, p peer, field string, password, multihop bool) {
	if strings.Contains(p.SourceAddress, ":") != strings.Contains(p.Address, ":") || p.Interface != "" {
		p.SourceAddress = ""
	}
	p.Name = fmt.Sprintf("peer-%d", len(m.doc.Peers)+1)
	if multihop && p.PeerASN != p.LocalASN {
		p.Multihop = anyHops
	}
	if password {
		p.Password = m.newSecret(s.object, s.field+".env["+field+"]", p.Name)
	}
	m.doc.Peers = append(m.doc.Peers, p)
}
