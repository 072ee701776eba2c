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
	// Sessions are the sessions that the node shall have, by peer name.
	Sessions map[string]Session
	// Problems are, by peer name, what is wrong with a session: there is none,
	// unless it is among Sessions all the same.
	Problems map[string]Problem
	// Routes are what it announces. Update replaces the maps of those that
	// change, and no others.
	Routes map[netip.Prefix]Route
	// Permit contains all that may be announced, whatever Routes say. Nil: there
	// is no such list.
	Permit *netipx.IPSet
	// VIPs are the VIPs that it announces, alone or within an aggregate, with
	// the names of the peers that hear of them, sorted.
	VIPs map[netip.Addr][]string
}

// Session is a session with a router, with what is particular to this node.
type Session struct {
	// Peer is what the configuration says.
	Peer *config.Peer
	// LocalASN, RouterID and Source are the node's end. Source is invalid where
	// the kernel chooses.
	LocalASN uint32
	RouterID netip.Addr
	Source   netip.Addr
}

// Route is a prefix that the node announces: with which attributes by peer
// name. The next hop is always the node. Prefixes may share it: nobody may
// modify it.
type Route map[string]Attributes

// Attributes are the path attributes that advertisements ask for, those of
// overlapping ones united.
type Attributes struct {
	Communities      []config.Community
	LargeCommunities []config.LargeCommunity
	LocalPreference  *uint32
	MED              *uint32
	Prepend          int
}

// Problem is what is wrong with the session of a node with a peer.
type Problem struct {
	Reason ProblemReason
	// Message is a sentence for people that says what to do.
	Message string
}

// ProblemReason is a stable code for what is wrong with a session.
type ProblemReason string

// What can be wrong, which ProblemReasons explains. With RouterIDShared there is a session all the same.
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
