package release

import (
	"bytes"
	"context"
	"crypto"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

// Push brings what a release has for registries into one of them, each thing with its signature, to
// the places of images.txt below the registry given. With the file of a public key, only what
// that key has signed. The password is the one of docker login or podman login.
func Push(ctx context.Context, dist, registry, publicKey string, out io.Writer) error {
	list, err := readList(dist, publicKey)
	if err != nil {
		return err
	}
	origin, layouts := path.Dir(list[0].repository), make([]map[string]entry, len(list))
	for i := range list {
		p := &list[i]
		place := strings.TrimPrefix(p.repository, origin+"/")
		p.repository = registry + "/" + place
		switch {
		case p.tag == hubTag:
			p.layout = hubLayout
		case strings.HasPrefix(place, chartsPlace+"/"):
			p.layout = chartLayout
		default:
			p.layout = filepath.Join(imagesFolder, place)
		}
		if layouts[i], err = p.entries(filepath.Join(dist, p.layout)); err != nil {
			return err
		}
	}
	for i, p := range list {
		if err := p.push(ctx, layouts[i]); err != nil {
			return err
		}
		fmt.Fprintln(out, p)
	}
	return nil
}

// push pushes all of a layout: the thing itself, and its signature, if there is one.
func (p published) push(ctx context.Context, entries map[string]entry) error {
	for _, tag := range []string{p.tag, signatureTag(p.digest)} {
		e, has := entries[tag]
		if !has {
			continue
		}
		place, err := name.NewTag(p.repository + ":" + tag)
		if err != nil {
			return fmt.Errorf("%s is no place in a registry: %w", p, err)
		}
		what := remote.Taggable(e.image)
		if e.index != nil {
			what = e.index
		}
		if err := remote.Push(place, what, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
			var refused *transport.Error
			if errors.As(err, &refused) && (refused.StatusCode == http.StatusUnauthorized || refused.StatusCode == http.StatusForbidden) {
				err = fmt.Errorf("log in, as somebody who may push there: docker login %s: %w", place.RegistryStr(), err)
			}
			return fmt.Errorf("push %s: %w", place, err)
		}
	}
	return nil
}

// entries returns what a layout has, by tag: the thing that is listed and its signature. It refuses a layout with anything else, which
// nobody has signed, and which could take the place of something in the registry.
func (p published) entries(dir string) (map[string]entry, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read the layout of %s: %w", p, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read the layout of %s: %w", p, err)
	}
	all := map[string]entry{}
	for _, d := range manifest.Manifests {
		e, err := entryOf(index, d)
		if err != nil {
			return nil, fmt.Errorf("read the layout of %s: %w", p, err)
		}
		digest, err := e.digest()
		if err != nil {
			return nil, fmt.Errorf("read the layout of %s: %w", p, err)
		}
		switch tag := d.Annotations[refName]; {
		case tag == p.tag && digest.String() != p.digest:
			return nil, fmt.Errorf("%s has %s, and images.txt lists %s: the layout was changed, take that of the release", dir, digest, p)
		case tag == p.tag, tag == signatureTag(p.digest):
			all[tag] = e
		default:
			return nil, fmt.Errorf("%s has %q, which is neither %s nor its signature: the layout was changed, take that of the release",
				dir, tag, p)
		}
	}
	if _, listed := all[p.tag]; !listed {
		return nil, fmt.Errorf("%s has no %s, which images.txt lists: take the layout of the release", dir, p.tag)
	}
	return all, nil
}

func entryOf(all v1.ImageIndex, d v1.Descriptor) (e entry, err error) {
	if d.MediaType.IsIndex() {
		e.index, err = all.ImageIndex(d.Digest)
	} else {
		e.image, err = all.Image(d.Digest)
	}
	return e, err
}

// readList reads images.txt, and verifies its signature if there is a key.
func readList(dist, publicKey string) (list []published, _ error) {
	text, err := os.ReadFile(filepath.Join(dist, listName))
	if err != nil {
		return nil, fmt.Errorf("read what the release has for registries; make release writes it: %w", err)
	}
	if publicKey != "" {
		if err := verifyList(dist, publicKey, text); err != nil {
			return nil, err
		}
	}
	for line := range strings.Lines(string(text)) {
		place, digest, found := strings.Cut(strings.TrimSpace(line), "@")
		colon := strings.LastIndex(place, ":")
		if !found || colon < 0 {
			return nil, fmt.Errorf("%s has the line %q, and has to have repository:tag@digest", listName, line)
		}
		list = append(list, published{repository: place[:colon], tag: place[colon+1:], digest: digest})
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s is empty: make the release again", listName)
	}
	return list, nil
}

// verifyList verifies the signature of the checksums, and that the list has the checksum there.
func verifyList(dist, publicKey string, list []byte) error {
	verifier, err := loadVerifier(publicKey)
	if err != nil {
		return err
	}
	signed, err := os.ReadFile(filepath.Join(dist, signatureName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the release in %s is not signed, and so the key %s vouches for nothing in it: take one that is", dist, publicKey)
	} else if err != nil {
		return fmt.Errorf("read the signature: %w", err)
	}
	checksums, err := os.ReadFile(filepath.Join(dist, checksumsName))
	if err != nil {
		return fmt.Errorf("read the checksums: %w", err)
	}
	decoded := base64.NewDecoder(base64.StdEncoding, bytes.NewReader(signed))
	if err := verifier.VerifySignature(decoded, bytes.NewReader(checksums)); err != nil {
		return fmt.Errorf("%s in %s is not the signature of %s by the key %s: one of them was changed, or another key has signed; "+
			"take the release, and the key, from where you trust them: %w", signatureName, dist, checksumsName, publicKey, err)
	}
	line := hexSHA256(list) + "  " + listName
	if !slices.Contains(strings.Split(string(checksums), "\n"), line) {
		return fmt.Errorf("%s in %s is not the one in %s, which is signed: it was changed; take that of the release",
			listName, dist, checksumsName)
	}
	return nil
}

func loadVerifier(publicKey string) (signature.Verifier, error) {
	text, err := os.ReadFile(publicKey)
	if err != nil {
		return nil, fmt.Errorf("read the public key: %w", err)
	}
	key, err := cryptoutils.UnmarshalPEMToPublicKey(text)
	if err != nil {
		return nil, fmt.Errorf("%s is no public key in PEM, as %s is: %w", publicKey, publicKeyName, err)
	}
	verifier, err := signature.LoadVerifier(key, crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("%s has a key that cannot verify a release: %w", publicKey, err)
	}
	return verifier, nil
}
