package lodestone

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

// detour is a way to the API server that leads through this process.
type detour struct {
	// Kubeconfig is for clients that are to go this way.
	Kubeconfig string

	server *http.Server
	served sync.WaitGroup
}

// open serves on the control plane's loopback until Close. Requests pass the
// handler on their way to this process and the transport on their way out.
func (d *detour) open(i *Installation, handler func(http.Handler) http.Handler, transport func(http.RoundTripper) http.RoundTripper) error {
	config, err := i.Lab.RESTConfig()
	if err != nil {
		return err
	}
	direct, err := rest.TransportFor(config)
	if err != nil {
		return err
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport(direct),
		FlushInterval: -1, // watches
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) {
			panic(http.ErrAbortHandler) // the client sees a connection that breaks
		},
	}
	var listener net.Listener
	err = i.Lab.InNamespace(lab.ControlPlane, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return fmt.Errorf("listen for a detour to the API server: %w", err)
	}
	d.server = &http.Server{Handler: handler(proxy), ReadHeaderTimeout: time.Minute}
	d.served.Go(func() { _ = d.server.Serve(listener) }) // until Close
	name := fmt.Sprintf("detour-%s-%d.kubeconfig", i.Lab.Namespace(lab.ControlPlane), listener.Addr().(*net.TCPAddr).Port)
	d.Kubeconfig = filepath.Join(os.TempDir(), name)
	return writeKubeconfig(d.Kubeconfig, "http://"+listener.Addr().String())
}

func writeKubeconfig(path, server string) error {
	config := clientcmdapi.NewConfig()
	config.Clusters["detour"] = &clientcmdapi.Cluster{Server: server}
	config.Contexts["detour"] = &clientcmdapi.Context{Cluster: "detour"}
	config.CurrentContext = "detour"
	return clientcmd.WriteToFile(*config, path)
}

// Close ends the service.
func (d *detour) Close() error {
	err := d.server.Close()
	d.served.Wait()
	return errors.Join(err, os.Remove(d.Kubeconfig))
}

// CountingAPI is a way to the API server on which every write is counted, also
// one that changes nothing, one that is refused, and one of an Event: a watch
// would not show these, and the API server's metrics do not show their client.
type CountingAPI struct {
	detour

	mu     sync.Mutex
	writes map[string]int
}

// NewCountingAPI serves on the control plane's loopback until Close.
func (i *Installation) NewCountingAPI() (*CountingAPI, error) {
	c := &CountingAPI{writes: map[string]int{}}
	return c, c.open(i, c.counting, func(next http.RoundTripper) http.RoundTripper { return next })
}

// Writes returns how often each thing was written, by method and resource:
// "PATCH services/status". Leader election and reviews, which store nothing,
// are left out.
func (c *CountingAPI) Writes() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.writes)
}

func (c *CountingAPI) counting(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resource := resourceOf(r.URL.Path)
		if r.Method != http.MethodGet && r.Method != http.MethodHead && resource != "leases" && !strings.HasSuffix(resource, "reviews") {
			c.mu.Lock()
			c.writes[r.Method+" "+resource]++
			c.mu.Unlock()
		}
		next.ServeHTTP(w, r)
	})
}

// resourcePath matches the path of a resource in a group or in none, in a
// namespace or in none.
var resourcePath = regexp.MustCompile(`^/(?:api|apis/[^/]+)/[^/]+/(?:namespaces/[^/]+/)?([^/]+)(?:/[^/]+(/[^/]+)?)?$`)

// resourceOf is the resource and the subresource that a path is about:
// "services/status". A path of another kind is returned as it is.
func resourceOf(path string) string {
	match := resourcePath.FindStringSubmatch(path)
	if match == nil {
		return path
	}
	return match[1] + match[2]
}

// GatedAPI is a way to the API server that lets a number of writes of one kind pass, and
// holds further ones until Close. Those then fail without having been carried out.
type GatedAPI struct {
	detour
	what  string
	limit int64
	// passed are the writes that were let pass, carried those of them that are done, and
	// waiting those that are held.
	passed, carried, waiting atomic.Int64
	held                     chan struct{}
	closed                   chan struct{}
}

// NewGatedAPI serves on the control plane's loopback until Close. What is as in
// CountingAPI.Writes.
func (i *Installation) NewGatedAPI(what string, limit int64) (*GatedAPI, error) {
	g := &GatedAPI{what: what, limit: limit, held: make(chan struct{}, 1), closed: make(chan struct{})}
	return g, g.open(i, g.holding, func(next http.RoundTripper) http.RoundTripper { return next })
}

// Held receives a value once a write is being held and all that passed are carried out.
func (g *GatedAPI) Held() <-chan struct{} { return g.held }

// Close fails what is held and ends the service.
func (g *GatedAPI) Close() error {
	close(g.closed)
	return g.detour.Close()
}

func (g *GatedAPI) holding(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method+" "+resourceOf(r.URL.Path) != g.what {
			next.ServeHTTP(w, r)
			return
		}
		if g.passed.Add(1) <= g.limit {
			next.ServeHTTP(w, r)
			g.carried.Add(1)
			g.announce()
			return
		}
		g.waiting.Add(1)
		g.announce()
		select {
		case <-g.closed:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler) // the client sees a connection that breaks
	})
}

// announce sends to Held if it is time.
func (g *GatedAPI) announce() {
	if g.carried.Load() < g.limit || g.waiting.Load() == 0 {
		return
	}
	select {
	case g.held <- struct{}{}:
	default: // it is known already
	}
}
