package release

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// checkout is the one that this test is in.
const checkout = "../../../.."

// commitDate is the time of the commit that tests make a release of.
const commitDate = "2031-05-04T03:02:01+00:00"

// fake returns a program that answers as the command does. It is a script: compiling programs and compressing them
// would be most of what these tests cost.
func fake(version, commit string) []byte {
	return []byte(`#!/bin/sh
case $1 in
version) echo "lodestone ` + version + " (commit " + commit + ", date " + commitDate + `, go)" ;;
completion) echo "# completion for $2" ;;
man) echo ".TH LODESTONE 1" >"$2/lodestone.1" ;;
esac
exit
`)
}

// fakeBuilder returns a builder that writes the fake for this machine, whatever platform is asked for. The
// returned build info is that of a correct build.
func fakeBuilder(version, commit string) Builder {
	return func(_ context.Context, b Build) (*debug.BuildInfo, error) {
		return infoOf(b.Platform), os.WriteFile(b.Out, content(fake(version, commit), b.Package, b.Platform), 0o700)
	}
}

// content is a program of that package for the platform. The line after the script is not run. It makes the
// binaries differ.
func content(program []byte, pkg string, p Platform) []byte {
	return append(bytes.Clone(program), "\n"+pkg+" "+p.String()+"\n"...)
}

// infoOf is what the Go tool would have recorded.
func infoOf(p Platform) *debug.BuildInfo {
	return &debug.BuildInfo{
		GoVersion: "go1.26.9",
		Deps: []*debug.Module{
			{Path: "example.com/plain", Version: "v1.2.3", Sum: "h1:plain="},
			{Path: "example.com/replaced", Version: "v1.0.0", Replace: &debug.Module{Path: "example.com/fork", Version: "v1.0.1+incompatible"}},
		},
		Settings: []debug.BuildSetting{
			{Key: "-trimpath", Value: "true"}, {Key: "CGO_ENABLED", Value: "0"}, {Key: "GOOS", Value: p.OS}, {Key: "GOARCH", Value: p.Arch},
		},
	}
}

// repository is a checkout with what a release takes of ours but the programs, in one commit.
func repository(t *testing.T) (root, commit string) {
	t.Helper()
	root = t.TempDir()
	require.NoError(t, os.CopyFS(filepath.Join(root, chartFolder), os.DirFS(filepath.Join(checkout, chartFolder))))
	for _, name := range []string{licenseFile, changelogFile, hubFile} {
		text, err := os.ReadFile(filepath.Join(checkout, name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(root, name), text, 0o600))
	}
	run(t, root, "init", "--quiet", "--initial-branch=main")
	run(t, root, "add", "--all")
	run(t, root, "commit", "--quiet", "--message=all of it")
	return root, run(t, root, "rev-parse", "HEAD")
}

func run(t *testing.T, root string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com", "GIT_AUTHOR_DATE="+commitDate, "GIT_COMMITTER_DATE="+commitDate)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "git %v: %s", args, out)
	return strings.TrimSpace(string(out))
}

// released is a release for tests.
type released struct {
	Config
	commit  string
	printed *bytes.Buffer
}

// read returns a file of the release.
func (r released) read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(r.Dist, name))
	require.NoError(t, err)
	return text
}

// fakeRelease makes a release of a repository, of fake programs.
func fakeRelease(t *testing.T, version string, key *Key) released {
	t.Helper()
	root, commit := repository(t)
	printed := &bytes.Buffer{}
	r := released{Config{
		Root: root, Dist: filepath.Join(t.TempDir(), "dist"), Version: version, Key: key, Out: printed, Build: fakeBuilder(version, commit),
	}, commit, printed}
	require.NoError(t, Make(t.Context(), r.Config))
	return r
}

// makeRelease clones what is committed here, makes a release of it as people do, and returns its folder.
func makeRelease(t *testing.T, root, key string, env ...string) string {
	t.Helper()
	here, err := filepath.Abs(checkout)
	require.NoError(t, err)
	clone := exec.CommandContext(t.Context(), "git", "clone", "--quiet", here, root)
	out, err := clone.CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "release", "VERSION=v99.1.0", "KEY="+key)
	// The flags of a make that runs this test must not reach this one.
	cmd.Dir, cmd.Env = root, append(append(os.Environ(), "MAKEFLAGS=", "LODESTONE_RELEASE_KEY="), env...)
	out, err = cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return filepath.Join(root, "dist")
}

func TestMain(m *testing.M) {
	if own := (Platform{runtime.GOOS, runtime.GOARCH}); own.OS != "linux" {
		fmt.Fprintln(os.Stderr, "these tests need Linux, and this is", own)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func TestAReleaseIsWhole(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7", testKey(t))
	entries, err := os.ReadDir(r.Dist)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	require.Equal(t, []string{
		"artifacthub", "chart", "checksums.txt", "checksums.txt.sig", "checksums.txt.sigstore.json", "cosign.pub", "images", "images.txt",
		"lodestone-9.8.7.tgz",
		"lodestone-controller_v9.8.7_linux_amd64.cdx.json", "lodestone-controller_v9.8.7_linux_arm64.cdx.json",
		"lodestone-krew.yaml",
		"lodestone-speaker_v9.8.7_linux_amd64.cdx.json", "lodestone-speaker_v9.8.7_linux_arm64.cdx.json",
		"lodestone_v9.8.7_darwin_amd64.cdx.json", "lodestone_v9.8.7_darwin_amd64.tar.gz",
		"lodestone_v9.8.7_darwin_arm64.cdx.json", "lodestone_v9.8.7_darwin_arm64.tar.gz",
		"lodestone_v9.8.7_linux_amd64.cdx.json", "lodestone_v9.8.7_linux_amd64.tar.gz",
		"lodestone_v9.8.7_linux_arm64.cdx.json", "lodestone_v9.8.7_linux_arm64.tar.gz",
		"lodestone_v9.8.7_windows_amd64.cdx.json", "lodestone_v9.8.7_windows_amd64.zip",
		"lodestone_v9.8.7_windows_arm64.cdx.json", "lodestone_v9.8.7_windows_arm64.zip",
		"provenance.intoto.jsonl", "release-notes.md",
	}, names)
	require.NotContains(t, r.printed.String(), "UNSIGNED")

	// sha256sum agrees with the checksums, and notices a byte that changed.
	check := func() (string, error) {
		cmd := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", "checksums.txt")
		cmd.Dir = r.Dist
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := check()
	require.NoError(t, err, out)
	require.Contains(t, out, "lodestone_v9.8.7_linux_amd64.tar.gz: OK")
	tamper(t, filepath.Join(r.Dist, "lodestone-9.8.7.tgz"))
	out, err = check()
	require.Error(t, err)
	require.Contains(t, out, "lodestone-9.8.7.tgz: FAILED")
}

// TestTheSameCommitGivesTheSameBytes makes a release twice, signed: nothing in it is of the day,
// the folder or chance. A third one, of another version, differs.
func TestTheSameCommitGivesTheSameBytes(t *testing.T) {
	t.Parallel()
	key := testKey(t)
	first, second, other := fakeRelease(t, "v9.8.7", key), fakeRelease(t, "v9.8.7", key), fakeRelease(t, "v9.8.8", key)
	require.Equal(t, first.commit, second.commit, "the repositories of this test differ")
	require.NotEqual(t, first.Root, second.Root)
	require.Equal(t, allDigests(t, first.Dist), allDigests(t, second.Dist))
	require.NotEqual(t, allDigests(t, first.Dist), allDigests(t, other.Dist))
}

// allDigests returns those of all files in a folder, by path.
func allDigests(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		relative, _ := filepath.Rel(dir, path)
		found[relative] = hexSHA256(text)
		return err
	}))
	require.NotEmpty(t, found)
	return found
}

// tamper changes one byte in the middle of a file.
func tamper(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	text[len(text)/2] ^= 1
	require.NoError(t, os.WriteFile(path, text, 0o600))
}

func TestWithoutAKeyTheReleaseIsMarkedAsUnsigned(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7", nil)
	require.Contains(t, r.printed.String(), "UNSIGNED: no key was given; make release VERSION=v9.8.7 KEY=<file> signs\n")
	for _, name := range []string{signatureName, bundleName, publicKeyName, envelopeName} {
		require.NoFileExists(t, filepath.Join(r.Dist, name))
	}
	require.FileExists(t, filepath.Join(r.Dist, provenanceName))
	for _, name := range []string{"images/lodestone", "images/lodestone-speaker", "images/lodestone-controller", chartLayout} {
		require.NotContains(t, string(r.read(t, name+"/index.json")), ".sig", "%s is signed, by whom?", name)
	}
}

func TestWhatIsNoReleaseIsRefused(t *testing.T) {
	t.Parallel()
	root, commit := repository(t)
	try := func(change func(*Config)) error {
		c := Config{
			Root: root, Dist: filepath.Join(t.TempDir(), "dist"), Version: "v9.8.7", Out: io.Discard, Build: fakeBuilder("v9.8.7", commit),
		}
		change(&c)
		return Make(t.Context(), c)
	}
	for _, version := range []string{
		"", "9.8.7", "v9.8", "v9", "v9.8.7+linux", "v09.8.7", "latest", "v9.8.7-dirty+x", "abc1234-dirty", "v9.8.7 ",
	} {
		err := try(func(c *Config) { c.Version = version })
		require.ErrorContains(t, err, fmt.Sprintf("the version %q is no semantic version", version))
	}
	require.ErrorContains(t, try(func(c *Config) { c.Root = t.TempDir() }), "which has to be a checkout")

	// Nobody's files are overwritten.
	used := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(used, "precious"), nil, 0o600))
	require.ErrorContains(t, try(func(c *Config) { c.Dist = used }), used+" for the release is not empty")

	// A program that prints another version, because of wrong linker flags, is not released.
	require.ErrorContains(t, try(func(c *Config) { c.Build = fakeBuilder("v9.8.6", commit) }), `should begin with "lodestone v9.8.7`)
	require.ErrorContains(t, try(func(c *Config) { c.Build = fakeBuilder("v9.8.7", "deadbeef") }), "linker flags are not this commit's")

	// Nor is a binary that was built with settings of the machine.
	require.ErrorContains(t, try(func(c *Config) {
		c.Build = func(context.Context, Build) (*debug.BuildInfo, error) { return infoOf(Platform{"plan9", "mips"}), nil }
	}), `lodestone-controller for linux/amd64: it was built with`)

	// Changed and new files that are in no commit are refused. Files that Git ignores do not matter.
	require.NoError(t, os.WriteFile(filepath.Join(root, ".git/info/exclude"), []byte("ignored\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(root, "ignored"), nil, 0o600))
	require.NoError(t, try(func(*Config) {}))
	require.NoError(t, os.WriteFile(filepath.Join(root, chartFolder, "templates", "ignored"), nil, 0o600))
	require.ErrorContains(t, try(func(*Config) {}), "that may be in the release; remove them:\ndeploy/chart/templates/ignored")
	require.NoError(t, os.Remove(filepath.Join(root, chartFolder, "templates", "ignored")))
	embedded := filepath.Join(root, "inspect", "dashboard", "page", "ignored") // what is embedded is no Go file
	require.NoError(t, os.MkdirAll(filepath.Dir(embedded), 0o755))
	require.NoError(t, os.WriteFile(embedded, nil, 0o600))
	require.ErrorContains(t, try(func(*Config) {}), "inspect/dashboard/page/ignored")
	require.NoError(t, os.Remove(embedded))
	require.NoError(t, os.WriteFile(filepath.Join(root, "new"), nil, 0o600))
	require.ErrorContains(t, try(func(*Config) {}), "has changes that are in no commit; commit or remove them:\n?? new")
	require.NoError(t, try(func(c *Config) { c.AllowDirty = true }))
	require.NoError(t, os.Remove(filepath.Join(root, "new")))
	tamper(t, filepath.Join(root, chartFolder, valuesName))
	require.ErrorContains(t, try(func(*Config) {}), " M deploy/chart/values.yaml")
}
