package release

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

const checksumsName = "checksums.txt"

// digested is something with a SHA-256.
type digested struct{ name, sha256 string }

func hexSHA256(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// sortedFiles returns those of the release so far, by name. Layouts are none: their content has digests of its
// own, and images.txt the topmost ones.
func (m *making) sortedFiles() []digested {
	return slices.SortedFunc(slices.Values(m.files), func(a, b digested) int { return cmp.Compare(a.name, b.name) })
}

// writeChecksums writes what sha256sum --check reads.
func (m *making) writeChecksums() error {
	var lines strings.Builder
	for _, d := range m.sortedFiles() {
		fmt.Fprintf(&lines, "%s  %s\n", d.sha256, d.name)
	}
	return m.write(checksumsName, []byte(lines.String()))
}
