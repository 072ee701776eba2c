package membership

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// The encoding of the metadata: a format version, flags, the claims if their flag is set, and the
// interfaces that are down. Later versions may have more flags. The session stands among the interfaces, in
// a form that no interface has, because v0.1.0 takes all that comes there for interfaces.
const (
	metaVersion  = 1
	metaReady    = 1 << 0
	metaClaims   = 1 << 1
	metaAnswered = 1 << 2
	metaBlind    = 1 << 3
	metaSick     = 1 << 4

	sessionMark = "/"
)

// view is what a speaker sees of its surroundings: whether the API server answers it, whether it has
// given up on the API server while others have answers (blind), and whether kube-proxy on the node is
// sick. If it is neither answered nor blind, it does not know yet.
type view struct{ answered, blind, sick bool }

// metadata is what a speaker publishes about itself by memberlist.
type metadata struct {
	ready bool
	view  view
	// The claims are in the same message as the readiness, so that nobody knows one without the other.
	// They mean nothing to this package.
	claims report.Claims
	down   string // the names of the interfaces that are down, separated by commas
	// session is a random number from which the failure detector's is derived, from the speaker's start to its end. Zero: it
	// does not take part, as speakers of v0.1.0.
	session uint64
}

// encode returns the metadata in at most limit bytes. Interfaces for which there is no room are left out:
// VIPs stay on them.
func (m metadata) encode(limit int) []byte {
	meta := []byte{metaVersion, 0}
	claimed := m.claims != report.Claims{}
	for flag, set := range map[byte]bool{
		metaReady: m.ready, metaClaims: claimed, metaAnswered: m.view.answered, metaBlind: m.view.blind, metaSick: m.view.sick,
	} {
		if set {
			meta[1] |= flag
		}
	}
	if claimed {
		meta = append(meta, m.claims[:]...)
	}
	down := m.down
	if m.session != 0 {
		down = strings.TrimSuffix(fmt.Sprintf("%s%x,%s", sessionMark, m.session, down), ",")
	}
	for down != "" && len(meta)+len(down) > limit {
		down = down[:max(0, strings.LastIndexByte(down, ','))]
	}
	return append(meta, down...)
}

// decode reads the metadata of a speaker of any version.
func decode(meta []byte) (m metadata) {
	if len(meta) < 2 {
		return m
	}
	flags, rest := meta[1], meta[2:]
	m.ready = flags&metaReady != 0
	m.view = view{flags&metaAnswered != 0, flags&metaBlind != 0, flags&metaSick != 0}
	if flags&metaClaims != 0 && len(rest) >= len(m.claims) {
		m.claims, rest = report.Claims(rest[:len(m.claims)]), rest[len(m.claims):]
	}
	m.down = string(rest)
	if session, ok := strings.CutPrefix(m.down, sessionMark); ok {
		session, m.down, _ = strings.Cut(session, ",")
		m.session, _ = strconv.ParseUint(session, 16, 64)
	}
	return m
}
