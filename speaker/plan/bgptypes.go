package plan

import (
	"net/netip"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// BGP is what a node announces to routers.
type BGP struct {
	// Sessions are the node's sessions by peer name.
	Sessions map[string]Session
	// Problems are the problems with sessions by peer name. The session does not exist, unless it
	// is in Sessions, too.
	Problems map[string]Problem
	// Routes are the announced routes. Update replaces the Route of a prefix when it changes.
	Routes map[netip.Prefix]Route
	// Permit contains everything that may be announced, whatever Routes contain. Nil: everything
	// may.
	Permit *netipx.IPSet
	// VIPs are the VIPs that the node announces, alone or within an aggregate, with the sorted
	// names of the peers to which it announces them.
	VIPs map[netip.Addr][]string
}

// Session is a session of this node with a router.
type Session struct {
	// Peer is the router in the configuration.
	Peer *config.Peer
	// LocalASN, RouterID and Source are the node's end. Source is invalid if the kernel chooses it.
	LocalASN uint32
	RouterID netip.Addr
	Source   netip.Addr
}

// Internal reports whether both ends are to be in the same AS (iBGP).
func (s Session) Internal() bool {
	return s.Peer.PeerASN.Internal || s.Peer.PeerASN.Number == s.LocalASN
}

// Route has the attributes of an announced prefix by peer name. The next hop is always the node.
// Prefixes may share a Route: nobody may modify it.
type Route map[string]Attributes

// Attributes are the path attributes of a route: the union of those that its advertisements ask for.
type Attributes struct {
	Communities      []config.Community
	LargeCommunities []config.LargeCommunity
	LocalPreference  *uint32
	MED              *uint32
	Prepend          int
}

// Problem is a problem with the session of a node with a peer.
type Problem struct {
	Reason ProblemReason
	// Message is a sentence for people, with what to do.
	Message string
}

// ProblemReason is the stable code of a Problem.
type ProblemReason string

// The problems, which ProblemReasons explains. With RouterIDShared the session exists all the same.
const (
	NoLocalASN        ProblemReason = "NoLocalASN"
	NoRouterID        ProblemReason = "NoRouterID"
	AnnotationInvalid ProblemReason = "AnnotationInvalid"
	AddressTaken      ProblemReason = "AddressTaken"
	RouterIDShared    ProblemReason = "RouterIDShared"
)

// ProblemReasons explains each ProblemReason.
func ProblemReasons() reason.Texts[ProblemReason] {
	return reason.Texts[ProblemReason]{
		NoLocalASN: {Cause: "Neither the peer has a localASN nor the node an AS number.",
			Cure: "Set localASN on the peer, or annotate the node with lodestone.io/bgp-asn.",
			Keys: []string{"peers[].localASN", annotation.BGPASN}},
		NoRouterID: {Cause: "Neither the peer nor the node has a router ID, and the node has no IPv4 address to take for one.",
			Cure: "Annotate the node with lodestone.io/bgp-router-id, or set routerID on the peer.",
			Keys: []string{"peers[].routerID", annotation.BGPRouterID}},
		AnnotationInvalid: {Cause: "An annotation of the node about BGP is not understood.",
			Cure: "Correct the annotation that the message names."},
		AddressTaken: {Cause: "Another peer of the node has the same address; the first in the document has the session.",
			Cure: "Remove one of the two peers, or give one a nodeSelector that leaves the node out.",
			Keys: []string{"peers[].nodeSelector"}},
		RouterIDShared: {Cause: "Another node has the same router ID. There is a session all the same, and some routers refuse the second.",
			Cure: "Give one of the nodes another lodestone.io/bgp-router-id.", Keys: []string{annotation.BGPRouterID}},
	}
}
