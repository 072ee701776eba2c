package release

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const checksumsName = "checksums.txt"

// digested is something with a SHA-256.
type digested struct{ name, sha256 string }

func hexSHA256(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// digests returns those of the files of the release so far, by name. Folders are layouts,
// whose content has digests of its own; images.txt has the topmost ones.
func (m *making) digests() (found []digested, _ error) {
	entries, err := os.ReadDir(m.Dist) // sorted
	if err != nil {
		return nil, fmt.Errorf("look into the folder of the release: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		content, err := os.ReadFile(filepath.Join(m.Dist, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("checksum of %s: %w", e.Name(), err)
		}
		found = append(found, digested{e.Name(), hexSHA256(content)})
	}
	return found, nil
}

// writeChecksums writes what sha256sum --check reads.
func (m *making) writeChecksums() error {
	all, err := m.digests()
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, d := range all {
		fmt.Fprintf(&lines, "%s  %s\n", d.sha256, d.name)
	}
	return m.write(checksumsName, []byte(lines.String()))
}
