package release

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature/payload"
)

const (
	publicKeyName = "cosign.pub"
	signatureName = checksumsName + ".sig"
	bundleName    = checksumsName + ".sigstore.json"
	bundleType    = "application/vnd.dev.sigstore.bundle.v0.3+json"
)

// Key signs by ECDSA on P-256 over SHA-256, as cosign does with such a key.
type Key struct{ private *ecdsa.PrivateKey }

// LoadKey reads a key in PEM, or one of cosign's, which a password decrypts.
func LoadKey(file string, password []byte) (*Key, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the key that signs: %w", err)
	}
	// Other blocks of the file are skipped, such as the parameters that openssl writes before a
	// key.
	if at := bytes.Index(text, []byte("-----BEGIN EC PRIVATE KEY-----")); at > 0 {
		text = text[at:]
	}
	found, err := cryptoutils.UnmarshalPEMToPrivateKey(text, func(bool) ([]byte, error) { return password, nil })
	if err != nil {
		return nil, fmt.Errorf("%s is no private key that can be read; take one of openssl ecparam -name prime256v1 -genkey, "+
			"or one of cosign generate-key-pair and its password in COSIGN_PASSWORD: %w", file, err)
	}
	key, ok := found.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%s has no key of ECDSA on the curve P-256, which is what cosign verifies with SHA-256", file)
	}
	return &Key{key}, nil
}

// sign signs a text. The signature follows from key and text alone (RFC 6979), so that the same
// release made again has the same bytes.
func (k *Key) sign(text []byte) ([]byte, error) {
	sum := sha256.Sum256(text)
	return k.private.Sign(nil, sum[:], crypto.SHA256)
}

// signature is the signature of an image in the form in which registries keep it. It has the name below the registry
// and its tag, too: a registry could serve an older image, or another one, with the signature of that one.
func (k *Key) signature(p published, below string) (v1.Image, error) {
	digest, err := name.NewDigest(p.repository + "@" + p.digest)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(payload.Cosign{Image: digest, Annotations: map[string]any{"name": below, "tag": p.tag}})
	if err != nil {
		return nil, err
	}
	signed, err := k.sign(text)
	if err != nil {
		return nil, err
	}
	return signatureImage(text, base64.StdEncoding.EncodeToString(signed))
}

// envelope signs a text of a type, as DSSE has it.
func (k *Key) envelope(kind string, text []byte) ([]byte, error) {
	signed, err := k.sign(dsse.PAE(kind, text))
	if err != nil {
		return nil, err
	}
	return json.Marshal(dsse.Envelope{
		PayloadType: kind, Payload: base64.StdEncoding.EncodeToString(text),
		// The key has no name here: a verifier is given the key.
		Signatures: []dsse.Signature{{Sig: base64.StdEncoding.EncodeToString(signed)}},
	})
}

// bundle is the part that a key needs of a Sigstore bundle, the form of newer cosigns.
type bundle struct {
	MediaType            string               `json:"mediaType"`
	VerificationMaterial verificationMaterial `json:"verificationMaterial"`
	MessageSignature     messageSignature     `json:"messageSignature"`
}

type verificationMaterial struct {
	PublicKey struct {
		Hint string `json:"hint"`
	} `json:"publicKey"`
}

type messageSignature struct {
	MessageDigest struct {
		Algorithm string `json:"algorithm"`
		Digest    []byte `json:"digest"`
	} `json:"messageDigest"`
	Signature []byte `json:"signature"`
}

// signChecksums signs the checksums, and so all files, in both forms that there are. The public
// key beside them only shows which key signed; a verifier has to have it from elsewhere.
func (m *making) signChecksums() error {
	if m.Key == nil {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(m.Dist, checksumsName))
	if err != nil {
		return fmt.Errorf("read the checksums: %w", err)
	}
	signed, err := m.Key.sign(text)
	if err != nil {
		return fmt.Errorf("sign the checksums: %w", err)
	}
	public, err := cryptoutils.MarshalPublicKeyToPEM(m.Key.private.Public())
	if err != nil {
		return fmt.Errorf("write the public key: %w", err)
	}
	der, err := cryptoutils.MarshalPublicKeyToDER(m.Key.private.Public())
	if err != nil {
		return fmt.Errorf("write the public key: %w", err)
	}
	sum, hint := sha256.Sum256(text), sha256.Sum256(der)
	b := bundle{MediaType: bundleType}
	b.VerificationMaterial.PublicKey.Hint = base64.StdEncoding.EncodeToString(hint[:])
	b.MessageSignature.MessageDigest.Algorithm, b.MessageSignature.MessageDigest.Digest = "SHA2_256", sum[:]
	b.MessageSignature.Signature = signed
	bundled, err := json.Marshal(b)
	if err != nil {
		return fmt.Errorf("bundle the signature: %w", err)
	}
	return errors.Join(
		m.write(signatureName, []byte(base64.StdEncoding.EncodeToString(signed))),
		m.write(bundleName, bundled),
		m.write(publicKeyName, public),
	)
}
