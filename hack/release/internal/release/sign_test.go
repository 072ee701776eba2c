package release

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	provenancev1 "github.com/in-toto/attestation/go/predicates/provenance/v1"
	intoto "github.com/in-toto/attestation/go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	sigstore "github.com/sigstore/protobuf-specs/gen/pb-go/bundle/v1"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/sigstore/sigstore/pkg/signature/payload"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
)

// testKey returns a key as somebody would load it.
func testKey(t *testing.T) *Key {
	t.Helper()
	key, err := LoadKey(keyFile(t, testKeyPEM(t)), nil)
	require.NoError(t, err)
	return key
}

func testKeyPEM(t *testing.T) []byte {
	t.Helper()
	private, _, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), nil)
	require.NoError(t, err)
	return private
}

func keyFile(t *testing.T, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key.pem")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

// verifier is Sigstore's, with the public key of a release.
func verifier(t *testing.T, r released) signature.Verifier {
	t.Helper()
	public, err := cryptoutils.UnmarshalPEMToPublicKey(r.read(t, publicKeyName))
	require.NoError(t, err)
	v, err := signature.LoadVerifier(public, crypto.SHA256)
	require.NoError(t, err)
	return v
}

// verify returns an error unless Sigstore's library accepts a signature in base64 for a text.
func verify(v signature.Verifier, signed string, text []byte) error {
	return v.VerifySignature(base64.NewDecoder(base64.StdEncoding, strings.NewReader(signed)), bytes.NewReader(text))
}

func TestSignaturesAreVerifiedBySigstore(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7", testKey(t))
	v := verifier(t, r)
	stranger, err := signature.LoadVerifier(testKey(t).private.Public(), crypto.SHA256)
	require.NoError(t, err)

	t.Run("of the checksums", func(t *testing.T) {
		text, signed := r.read(t, checksumsName), string(r.read(t, signatureName))
		require.NoError(t, verify(v, signed, text))
		require.Error(t, verify(v, signed, append(bytes.Clone(text), '\n')))
		require.Error(t, verify(stranger, signed, text))

		var b sigstore.Bundle // the reader refuses what it does not know
		require.NoError(t, protojson.Unmarshal(r.read(t, bundleName), &b))
		require.Equal(t, "application/vnd.dev.sigstore.bundle.v0.3+json", b.GetMediaType())
		require.Equal(t, signed, base64.StdEncoding.EncodeToString(b.GetMessageSignature().GetSignature()))
		require.Equal(t, "SHA2_256", b.GetMessageSignature().GetMessageDigest().GetAlgorithm().String())
		require.Equal(t, hexSHA256(text), hex.EncodeToString(b.GetMessageSignature().GetMessageDigest().GetDigest()))
		require.NotEmpty(t, b.GetVerificationMaterial().GetPublicKey().GetHint())
	})

	t.Run("of images and chart", func(t *testing.T) {
		for _, line := range strings.Split(strings.TrimSpace(string(r.read(t, "images.txt"))), "\n") {
			folder := chartLayout
			switch place, _, _ := strings.Cut(strings.TrimPrefix(line, "ghcr.io/lodestone-lb/"), "@"); {
			case strings.HasSuffix(place, ":artifacthub.io"):
				folder = "artifacthub"
			case !strings.HasPrefix(place, "charts/"):
				folder = filepath.Join(imagesFolder, strings.TrimSuffix(place, ":v9.8.7"))
			}
			_, digest, _ := strings.Cut(line, "@")
			require.Equal(t, topDigest(t, r, folder), digest)

			// The signature is under the tag at which cosign looks.
			all, entries := described(t, r, folder)
			about, found := entries[strings.Replace(digest, ":", "-", 1)+".sig"]
			require.True(t, found, "%s has no signature", folder)
			require.Equal(t, kindSigs, about.Annotations["kind"])
			img, err := all.Image(about.Digest)
			require.NoError(t, err)
			manifest, err := img.Manifest()
			require.NoError(t, err)
			require.Len(t, manifest.Layers, 1)
			require.EqualValues(t, "application/vnd.dev.cosign.simplesigning.v1+json", manifest.Layers[0].MediaType)
			text, signature := blob(t, img), manifest.Layers[0].Annotations["dev.cosignproject.cosign/signature"]
			require.NoError(t, verify(v, signature, text))
			require.Error(t, verify(stranger, signature, text))

			// What was signed is this digest at this place, by its name and version.
			var signed payload.Cosign
			require.NoError(t, json.Unmarshal(text, &signed))
			repository, _, _ := strings.Cut(strings.TrimPrefix(line, "ghcr.io/"), ":")
			want, err := name.NewDigest("ghcr.io/" + repository + "@" + digest)
			require.NoError(t, err)
			require.Equal(t, want.String(), signed.Image.String())
			below, tag, _ := strings.Cut(strings.TrimPrefix(strings.TrimSuffix(line, "@"+digest), "ghcr.io/lodestone-lb/"), ":")
			require.Equal(t, map[string]any{"name": below, "tag": tag}, signed.Annotations)
			require.Error(t, verify(v, signature, bytes.Replace(text, []byte(digest), []byte("sha256:"+strings.Repeat("0", 64)), 1)))
		}
	})

	t.Run("of the provenance", func(t *testing.T) {
		var envelope dsse.Envelope
		require.NoError(t, json.Unmarshal(r.read(t, envelopeName), &envelope))
		require.Equal(t, "application/vnd.in-toto+json", envelope.PayloadType)
		check, err := dsse.NewEnvelopeVerifier(dsseVerifier{v})
		require.NoError(t, err)
		_, err = check.Verify(t.Context(), &envelope)
		require.NoError(t, err)
		text, err := envelope.DecodeB64Payload()
		require.NoError(t, err)
		checkStatement(t, r, text)

		changed := envelope
		changed.Payload = base64.StdEncoding.EncodeToString(bytes.Replace(text, []byte(r.commit), []byte(strings.Repeat("0", 40)), 1))
		_, err = check.Verify(t.Context(), &changed)
		require.Error(t, err, "another commit was taken for the signed one")
		alien, err := dsse.NewEnvelopeVerifier(dsseVerifier{stranger})
		require.NoError(t, err)
		_, err = alien.Verify(t.Context(), &envelope)
		require.Error(t, err)
	})
}

// checkStatement reads the provenance by in-toto's own types, which check it.
func checkStatement(t *testing.T, r released, text []byte) {
	t.Helper()
	var s intoto.Statement
	require.NoError(t, protojson.Unmarshal(text, &s))
	require.NoError(t, s.Validate())
	require.Equal(t, "https://slsa.dev/provenance/v1", s.GetPredicateType())
	predicate, err := protojson.Marshal(s.GetPredicate())
	require.NoError(t, err)
	var p provenancev1.Provenance
	require.NoError(t, protojson.Unmarshal(predicate, &p))
	require.NoError(t, p.Validate())
	require.Equal(t, r.commit, p.GetBuildDefinition().GetResolvedDependencies()[0].GetDigest()["gitCommit"])
	require.Equal(t, r.Version, p.GetBuildDefinition().GetExternalParameters().GetFields()["version"].GetStringValue())

	// It speaks of every file but those that are signatures, and of every image.
	digests := map[string]string{}
	for _, subject := range s.GetSubject() {
		digests[subject.GetName()] = subject.GetDigest()["sha256"]
	}
	entries, err := os.ReadDir(r.Dist)
	require.NoError(t, err)
	files := 0
	for _, e := range entries {
		switch e.Name() {
		case signatureName, bundleName, publicKeyName, envelopeName, provenanceName:
			continue
		}
		if !e.IsDir() {
			require.Equal(t, hexSHA256(r.read(t, e.Name())), digests[e.Name()], e.Name())
			files++
		}
	}
	for _, line := range strings.Split(strings.TrimSpace(string(r.read(t, "images.txt"))), "\n") {
		place, digest, _ := strings.Cut(line, "@sha256:")
		require.Equal(t, digest, digests[place], line)
		files++
	}
	require.Len(t, digests, files)
}

// TestTheUnsignedProvenanceIsTheSameStatement without an envelope around it.
func TestTheUnsignedProvenanceIsTheSameStatement(t *testing.T) {
	t.Parallel()
	r := fakeRelease(t, "v9.8.7", nil)
	checkStatement(t, r, r.read(t, provenanceName))
}

// dsseVerifier verifies envelopes by Sigstore's library.
type dsseVerifier struct{ signature.Verifier }

// Verify returns an error unless the signature is that of the data.
func (v dsseVerifier) Verify(_ context.Context, data, signed []byte) error {
	return v.VerifySignature(bytes.NewReader(signed), bytes.NewReader(data))
}

// KeyID names no key: there is only one.
func (v dsseVerifier) KeyID() (string, error) { return "", nil }

// Public returns the key.
func (v dsseVerifier) Public() crypto.PublicKey {
	key, err := v.PublicKey()
	if err != nil {
		return nil
	}
	return key
}

func TestKeysAreRead(t *testing.T) {
	t.Parallel()
	// cosign's own, with its password.
	locked, _, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), func(bool) ([]byte, error) { return []byte("secret"), nil })
	require.NoError(t, err)
	key, err := LoadKey(keyFile(t, locked), []byte("secret"))
	require.NoError(t, err)
	require.IsType(t, &ecdsa.PrivateKey{}, key.private)
	_, err = LoadKey(keyFile(t, locked), []byte("wrong"))
	require.ErrorContains(t, err, "COSIGN_PASSWORD")

	// openssl's, which has parameters before the key.
	der, err := x509.MarshalECPrivateKey(key.private)
	require.NoError(t, err)
	parameters := pem.EncodeToMemory(&pem.Block{Type: "EC PARAMETERS", Bytes: []byte{6, 8, 42, 134, 72, 206, 61, 3, 1, 7}})
	again, err := LoadKey(keyFile(t, append(parameters, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...)), nil)
	require.NoError(t, err)
	one, err := key.sign([]byte("text"))
	require.NoError(t, err)
	two, err := again.sign([]byte("text"))
	require.NoError(t, err)
	require.Equal(t, one, two, "the signature is not a matter of chance")

	rsa, _, err := cryptoutils.GeneratePEMEncodedRSAKeyPair(2048, nil)
	require.NoError(t, err)
	p384, _, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P384(), nil)
	require.NoError(t, err)
	for _, other := range [][]byte{rsa, p384} {
		_, err = LoadKey(keyFile(t, other), nil)
		require.ErrorContains(t, err, "no key of ECDSA on the curve P-256")
	}
	_, err = LoadKey(keyFile(t, []byte("hello")), nil)
	require.ErrorContains(t, err, "is no private key that can be read")
	_, err = LoadKey(filepath.Join(t.TempDir(), "nowhere"), nil)
	require.ErrorContains(t, err, "read the key that signs")
}
