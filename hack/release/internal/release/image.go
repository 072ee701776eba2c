package release

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// imagesFolder has a layout for each image.
const imagesFolder = "images"

// writeImages writes an index of each program's images, which are those for Linux.
func (m *making) writeImages(all []binary) error {
	for _, p := range programs() {
		about := m.source.annotations(p.name, p.description, m.Version)
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, b := range all {
			if b.name != p.name || b.OS != "linux" {
				continue
			}
			img, err := image(b, m.source, about)
			if err != nil {
				return fmt.Errorf("image of %s for %s: %w", p.name, b.Platform, err)
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{
				Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: b.OS, Architecture: b.Arch}},
			})
		}
		index, ok := mutate.Annotations(index, about).(v1.ImageIndex)
		if !ok {
			return fmt.Errorf("index of %s: with annotations it is none any more", p.name)
		}
		place := published{layout: filepath.Join(imagesFolder, p.name), repository: m.values.Image.Registry + "/" + p.name, tag: m.Version}
		if err := m.publish(place, entry{index: index}); err != nil {
			return err
		}
	}
	return nil
}

// image is what the Dockerfile makes: one static binary, and who runs it.
func image(b binary, s Source, about map[string]string) (v1.Image, error) {
	content, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	packed, err := tarGz([]file{{b.name, 0o755, content}}, s.Date)
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed)), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(base, mutate.Addendum{
		Layer: layer, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: s.Date}, CreatedBy: "make release", Comment: module + "/" + strings.TrimPrefix(b.pkg, "./")},
	})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = b.OS, b.Arch, v1.Time{Time: s.Date}
	config.Config = v1.Config{Entrypoint: []string{"/" + b.name}, User: b.user, Labels: about}
	img, err = mutate.ConfigFile(img, config)
	if err != nil {
		return nil, err
	}
	annotated, ok := mutate.Annotations(img, about).(v1.Image)
	if !ok {
		return nil, errors.New("with annotations it is no image any more")
	}
	return annotated, nil
}
