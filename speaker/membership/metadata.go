package membership

import (
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// The encoding of the metadata: a format version, flags, of which later versions may know
// more, the claims if a flag announces them, and the interfaces that are down.
const (
	metaVersion  = 1
	metaReady    = 1 << 0
	metaClaims   = 1 << 1
	metaAnswered = 1 << 2
	metaBlind    = 1 << 3
	metaSick     = 1 << 4
)

// view is what a speaker sees of its node's surroundings: whether the API server answers
// it, whether it has given up on the API server while others are answered, and whether
// kube-proxy on the node is sick. With neither of the first two, it is about to find out.
type view struct{ answered, blind, sick bool }

// metadata is what a speaker publishes about itself by memberlist.
type metadata struct {
	ready bool
	view  view
	// The claims travel with the readiness of the speaker: a speaker that knows one knows the
	// other, and their order is memberlist's. What they say means nothing to the membership.
	claims report.Claims
	down   string // the names of the interfaces that are down, separated by commas
}

// encode leaves out the interfaces that limit has no room for: VIPs stay there.
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
	return m
}
