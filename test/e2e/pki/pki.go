// Package pki makes the lab's certificates and kubeconfigs. Each component has
// an identity of its own and gets no more rights than it would in production.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const validity = 30 * 24 * time.Hour

// Pair names the files of a certificate and its private key.
type Pair struct{ Cert, Key string }

// Authority signs certificates and writes them to a directory.
type Authority struct {
	Pair
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
}

// NewAuthority makes a self-signed certificate authority whose files begin
// with name.
func NewAuthority(dir, name string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create certificate directory: %w", err)
	}
	a := &Authority{dir: dir}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	var err error
	a.Pair, err = a.sign(name, template)
	return a, err
}

// Client issues a client certificate: the user name and groups are what the
// API server takes its holder for.
func (a *Authority) Client(name, user string, groups ...string) (Pair, error) {
	return a.sign(name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// Server issues a serving certificate for the names and addresses.
func (a *Authority) Server(name string, hosts []string, addresses ...netip.Addr) (Pair, error) {
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    hosts,
	}
	for _, address := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(address.AsSlice()))
	}
	return a.sign(name, template)
}

// sign completes the template with a new key and writes both; the authority's
// own certificate is the first, signed with its own key.
func (a *Authority) sign(name string, template *x509.Certificate) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("generate key of %s: %w", name, err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return Pair{}, err
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	if a.cert == nil {
		a.cert, a.key = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return Pair{}, fmt.Errorf("sign certificate of %s: %w", name, err)
	}
	if template.IsCA {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return Pair{}, err
		}
	}
	pair := Pair{Cert: filepath.Join(a.dir, name+".crt"), Key: filepath.Join(a.dir, name+".key")}
	return pair, pair.write(der, key)
}

func (p Pair) write(cert []byte, key *ecdsa.PrivateKey) error {
	if err := writePEM(p.Cert, "CERTIFICATE", cert); err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(p.Key, "EC PRIVATE KEY", der)
}

// WriteKey writes a new private key that needs no certificate.
func WriteKey(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("generate key: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(path, "EC PRIVATE KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// WriteKubeconfig issues a client certificate and writes a self-contained
// kubeconfig that uses it.
func (a *Authority) WriteKubeconfig(path, server, name, user string, groups ...string) error {
	pair, err := a.Client(name, user, groups...)
	if err != nil {
		return err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["lab"] = &clientcmdapi.Cluster{Server: server, CertificateAuthority: a.Cert}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificate: pair.Cert, ClientKey: pair.Key}
	config.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: name}
	config.CurrentContext = "lab"
	if err := clientcmdapi.FlattenConfig(config); err != nil {
		return fmt.Errorf("embed certificates in kubeconfig of %s: %w", name, err)
	}
	return clientcmd.WriteToFile(*config, path)
}
