// Package apiclient connects to the API servers.
//
// Where there are several, the address that clients use leads to one of them for each
// connection: kube-proxy, or a load balancer, chooses. client-go notices after 45 s that the
// one at the other end is gone. It may then be led to the same one again, until the API
// servers have removed that from the list after 15 to 25 s. Meanwhile watches show nothing
// new, and a leader loses its Lease.
//
// A Transport notices within SilenceTimeout, by HTTP/2 pings, which cost an idle connection
// one frame each way in two seconds. It opens a connection by several attempts and uses the
// first one that completes the TLS handshake. An API server that is gone or hangs costs no
// more time than hedgeDelay.
//
// Controller and speaker use it for all their clients. It does not retry requests, and reads of the
// answers only what restored.go and foreign.go need.
//
//	apiclient.go  Transport: connections, of which one may hang
//	restored.go   ends watches after etcd was restored from a backup
//	foreign.go    what others answer in place of an API server
package apiclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/connrotation"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// pingAfter is how long a connection is silent before a ping is sent, and pingTimeout how
	// long the answer may take. An API server answers pings from memory, but late if it lacks
	// CPU time. Its clients must not all reconnect because of that.
	pingAfter, pingTimeout = 2 * time.Second, 3 * time.Second
	// SilenceTimeout is how long a connection to an API server that is gone is used.
	SilenceTimeout = pingAfter + pingTimeout

	// attempts is how many connections are tried at most for one that is needed. With one of
	// three API servers gone, all of them lead to that one in one case of 27.
	attempts = 3
	// hedgeDelay is how long an attempt may take before the next one starts beside it. A
	// handshake takes some milliseconds.
	hedgeDelay = 500 * time.Millisecond
	// attemptTimeout bounds an attempt.
	attemptTimeout = 10 * time.Second

	// As client-go has them.
	idleConnections = 25
	idleTimeout     = 90 * time.Second
)

// Transport carries the requests of all clients that are made from a configuration.
type Transport struct {
	config *rest.Config // as it was given
	http   *http.Transport

	rewound notify.Signal // see Rewound

	conns *connrotation.Dialer // it knows those that are open
}

// Load returns how to reach the API server: by the values of the flags --master and --kubeconfig, or, if both are
// empty, as a pod does. It logs nothing: the controller calls it before there is a log, and the framework once more.
func Load(master, kubeconfig string) (*rest.Config, error) {
	if master == "" && kubeconfig == "" {
		config, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster):
			return nil, errors.New("find the API server: this is no pod: name a file by --kubeconfig")
		case err != nil:
			return nil, fmt.Errorf("find the API server as a pod does: %w: does the pod have the token of its service account?", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags(master, kubeconfig)
	switch {
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("--kubeconfig: %s has no cluster in it", kubeconfig)
	case err != nil:
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return config, nil
}

// Use makes all clients share the Transport that it returns, if they are made from the
// configuration after the call. The files that the configuration names are read for each
// connection, because certificates may change. A configuration with a plugin for credentials
// is left as it is, because the plugin makes the connections.
func Use(config *rest.Config) (*Transport, error) {
	t, err := newTransport(rest.CopyConfig(config))
	if err != nil || config.ExecProvider != nil || config.AuthProvider != nil {
		return t, err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("read address of the API server %q: %w", config.Host, err)
	}
	config.Host = base.String() // its scheme depends on the settings of TLS
	config.Transport, config.TLSClientConfig = rewound{writes{t.http}, t.rewound.Notify}, rest.TLSClientConfig{}
	return t, nil
}

func newTransport(config *rest.Config) (*Transport, error) {
	settings, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, fmt.Errorf("read TLS settings of the API server: %w", err)
	}
	proxy := http.ProxyFromEnvironment
	if config.Proxy != nil {
		proxy = config.Proxy
	}
	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: attemptTimeout}).DialContext
	}
	t := &Transport{config: config, conns: connrotation.NewDialer(dial)}
	t.http = &http.Transport{
		Proxy: proxy, DialContext: t.conns.DialContext, DialTLSContext: t.dialTLS,
		TLSClientConfig: settings, TLSHandshakeTimeout: attemptTimeout, // of connections by way of a proxy
		MaxIdleConnsPerHost: idleConnections, IdleConnTimeout: idleTimeout, DisableCompression: config.DisableCompression,
		ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
	}
	return t, nil
}

// Rewound returns a channel that is closed when etcd is found, from now on, to have an older version than before, because it was
// restored from a backup.
func (t *Transport) Rewound() <-chan struct{} { return t.rewound.Next() }

// Ask returns nil if an API server answers over the connections that all requests use. A refusal counts. What a load balancer
// before API servers that are away may answer does not.
func (t *Transport) Ask(ctx context.Context) error { return t.ask(ctx, t.http) }

// Renew asks over a connection of its own. If an API server answers there, all other
// connections are closed: their requests fail, and watches begin anew elsewhere.
func (t *Transport) Renew(ctx context.Context) error {
	fresh, err := newTransport(t.config)
	if err != nil {
		return err
	}
	defer fresh.conns.CloseAll()
	if err := t.ask(ctx, fresh.http); err != nil {
		return err
	}
	t.conns.CloseAll()
	return nil
}

// ask asks for the version, which an API server knows from memory.
func (t *Transport) ask(ctx context.Context, by http.RoundTripper) error {
	base, _, err := rest.DefaultServerUrlFor(t.config)
	if err != nil {
		return fmt.Errorf("read address of the API server %q: %w", t.config.Host, err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.ResolveReference(&url.URL{Path: "/version"}).String(), nil)
	if err != nil {
		return fmt.Errorf("ask the API server for its version: %w", err)
	}
	by, err = rest.HTTPWrappersForConfig(t.config, by)
	if err != nil {
		return fmt.Errorf("find credentials for the API server: %w", err)
	}
	answer, err := by.RoundTrip(request)
	if err != nil {
		return fmt.Errorf("ask the API server for its version: %w", err)
	}
	defer answer.Body.Close()
	_, _ = io.CopyN(io.Discard, answer.Body, 4096) // so that the connection can be used again; the answer has come
	if !isAnswer(answer.StatusCode) {
		return fmt.Errorf("ask the API server for its version: %s, which something before it has answered", answer.Status)
	}
	return nil
}

// handshake opens a connection and completes the TLS handshake.
func (t *Transport) handshake(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	settings, err := rest.TLSConfigFor(t.config)
	if err != nil {
		return nil, fmt.Errorf("read TLS settings of the API server: %w", err)
	}
	if settings == nil {
		settings = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if settings.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err //nolint:wrapcheck // it names the address
		}
		settings.ServerName = host
	}
	settings.NextProtos = []string{"h2", "http/1.1"}
	plain, err := t.conns.DialContext(ctx, network, address)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the address
	}
	conn := tls.Client(plain, settings)
	if err := conn.HandshakeContext(ctx); err != nil {
		plain.Close()
		return nil, fmt.Errorf("TLS handshake with the API server at %s: %w", address, err)
	}
	return conn, nil
}

// dialTLS makes up to attempts attempts, and returns the first connection that succeeds. It
// starts the next attempt as soon as one has failed or takes longer than hedgeDelay.
func (t *Transport) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	type outcome struct {
		conn net.Conn
		err  error
	}
	ctx, cancel := context.WithCancel(ctx)
	outcomes, pending := make(chan outcome, attempts), 0
	var running sync.WaitGroup
	defer func() { // close the connections that come too late
		cancel()
		running.Wait()
		for ; pending > 0; pending-- {
			if o := <-outcomes; o.err == nil {
				o.conn.Close()
			}
		}
	}()
	for tried := 0; ; {
		if tried < attempts {
			tried, pending = tried+1, pending+1
			running.Go(func() {
				conn, err := t.handshake(ctx, network, address)
				outcomes <- outcome{conn, err}
			})
		}
		var late <-chan time.Time
		if tried < attempts {
			late = time.After(hedgeDelay)
		}
		select {
		case <-late:
		case o := <-outcomes:
			pending--
			if o.err == nil {
				return o.conn, nil
			}
			if pending == 0 && tried == attempts {
				return nil, o.err
			}
		}
	}
}
