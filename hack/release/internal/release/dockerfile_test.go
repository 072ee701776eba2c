package release

import (
	"archive/tar"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"
)

func TestTheDockerfileMakesTheImagesOfARelease(t *testing.T) {
	t.Parallel()
	compareWithDockerfile(t, Platform{"linux", runtime.GOARCH})
}

// targets are the Dockerfile's, by program.
var targets = map[string]string{"lodestone-controller": "controller", "lodestone-speaker": "speaker", commandName: "cli"}

// compareWithDockerfile makes the release of what is committed here, builds the Dockerfile of the same
// commit, and compares the images.
func compareWithDockerfile(t *testing.T, p Platform) {
	t.Helper()
	b := newBuildah(t, p)
	root := filepath.Join(b.dir, "clone")
	own := Platform{runtime.GOOS, runtime.GOARCH}
	dist := makeRelease(t, root, "", "PLATFORMS="+own.String()+","+p.String())
	b.base(t, root)
	for _, program := range programs() {
		want := imageIn(t, filepath.Join(dist, imagesFolder, program.name), p)
		got := b.build(t, root, targets[program.name])
		require.Equal(t, contents(t, want), contents(t, got), program.name)

		wanted, err := want.ConfigFile()
		require.NoError(t, err)
		config, err := got.ConfigFile()
		require.NoError(t, err)
		require.Equal(t, p, Platform{config.OS, config.Architecture})
		// What builds gives every image a PATH. Nothing is started by its bare name in one that has a single file.
		require.Len(t, config.Config.Env, 1)
		require.Regexp(t, `^PATH=`, config.Config.Env[0])
		// A release's labels are about where it comes from. Who builds an image himself has his own to add, by --label.
		require.Equal(t, []string{"io.buildah.version"}, slices.Collect(maps.Keys(config.Config.Labels)))
		config.Config.Env, config.Config.Labels, wanted.Config.Labels = nil, nil, nil
		require.Equal(t, wanted.Config, config.Config, program.name)
	}
}

// buildah builds images as root, without a daemon and without a network, in a folder of its own.
type buildah struct {
	Platform
	dir string
}

func newBuildah(t *testing.T, p Platform) buildah {
	t.Helper()
	require.Zero(t, os.Geteuid(), "buildah needs root here: run make test with sudo")
	_, err := exec.LookPath("buildah")
	require.NoError(t, err, "hack/deps.sh installs buildah")
	// Always the same folder, so that what a run leaves that was killed is removed by the next one.
	dir, err := filepath.Abs(filepath.Join(checkout, ".cache", "dockerfile-"+p.OS+"-"+p.Arch))
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(dir))
	for _, name := range []string{"tmp", "images"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return buildah{p, dir}
}

// base makes the image that the Dockerfile names, of what this machine has: Go, a shell, make and
// their libraries. They are mounted when something runs in it, and not copied.
func (b buildah) base(t *testing.T, root string) {
	t.Helper()
	dir := filepath.Join(b.dir, "base")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "root/tmp"), 0o755))
	for _, name := range []string{"bin", "lib", "lib64"} {
		require.NoError(t, os.Symlink("usr/"+name, filepath.Join(dir, "root", name)))
	}
	const text = "FROM scratch\nCOPY root /\n" +
		"ENV PATH=/goroot/bin:/usr/bin GOTOOLCHAIN=local GOPROXY=off GOMODCACHE=/modules GOCACHE=/gocache\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o600))
	_, image, found := strings.Cut(string(mustRead(t, filepath.Join(root, "Dockerfile"))), "\nARG GO_IMAGE=")
	require.True(t, found, "the Dockerfile names no image that builds")
	image, _, _ = strings.Cut(image, "\n")
	b.run(t, dir, "build", "--isolation=chroot", "--tag=localhost/"+image, ".")
	// All that go.mod names, also what no package of ours imports, is what the Dockerfile asks for.
	goCommand(t, root, "mod", "download")
}

// build builds a target of the Dockerfile.
func (b buildah) build(t *testing.T, root, target string) v1.Image {
	t.Helper()
	args := []string{
		"build", "--isolation=chroot", "--pull=never", "--layers", "--target=" + target, "--tag=" + target, "--platform=" + b.String(),
		// The buildah of Debian 12 does not know it.
		"--build-arg=BUILDPLATFORM=linux/" + runtime.GOARCH,
		"--build-arg=VERSION=v99.1.0", "--build-arg=COMMIT=" + run(t, root, "rev-parse", "HEAD"),
		"--build-arg=DATE=" + run(t, root, "log", "-1", "--format=%cI"),
		"--volume=/usr:/usr:ro",
		"--volume=" + goCommand(t, root, "env", "GOROOT") + ":/goroot:ro",
		"--volume=" + goCommand(t, root, "env", "GOMODCACHE") + ":/modules:ro",
		"--volume=" + goCommand(t, root, "env", "GOCACHE") + ":/gocache",
	}
	b.run(t, root, append(args, ".")...)
	out := filepath.Join(b.dir, "images", target)
	b.run(t, root, "push", "--quiet", target, "oci:"+out+":latest")
	return imageIn(t, out, b.Platform)
}

func (b buildah) run(t *testing.T, dir string, args ...string) {
	t.Helper()
	own := []string{"--root=" + filepath.Join(b.dir, "storage"), "--runroot=" + filepath.Join(b.dir, "run"), "--storage-driver=vfs"}
	cmd := exec.CommandContext(t.Context(), "buildah", append(own, args...)...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "TMPDIR="+filepath.Join(b.dir, "tmp"))
	// No network; and who is killed takes along all that it has started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "buildah %s: %s", args, out)
}

func goCommand(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir, cmd.Stderr = dir, t.Output()
	out, err := cmd.Output()
	require.NoError(t, err, "go %s", args)
	return strings.TrimSpace(string(out))
}

// imageIn returns a platform's from a layout: it is in an index in the layout's, or in that itself.
func imageIn(t *testing.T, dir string, p Platform) v1.Image {
	t.Helper()
	index, err := layout.ImageIndexFromPath(dir)
	require.NoError(t, err)
	manifest, err := index.IndexManifest()
	require.NoError(t, err)
	top := manifest.Manifests[0]
	if top.MediaType.IsImage() {
		img, err := index.Image(top.Digest)
		require.NoError(t, err)
		return img
	}
	index, err = index.ImageIndex(top.Digest)
	require.NoError(t, err)
	manifest, err = index.IndexManifest()
	require.NoError(t, err)
	for _, m := range manifest.Manifests {
		if m.Platform.OS == p.OS && m.Platform.Architecture == p.Arch {
			img, err := index.Image(m.Digest)
			require.NoError(t, err)
			return img
		}
	}
	require.Fail(t, "no image", "%s in %s", p, dir)
	return nil
}

// contentOf is what a file in an image is. Its time is left out: the Dockerfile's is that of the build.
type contentOf struct {
	mode     os.FileMode
	uid, gid int
	link     string
	digest   string
}

func contents(t *testing.T, img v1.Image) map[string]contentOf {
	t.Helper()
	packed := mutate.Extract(img)
	defer packed.Close()
	found := map[string]contentOf{}
	for r := tar.NewReader(packed); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		text, err := io.ReadAll(r)
		require.NoError(t, err)
		found[filepath.Join("/", h.Name)] = contentOf{h.FileInfo().Mode(), h.Uid, h.Gid, h.Linkname, hexSHA256(text)}
	}
}
