// Package report is the report of a speaker about itself and its node. It is one struct, which
// the speaker writes on its Lease as one annotation, for the other speakers, the controller
// and the CLI.
//
// The annotation is JSON with a line for each field, so that people can read it, too. Fields
// that a reader does not know are ignored, so that speakers of two versions get along. A user
// who may write a Lease may write anything. A text that is not understood counts as an empty
// report. The writer and the reader both leave out what is out of bounds.
//
//	lease.go    Report: the whole, to text and back, and its bounds
//	network.go  Network: the segments of a node, and the conflicts seen there
//	session.go  Session: a BGP session of the node
//	move.go     Move: VIPs that changed owner lately, and why
//	late.go     Late: how late the failure detector was
//	claims.go   Claims: what a speaker owns; by gossip, not on its Lease
package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// MaxBytes is the length of the longest text. The API server refuses a longer one from a
// speaker.
const MaxBytes = 64 << 10

// The most that a report has of each.
const (
	MaxKeys      = 8
	MaxSegments  = 128
	MaxGateways  = 16
	MaxConflicts = 32
	MaxPodCIDRs  = 8
	MaxUnmatched = 64
	MaxSessions  = 64
	MaxVIPs      = 1024 // of all moves

	maxLabel = 63  // bytes of the name of a peer or an advertisement
	maxName  = 253 // bytes of a Node's
)

// Report is a speaker's report about itself and its node.
type Report struct {
	// Address is where the speaker listens for others. Invalid: not known.
	Address netip.AddrPort `json:"address,omitzero"`
	// Keys are the marks of the membership keys that the speaker understands. The first is the
	// one that it uses. Nil: not known.
	Keys []string `json:"membershipKeys,omitempty"`
	Network
	// PodRoutes is the mode of routes to pods that the speaker works in. Empty: none, or
	// not known if RoutedPodCIDRs are not.
	PodRoutes string `json:"podRoutes,omitempty"`
	// RoutedPodCIDRs are the pod CIDRs of the node to which its speaker provides routes. Nil:
	// not known.
	RoutedPodCIDRs []netip.Prefix `json:"routedPodCIDRs,omitzero"`
	// Unmatched are the advertisements by layer 2 that select the node and name no
	// interface that it has. Nil: not known.
	Unmatched []string `json:"unmatchedAdvertisements,omitzero"`
	// Sessions are the node's BGP sessions, by the peer's name.
	Sessions []Session `json:"bgpSessions,omitempty"`
	// Late is how late the speaker's failure detector was in the hour before the report, if that was
	// so late that the others may have taken the speaker for lost.
	Late Late `json:"late,omitzero"`
	// Moves are VIPs that changed hands lately, by time. One speaker reports a move for all.
	Moves []Move `json:"moves,omitempty"`
}

// Annotations returns the report as a Lease has it.
func (r Report) Annotations() map[string]string {
	return map[string]string{annotation.Report: r.String()}
}

// String returns the report as text, within the bounds. Of too many moves the latest
// are kept.
func (r Report) String() string {
	r = r.Tidy()
	text := r.encode()
	for len(text) > MaxBytes { // TestTheLongestReport: all but the moves fit
		r.Moves = halve(r.Moves)
		text = r.encode()
	}
	return text
}

// Of returns the report of a Lease with these annotations. It is empty if there is none or it
// is not understood.
func Of(annotations map[string]string) Report {
	r, err := Parse(annotations[annotation.Report])
	if err != nil {
		return Report{}
	}
	return r
}

// Parse reads what String returned. The empty text is an empty report.
func Parse(text string) (Report, error) {
	if len(text) > MaxBytes {
		return Report{}, fmt.Errorf("read the report of a speaker: %d bytes, at most %d", len(text), MaxBytes)
	}
	if text == "" {
		return Report{}, nil
	}
	var r Report
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return Report{}, fmt.Errorf("read the report of a speaker: %w", err)
	}
	return r.Tidy(), nil
}

// NodeOf returns the node whose speaker has the Lease of this name, if a speaker has it.
func NodeOf(lease string) (node string, ok bool) {
	if node, ok = strings.CutPrefix(lease, annotation.SpeakerLeasePrefix); !ok {
		return "", false
	}
	return node, node != ""
}

// Over returns r, with the fields that r does not know taken from the report before. A speaker
// that does not know the segments has not looked at its node yet.
func (r Report) Over(before Report) Report {
	if r.KubeProxyUnknown {
		r.KubeProxy = before.KubeProxy
	}
	if r.Segments == nil {
		r.Segments, r.KubeProxy, r.KubeProxyUnknown = before.Segments, before.KubeProxy, before.KubeProxyUnknown
		r.Forwards, r.NoRules = before.Forwards, before.NoRules
	}
	if r.Gateways == nil {
		r.Gateways = before.Gateways
	}
	if r.RoutedPodCIDRs == nil {
		r.RoutedPodCIDRs = before.RoutedPodCIDRs
		if r.PodRoutes == "" {
			r.PodRoutes = before.PodRoutes
		}
	}
	if r.Unmatched == nil {
		r.Unmatched = before.Unmatched
	}
	return r
}

// Tidy returns the report without what is out of bounds, each list in its order. It does not
// change lists of r.
func (r Report) Tidy() Report {
	if !r.Address.IsValid() || r.Address.Addr().Zone() != "" {
		r.Address = netip.AddrPort{}
	}
	if len(r.Keys) > MaxKeys || slices.ContainsFunc(r.Keys, func(k string) bool { return !isMark(k) }) {
		r.Keys = nil // without the first one it is not known which is in use
	}
	r.Network = r.Network.tidy()
	if !isName(r.PodRoutes, maxLabel) {
		r.PodRoutes = ""
	}
	if r.RoutedPodCIDRs != nil {
		r.RoutedPodCIDRs = tidy(r.RoutedPodCIDRs, MaxPodCIDRs, isPodCIDR, netip.Prefix.Compare)
	}
	if r.Unmatched != nil {
		r.Unmatched = tidy(r.Unmatched, MaxUnmatched, func(name string) bool { return isName(name, maxLabel) }, strings.Compare)
	}
	r.Late = r.Late.tidy()
	r.Sessions = tidySessions(r.Sessions)
	r.Moves = tidyMoves(r.Moves)
	return r
}

// encode returns the JSON with a line for each field.
func (r Report) encode() string {
	var compact bytes.Buffer
	encoder := json.NewEncoder(&compact)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(r); err != nil {
		return "" // a report that is tidy has a text
	}
	var lines strings.Builder
	depth, quoted, escaped := 0, false, false
	for _, c := range bytes.TrimSpace(compact.Bytes()) {
		switch {
		case escaped:
			escaped = false
		case quoted:
			quoted, escaped = c != '"', c == '\\'
		case c == '"':
			quoted = true
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			depth--
		}
		lines.WriteByte(c)
		if c == ',' && depth == 1 && !quoted {
			lines.WriteString("\n ")
		}
	}
	return lines.String()
}

// tidy returns at most limit of those that are good, sorted, each once; never nil.
func tidy[T comparable](all []T, limit int, good func(T) bool, compare func(T, T) int) []T {
	kept := make([]T, 0, min(len(all), limit))
	for _, v := range all {
		if good(v) {
			kept = append(kept, v)
		}
	}
	slices.SortFunc(kept, compare)
	kept = slices.Compact(kept)
	return slices.Clip(kept[:min(len(kept), limit)])
}

// isMark reports whether the text is 8 bytes in hexadecimal digits.
func isMark(text string) bool {
	return len(text) == 16 && strings.Trim(text, "0123456789abcdef") == ""
}

// isName reports whether the text is as long as a name may be, and of characters that
// JSON writes as they are.
func isName(text string, limit int) bool {
	return text != "" && len(text) <= limit && !strings.ContainsFunc(text, func(c rune) bool {
		return c <= ' ' || c > '~' || c == '"' || c == '\\'
	})
}

// isTime reports whether JSON has a text for the time (RFC 3339).
func isTime(t time.Time) bool { return t.UTC().Year() >= 0 && t.UTC().Year() <= 9999 }

func isPodCIDR(p netip.Prefix) bool { return p.IsValid() && p == p.Masked() && !p.Addr().Is4In6() }

// clip returns the text in characters that can be seen, cut where its JSON becomes
// longer than limit bytes.
func clip(text string, limit int) string {
	const more = "..."
	var kept strings.Builder
	length, end := 0, 0 // of the JSON; of what is kept if more follows
	for _, c := range text {
		if !unicode.IsPrint(c) {
			c = ' '
		}
		size := utf8.RuneLen(c)
		if c == '"' || c == '\\' {
			size++
		}
		if length+size > limit {
			return kept.String()[:end] + more
		}
		length += size
		kept.WriteRune(c)
		if length <= limit-len(more) {
			end = kept.Len()
		}
	}
	return kept.String()
}
