package release

import (
	"bytes"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/stretchr/testify/require"
)

// TestPushBringsAllToARegistry below another place, each with a signature that is verified from there.
func TestPushBringsAllToARegistry(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7", testKey(t))
	hub := httptest.NewServer(registry.New())
	t.Cleanup(hub.Close)
	place := strings.TrimPrefix(hub.URL, "http://") + "/deep/below"
	var out bytes.Buffer
	require.NoError(t, Push(t.Context(), r.Dist, place, filepath.Join(r.Dist, publicKeyName), &out))
	require.Equal(t, strings.ReplaceAll(string(r.read(t, listName)), "ghcr.io/lodestone-lb", place), out.String())

	for _, line := range strings.Fields(out.String()) {
		tagged, digest, _ := strings.Cut(line, "@")
		tag, err := name.NewTag(tagged)
		require.NoError(t, err)
		found, err := remote.Head(tag)
		require.NoError(t, err)
		require.Equal(t, digest, found.Digest.String())
		img, err := remote.Image(tag.Context().Tag(strings.Replace(digest, ":", "-", 1) + ".sig"))
		require.NoError(t, err)
		manifest, err := img.Manifest()
		require.NoError(t, err)
		text := blob(t, img)
		require.Contains(t, string(text), digest)
		require.NoError(t, verify(verifier(t, r), manifest.Layers[0].Annotations["dev.cosignproject.cosign/signature"], text))
	}
}

func TestPushRefusesWhatIsNotTheRelease(t *testing.T) {
	t.Parallel()
	key := testKey(t)
	r := fakeRelease(t, "v9.8.7", key)
	hub := httptest.NewServer(registry.New())
	place := strings.TrimPrefix(hub.URL, "http://")
	own := filepath.Join(r.Dist, publicKeyName)
	copied := func(change func(dist string)) string {
		dist := filepath.Join(t.TempDir(), "dist")
		require.NoError(t, os.CopyFS(dist, os.DirFS(r.Dist)))
		change(dist)
		return dist
	}
	refuse := func(dist, key, want string) {
		t.Helper()
		var out bytes.Buffer
		require.ErrorContains(t, Push(t.Context(), dist, place, key, &out), want)
		require.Empty(t, out.String())
	}
	stranger := fakeRelease(t, "v9.8.7", testKey(t))
	refuse(r.Dist, filepath.Join(stranger.Dist, publicKeyName), "by the key "+stranger.Dist)
	refuse(copied(func(dist string) { tamper(t, filepath.Join(dist, checksumsName)) }), own, "one of them was changed, or another key")
	refuse(copied(func(dist string) { tamper(t, filepath.Join(dist, signatureName)) }), own, "is not the signature of checksums.txt")
	refuse(copied(func(dist string) { tamper(t, filepath.Join(dist, listName)) }), own, "images.txt in ")
	refuse(copied(func(dist string) { require.NoError(t, os.Remove(filepath.Join(dist, signatureName))) }), own, "is not signed")
	refuse(r.Dist, filepath.Join(r.Dist, listName), "is no public key in PEM")
	refuse(copied(func(dist string) {
		blob := strings.TrimPrefix(topDigest(t, r, "images/lodestone-controller"), "sha256:")
		tamper(t, filepath.Join(dist, "images/lodestone-controller/blobs/sha256", blob))
	}), own, "lodestone-controller")
	refuse(copied(func(dist string) { // a chart of somebody else, which would take the place of the one that is signed
		at, err := layout.FromPath(filepath.Join(dist, chartLayout))
		require.NoError(t, err)
		require.NoError(t, at.AppendImage(empty.Image, layout.WithAnnotations(map[string]string{refName: "latest"})))
	}), own, `has "latest", which is neither `)
	refuse(t.TempDir(), "", "make release writes it")

	hub.Close()
	refuse(r.Dist, "", "push "+place+"/lodestone-controller:v9.8.7: ")
}

func TestAReleaseForFewerPlatforms(t *testing.T) {
	t.Parallel()
	root, commit := repository(t)
	var log bytes.Buffer
	c := Config{Root: root, Dist: filepath.Join(t.TempDir(), "dist"), Version: "v9.8.7", Out: &log, Build: fakeBuilder("v9.8.7", commit)}
	for platform, want := range map[string]string{
		"plan9/mips":   `the platform "plan9/mips" is none of those that a release has: linux/amd64 linux/arm64`,
		"darwin/arm64": "the platforms darwin/arm64 have to have one of Linux",
	} {
		c.Platforms = []string{platform}
		require.ErrorContains(t, Make(t.Context(), c), want)
		require.NoDirExists(t, c.Dist)
	}
	own := Platform{runtime.GOOS, runtime.GOARCH}.String()
	c.Platforms = []string{own}
	require.NoError(t, Make(t.Context(), c))
	require.Contains(t, log.String(), "PARTIAL: only for "+own)
	built, err := filepath.Glob(filepath.Join(c.Dist, "*.cdx.json"))
	require.NoError(t, err)
	require.Len(t, built, len(programs()))
	provenance, err := os.ReadFile(filepath.Join(c.Dist, provenanceName))
	require.NoError(t, err)
	require.Contains(t, string(provenance), "make release VERSION=v9.8.7 PLATFORMS="+own)
}
