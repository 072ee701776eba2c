package release

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	helm "helm.sh/helm/v3/pkg/registry"
	jsonyaml "sigs.k8s.io/yaml"
)

// TestParts looks at each part of one release, as those do who get it.
func TestParts(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7-rc.1", testKey(t))
	program := fake(r.Version, r.commit)
	hub := httptest.NewServer(registry.New())
	t.Cleanup(hub.Close)
	host := strings.TrimPrefix(hub.URL, "http://")

	t.Run("images come back from a registry as the Dockerfile has them", func(t *testing.T) {
		for _, p := range programs() {
			index := push(t, r, filepath.Join(imagesFolder, p.name), host+"/"+p.name, r.Version)
			manifest, err := index.IndexManifest()
			require.NoError(t, err)
			require.Equal(t, annotationsOf(r, p.name, p.description, r.Version), manifest.Annotations)
			require.Len(t, manifest.Manifests, 2)
			for i, want := range []Platform{{"linux", "amd64"}, {"linux", "arm64"}} {
				described := manifest.Manifests[i]
				require.Equal(t, &v1.Platform{OS: want.OS, Architecture: want.Arch}, described.Platform)
				img, err := index.Image(described.Digest)
				require.NoError(t, err)
				require.NoError(t, validate.Image(img))
				config, err := img.ConfigFile()
				require.NoError(t, err)
				require.Equal(t, want, Platform{config.OS, config.Architecture})
				require.Equal(t, p.user, config.Config.User)
				require.Equal(t, []string{"/" + p.name}, config.Config.Entrypoint)
				require.Equal(t, annotationsOf(r, p.name, p.description, r.Version), config.Config.Labels)
				require.Equal(t, commitDate, config.Created.UTC().Format("2006-01-02T15:04:05-07:00"))
				require.Equal(t, []file{{p.name, 0o755, content(program, p.pkg, want)}}, untar(t, mutate.Extract(img)))
			}
		}
	})

	t.Run("values of the chart name the digests of the images", func(t *testing.T) {
		digests := map[string]string{}
		for _, p := range programs() {
			digests[p.component] = topDigest(t, r, filepath.Join(imagesFolder, p.name))
		}
		files := chartFiles(t, r.read(t, "lodestone-9.8.7-rc.1.tgz"))
		var values chartValues
		require.NoError(t, yaml.Unmarshal(files["lodestone/values.yaml"], &values))
		for component, digest := range digests {
			require.Equal(t, digest, values.of(component).Digest, component)
		}
		// Nothing else of the values was touched, comments and all.
		before, err := os.ReadFile(filepath.Join(checkout, chartFolder, valuesName))
		require.NoError(t, err)
		after := regexp.MustCompile(`digest: "sha256:[0-9a-f]{64}"`).ReplaceAll(files["lodestone/values.yaml"], []byte(`digest: ""`))
		require.Equal(t, string(before), string(after))
		// All other files are those of the checkout.
		require.Equal(t, files["lodestone/LICENSE"], mustRead(t, filepath.Join(checkout, licenseFile)))
		rest := 0
		for path, text := range files {
			if base := strings.TrimPrefix(path, "lodestone/"); base != licenseFile && base != valuesName && base != "Chart.yaml" {
				require.Equal(t, string(mustRead(t, filepath.Join(checkout, chartFolder, base))), string(text), base)
				rest++
			}
		}
		require.Greater(t, rest, 10)
	})

	t.Run("Helm pulls the chart from a registry", func(t *testing.T) {
		img := pushImage(t, r, chartLayout, host+"/charts/lodestone", "9.8.7-rc.1")
		manifest, err := img.Manifest()
		require.NoError(t, err)
		require.Equal(t, "9.8.7-rc.1", manifest.Annotations["org.opencontainers.image.version"])
		require.Equal(t, r.commit, manifest.Annotations["org.opencontainers.image.revision"])
		client, err := helm.NewClient(helm.ClientOptPlainHTTP(), helm.ClientOptWriter(io.Discard),
			helm.ClientOptCredentialsFile(filepath.Join(t.TempDir(), "none.json")))
		require.NoError(t, err)
		pulled, err := client.Pull(host + "/charts/lodestone:9.8.7-rc.1")
		require.NoError(t, err)
		require.Equal(t, r.read(t, "lodestone-9.8.7-rc.1.tgz"), pulled.Chart.Data)
		about := pulled.Chart.Meta
		require.NoError(t, about.Validate())
		require.Equal(t, []string{"lodestone", "9.8.7-rc.1", "v9.8.7-rc.1"}, []string{about.Name, about.Version, about.AppVersion})
		require.Equal(t, "true", about.Annotations["artifacthub.io/prerelease"])
		require.Equal(t, "networking", about.Annotations["artifacthub.io/category"])
		var images []struct{ Name, Image string }
		require.NoError(t, jsonyaml.Unmarshal([]byte(about.Annotations["artifacthub.io/images"]), &images))
		require.Len(t, images, 3)
		for _, i := range images {
			require.True(t, strings.HasSuffix(i.Image, "@"+topDigest(t, r, filepath.Join(imagesFolder, i.Name))), "%+v", i)
		}
		// The check of the release itself would notice another chart.
		m := making{Config: r.Config, source: Source{Version: "v9.8.7-rc.2"}}
		require.ErrorContains(t, m.checkChart(pulled.Chart.Data, nil), "it has version 9.8.7-rc.1 and appVersion v9.8.7-rc.1")
		require.ErrorContains(t, m.checkChart([]byte("no archive"), nil), "not loaded by Helm")
	})

	t.Run("Artifact Hub finds who owns the repository", func(t *testing.T) {
		img := pushImage(t, r, "artifacthub", host+"/charts/lodestone", "artifacthub.io")
		manifest, err := img.Manifest()
		require.NoError(t, err)
		require.EqualValues(t, "application/vnd.cncf.artifacthub.config.v1+yaml", manifest.Config.MediaType)
		require.EqualValues(t, "application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml", manifest.Layers[0].MediaType)
		require.Equal(t, mustRead(t, filepath.Join(checkout, hubFile)), blob(t, img))
	})

	t.Run("the list of images has them all by digest", func(t *testing.T) {
		want := ""
		for _, p := range programs() {
			want += "ghcr.io/lodestone-lb/" + p.name + ":v9.8.7-rc.1@" + topDigest(t, r, filepath.Join(imagesFolder, p.name)) + "\n"
		}
		want += "ghcr.io/lodestone-lb/charts/lodestone:9.8.7-rc.1@" + topDigest(t, r, chartLayout) + "\n"
		want += "ghcr.io/lodestone-lb/charts/lodestone:artifacthub.io@" + topDigest(t, r, "artifacthub") + "\n"
		require.Equal(t, want, string(r.read(t, "images.txt")))
	})

	t.Run("an archive has the command as kubectl's plugin, and what belongs to it", func(t *testing.T) {
		shared := []file{
			{licenseFile, 0o644, mustRead(t, filepath.Join(checkout, licenseFile))},
			{"completions/_lodestone", 0o644, []byte("# completion for zsh\n")},
			{"completions/lodestone.bash", 0o644, []byte("# completion for bash\n")},
			{"completions/lodestone.fish", 0o644, []byte("# completion for fish\n")},
			{"completions/lodestone.ps1", 0o644, []byte("# completion for powershell\n")},
		}
		page := file{"man/man1/lodestone.1", 0o644, []byte(".TH LODESTONE 1\n")}
		for _, p := range programs()[2].platforms {
			command := content(program, "./cmd/lodestone", p)
			if p.OS == "windows" {
				files := unzip(t, r.read(t, "lodestone_v9.8.7-rc.1_windows_"+p.Arch+".zip"))
				require.Equal(t, append(slices.Clone(shared), file{"kubectl-lodestone.exe", 0o755, command}, page), files, p)
				continue
			}
			packed := r.read(t, "lodestone_v9.8.7-rc.1_"+p.OS+"_"+p.Arch+".tar.gz")
			require.Equal(t, append(slices.Clone(shared),
				file{"kubectl-lodestone", 0o755, command}, file{"kubectl_complete-lodestone", 0o755, []byte(complete)}, page), untarGz(t, packed), p)
		}
	})

	t.Run("krew gets the archives that there are", func(t *testing.T) {
		var plugin krewPlugin
		require.NoError(t, jsonyaml.UnmarshalStrict(r.read(t, krewName), &plugin))
		require.Equal(t, "v9.8.7-rc.1", plugin.Spec.Version)
		require.LessOrEqual(t, len(plugin.Spec.ShortDescription), 50)
		require.Len(t, plugin.Spec.Platforms, 6)
		for i, p := range programs()[2].platforms {
			entry := plugin.Spec.Platforms[i]
			require.Equal(t, map[string]string{"os": p.OS, "arch": p.Arch}, entry.Selector.MatchLabels)
			archive, found := strings.CutPrefix(entry.URI, "https://github.com/lodestone-lb/lodestone/releases/download/v9.8.7-rc.1/")
			require.True(t, found, entry.URI)
			packed := r.read(t, archive)
			require.Equal(t, hexSHA256(packed), entry.SHA256, archive)
			var names []string
			if strings.HasSuffix(archive, ".zip") {
				names = namesOf(unzip(t, packed))
			} else {
				names = namesOf(untarGz(t, packed))
			}
			require.Contains(t, names, entry.Bin)
			for _, f := range entry.Files {
				require.Contains(t, names, f.From)
			}
		}
	})

	t.Run("a bill of materials has what is linked", func(t *testing.T) {
		bom := new(cdx.BOM)
		text := r.read(t, "lodestone-speaker_v9.8.7-rc.1_linux_arm64.cdx.json")
		require.NoError(t, cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(bom))
		require.Equal(t, cdx.SpecVersion1_6, bom.SpecVersion)
		require.Regexp(t, `^urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`, bom.SerialNumber)
		require.Equal(t, "2031-05-04T03:02:01Z", bom.Metadata.Timestamp)
		own := bom.Metadata.Component
		require.Equal(t, "pkg:golang/github.com/lodestone-lb/lodestone@v9.8.7-rc.1#cmd/speaker", own.PackageURL)
		binary := content(program, "./cmd/speaker", Platform{"linux", "arm64"})
		require.Equal(t, []cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hexSHA256(binary)}}, *own.Hashes)
		var purls []string
		for _, c := range *bom.Components {
			purls = append(purls, c.PackageURL)
		}
		require.Equal(t, []string{"pkg:golang/stdlib@1.26.9", "pkg:golang/example.com/plain@v1.2.3",
			"pkg:golang/example.com/fork@v1.0.1%2Bincompatible"}, purls)
		other := new(cdx.BOM)
		text = r.read(t, "lodestone-speaker_v9.8.7-rc.1_linux_amd64.cdx.json")
		require.NoError(t, cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(other))
		require.NotEqual(t, bom.SerialNumber, other.SerialNumber)
	})

	t.Run("notes are the changelog's", func(t *testing.T) {
		text := string(r.read(t, "release-notes.md"))
		require.True(t, strings.HasPrefix(text, "# Lodestone v9.8.7-rc.1\n\n#"), text[:80])
		require.NotRegexp(t, `\]\((docs|#)`, text)
	})
}

// annotationsOf returns the annotations of an image.
func annotationsOf(r released, title, description, version string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.created": "2031-05-04T03:02:01Z", "org.opencontainers.image.description": description,
		"org.opencontainers.image.licenses": "Apache-2.0", "org.opencontainers.image.revision": r.commit,
		"org.opencontainers.image.source": "https://github.com/lodestone-lb/lodestone", "org.opencontainers.image.title": title,
		"org.opencontainers.image.url": "https://github.com/lodestone-lb/lodestone", "org.opencontainers.image.version": version,
	}
}

// described returns the entries of a layout by the name under which they are there.
func described(t *testing.T, r released, folder string) (v1.ImageIndex, map[string]v1.Descriptor) {
	t.Helper()
	index, err := layout.ImageIndexFromPath(filepath.Join(r.Dist, folder))
	require.NoError(t, err)
	manifest, err := index.IndexManifest()
	require.NoError(t, err)
	found := map[string]v1.Descriptor{}
	for _, d := range manifest.Manifests {
		found[d.Annotations[refName]] = d
	}
	return index, found
}

// topDigest returns the digest of what a layout is there for.
func topDigest(t *testing.T, r released, folder string) string {
	t.Helper()
	_, entries := described(t, r, folder)
	for ref, d := range entries {
		if !strings.HasSuffix(ref, ".sig") {
			return d.Digest.String()
		}
	}
	require.Fail(t, "there is nothing in "+folder)
	return ""
}

// addressed returns a layout, the digest of what has the tag in it, and where that belongs.
func addressed(t *testing.T, r released, folder, place, tag string) (v1.ImageIndex, v1.Hash, name.Tag) {
	t.Helper()
	all, entries := described(t, r, folder)
	require.Contains(t, entries, tag)
	ref, err := name.NewTag(place + ":" + tag)
	require.NoError(t, err)
	return all, entries[tag].Digest, ref
}

// push brings an index from its layout into a registry, and fetches it from there.
func push(t *testing.T, r released, folder, place, tag string) v1.ImageIndex {
	t.Helper()
	all, digest, ref := addressed(t, r, folder, place, tag)
	index, err := all.ImageIndex(digest)
	require.NoError(t, err)
	require.NoError(t, validate.Index(index))
	require.NoError(t, remote.WriteIndex(ref, index))
	pulled, err := remote.Index(ref)
	require.NoError(t, err)
	return pulled
}

// pushImage does so with what is no index.
func pushImage(t *testing.T, r released, folder, place, tag string) v1.Image {
	t.Helper()
	all, digest, ref := addressed(t, r, folder, place, tag)
	img, err := all.Image(digest)
	require.NoError(t, err)
	require.NoError(t, remote.Write(ref, img))
	pulled, err := remote.Image(ref)
	require.NoError(t, err)
	return pulled
}

// blob returns the only layer.
func blob(t *testing.T, img v1.Image) []byte {
	t.Helper()
	layers, err := img.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	reader, err := layers[0].Compressed()
	require.NoError(t, err)
	defer reader.Close()
	text, err := io.ReadAll(reader)
	require.NoError(t, err)
	return text
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return text
}

func namesOf(files []file) (names []string) {
	for _, f := range files {
		names = append(names, f.name)
	}
	return names
}

func untarGz(t *testing.T, packed []byte) []file {
	t.Helper()
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	require.True(t, reader.ModTime.IsZero())
	return untar(t, reader)
}

// untar also checks that an archive has nothing of the machine on which it was packed.
func untar(t *testing.T, reader io.Reader) (files []file) {
	t.Helper()
	for archive := tar.NewReader(reader); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(0, 0, "", ""), fmt.Sprint(header.Uid, header.Gid, header.Uname, header.Gname))
		require.Equal(t, commitDate, header.ModTime.UTC().Format("2006-01-02T15:04:05-07:00"))
		text, err := io.ReadAll(archive)
		require.NoError(t, err)
		files = append(files, file{header.Name, fs.FileMode(header.Mode), text})
	}
}

func unzip(t *testing.T, packed []byte) (files []file) {
	t.Helper()
	archive, err := zip.NewReader(bytes.NewReader(packed), int64(len(packed)))
	require.NoError(t, err)
	for _, f := range archive.File {
		reader, err := f.Open()
		require.NoError(t, err)
		text, err := io.ReadAll(reader)
		require.NoError(t, err)
		require.Equal(t, commitDate, f.Modified.UTC().Format("2006-01-02T15:04:05-07:00"))
		files = append(files, file{f.Name, f.Mode(), text})
	}
	return files
}

func chartFiles(t *testing.T, packed []byte) map[string][]byte {
	t.Helper()
	found := map[string][]byte{}
	for _, f := range untarGz(t, packed) {
		found[f.name] = f.content
	}
	return found
}

func TestDigestsAreFilledInWhereThereAreNone(t *testing.T) {
	t.Parallel()
	digests := map[string]string{"a": "sha256:1"}
	got, err := setDigests([]byte("# about ä\na:\n  # why\n  digest: \"\"  # ü\nb: {digest: \"\"}\n"), digests)
	require.NoError(t, err)
	require.Equal(t, "# about ä\na:\n  # why\n  digest: \"sha256:1\"  # ü\nb: {digest: \"\"}\n", string(got))
	for text, want := range map[string]string{
		"":                        "it is empty",
		"a: [":                    "did not find expected",
		"b: {digest: \"\"}":       "there is no value a.digest to fill in",
		"a: {digest: {}}":         "there is no value a.digest to fill in",
		"a: {digest: 'sha256:2'}": `line 1: a.digest is "sha256:2", and is filled in by a release only if it is ""`,
	} {
		_, err := setDigests([]byte(text), digests)
		require.ErrorContains(t, err, want, text)
	}
}

func TestNotesAreTheSectionOfTheVersion(t *testing.T) {
	t.Parallel()
	const changelog = "# Changelog\n\n## Unreleased\n\n- new [a](docs/a.md#b), [c](#unreleased), [d](https://example.com/e)\n\n" +
		"## v0.2.0 (2026-12-01)\n\n### Fixed\n\n- two\n\n## [0.1.0] - 2026-01-01\n\n- one\n\n## v0.3.0-rc.1\n\n- candidate\n"
	for version, want := range map[string]string{
		"v0.2.0": "# Lodestone v0.2.0\n\n### Fixed\n\n- two\n",
		"v0.1.0": "# Lodestone v0.1.0\n\n- one\n",
		"v0.3.0": "# Lodestone v0.3.0\n\n- new [a](https://github.com/lodestone-lb/lodestone/blob/v0.3.0/docs/a.md#b), " +
			"[c](https://github.com/lodestone-lb/lodestone/blob/v0.3.0/CHANGELOG.md#unreleased), [d](https://example.com/e)\n",
		"v0.3.0-rc.1": "# Lodestone v0.3.0-rc.1\n\n- candidate\n",
	} {
		got, err := notes(changelog, version)
		require.NoError(t, err, version)
		require.Equal(t, want, got)
	}
	_, err := notes(changelog, "v0.1.5")
	require.ErrorContains(t, err, "there is no section for v0.1.5, and it is older than v0.3.0-rc.1")
	_, err = notes("# Changelog\n\n## Unreleased\n\n## v0.1.0\n\n- one\n", "v0.2.0")
	require.ErrorContains(t, err, "it has nothing about v0.2.0")
}

func TestABuildThatOthersWouldNotGetIsRefused(t *testing.T) {
	t.Parallel()
	p := Platform{"linux", "amd64"}
	require.NoError(t, checkBuild(infoOf(p), p))
	require.ErrorContains(t, checkBuild(nil, p), "does not record how it was built")
	for _, s := range []debug.BuildSetting{
		{Key: "vcs.revision", Value: "abc"}, {Key: "GOEXPERIMENT", Value: "x"}, {Key: "-trimpath", Value: "false"},
		{Key: "CGO_ENABLED", Value: "1"}, {Key: "GOOS", Value: "darwin"}, {Key: "GOARCH", Value: "arm64"}, {Key: "-tags", Value: "long"},
	} {
		info := infoOf(p)
		info.Settings = append(info.Settings, s)
		require.ErrorContains(t, checkBuild(info, p), "it was built with "+s.Key, s.Key)
	}
}

// TestTheGoCommandBuildsTheSameEverywhere builds with an environment that would spoil it.
func TestTheGoCommandBuildsTheSameEverywhere(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module fake\n\ngo 1.26\n"), 0o600))
	const source = "package main\n\nvar version string\n\nfunc main() { println(version) }\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(source), 0o600))
	t.Setenv("GOFLAGS", "-tags=mine -trimpath=false")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GOAMD64", "v3")
	t.Setenv("GOOS", "plan9")
	build := GoBuild(dir, "-X main.version=v1.2.3")
	out := filepath.Join(t.TempDir(), "out")
	p := Platform{"linux", "amd64"}
	info, err := build(t.Context(), Build{Package: ".", Platform: p, Out: out})
	require.NoError(t, err)
	require.NoError(t, checkBuild(info, p))
	require.Contains(t, info.Settings, debug.BuildSetting{Key: "GOAMD64", Value: "v1"})
	require.NotContains(t, string(mustRead(t, out)), dir)

	_, err = GoBuild(dir, "")(t.Context(), Build{Package: ".", Platform: p, Out: out})
	require.ErrorContains(t, err, "run make release")
	_, err = build(t.Context(), Build{Package: "./nowhere", Platform: p, Out: out})
	require.ErrorContains(t, err, "nowhere")
}

func TestArchivesDoNotDependOnTheOrder(t *testing.T) {
	t.Parallel()
	files := []file{{"b", 0o644, []byte("2")}, {"a", 0o755, []byte("1")}}
	turned := slices.Clone(files)
	slices.Reverse(turned)
	when := time.Date(2031, 5, 4, 3, 2, 1, 0, time.UTC)
	for _, pack := range []func([]file, time.Time) ([]byte, error){tarGz, zipped} {
		one, err := pack(files, when)
		require.NoError(t, err)
		two, err := pack(turned, when)
		require.NoError(t, err)
		require.Equal(t, one, two)
		later, err := pack(files, when.Add(time.Hour))
		require.NoError(t, err)
		require.NotEqual(t, one, later)
	}
}
