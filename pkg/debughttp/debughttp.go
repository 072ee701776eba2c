// Package debughttp serves what operators, Prometheus and the kubelet ask a
// process: /metrics, /status and /diagnose to those whom the API server lets read these
// paths, /healthz and /readyz to everybody. One port, always HTTPS.
//
// The files, from the outside in:
//
//	debughttp.go  Server, the task: the paths, and who may have which
//	authorize.go  who asks, as the API server knows them
//	limit.go      how many connections one source may have, and how often it may ask
//	tls.go        the certificate
package debughttp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/time/rate"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

const (
	headerTimeout   = 5 * time.Second
	readTimeout     = 10 * time.Second
	writeTimeout    = 30 * time.Second
	idleTimeout     = time.Minute
	shutdownTimeout = time.Second
	// logInterval is how often something is logged that strangers can cause all the time.
	logInterval = time.Minute
)

// MaxHeader is how long the header of any request may be, in bytes.
const MaxHeader = 16 << 10

// Authorizer decides who may read a path. It returns an error that is
// ErrUnauthenticated, ErrForbidden or ErrBusy, or another one when it is not known.
type Authorizer interface {
	Authorize(ctx context.Context, source netip.Addr, token, path string) error
}

// Options are what a Server needs.
type Options struct {
	// Address is host:port, with or without host.
	Address string
	// CertFile and KeyFile are read anew for each connection. Empty: a
	// self-signed certificate that lives as long as the process.
	CertFile, KeyFile string
	Authorizer        Authorizer
	Gatherer          prometheus.Gatherer
	// Status returns what /status shows, as JSON.
	Status func() any
	// Diagnose serves diagnose.Path. Nil: nobody does.
	Diagnose http.Handler
	// Alive returns why the process should be restarted. Checks are whether
	// it is ready.
	Alive  func() error
	Checks func() []diagnose.Condition
	Log    *slog.Logger
}

// Server is the task that serves.
type Server struct {
	options  Options
	ready    chan struct{}
	listener net.Listener
	unknown  rate.Sometimes // logs that the API server cannot be asked
}

// New returns a Server that starts with Run.
func New(o Options) *Server {
	return &Server{options: o, ready: make(chan struct{}), unknown: rate.Sometimes{Interval: logInterval}}
}

// String names the task.
func (s *Server) String() string { return "debughttp" }

// Ready is closed once the server listens.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr returns where the server listens, once it is ready.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	config, err := tlsConfig(s.options.CertFile, s.options.KeyFile)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.options.Address)
	if err != nil {
		return fmt.Errorf("listen for metrics and probes: %w", err)
	}
	s.listener = Limit(listener)
	close(s.ready)
	server := &http.Server{
		Handler:           s.handler(),
		TLSConfig:         config,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    MaxHeader,
		ErrorLog:          ErrorLog(s.options.Log),
		ConnContext:       WithConn,
		Protocols:         &http.Protocols{},
	}
	server.Protocols.SetHTTP1(true) // by HTTP/2 one connection would have hundreds of requests
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		server.Shutdown(ctx) //nolint:errcheck // the process ends
	})
	if err := server.ServeTLS(s.listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
		stop()
		return fmt.Errorf("serve metrics and probes: %w", err)
	}
	<-ended
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.authorized(promhttp.HandlerFor(s.options.Gatherer, promhttp.HandlerOpts{})))
	mux.Handle("GET /status", s.authorized(http.HandlerFunc(s.status)))
	if s.options.Diagnose != nil {
		mux.Handle("GET "+diagnose.Path, s.authorized(s.options.Diagnose))
	}
	mux.Handle("GET /healthz", Healthz(s.options.Alive))
	mux.Handle("GET /readyz", Readyz(s.options.Checks))
	return mux
}

func (s *Server) status(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff") // it quotes texts that others wrote
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(s.options.Status()); err != nil {
		s.options.Log.Debug("status not sent", "err", err)
	}
}

// Healthz answers with the error of alive, which is why the process should
// be restarted.
func Healthz(alive func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := alive(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
}

// Readyz lists the checks, those that fail marked [-], to everybody. Without any the
// process is starting and not ready.
func Readyz(checks func() []diagnose.Condition) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		code, body := http.StatusOK, ""
		for _, c := range checks() {
			mark := "[+]"
			if !c.OK {
				mark, code = "[-]", http.StatusServiceUnavailable
			}
			body += fmt.Sprintf("%s %s: %s\n", mark, c.Name, cmp.Or(c.Public, c.Message))
		}
		if body == "" {
			code, body = http.StatusServiceUnavailable, "[-] starting\n"
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(code)
		fmt.Fprint(w, body)
	})
}

// token returns the bearer token of a request. A request through the API server's proxy has it
// in a header of our own.
func token(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		token = r.Header.Get(diagnose.TokenHeader)
	}
	return strings.TrimSpace(token)
}

// authorized passes requests on that the Authorizer accepts.
func (s *Server) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := ErrUnauthenticated
		if token := token(r); token != "" {
			err = s.options.Authorizer.Authorize(r.Context(), sourceOf(r), token, r.URL.Path)
		}
		switch {
		case err == nil:
			trust(r.Context())
			next.ServeHTTP(w, r)
		case errors.Is(err, ErrUnauthenticated):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, err.Error(), http.StatusUnauthorized)
		case errors.Is(err, ErrForbidden):
			http.Error(w, err.Error(), http.StatusForbidden)
		case errors.Is(err, ErrBusy):
			http.Error(w, err.Error(), http.StatusTooManyRequests)
		default:
			s.unknown.Do(func() { s.options.Log.Warn("request not authorized", "path", r.URL.Path, "err", err) })
			http.Error(w, "the API server cannot be asked who you are", http.StatusServiceUnavailable)
		}
	})
}

// ErrorLog returns where an http.Server writes its errors. Whoever reaches its port causes as many as he likes, so they
// are for debugging, and a panic is logged once in logInterval.
func ErrorLog(to *slog.Logger) *log.Logger {
	return log.New(&errorLog{log: to, panics: rate.Sometimes{Interval: logInterval}}, "", 0)
}

type errorLog struct {
	log    *slog.Logger
	panics rate.Sometimes
}

// Write implements io.Writer.
func (l *errorLog) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	if strings.HasPrefix(text, "http: panic serving ") {
		l.panics.Do(func() { l.log.Error(text) })
	} else {
		l.log.Debug(text)
	}
	return len(line), nil
}
