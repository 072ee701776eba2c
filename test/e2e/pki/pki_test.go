package pki

import (
	"crypto/tls"
	"crypto/x509"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

func newAuthority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority(filepath.Join(t.TempDir(), "pki"), "ca")
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *Authority) verify(t *testing.T, pair Pair, options x509.VerifyOptions) *x509.Certificate {
	t.Helper()
	loaded, err := tls.LoadX509KeyPair(pair.Cert, pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	options.Roots = x509.NewCertPool()
	options.Roots.AddCert(a.cert)
	if _, err := loaded.Leaf.Verify(options); err != nil {
		t.Errorf("verify %s: %v", pair.Cert, err)
	}
	return loaded.Leaf
}

func TestServingCertificateHoldsForItsNamesAndAddresses(t *testing.T) {
	a := newAuthority(t)
	pair, err := a.Server("apiserver", []string{"kubernetes.default"}, netip.MustParseAddr("198.18.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kubernetes.default", "198.18.0.1"} {
		a.verify(t, pair, x509.VerifyOptions{DNSName: name})
	}
}

func TestClientCertificateCarriesUserAndGroups(t *testing.T) {
	a := newAuthority(t)
	pair, err := a.Client("kubelet-n1", "system:node:n1", "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	cert := a.verify(t, pair, x509.VerifyOptions{KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if cert.Subject.CommonName != "system:node:n1" || cert.Subject.Organization[0] != "system:nodes" {
		t.Errorf("subject = %v", cert.Subject)
	}
}

func TestKubeconfigStandsAlone(t *testing.T) {
	a := newAuthority(t)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := a.WriteKubeconfig(path, "https://198.18.0.1:6443", "admin", "admin", "system:masters"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(a.dir); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	if config.Host != "https://198.18.0.1:6443" || len(config.CertData) == 0 || len(config.CAData) == 0 {
		t.Errorf("kubeconfig = %v, want server and embedded certificates", config)
	}
}
