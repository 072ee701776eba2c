package lodestone

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// FaultyAPI is a way to the API server on which requests go wrong at random:
// refused with 409, 429 or 500, or carried out without an answer.
type FaultyAPI struct {
	// Kubeconfig is for clients that are to go this way.
	Kubeconfig string

	server *http.Server
	served sync.WaitGroup

	mu     sync.Mutex
	random *rand.Rand
	// faulty is how many of 100 requests go wrong.
	faulty int
	// Faults counts what went wrong, by kind.
	faults map[string]int
}

// NewFaultyAPI serves on the control plane's loopback until Close.
func (i *Installation) NewFaultyAPI(faulty int, seed uint64) (*FaultyAPI, error) {
	config, err := i.Lab.RESTConfig()
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		return nil, err
	}
	f := &FaultyAPI{random: rand.New(rand.NewPCG(seed, seed)), faulty: faulty, faults: map[string]int{}}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     lossy{transport, f},
		FlushInterval: -1, // watches
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) {
			panic(http.ErrAbortHandler) // the client sees a connection that breaks
		},
	}
	var listener net.Listener
	err = netns.Do(controlPlane, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen for the faulty API: %w", err)
	}
	f.server = &http.Server{Handler: f.refusing(proxy), ReadHeaderTimeout: time.Minute}
	f.served.Go(func() { _ = f.server.Serve(listener) }) // until Close
	f.Kubeconfig = filepath.Join(os.TempDir(), fmt.Sprintf("faulty-%d.kubeconfig", listener.Addr().(*net.TCPAddr).Port))
	return f, writeKubeconfig(f.Kubeconfig, "http://"+listener.Addr().String())
}

func writeKubeconfig(path, server string) error {
	config := clientcmdapi.NewConfig()
	config.Clusters["faulty"] = &clientcmdapi.Cluster{Server: server}
	config.Contexts["faulty"] = &clientcmdapi.Context{Cluster: "faulty"}
	config.CurrentContext = "faulty"
	return clientcmd.WriteToFile(*config, path)
}

// Heal ends the faults.
func (f *FaultyAPI) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faulty = 0
}

// Faults returns how many requests went wrong, by kind.
func (f *FaultyAPI) Faults() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprint(f.faults)
}

// Close ends the service.
func (f *FaultyAPI) Close() error {
	err := f.server.Close()
	f.served.Wait()
	return errors.Join(err, os.Remove(f.Kubeconfig))
}

// The ways in which a request goes wrong.
const (
	unanswered = "unanswered"
	conflict   = "409"
	throttled  = "429"
	failed     = "500"
)

// fault decides about one request; empty: it goes well. What only reads is
// never in conflict.
func (f *FaultyAPI) fault(r *http.Request) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.random.IntN(100) >= f.faulty {
		return ""
	}
	kinds := []string{throttled, failed, unanswered}
	if r.Method != http.MethodGet {
		kinds = append(kinds, conflict)
	}
	kind := kinds[f.random.IntN(len(kinds))]
	f.faults[kind]++
	return kind
}

type faultKey struct{}

// refusing answers in the API server's place when a request goes wrong.
func (f *FaultyAPI) refusing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind := f.fault(r)
		switch kind {
		case conflict:
			refuse(w, http.StatusConflict, "Conflict")
		case throttled:
			w.Header().Set("Retry-After", "1")
			refuse(w, http.StatusTooManyRequests, "TooManyRequests")
		case failed:
			refuse(w, http.StatusInternalServerError, "InternalError")
		default:
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), faultKey{}, kind)))
		}
	})
}

func refuse(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"injected","reason":%q,"code":%d}`, reason, code)
}

// lossy carries requests out and loses the answers of those that are to go
// unanswered.
type lossy struct {
	http.RoundTripper
	*FaultyAPI
}

var errLost = errors.New("the answer was lost")

func (l lossy) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := l.RoundTripper.RoundTrip(r)
	if err == nil && r.Context().Value(faultKey{}) == unanswered {
		response.Body.Close()
		return nil, errLost
	}
	return response, err
}
