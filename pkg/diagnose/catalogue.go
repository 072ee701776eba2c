package diagnose

import "slices"

// Entry describes a check.
type Entry struct {
	ID
	// Active checks send packets and are made on demand.
	Active bool
	// OfNodes is set if it is about the facts that speakers report of their nodes.
	OfNodes bool
	// run finds what the check is for. Nil: there are only the notices of its ID.
	run func(*Cluster) []Finding
	// Fine is the report's text when there is nothing to find.
	Fine string
	// Meaning is what a finding means, Cure what helps.
	Meaning, Cure string
}

// Catalogue returns all checks, in the order in which equally severe findings
// are reported.
func Catalogue() []Entry {
	return slices.Clone(catalogue)
}

// The checks.
const (
	Configuration   ID = "configuration"
	Controller      ID = "controller"
	Speakers        ID = "speakers"
	Complete        ID = "complete"
	Versions        ID = "versions"
	Conflict        ID = "conflict"
	Implementations ID = "other-implementation"
	KubeProxy       ID = "kube-proxy"
	ARP             ID = "arp"
	IPForward       ID = "ip-forward"
	RPFilter        ID = "rp-filter"
	OnSegment       ID = "segment"
	Announced       ID = "announced"
	Capabilities    ID = "capabilities"
	Forwards        ID = "direct-forwarding"
	Alive           ID = "membership"
	Heartbeats      ID = "heartbeats"
	MembershipPort  ID = "membership-port"
	BGP             ID = "bgp"
	BFD             ID = "bfd"
	BGPPort         ID = "bgp-port"
	Neighbours      ID = "neighbours"
	Reach           ID = "vip"
	MTU             ID = "mtu"
	ClockSkew       ID = "clock"
)

var catalogue = []Entry{
	{ID: Configuration,
		Fine:    "the configuration is valid",
		Meaning: "The document in the ConfigMap is missing or invalid, so that the last valid one, if there was any, stays in force.",
		Cure:    "`lodestone validate` names line and column of every mistake."},
	{ID: Controller,
		Fine:    "a controller leads, and all replicas are ready",
		Meaning: "No replica of the controller leads, or some are not ready: Services get no addresses, or nobody would take over.",
		Cure:    "`kubectl -n lodestone-system get pods` and the log of the controller."},
	{ID: Speakers, run: speakers,
		Fine:    "every node's speaker is ready",
		Meaning: "A node has no speaker that is ready to own VIPs, or a condition of being ready fails: its VIPs are on other nodes.",
		Cure:    "The message names the condition. `kubectl -n lodestone-system get pods -o wide` and the speaker's log have more."},
	{ID: Complete, run: complete,
		Fine:    "everything was read, and every speaker answered",
		Meaning: "Something could not be read, or a speaker did not answer: the checks that need it are undecided. Lodestone may well work.",
		Cure:    "Grant the right that the message names, or see to the node; then diagnose again."},
	{ID: Versions,
		Fine:    "controller and speakers are of one version",
		Meaning: "Controller and speakers are of different versions: an upgrade is under way, or has stopped half way.",
		Cure:    "`kubectl -n lodestone-system rollout status daemonset/lodestone-speaker`"},
	{ID: Conflict,
		Fine:    "no other machine has a VIP",
		Meaning: "A machine that is no speaker of this cluster uses the address of a VIP.",
		Cure:    "Find it by its hardware address in the switches' tables, and give it another address; or exclude the address from the pool."},
	{ID: Implementations, run: implementations,
		Fine: "nobody else serves the Services that Lodestone serves",
		Meaning: "Another implementation of Services of type LoadBalancer runs in the cluster (MetalLB, kube-vip, the servicelb of k3s, the " +
			"LB IPAM of Cilium, ...). Two that serve the same Services overwrite each other's addresses.",
		Cure: "Remove the other one, or give each its class; `controller.handleClassless=false` leaves Services without a class to the other."},
	{ID: KubeProxy, OfNodes: true, run: kubeProxy,
		Fine: "kube-proxy does not make nodes answer ARP for VIPs",
		Meaning: "kube-proxy in mode IPVS gives every node every VIP, on the interface kube-ipvs0. Without `strictARP` the kernel of every " +
			"node answers ARP for it, whoever the owner is.",
		Cure: "`kubectl -n kube-system edit configmap kube-proxy`: under `ipvs`, `strictARP: true`; then restart the DaemonSet kube-proxy."},
	{ID: ARP, OfNodes: true, run: arp,
		Fine: "no node has a VIP of its own, and all nodes answer ARP",
		Meaning: "A VIP is configured on an interface, so that the kernel answers for it beside Lodestone; or the kernel does not answer " +
			"ARP at all (`arp_ignore` 8); or, with VIPs on kube-ipvs0, asks its neighbours in their name (`arp_announce` below 2).",
		Cure: "Remove the address where it does not belong; set the sysctl as in the finding."},
	{ID: IPForward, OfNodes: true, run: ipForward,
		Fine:    "all nodes forward packets",
		Meaning: "The kernel of a node does not forward packets: what comes for a VIP never reaches a pod of another node, or any pod.",
		Cure: "Set the sysctl as in the finding, for good in /etc/sysctl.d. Tools that configure the host's firewall or network may " +
			"reset it."},
	{ID: RPFilter, OfNodes: true, run: rpFilter,
		Fine: "no interface drops packets whose way back leads elsewhere",
		Meaning: "An interface on the segment of a VIP filters strictly by reverse path (RFC 3704), and the default route leads through " +
			"another one: packets of clients behind routers are dropped there.",
		Cure: "Loose mode (2) on the interface, or a route by which answers leave there."},
	{ID: OnSegment, run: onSegment,
		Fine: "every VIP on a segment has two nodes there, or there is one node",
		Meaning: "No node, or a single one, has an interface that is up on the segment of a VIP: nobody answers for it, or nobody could " +
			"take over.",
		Cure: "Compare the pools with `ip -brief addr` of the nodes; see interfaces and nodeSelector of the advertisements."},
	{ID: Announced,
		Fine:    "every VIP is announced",
		Meaning: "Nobody announces a VIP.",
		Cure:    "`lodestone explain vip ADDRESS` shows why each node does not."},
	{ID: Capabilities, OfNodes: true, run: capabilities,
		Fine:    "the speakers have the capabilities that they need",
		Meaning: "A speaker runs without a capability that the configuration asks for.",
		Cure: "Set the value of the chart that the finding names. A runtime or policy that takes capabilities away shows in `kubectl -n " +
			"lodestone-system get pod NAME -o yaml`."},
	{ID: Forwards, OfNodes: true, run: forwards,
		Fine:    "nothing keeps a node from direct forwarding, where that is asked for",
		Meaning: "A node does not hand connections over as `forwarding: direct` asks for: VIPs work, and some connections end when one moves.",
		Cure: "The finding has the reason. The guide on connections that outlive the owner of their address has what nodes and switches " +
			"need, and `lodestone explain vip ADDRESS` who is left out of a VIP."},
	{ID: Alive, OfNodes: true, run: alive,
		Fine:    "every speaker sees all others",
		Meaning: "Speakers do not take each other for alive although they are: two nodes may announce the same VIP.",
		Cure: "Open the membership port (9744) between all nodes, for TCP and UDP; `lodestone diagnose --active` finds between which it " +
			"is closed. Speakers with different keys do not hear each other either: `lodestone status` shows which have which."},
	{ID: Heartbeats, OfNodes: true, run: heartbeats,
		Fine: "no speaker that is alive was taken for lost in the last hour",
		Meaning: "A speaker was late to send its heartbeats, or they were lost on the way: the others took it for lost, and its VIPs moved, " +
			"and came back soon.",
		Cure: "The finding has which of the two it was, and when. A late speaker needs real-time priority (`speaker.bgp.realTimeBFD`) or " +
			"larger CPU requests (`speaker.resources`); `failover: conservative` waits 0.8 s."},
	{ID: MembershipPort, Active: true, OfNodes: true, run: membershipPort,
		Fine:    "every speaker reaches the membership port of all others",
		Meaning: "A speaker does not reach another one's membership port, by UDP or TCP.",
		Cure:    "Open the port (9744) for both protocols, in both directions, in the nodes' firewalls and between them."},
	{ID: BGP, run: bgp,
		Fine:    "every BGP session is established",
		Meaning: "A BGP session that should be there is not, or something is wrong with it.",
		Cure:    "`lodestone bgp peers`, and the finding's message; see the guide on sessions."},
	{ID: BFD, run: bfd,
		Fine:    "every BFD session is up",
		Meaning: "The BFD session beside a BGP session is not up: the loss of the router is noticed late.",
		Cure:    "Is BFD on at the router for this peer, and UDP port 3784 (4784 with multihop) open in both directions?"},
	{ID: BGPPort, OfNodes: true, run: bgpPort,
		Fine:    "nothing else listens where passive peers connect to",
		Meaning: "A passive peer connects to port 179 of the node, and another BGP daemon, or nobody, listens there.",
		Cure:    "`ss -ltnp 'sport = :179'` on the node names the daemon: have it listen on another address, or make the peer active."},
	{ID: Neighbours, Active: true, OfNodes: true, run: neighbours,
		Fine:    "nodes on a segment answer each other's ARP and NDP",
		Meaning: "A node does not get, or gets from two machines, an answer to ARP or NDP for the address of another node on the same segment.",
		Cure:    "Same VLAN? Port security, ARP inspection or a cloud's anti-spoofing on the way? `arping -I INTERFACE ADDRESS` on the node."},
	{ID: Reach, Active: true, OfNodes: true, run: reach,
		Fine: "every VIP that was tried answers another node",
		Meaning: "A VIP does not answer another node of its segment: not to ARP or NDP, from the wrong machine, from two, or its port answers " +
			"nothing.",
		Cure: "`lodestone explain vip ADDRESS`; tcpdump on the owner shows whether the packet arrives and whether the endpoint answers. A " +
			"NetworkPolicy may forbid nodes what it allows to clients."},
	{ID: MTU, OfNodes: true, run: mtu,
		Fine:    "interfaces on a segment have one MTU",
		Meaning: "Interfaces on one segment have different MTUs: large packets to the nodes with the smaller one are lost without a trace.",
		Cure:    "`ip link set dev INTERFACE mtu SIZE`, in the host's network configuration."},
	{ID: ClockSkew, OfNodes: true, run: clocks,
		Fine: "the clocks of nodes and API server agree",
		Meaning: "The clock of a node differs from the API server's: tokens and certificates are refused, and times in logs and quarantines " +
			"mislead. Who is alive does not depend on clocks.",
		Cure: "`chronyc tracking` or `timedatectl` on the node."},
}
