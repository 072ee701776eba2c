package release

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// Platform is what a binary runs on.
type Platform struct{ OS, Arch string }

func (p Platform) String() string { return p.OS + "/" + p.Arch }

// program is one of ours.
type program struct {
	name, pkg, description string
	// user is the image's: numbers, because the image has no file to look names up in.
	user string
	// component is the key of the chart's values that names the image.
	component string
	platforms []Platform
}

const commandName = "lodestone"

// programs are all of them. Images are made for those platforms that are Linux.
func programs() []program {
	nodes := []Platform{{"linux", "amd64"}, {"linux", "arm64"}}
	desks := append(slices.Clone(nodes), Platform{"darwin", "amd64"}, Platform{"darwin", "arm64"},
		Platform{"windows", "amd64"}, Platform{"windows", "arm64"})
	return []program{
		{"lodestone-controller", "./cmd/controller", "Gives Services of type LoadBalancer their addresses", "65532:65532", "controller", nodes},
		{"lodestone-speaker", "./cmd/speaker", "Announces the addresses of Services from a node", "0:0", "speaker", nodes},
		{commandName, "./cmd/lodestone", "Shows what the Lodestone load balancer does, and why", "65532:65532", "tests", desks},
	}
}

// checkPlatforms refuses platforms that are not built, a choice without Linux, and one without the
// platform of this machine, on which the command writes the man pages.
func checkPlatforms(chosen []string) error {
	var all []string
	for _, p := range programs()[2].platforms {
		all = append(all, p.String())
	}
	for _, p := range chosen {
		if !slices.Contains(all, p) {
			return fmt.Errorf("the platform %q is none of those that a release has: %s", p, strings.Join(all, " "))
		}
	}
	own := Platform{runtime.GOOS, runtime.GOARCH}.String()
	linux := func(p string) bool { return strings.HasPrefix(p, "linux/") }
	if len(chosen) > 0 && (!slices.Contains(chosen, own) || !slices.ContainsFunc(chosen, linux)) {
		return fmt.Errorf("the platforms %s have to have one of Linux, for the nodes, and this machine's, which is %s",
			strings.Join(chosen, " "), own)
	}
	return nil
}

// wants reports whether the release is for the platform, too.
func (c Config) wants(p Platform) bool {
	return len(c.Platforms) == 0 || slices.Contains(c.Platforms, p.String())
}

// Build is a program to build for a platform.
type Build struct {
	// Package is the program's, as in ./cmd/speaker.
	Package string
	Platform
	// Out is the file to write.
	Out string
}

// Builder builds a program, and returns what the Go tool recorded in it.
type Builder func(ctx context.Context, b Build) (*debug.BuildInfo, error)

// binary is a program for a platform.
type binary struct {
	program
	Platform
	path string
	info *debug.BuildInfo
}

// file names a file about the binary.
func (b binary) file(version, extension string) string {
	return fmt.Sprintf("%s_%s_%s_%s%s", b.name, version, b.OS, b.Arch, extension)
}

// build builds everything, one after the other: the compiler takes all processors by itself.
func (m *making) build(ctx context.Context, work string) (all []binary, _ error) {
	for _, p := range programs() {
		for _, platform := range p.platforms {
			if !m.wants(platform) {
				continue
			}
			dir := filepath.Join(work, platform.OS+"_"+platform.Arch)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return nil, fmt.Errorf("make a folder for binaries: %w", err)
			}
			b := binary{program: p, Platform: platform, path: filepath.Join(dir, p.name)}
			info, err := m.Build(ctx, Build{Package: p.pkg, Platform: platform, Out: b.path})
			if err != nil {
				return nil, fmt.Errorf("build %s for %s: %w", p.name, platform, err)
			}
			if err := checkBuild(info, platform); err != nil {
				return nil, fmt.Errorf("%s for %s: %w", p.name, platform, err)
			}
			b.info = info
			all = append(all, b)
			m.log("built %s for %s", p.name, platform)
		}
	}
	return all, nil
}

// GoBuild builds with the go command, in a checkout.
func GoBuild(root, ldflags string) Builder {
	return func(ctx context.Context, b Build) (*debug.BuildInfo, error) {
		if ldflags == "" {
			return nil, errors.New("no linker flags were given, which give a program its version: run make release")
		}
		args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", b.Out, b.Package}
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = root
		// Settings of people and machines for their own builds would change the binaries.
		cmd.Env = append(os.Environ(), "GOOS="+b.OS, "GOARCH="+b.Arch, "CGO_ENABLED=0", "GOFLAGS=-mod=readonly", "GOWORK=off",
			"GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFIPS140=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("go build: %w\n%s", err, bytes.TrimSpace(out))
		}
		return buildinfo.ReadFile(b.Out)
	}
}

// checkBuild checks that a binary is static, for the platform, and the same wherever it is built.
func checkBuild(info *debug.BuildInfo, p Platform) error {
	if info == nil {
		return errors.New("the binary does not record how it was built")
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
		if strings.HasPrefix(s.Key, "vcs.") || s.Key == "GOEXPERIMENT" || s.Key == "-tags" {
			return fmt.Errorf("it was built with %s=%s, so that others would not get the same one", s.Key, s.Value)
		}
	}
	for key, want := range map[string]string{"-trimpath": "true", "CGO_ENABLED": "0", "GOOS": p.OS, "GOARCH": p.Arch} {
		if got := settings[key]; got != want {
			return fmt.Errorf("it was built with %s=%q, and has to be with %q", key, got, want)
		}
	}
	return nil
}
