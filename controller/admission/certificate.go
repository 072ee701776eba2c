package admission

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// life is how long a certificate is valid, and renewal how long before its end the next
	// one is made.
	life    = 365 * 24 * time.Hour
	renewal = 120 * 24 * time.Hour
	// skew is by how much the clocks of nodes may differ.
	skew = time.Hour
	// keyAuthorities is the key of the Secret with the certificates of the
	// authorities, the newest first; the others are those of kubernetes.io/tls.
	keyAuthorities = "ca.crt"
)

// pair is a certificate of the webhook's name, its key, and the authorities that
// have signed it and the one before, all in PEM.
type pair struct {
	certificate, key, authorities []byte
	// until is when the certificate ends.
	until time.Time
}

// newPair makes a certificate, and an authority for it alone, whose key is not kept. The
// newest authority of the pair before remains in the pair, because replicas serve the
// certificate before until they have read this one.
//
// GenerateSelfSignedCertKey of client-go would not do: its keys are RSA, which
// take long to make for every replica that starts, it goes by a clock of its own,
// and its authority may sign for any name.
func newPair(name string, before *pair, now time.Time) (*pair, error) {
	authority := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "lodestone admission " + now.UTC().Format(time.DateOnly)},
		NotBefore: now.Add(-skew), NotAfter: now.Add(life),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{name},
	}
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	authorityDER, err := x509.CreateCertificate(rand.Reader, authority, authority, authorityKey.Public(), authorityKey)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: now.Add(-skew), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, authority, key.Public(), authorityKey)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	p := &pair{certificate: toPEM("CERTIFICATE", der), key: toPEM("PRIVATE KEY", keyDER), authorities: toPEM("CERTIFICATE", authorityDER),
		until: leaf.NotAfter}
	if before != nil {
		if newest, _ := pem.Decode(before.authorities); newest != nil {
			p.authorities = append(p.authorities, pem.EncodeToMemory(newest)...)
		}
	}
	return p, nil
}

func toPEM(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// serial returns a serial number that cannot be guessed (RFC 5280, section 4.1.2.2).
func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // does not fail
	return new(big.Int).SetBytes(b[:])
}

// pairOf reads the pair in a Secret. The error is why it cannot be used at that time.
func pairOf(s *corev1.Secret, name string, now time.Time) (*pair, error) {
	p := &pair{certificate: s.Data[corev1.TLSCertKey], key: s.Data[corev1.TLSPrivateKeyKey], authorities: s.Data[keyAuthorities]}
	if len(p.certificate) == 0 {
		return nil, errors.New("it holds no certificate yet")
	}
	parsed, err := tls.X509KeyPair(p.certificate, p.key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(p.authorities) {
		return nil, fmt.Errorf("there is no certificate in %s", keyAuthorities)
	}
	if _, err := parsed.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
		return nil, err
	}
	p.until = parsed.Leaf.NotAfter
	return p, nil
}

// data is what the Secret holds of the pair.
func (p *pair) data() map[string][]byte {
	return map[string][]byte{corev1.TLSCertKey: p.certificate, corev1.TLSPrivateKeyKey: p.key, keyAuthorities: p.authorities}
}

func (p *pair) equal(other *pair) bool {
	return other != nil && bytes.Equal(p.certificate, other.certificate) && bytes.Equal(p.key, other.key)
}
