package release

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// What an entry of a layout is called: by OCI, which most tools copy by, and by cosign, whose
// load puts an image and its signature into a registry.
const (
	refName   = "org.opencontainers.image.ref.name"
	kind      = "kind"
	kindImage = "dev.cosignproject.cosign/image"
	kindIndex = "dev.cosignproject.cosign/imageIndex"
	kindSigs  = "dev.cosignproject.cosign/sigs"
)

// entry is an image or an index.
type entry struct {
	image v1.Image
	index v1.ImageIndex
}

func (e entry) digest() (v1.Hash, error) {
	if e.index != nil {
		return e.index.Digest()
	}
	return e.image.Digest()
}

// publish writes the layout of something that has a place in a registry, with its signature if
// there is a key.
func (m *making) publish(p published, e entry) error {
	digest, err := e.digest()
	if err != nil {
		return fmt.Errorf("digest of %s: %w", p.layout, err)
	}
	p.digest = digest.String()
	path, err := layout.Write(filepath.Join(m.Dist, p.layout), empty.Index)
	if err != nil {
		return fmt.Errorf("write the layout %s: %w", p.layout, err)
	}
	what := kindImage
	if e.index != nil {
		what = kindIndex
	}
	if err := add(path, e, map[string]string{refName: p.tag, kind: what}); err != nil {
		return fmt.Errorf("write the layout %s: %w", p.layout, err)
	}
	if m.Key != nil {
		signature, err := m.Key.signature(p, strings.TrimPrefix(p.repository, m.values.Image.Registry+"/"))
		if err != nil {
			return fmt.Errorf("sign %s: %w", p, err)
		}
		// The tag is where cosign looks for signatures of the digest.
		about := map[string]string{refName: signatureTag(digest.String()), kind: kindSigs}
		if err := add(path, entry{image: signature}, about); err != nil {
			return fmt.Errorf("write the layout %s: %w", p.layout, err)
		}
	}
	m.images = append(m.images, p)
	m.log("%s %s", p.layout, p.digest)
	return nil
}

func add(path layout.Path, e entry, about map[string]string) error {
	if e.index != nil {
		return path.AppendIndex(e.index, layout.WithAnnotations(about))
	}
	return path.AppendImage(e.image, layout.WithAnnotations(about))
}

// artifact is content in a registry that is no container image: one layer, and a config of its
// own kind.
type artifact struct {
	config     []byte
	configType types.MediaType
	layer      v1.Layer
	about      map[string]string
}

// image returns the artifact in the form of an image, which is how registries take it.
func (a artifact) image() (v1.Image, error) {
	layer, err := partial.Descriptor(a.layer)
	if err != nil {
		return nil, err
	}
	config, err := partial.Descriptor(static.NewLayer(a.config, a.configType))
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal(v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: *config, Layers: []v1.Descriptor{*layer}, Annotations: a.about,
	})
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(core{a, manifest})
}

// core is what an image is made of.
type core struct {
	artifact
	manifest []byte
}

// RawConfigFile returns the config, of whatever kind.
func (c core) RawConfigFile() ([]byte, error) { return c.config, nil }

// MediaType returns the manifest's.
func (c core) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }

// RawManifest returns the manifest.
func (c core) RawManifest() ([]byte, error) { return c.manifest, nil }

// LayerByDigest returns the only layer. Asked for the config, which counts as one when an image
// is written, it returns that.
func (c core) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, layer := range []v1.Layer{c.layer, static.NewLayer(c.config, c.configType)} {
		if digest, err := layer.Digest(); err == nil && digest == h {
			return layer, nil
		}
	}
	return nil, fmt.Errorf("there is no layer %s", h)
}

// signatureImage is how cosign keeps a signature in a registry: the signed text is a layer, and
// the signature is the layer's annotation.
func signatureImage(text []byte, signature string) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	const simpleSigning = types.MediaType("application/vnd.dev.cosign.simplesigning.v1+json")
	return mutate.Append(base, mutate.Addendum{
		Layer: static.NewLayer(text, simpleSigning), MediaType: simpleSigning,
		Annotations: map[string]string{"dev.cosignproject.cosign/signature": signature},
	})
}

// signatureTag returns the tag at which cosign looks for the signature of what has the digest.
func signatureTag(digest string) string { return strings.Replace(digest, ":", "-", 1) + ".sig" }
