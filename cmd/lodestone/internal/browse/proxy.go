// Package browse brings the dashboard to a browser on this machine: it forwards a port of the loopback
// interface to a controller, through the API server, and adds the credentials that a browser does not have.
//
//	proxy.go    Proxy: the port on this machine, and who may use it
//	account.go  Account: tokens of the account that may only see the dashboard
//	tunnel.go   Tunnel: the connection to a controller through the API server
package browse

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/dashboard"
)

// Token is a source of tokens that the dashboard takes.
type Token interface {
	Token(ctx context.Context) (string, error)
}

// Proxy passes requests for the dashboard on, with a token. Other users of the
// machine can connect to its port, and any web page can have the browser do so:
// it answers only requests with the secret, which is in the address that is printed on the terminal
// and nowhere else, and with the name of the loopback interface as host.
type Proxy struct {
	secret string
	port   string
	proxy  *httputil.ReverseProxy
	token  Token
}

// NewProxy returns a Proxy. target is where requests go.
func NewProxy(target http.RoundTripper, token Token) *Proxy {
	p := &Proxy{secret: rand.Text(), token: token}
	p.proxy = &httputil.ReverseProxy{
		Transport: target,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "https", controllerHost, controllerHost
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, "the controller cannot be reached: "+err.Error(), http.StatusBadGateway)
		},
	}
	return p
}

// controllerHost stands for the controller in URLs. No name resolves to it.
const controllerHost = "lodestone-controller"

// url is the address of the page. Whoever knows it may see the page.
func (p *Proxy) url() string {
	return "http://" + net.JoinHostPort("127.0.0.1", p.port) + "/" + p.secret + dashboard.Path + "/"
}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if host := r.Host; host != net.JoinHostPort("127.0.0.1", p.port) && host != net.JoinHostPort("localhost", p.port) {
		http.Error(w, "this is not the host that the request is for", http.StatusMisdirectedRequest) // DNS rebinding
		return
	}
	secret, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	path = "/" + path
	if subtle.ConstantTimeCompare([]byte(secret), []byte(p.secret)) == 0 || !strings.HasPrefix(path, dashboard.Path+"/") ||
		strings.Contains(path, "..") {
		http.NotFound(w, r)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "the dashboard is there to be read", http.StatusMethodNotAllowed)
		return
	}
	token, err := p.token.Token(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	out := r.Clone(r.Context())
	out.URL.Path, out.URL.RawPath = path, ""
	out.Header = http.Header{"Authorization": {"Bearer " + token}}
	for _, name := range []string{"Accept", "Last-Event-Id"} {
		if value := r.Header.Get(name); value != "" {
			out.Header.Set(name, value)
		}
	}
	p.proxy.ServeHTTP(w, out)
}

// Options are what Serve works with.
type Options struct {
	// Port is that of the loopback interface; 0: any that is free.
	Port uint16
	// Target is where requests go.
	Target http.RoundTripper
	Token  Token
	// Timeout is how long the first page may take. 0: without a limit.
	Timeout time.Duration
	// Out is where the address is printed.
	Out io.Writer
}

// Serve prints the address of the page and serves it until ctx ends. It opens
// nothing before the controller has shown the page.
func Serve(ctx context.Context, o Options) error {
	p := NewProxy(o.Target, o.Token)
	if err := p.check(ctx, o.Timeout); err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", fmt.Sprint(o.Port)))
	if err != nil {
		return fmt.Errorf("listen on the loopback interface: %w", err)
	}
	p.port = fmt.Sprint(listener.Addr().(*net.TCPAddr).Port)
	if _, err := fmt.Fprintf(o.Out, "The dashboard is at\n\n  %s\n\nuntil this command ends (Ctrl-C). Whoever has the address can see it.\n",
		p.url()); err != nil {
		return err
	}
	// No timeout for answers: events come as long as the page is open.
	server := &http.Server{Handler: p, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(ended); server.Close() })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		stop()
		return err
	}
	<-ended
	return nil
}

// check asks for the page once, and returns why it may not be seen.
func (p *Proxy) check(ctx context.Context, timeout time.Duration) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	token, err := p.token.Token(ctx)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+controllerHost+dashboard.Path+"/", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := p.proxy.Transport.RoundTrip(request)
	if err != nil {
		return fmt.Errorf("the controller cannot be reached: %w", err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusNotFound:
		return errors.New("the controller has no dashboard: it is older than this command, or runs with --dashboard=false " +
			"(dashboard.enabled in the values of the chart)")
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("the controller refuses the account of the dashboard (%s): is the ClusterRole lodestone-dashboard-reader bound to it?",
			response.Status)
	}
	return fmt.Errorf("the controller answers %s", response.Status)
}
