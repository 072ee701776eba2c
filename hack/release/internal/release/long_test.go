//go:build long

package release

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/stretchr/testify/require"
)

// TestMakeReleaseTwice clones this repository to two places, makes the release there as people
// do, and compares every file. One build has a build cache of its own, so that nothing is the
// same only because it was not built again.
func TestMakeReleaseTwice(t *testing.T) {
	key, err := filepath.Abs(keyFile(t, testKeyPEM(t)))
	require.NoError(t, err)
	first := makeRelease(t, filepath.Join(t.TempDir(), "one"), key)
	second := makeRelease(t, filepath.Join(t.TempDir(), "two/deeper"), key, "GOCACHE="+t.TempDir())
	require.Equal(t, allDigests(t, first), allDigests(t, second))

	// The binaries in it are ours: the archive's command runs, and knows its version.
	dir := t.TempDir()
	unpack := exec.CommandContext(t.Context(), "tar", "--extract", "--gzip", "--directory="+dir,
		"--file="+filepath.Join(first, "lodestone_v99.1.0_linux_amd64.tar.gz"))
	out, err := unpack.CombinedOutput()
	require.NoError(t, err, "%s", out)
	plugin := filepath.Join(dir, pluginName)
	said, err := exec.CommandContext(t.Context(), plugin, "version").CombinedOutput()
	require.NoError(t, err, "%s", said)
	require.True(t, strings.HasPrefix(string(said), "lodestone v99.1.0 (commit "), "%s", said)
	pages, err := filepath.Glob(filepath.Join(dir, "man/man1/lodestone-*.1"))
	require.NoError(t, err)
	require.Greater(t, len(pages), 10)

	// And so is the bill of materials: it has all modules that the binary has, and no others.
	info, err := buildinfo.ReadFile(plugin)
	require.NoError(t, err)
	file, err := os.Open(filepath.Join(first, "lodestone_v99.1.0_linux_amd64.cdx.json"))
	require.NoError(t, err)
	defer file.Close()
	bom := new(cdx.BOM)
	require.NoError(t, cdx.NewBOMDecoder(file, cdx.BOMFileFormatJSON).Decode(bom))
	require.Len(t, *bom.Components, len(info.Deps)+1)
}

// TestTheDockerfileForOtherNodes: whatever builds, the compiler runs on this machine and not in emulation.
func TestTheDockerfileForOtherNodes(t *testing.T) {
	other := Platform{"linux", "arm64"}
	if runtime.GOARCH == other.Arch {
		other.Arch = "amd64"
	}
	compareWithDockerfile(t, other)
}
