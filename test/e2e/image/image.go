// Package image makes container images of static binaries. No registry outside can be
// reached from the lab, and none is needed.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Image is one static binary at /<its name>, and nothing else: the layout of
// the images that we release.
type Image struct {
	Ref    string // name:tag
	Binary string // a file of this machine
	User   string // numeric uid:gid; there is no /etc/passwd to look names up in
}

// Write makes the image's archive, as `docker save` would.
func (i Image) Write(archive string) error {
	ref, err := name.NewTag(i.Ref)
	if err != nil {
		return fmt.Errorf("name image: %w", err)
	}
	img, err := i.build()
	if err != nil {
		return fmt.Errorf("build image %s: %w", i.Ref, err)
	}
	if err := tarball.WriteToFile(archive, ref, img); err != nil {
		return fmt.Errorf("write image %s: %w", i.Ref, err)
	}
	return nil
}

func (i Image) build() (v1.Image, error) {
	content, err := i.layer()
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, static.NewLayer(content, types.DockerUncompressedLayer)) // tarball would compress it
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{Entrypoint: []string{i.entrypoint()}, User: i.User}
	return mutate.ConfigFile(img, file)
}

func (i Image) entrypoint() string { return path.Join("/", filepath.Base(i.Binary)) }

func (i Image) layer() ([]byte, error) {
	binary, err := os.ReadFile(i.Binary)
	if err != nil {
		return nil, err
	}
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	header := &tar.Header{Name: i.entrypoint()[1:], Mode: 0o755, Size: int64(len(binary))}
	if err := archive.WriteHeader(header); err != nil {
		return nil, err
	}
	if _, err := archive.Write(binary); err != nil {
		return nil, err
	}
	err = archive.Close()
	return buffer.Bytes(), err
}
