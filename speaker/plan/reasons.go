package plan

import "github.com/lodestone-lb/lodestone/pkg/reason"

// Reason is a stable code for why a node does not announce a VIP. Logs, metrics and the CLI have the same
// codes.
type Reason string

// The reasons, which Reasons explains.
const (
	NotOwner           Reason = "NotOwner"
	AnnouncedByOthers  Reason = "AnnouncedByOthers"
	NoAdvertisement    Reason = "NoAdvertisement"
	ServiceNotSelected Reason = "ServiceNotSelected"
	NoServingEndpoint  Reason = "NoServingEndpoint"
	NoLocalEndpoint    Reason = "NoLocalEndpoint"
	NodeNotSelected    Reason = "NodeNotSelected"
	NotOnSegment       Reason = "NotOnSegment"
	NodeExcluded       Reason = "NodeExcluded"
	NetworkUnavailable Reason = "NetworkUnavailable"
	LinkDown           Reason = "LinkDown"
	LessPreferred      Reason = "LessPreferred"
	SpeakerNotReady    Reason = "SpeakerNotReady"
	NodeUnknown        Reason = "NodeUnknown"
	NoPeer             Reason = "NoPeer"
	NoSession          Reason = "NoSession"
	NotPermitted       Reason = "NotPermitted"
)

// Reasons explains each Reason.
func Reasons() reason.Texts[Reason] {
	return reason.Texts[Reason]{
		NotPermitted: {Cause: "The configuration lists in bgpPermit what may be announced by BGP, and the VIP is not in it.",
			Cure: "Add it to bgpPermit, or take the address out of the pools that are advertised by BGP.", Keys: []string{"bgpPermit"}},
		NotOwner: {Cause: "Another node, which the message names, announces the VIP by layer 2.",
			Cure: "Not a fault: one node answers for each VIP."},
		AnnouncedByOthers: {Cause: "The configuration has advertisements: [], so that something else announces the VIPs.",
			Cure: "Not a fault if something does.", Keys: []string{"advertisements"}},
		NoAdvertisement: {Cause: "No advertisement is for the pool.", Cure: "Add one, or name one in the pool's advertise.",
			Keys: []string{"pools[].advertise"}},
		ServiceNotSelected: {Cause: "Every advertisement for the pool has a serviceSelector that matches no Service with the VIP.",
			Cure: "Compare the selectors with kubectl get service NAME --show-labels.",
			Keys: []string{"advertisements[].serviceSelector"}},
		NoServingEndpoint: {Cause: "The Service has no endpoint that takes traffic, on any node.",
			Cure: "Find out why no pod is ready, or why the Service's selector matches none."},
		NoLocalEndpoint: {Cause: "The Service has externalTrafficPolicy Local, and this node runs none of its ready pods.",
			Cure: "Not a fault if another node does."},
		NodeNotSelected: {Cause: "The nodeSelector of the advertisements leaves the node out.",
			Cure: "Not a fault if other nodes announce the VIP; otherwise change the nodeSelector or the node's labels.",
			Keys: []string{"advertisements[].layer2.nodeSelector"}},
		NotOnSegment: {Cause: "The node has no interface on the VIP's subnet, and others have.",
			Cure: "Not a fault if another node announces it. If a router takes the VIP to the node all the same: anySegment in the advertisement.",
			Keys: []string{"advertisements[].layer2.anySegment"}},
		NodeExcluded: {Cause: "A label excludes the node, or a taint: node.kubernetes.io/out-of-service, " +
			"ToBeDeletedByClusterAutoscaler, or one of the configuration's excludeTaints.",
			Cure: "Remove node.kubernetes.io/exclude-from-external-load-balancers if the node is to announce VIPs. kubeadm sets it on nodes " +
				"of the control plane: where there are no others, ignoreExcludeLabel in the configuration is for them.",
			Keys: []string{"ignoreExcludeLabel", "excludeTaints"}},
		NetworkUnavailable: {Cause: "The node's condition NetworkUnavailable is true: its network plugin is not ready, and that of " +
			"another node that could serve is.",
			Cure: "See to the network plugin on the node."},
		LinkDown: {Cause: "The node's interfaces that announce the VIP are down or without a carrier, or the one by which its speaker " +
			"lost the others was, and it has not met them again.", Cure: "See to the cable, the switch port, or ip link on the node."},
		LessPreferred: {Cause: "The advertisements prefer another node for the VIP.", Cure: "Not a fault: preferredNodes asks for it.",
			Keys: []string{"advertisements[].layer2.preferredNodes"}},
		SpeakerNotReady: {Cause: "The node's speaker is starting, does not run, has lost the others, or is cut off from the API server " +
			"while others are not; or kube-proxy on the node is not healthy, and is on others.",
			Cure: "See kubectl -n lodestone-system get pods -o wide, and the speaker's log."},
		NodeUnknown: {Cause: "The API server has no Node of the name that the speaker was started with.",
			Cure: "Compare NODE_NAME of the speaker with kubectl get nodes."},
		NoPeer: {Cause: "The VIP is announced by BGP, and the nodeSelector of each peer leaves the node out.",
			Cure: "Not a fault if other nodes announce it.", Keys: []string{"peers[].nodeSelector"}},
		NoSession: {Cause: "The VIP is announced by BGP, and the node lacks something for its sessions with all peers.",
			Cure: "The message names what it lacks; lodestone bgp peers shows it for all nodes."},
	}
}
