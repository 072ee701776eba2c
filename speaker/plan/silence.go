package plan

import "fmt"

// silenceKey is what the Silences of a scope depend on.
type silenceKey struct {
	node, owner string
	reason      Reason
}

// silence returns why the node does not own the VIP.
func (s *scope) silence(node, owner string, v vip) Silence {
	key := silenceKey{node, owner, s.reason(node, owner, v)}
	silence, ok := s.silences[key]
	if !ok {
		silence = Silence{Reason: key.reason, Owner: owner, Message: s.message(key.reason, node, owner)}
		s.silences[key] = silence
	}
	return silence
}

// reason returns why the node does not own the VIP. Reasons that hold for all nodes come first, then
// decisions of the operator, then temporary states.
func (s *scope) reason(node, owner string, v vip) Reason {
	n, known := s.Nodes[node]
	c, selected := s.candidates[node]
	switch {
	case !known:
		return NodeUnknown
	case s.Config.AnnouncedByOthers():
		return AnnouncedByOthers
	case len(s.advertisements) == 0 && s.applied != "":
		return ServiceNotSelected
	case len(s.advertisements) == 0:
		return NoAdvertisement
	case !v.serving:
		return NoServingEndpoint
	case !selected:
		return NodeNotSelected
	case c.elsewhere:
		return NotOnSegment
	case n.Excluded(s.Config):
		return NodeExcluded
	case n.NetworkUnavailable:
		return NetworkUnavailable
	case c.unplugged, c.apart:
		return LinkDown
	case !v.acceptedBy(node):
		return NoLocalEndpoint
	case !s.Speakers[node], n.impaired():
		return SpeakerNotReady
	case owner != "" && c.weight < s.candidates[owner].weight:
		return LessPreferred
	}
	return NotOwner
}

var messages = map[Reason]string{
	AnnouncedByOthers:  "the configuration leaves it to others: advertisements: []",
	NoAdvertisement:    "no advertisement applies to its pool",
	ServiceNotSelected: "no serviceSelector of the advertisements selects its Service",
	NoServingEndpoint:  "no endpoint takes traffic",
	NoLocalEndpoint:    "externalTrafficPolicy is Local and no endpoint on this node takes traffic",
	NodeNotSelected:    "the advertisements select other nodes",
	NotOnSegment:       "the advertisements announce on no interface of this node that is on its subnet",
	NodeExcluded: "the node has the label node.kubernetes.io/exclude-from-external-load-balancers, or the taint " +
		"node.kubernetes.io/out-of-service or ToBeDeletedByClusterAutoscaler, or one of the configuration's excludeTaints",
	NetworkUnavailable: "the node's condition NetworkUnavailable is set, and not that of another node that could serve",
	LinkDown:           "the node's interfaces that announce it are down, or down for IPv6",
	SpeakerNotReady:    "the node's speaker is not ready",
	NodeUnknown:        "the API server has no such node",
	NoPeer:             "no BGP peer of the advertisements selects this node",
	NotPermitted:       "bgpPermit of the configuration does not contain it",
	NoSession:          "this node has no session with the BGP peers of the advertisements",
}

func (s *scope) message(r Reason, node, owner string) string {
	text := messages[r]
	switch {
	case s.Config == nil:
		text = "no configuration is in force"
	case r == NotOnSegment && s.segment.IsValid():
		text = fmt.Sprintf("the advertisements announce on no interface of this node that is on %s", s.segment)
	case r == NoAdvertisement && s.pool != nil:
		text = fmt.Sprintf("no advertisement applies to pool %q", s.pool.Name)
	case r == ServiceNotSelected && s.pool != nil:
		text = fmt.Sprintf("no serviceSelector of the advertisements for pool %q selects its Service", s.pool.Name)
	}
	owned := fmt.Sprintf("node %s owns it", owner)
	switch {
	case r == NotOwner:
		return owned
	case r == LessPreferred:
		return fmt.Sprintf("%s: it is preferred by %d, this node by %d", owned, s.candidates[owner].weight,
			s.candidates[node].weight)
	case r == AnnouncedByOthers, r == NoAdvertisement, r == ServiceNotSelected, r == NoServingEndpoint:
		return text
	case owner == "":
		return text + "; nobody owns it"
	}
	return text + "; " + owned
}
