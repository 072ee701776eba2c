package report

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// MaxMessage bounds a session's message, in bytes of its JSON.
const MaxMessage = 256

// maxBFD bounds the name of a state of BFD.
const maxBFD = 16

// Session is a node's BGP session with a peer. It has nothing that changes with every Service,
// because each change is a write to the API server.
type Session struct {
	Peer string `json:"peer"`
	// Router is the peer's address. Invalid: not known, or not yet.
	Router netip.Addr `json:"router,omitzero"`
	// Established is set while routes are exchanged (RFC 4271, section 8.2.2).
	Established bool `json:"established,omitempty"`
	// Since is when the session came up or went down, in whole seconds.
	Since time.Time `json:"since"`
	// Message is why there is no session, or what is wrong with it, for people.
	Message string `json:"message,omitempty"`
	// BFD is the state of the BFD session (RFC 5880, section 4.1). Empty: there
	// is none.
	BFD string `json:"bfd,omitempty"`
}

// Title names the peer for people, as in: peer "tor" (203.0.113.254).
func (s Session) Title() string {
	if !s.Router.IsValid() {
		return fmt.Sprintf("peer %q", s.Peer)
	}
	return fmt.Sprintf("peer %q (%s)", s.Peer, s.Router)
}

// tidySessions returns the sessions by name, each once, within the bounds.
func tidySessions(sessions []Session) []Session {
	sessions = slices.DeleteFunc(slices.Clone(sessions), func(s Session) bool {
		return !isName(s.Peer, maxLabel) || s.BFD != "" && !isName(s.BFD, maxBFD) || s.Router.IsValid() && len(s.Router.Zone()) > 0 &&
			!isName(s.Router.Zone(), maxInterface) ||
			!isTime(s.Since)
	})
	slices.SortStableFunc(sessions, func(a, b Session) int { return cmp.Compare(a.Peer, b.Peer) })
	sessions = slices.CompactFunc(sessions, func(a, b Session) bool { return a.Peer == b.Peer })
	if len(sessions) == 0 {
		return nil
	}
	sessions = slices.Clip(sessions[:min(len(sessions), MaxSessions)])
	for i := range sessions {
		s := &sessions[i]
		s.Since, s.Message = s.Since.UTC().Truncate(time.Second), clip(s.Message, MaxMessage)
	}
	return sessions
}
