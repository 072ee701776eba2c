// Package program builds what the lab runs: Kubernetes, Helm and MetalLB from their
// Go modules, once; our own programs on every run, which the Go build cache makes
// cheap.
//
//	program.go  Builder
//	jump.go     a speaker whose clock jumps
package program

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/lock"
)

// Builder builds programs of the repository at Root into its .cache folder.
type Builder struct {
	Root     string
	Progress func(format string, args ...any)
}

// kubernetesVersion is stamped into the binary, as a release has it: charts ask
// the API server for its version. It is the version of cmd/kubernetes/go.mod.
const kubernetesVersion = "1.36.3"

// Kubernetes returns the binary that is every Kubernetes program of the lab.
func (b Builder) Kubernetes(ctx context.Context) (string, error) {
	return b.once(ctx, "kubernetes", "kubernetes", "about 6 minutes on 2 cores", "-ldflags="+versionFlags(kubernetesVersion), ".")
}

func versionFlags(version string) string {
	numbers := strings.SplitN(version, ".", 3)
	const set = "-X k8s.io/component-base/version."
	return set + "gitVersion=v" + version + " " + set + "gitMajor=" + numbers[0] + " " + set + "gitMinor=" + numbers[1]
}

// Helm returns the helm binary.
func (b Builder) Helm(ctx context.Context) (string, error) {
	return b.once(ctx, "helm", "helm", "about 2 minutes on 2 cores", "helm.sh/helm/v3/cmd/helm")
}

// Promtool returns the binary of Prometheus' tool that tests rules. The build
// tag leaves out discovery in clouds.
func (b Builder) Promtool(ctx context.Context) (string, error) {
	return b.once(ctx, "promtool", "promtool", "about 90 seconds on 2 cores", "-tags=remove_all_sd",
		"github.com/prometheus/prometheus/cmd/promtool")
}

// KubeRouter returns the binary of kube-router, which enforces NetworkPolicies.
func (b Builder) KubeRouter(ctx context.Context) (string, error) {
	return b.once(ctx, "kuberouter", "kube-router", "about 2 minutes on 2 cores", "-ldflags=-s -w",
		"github.com/cloudnativelabs/kube-router/cmd/kube-router")
}

// MetalLB is a release of MetalLB.
type MetalLB struct {
	// Version is its tag, as in v0.16.2.
	Version string
	// Controller and Speaker are static binaries.
	Controller, Speaker string
	// Manifests is the folder with the manifests of the release.
	Manifests string
}

// metalLBModule is MetalLB's.
const metalLBModule = "go.universe.tf/metallb"

// MetalLB returns the release that cmd/metallb requires.
func (b Builder) MetalLB(ctx context.Context) (m MetalLB, err error) {
	const name, duration = "metallb", "about 2 minutes on 2 cores for both"
	if m.Controller, err = b.once(ctx, name, "metallb-controller", duration, metalLBModule+"/controller"); err != nil {
		return m, err
	}
	if m.Speaker, err = b.once(ctx, name, "metallb-speaker", duration, metalLBModule+"/speaker"); err != nil {
		return m, err
	}
	// Downloads it if there was nothing to build.
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", metalLBModule)
	cmd.Dir, cmd.Env = b.module(name), append(os.Environ(), "GOWORK=off")
	output, err := cmd.Output()
	if err != nil {
		return m, fmt.Errorf("run %v: %w\n%s", cmd.Args, err, output)
	}
	var module struct{ Version, Dir string }
	if err := json.Unmarshal(output, &module); err != nil {
		return m, fmt.Errorf("read the output of %v: %w", cmd.Args, err)
	}
	m.Version, m.Manifests = module.Version, filepath.Join(module.Dir, "config", "manifests")
	return m, nil
}

// Own returns a static binary of one of the lab's own commands.
func (b Builder) Own(ctx context.Context, name string) (string, error) {
	binary := filepath.Join(b.cache(), name)
	return binary, b.alone(ctx, name, func() error { return b.run(b.goBuild(ctx, b.module(name), binary, ".")) })
}

// Lodestone builds the product and returns the folder of its binaries.
func (b Builder) Lodestone(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "make", "--silent", "-C", b.Root, "build")
	return filepath.Join(b.Root, "bin"), b.alone(ctx, "lodestone", func() error { return b.run(cmd) })
}

// Release builds a release of the product from its commit, once, and returns the folder of its sources, which has
// the binaries in bin. The commit has to be in the repository's history: nothing is fetched.
func (b Builder) Release(ctx context.Context, version, commit string) (dir string, err error) {
	dir = filepath.Join(b.cache(), "release-"+version+"-"+commit)
	return dir, b.alone(ctx, "release-"+version, func() error {
		if _, err := os.Stat(dir); err == nil {
			return nil
		}
		if err := b.run(exec.CommandContext(ctx, "git", "-C", b.Root, "cat-file", "-e", commit+"^{commit}")); err != nil {
			return fmt.Errorf("the history here has no commit of %s: get all of it with git fetch --unshallow: %w", version, err)
		}
		return b.checkOut(ctx, version, commit, dir)
	})
}

// checkOut writes the commit's files to the folder, and builds them. The folder is there when all has worked.
func (b Builder) checkOut(ctx context.Context, version, commit, dir string) error {
	b.Progress("building lodestone %s: about a minute on 2 cores", version)
	partial := filepath.Join(b.cache(), ".release-"+version)
	if err := errors.Join(os.RemoveAll(partial), os.Mkdir(partial, 0o755)); err != nil {
		return fmt.Errorf("make a folder for %s: %w", version, err)
	}
	archive := filepath.Join(partial, "source.tar")
	for _, args := range [][]string{
		{"git", "-C", b.Root, "archive", "--output=" + archive, commit},
		{"tar", "-C", partial, "-xf", archive},
		{"make", "--silent", "-C", partial, "build", "VERSION=" + version, "COMMIT=" + commit},
	} {
		if err := b.run(exec.CommandContext(ctx, args[0], args[1:]...)); err != nil {
			return err
		}
	}
	return os.Rename(partial, dir)
}

func (b Builder) cache() string { return filepath.Join(b.Root, ".cache", "lab") }

// module is the folder of a module below cmd.
func (b Builder) module(name string) string {
	return filepath.Join(b.Root, "test", "e2e", "cmd", name)
}

// once builds a binary from a module below cmd unless that of just these sources
// and this Go release is in the cache. Older ones are removed: they are large.
func (b Builder) once(ctx context.Context, module, name, duration string, args ...string) (string, error) {
	key, err := hashSources(b.module(module), args)
	if err != nil {
		return "", err
	}
	binary := filepath.Join(b.cache(), name+"-"+key)
	return binary, b.alone(ctx, name, func() error {
		if _, err := os.Stat(binary); err == nil {
			return nil
		}
		return b.replace(ctx, module, name, binary, duration, args...)
	})
}

// replace builds a binary in place of those that are in the cache under its name.
func (b Builder) replace(ctx context.Context, module, name, binary, duration string, args ...string) error {
	old, err := filepath.Glob(filepath.Join(b.cache(), name+"-*"))
	if err != nil {
		return err
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove old program: %w", err)
		}
	}
	b.Progress("building %s: %s when the Go build cache is empty", name, duration)
	defer b.tick(name)()
	partial := filepath.Join(b.cache(), "."+name)
	if err := b.run(b.goBuild(ctx, b.module(module), partial, args...)); err != nil {
		return err
	}
	return os.Rename(partial, binary)
}

// alone runs build while no other program builds what has that name.
func (b Builder) alone(ctx context.Context, name string, build func() error) error {
	if err := os.MkdirAll(b.cache(), 0o755); err != nil {
		return fmt.Errorf("create cache: %w", err)
	}
	held, err := lock.First(ctx, b.Progress, lock.New(filepath.Join(b.cache(), "."+name+".lock")))
	if err != nil {
		return err
	}
	defer held.Release()
	return build()
}

// tick reports every few seconds that the build goes on, until stopped.
func (b Builder) tick(name string) (stop func()) {
	started := time.Now()
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		ticker := time.NewTicker(15 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				b.Progress("built %s in %s", name, time.Since(started).Round(time.Second))
				return
			case <-ticker.C:
				b.Progress("building %s: %s so far", name, time.Since(started).Round(time.Second))
			}
		}
	}()
	return func() { close(done); <-ended }
}

func (b Builder) goBuild(ctx context.Context, dir, output string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", append([]string{"build", "-C", dir, "-o", output}, args...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	return cmd
}

func (b Builder) run(cmd *exec.Cmd) error {
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run %v: %w\n%s", cmd.Args, err, output.Bytes())
	}
	return nil
}

// hashSources makes a key of a module's files, its build flags and the Go
// release.
func hashSources(dir string, args []string) (string, error) {
	hash := sha256.New()
	fmt.Fprintln(hash, runtime.Version(), args)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		fmt.Fprintf(hash, "%s %d\n", name, len(content))
		hash.Write(content)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("hash sources: %w", err)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16], nil
}
