//go:build long

package release

import (
	"debug/buildinfo"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/registry"
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
	out, err = exec.CommandContext(t.Context(), plugin, "version").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.True(t, strings.HasPrefix(string(out), "lodestone v99.1.0 (commit "), "%s", out)
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

// TestCosignVerifiesARelease runs cosign as the guide has people type it: it takes what is ours, and nothing that
// another key has signed.
func TestCosignVerifiesARelease(t *testing.T) {
	cosign := install(t, "github.com/sigstore/cosign/v3/cmd/cosign@v3.1.3")
	r := fakeRelease(t, "v9.8.7", testKey(t))
	stranger := fakeRelease(t, "v9.8.7", testKey(t))
	hub := httptest.NewServer(registry.New())
	t.Cleanup(hub.Close)
	place := strings.TrimPrefix(hub.URL, "http://")
	require.NoError(t, Push(t.Context(), r.Dist, place, "", io.Discard))

	guide, err := os.ReadFile(filepath.Join(checkout, "docs/guides/verify-a-release.md"))
	require.NoError(t, err)
	ours := strings.NewReplacer("\\\n", " ", "ghcr.io/lodestone-lb", place, "0.2.0", "9.8.7")
	commands := regexp.MustCompile(`(?m)^\$ cosign (.*)$`).FindAllStringSubmatch(ours.Replace(string(guide)), -1)
	require.Len(t, commands, 4)
	for _, command := range commands {
		verify := func(key string, other ...string) (string, error) {
			args := strings.Fields(strings.NewReplacer(append(other, "cosign.pub", filepath.Join(key, publicKeyName))...).Replace(command[1]))
			cmd := exec.CommandContext(t.Context(), cosign, args...)
			cmd.Dir = r.Dist
			out, err := cmd.CombinedOutput()
			return string(out), err
		}
		out, err := verify(r.Dist)
		require.NoError(t, err, "cosign %s: %s", command[1], out)
		out, err = verify(stranger.Dist)
		require.Error(t, err, "cosign %s: %s", command[1], out)
		if strings.HasPrefix(command[1], "verify ") { // an image, which the registry may serve in place of another one
			for _, other := range [][]string{{"name=", "name=another-"}, {"tag=", "tag=v0.0.1-"}} {
				out, err = verify(r.Dist, other...)
				require.Error(t, err, "cosign %s: %s", command[1], out)
			}
		}
	}
}

// TestKrewInstallsTheCommand from the manifest and the archive of a release.
func TestKrewInstallsTheCommand(t *testing.T) {
	krew := install(t, "sigs.k8s.io/krew/cmd/krew@v0.4.3")
	r := fakeRelease(t, "v9.8.7", nil)
	root := t.TempDir()
	own := runtime.GOOS + "_" + runtime.GOARCH
	cmd := exec.CommandContext(t.Context(), krew, "install", "--manifest="+krewName, "--archive=lodestone_v9.8.7_"+own+".tar.gz")
	cmd.Dir, cmd.Env = r.Dist, append(os.Environ(), "KREW_ROOT="+root)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.FileExists(t, filepath.Join(root, "bin", pluginName))
}

// install builds a program that is no module of ours.
func install(t *testing.T, program string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "install", program)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOBIN="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	name, _, _ := strings.Cut(filepath.Base(program), "@")
	return filepath.Join(dir, name)
}
