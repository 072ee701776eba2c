// Package peering is what speakers tell of their BGP sessions: each writes them
// on its Lease, where the controller, which makes Events of them, and the CLI
// read them.
package peering

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// The most that a Lease tells: what is beyond is not written, and not read from
// a Lease that somebody else wrote.
const (
	MaxSessions = 64
	MaxMessage  = 256 // bytes of a message
	maxName     = 63  // bytes of a peer's name
	maxText     = MaxSessions * 1024
)

// Session is a node's BGP session with a peer. It tells nothing that changes
// with every Service: each change is a write to the API server.
type Session struct {
	Peer string `json:"peer"`
	// Router is the peer's address. Invalid: not known, or not yet.
	Router netip.Addr `json:"router,omitzero"`
	// Established tells whether routes are exchanged (RFC 4271, section 8.2.2).
	Established bool `json:"established,omitempty"`
	// Since is when the session came up or went down, in whole seconds.
	Since time.Time `json:"since"`
	// Message says why there is no session, or what is wrong with it, for people.
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

// Annotations returns what the speaker's Lease says. A speaker without peers
// says nothing.
func Annotations(sessions []Session) map[string]string {
	if sessions = tidy(sessions); sessions == nil {
		return map[string]string{annotation.BGPSessions: ""}
	}
	text, err := json.Marshal(sessions)
	if err != nil { // every field has a text
		return nil
	}
	return map[string]string{annotation.BGPSessions: string(text)}
}

// Parse reads what Annotations wrote. Whoever may write Leases may write
// anything: what is malformed or out of bounds is ignored.
func Parse(annotations map[string]string) []Session {
	text := annotations[annotation.BGPSessions]
	if text == "" || len(text) > maxText {
		return nil
	}
	var sessions []Session
	if err := json.Unmarshal([]byte(text), &sessions); err != nil {
		return nil
	}
	return tidy(sessions)
}

// tidy returns the sessions by name, each once, within the bounds.
func tidy(sessions []Session) []Session {
	sessions = slices.DeleteFunc(slices.Clone(sessions), func(s Session) bool {
		return s.Peer == "" || len(s.Peer) > maxName || len(s.BFD) > maxName
	})
	slices.SortStableFunc(sessions, func(a, b Session) int { return cmp.Compare(a.Peer, b.Peer) })
	sessions = slices.CompactFunc(sessions, func(a, b Session) bool { return a.Peer == b.Peer })
	if len(sessions) == 0 {
		return nil
	}
	sessions = sessions[:min(len(sessions), MaxSessions)]
	for i := range sessions {
		s := &sessions[i]
		s.Since, s.Message = s.Since.UTC().Truncate(time.Second), clip(s.Message)
	}
	return sessions
}

// clip cuts a message where it becomes too long.
func clip(text string) string {
	const more = "..."
	if len(text) <= MaxMessage {
		return text
	}
	end := MaxMessage - len(more)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + more
}
