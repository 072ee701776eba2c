package release

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// file is one of an archive.
type file struct {
	name    string
	mode    fs.FileMode
	content []byte
}

// pluginName is the file by which kubectl finds the command, and completeName the one that it
// runs to complete what is typed after it. The second is a script: krew unpacks no links, and
// another copy of the binary would double the archive.
const (
	pluginName   = "kubectl-lodestone"
	completeName = "kubectl_complete-lodestone"
	complete     = `#!/bin/sh
# kubectl runs this to complete "kubectl lodestone".
exec kubectl lodestone __complete "$@"
`
)

// sorted returns the files by name, so that the order in which they were found is not in the
// archive.
func sorted(files []file) []file {
	return slices.SortedFunc(slices.Values(files), func(a, b file) int { return cmp.Compare(a.name, b.name) })
}

// tarGz packs files. They are owned by root, and have the given time.
func tarGz(files []file, t time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	archive := tar.NewWriter(zipped)
	for _, f := range sorted(files) {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: int64(f.mode.Perm()), Size: int64(len(f.content)), ModTime: t, Format: tar.FormatUSTAR,
		}
		if err := archive.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("pack %s: %w", f.name, err)
		}
		if _, err := archive.Write(f.content); err != nil {
			return nil, fmt.Errorf("pack %s: %w", f.name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if err := zipped.Close(); err != nil {
		return nil, fmt.Errorf("compress: %w", err)
	}
	return buffer.Bytes(), nil
}

// zipped packs files for Windows.
func zipped(files []file, t time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	archive := zip.NewWriter(&buffer)
	for _, f := range sorted(files) {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: t}
		header.SetMode(f.mode)
		w, err := archive.CreateHeader(header)
		if err != nil {
			return nil, fmt.Errorf("pack %s: %w", f.name, err)
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, fmt.Errorf("pack %s: %w", f.name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	return buffer.Bytes(), nil
}

// writeArchives writes an archive of the command for each platform, and the manifest by which
// krew finds them.
func (m *making) writeArchives(all []binary, manual []file) error {
	text, err := os.ReadFile(filepath.Join(m.Root, licenseFile))
	if err != nil {
		return fmt.Errorf("read the license: %w", err)
	}
	var archives []archived
	for _, b := range all {
		if b.name != commandName {
			continue
		}
		content, err := os.ReadFile(b.path)
		if err != nil {
			return fmt.Errorf("read the command: %w", err)
		}
		a := archived{Platform: b.Platform, plugin: pluginName}
		pack, extension := tarGz, ".tar.gz"
		files := append(slices.Clone(manual), file{licenseFile, 0o644, text})
		if b.OS == "windows" {
			a.plugin += ".exe"
			pack, extension = zipped, ".zip"
		} else {
			files = append(files, file{completeName, 0o755, []byte(complete)})
		}
		files = append(files, file{a.plugin, 0o755, content})
		packed, err := pack(files, m.source.Date)
		if err != nil {
			return fmt.Errorf("archive of the command for %s: %w", b.Platform, err)
		}
		a.file, a.sha256 = b.file(m.Version, extension), hexSHA256(packed)
		if err := m.write(a.file, packed); err != nil {
			return err
		}
		archives = append(archives, a)
	}
	return m.writeKrew(archives)
}
