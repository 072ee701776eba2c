// Package registry runs a container registry on a host of the lab, with a certificate of its own
// authority and, if asked for, a password, as those have that people run.
package registry

import (
	"crypto/subtle"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/pki"
)

// Registry keeps what is pushed to it in memory, and has it whenever it is open.
type Registry struct {
	// Host is its address. It is its name, too: nothing in the lab resolves names.
	Host string
	// CA is the file with the authority's certificate.
	CA string

	namespace   string
	certificate tls.Certificate
	content     http.Handler
	server      *http.Server
	served      sync.WaitGroup
}

// New returns a registry at the address of a host, which is its namespace. It is closed. Its
// certificates are in the folder.
func New(namespace string, address netip.Addr, dir string) (*Registry, error) {
	authority, err := pki.NewAuthority(dir, "registry-ca")
	if err != nil {
		return nil, err
	}
	pair, err := authority.Server("registry", nil, address)
	if err != nil {
		return nil, err
	}
	r := &Registry{Host: address.String(), CA: authority.Cert, namespace: namespace}
	if r.certificate, err = tls.LoadX509KeyPair(pair.Cert, pair.Key); err != nil {
		return nil, fmt.Errorf("load the registry's certificate: %w", err)
	}
	r.content = registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	return r, nil
}

// Open serves everybody, or only clients with the password if there is one.
func (r *Registry) Open(user, password string) error {
	var listener net.Listener
	err := netns.Do(r.namespace, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(r.Host, "443"))
		return err
	})
	if err != nil {
		return fmt.Errorf("open the registry: %w", err)
	}
	r.server = &http.Server{
		Handler: r.guarded(user, password), TLSConfig: &tls.Config{Certificates: []tls.Certificate{r.certificate}},
		ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0),
	}
	r.served.Go(func() { _ = r.server.ServeTLS(listener, "", "") }) // until Close
	return nil
}

// Close takes the registry away: connections to it are refused.
func (r *Registry) Close() error {
	err := r.server.Close()
	r.served.Wait()
	return err
}

func (r *Registry) guarded(user, password string) http.Handler {
	same := func(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		u, p, _ := request.BasicAuth()
		if password != "" && !(same(u, user) && same(p, password)) {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(w, `{"errors": [{"code": "UNAUTHORIZED", "message": "log in"}]}`, http.StatusUnauthorized)
			return
		}
		r.content.ServeHTTP(w, request)
	})
}
