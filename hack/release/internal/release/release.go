// Package release makes the files of a release from one commit: images, chart,
// archives of the command, what is in them, where they come from, and signatures.
//
// Everything follows from the commit, the version and the Go toolchain: times are the
// commit's, entries are sorted, and the same again gives the same bytes. That holds for
// signatures with the same key, too.
//
// The files, in the order of their work:
//
//	release.go     Make: prepares a folder, and takes all steps
//	source.go      the commit, and when there is none to release
//	notes.go       what the changelog has of the version
//	build.go       the programs, and how they are built
//	manual.go      what the command prints of itself: man pages and completions
//	sbom.go        which modules are in a binary
//	image.go       images
//	layout.go      OCI layouts, and artifacts in them that are no images
//	chart.go       the chart, with the digests of the images
//	archive.go     archives, and those of the command
//	krew.go        the manifest by which krew installs the command
//	checksums.go   checksums
//	provenance.go  where all of it comes from
//	sign.go        signatures
//	push.go        the way of all that into a registry
package release

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const (
	project     = "https://github.com/lodestone-lb/lodestone"
	module      = "github.com/lodestone-lb/lodestone"
	license     = "Apache-2.0"
	licenseFile = "LICENSE"
	listName    = "images.txt"
)

// Config is what a release is made of, and where.
type Config struct {
	// Root is the checkout, Dist the folder to write to. It is empty or does not exist.
	Root, Dist string
	// Version is a semantic version with a leading v.
	Version string
	// Build builds one program for one platform.
	Build Builder
	// Key signs. Nil: nothing is signed.
	Key *Key
	// Platforms are those that programs are built for, as in linux/amd64. None: all that there are.
	Platforms []string
	// AllowDirty accepts a checkout with uncommitted changes. It is for tests.
	AllowDirty bool
	// Out gets a line for each thing that was made. Nil: nobody reads it.
	Out io.Writer
}

// making is the state of Make.
type making struct {
	Config
	source Source
	values values
	// files and images are those made so far; images are of programs and of the chart.
	files  []digested
	images []published
}

// published is something for a registry: the layout that holds it, and its place there.
type published struct {
	layout, repository, tag, digest string
}

func (p published) String() string { return p.repository + ":" + p.tag + "@" + p.digest }

// Make makes a release.
func Make(ctx context.Context, c Config) error {
	if err := checkPlatforms(c.Platforms); err != nil {
		return err
	}
	source, err := Open(ctx, c.Root, c.Version, c.AllowDirty)
	if err != nil {
		return err
	}
	if err := prepare(c.Dist); err != nil {
		return err
	}
	m := &making{Config: c, source: source}
	if m.values, err = readValues(c.Root); err != nil {
		return err
	}
	// The notes come first, so that missing ones are reported before anything is compiled.
	if err := m.writeNotes(); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "lodestone-release-")
	if err != nil {
		return fmt.Errorf("make a folder for binaries: %w", err)
	}
	defer os.RemoveAll(work)
	binaries, err := m.build(ctx, work)
	if err != nil {
		return err
	}
	pages, err := m.manual(ctx, work, binaries)
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return m.writeSBOMs(binaries) },
		func() error { return m.writeImages(binaries) },
		m.writeChart,
		func() error { return m.writeArchives(binaries, pages) },
		m.writeImageList,
		m.writeChecksums,
		func() error { return m.writeProvenance(binaries) },
		m.signChecksums,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	if len(c.Platforms) > 0 {
		m.log("PARTIAL: only for %s", strings.Join(c.Platforms, " "))
	}
	if c.Key == nil {
		m.log("UNSIGNED: no key was given; make release VERSION=%s KEY=<file> signs", c.Version)
	}
	return nil
}

// prepare makes the folder to write to. What is there stays: it may be the only copy of
// another release.
func prepare(dist string) error {
	entries, err := os.ReadDir(dist)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("look into the folder for the release: %w", err)
	case len(entries) > 0:
		return fmt.Errorf("the folder %s for the release is not empty: remove it, or take another one", dist)
	}
	if err := os.MkdirAll(dist, 0o755); err != nil {
		return fmt.Errorf("make the folder for the release: %w", err)
	}
	return nil
}

// write writes a file of the release.
func (m *making) write(name string, content []byte) error {
	path := filepath.Join(m.Dist, name)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	m.files = append(m.files, digested{name, hexSHA256(content)})
	m.log("%s", name)
	return nil
}

func (m *making) log(format string, args ...any) {
	if m.Out != nil {
		fmt.Fprintf(m.Out, format+"\n", args...)
	}
}

// writeImageList writes what belongs where in a registry, by digest. The layouts are
// folders, which the checksums do not reach: a digest in this list does, through all of it.
func (m *making) writeImageList() error {
	var lines strings.Builder
	for _, p := range m.images {
		fmt.Fprintln(&lines, p)
	}
	return m.write(listName, []byte(lines.String()))
}
