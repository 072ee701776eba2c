package hostile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// frontAddress is where the programs reach the API server.
const frontAddress = "198.18.0.1:6444"

// front stands between the programs and the API server. It can make their watches expire, as
// an API server does that has forgotten the version a watch is to begin at: the program has
// to list the objects anew.
type front struct {
	proxy  httputil.ReverseProxy
	server *http.Server
	served sync.WaitGroup

	mu        sync.Mutex
	followers map[collection]*follower
	renewals  []time.Duration // how long the API server took for each renewal of the leader's Lease
	era       context.Context // ends when the watches expire
	endEra    context.CancelFunc
}

// collection is what a program at an address lists and watches.
type collection struct{ from, path, labels, fields string }

// follower is what the front has seen of a collection: how many watches run and how many have
// expired, and of these, how many were refused a new beginning and how many lists came then.
type follower struct{ watching, expired, refused, listed int }

// openFront serves until close.
func (g *ground) openFront() (*front, error) {
	config, err := g.config()
	if err != nil {
		return nil, err
	}
	config = rest.AnonymousClientConfig(config)
	config.NextProtos = []string{"http/1.1"} // a connection for each request: programs do not wait for each other
	direct, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		return nil, err
	}
	pair, err := g.authority.Server("front", nil, hosts[control])
	if err != nil {
		return nil, err
	}
	quiet := log.New(io.Discard, "", 0) // programs are killed while they wait for answers
	f := &front{followers: map[collection]*follower{}, proxy: httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: direct, FlushInterval: -1, ErrorLog: quiet,
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) {
			panic(http.ErrAbortHandler) // the client sees a connection that breaks
		},
	}}
	f.era, f.endEra = context.WithCancel(context.Background())
	var listener net.Listener
	err = netns.Do(g.host(control), func() (err error) {
		listener, err = net.Listen("tcp", frontAddress)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen before the API server: %w", err)
	}
	f.server = &http.Server{Handler: f, ReadHeaderTimeout: time.Minute, ErrorLog: quiet}
	f.served.Go(func() { _ = f.server.ServeTLS(listener, pair.Cert, pair.Key) }) // until close
	return f, nil
}

func (f *front) close() error {
	err := f.server.Close()
	f.served.Wait()
	return err
}

// ServeHTTP passes a request on, and counts it if it is a list or a watch.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/leases/"+controller) {
			defer f.renewed(time.Now())
		}
		f.proxy.ServeHTTP(w, r)
		return
	}
	host, _, _ := net.SplitHostPort(r.RemoteAddr) // the server wrote it
	query := r.URL.Query()
	of := collection{host, r.URL.Path, query.Get("labelSelector"), query.Get("fieldSelector")}
	if watch := query.Get("watch"); watch == "true" || watch == "1" {
		f.watch(w, r, of)
		return
	}
	f.list(w, r, of, query.Get("continue") == "")
}

// renewed notes that the renewal of the leader's Lease that began then is over, also if nobody waited for its end.
func (f *front) renewed(began time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.renewals = append(f.renewals, time.Since(began))
}

// takeRenewals returns how long the renewals took since the last call.
func (f *front) takeRenewals() []time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	taken := f.renewals
	f.renewals = nil
	return taken
}

// watch lets a watch run until it expires. The first one after that is refused, once for each
// that has expired.
func (f *front) watch(w http.ResponseWriter, r *http.Request, of collection) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	f.mu.Lock()
	by, known := f.followers[of]
	if !known {
		by = &follower{}
		f.followers[of] = by
	}
	if by.refused < by.expired {
		by.refused++
		f.mu.Unlock()
		refuse(w)
		return
	}
	by.watching++
	defer context.AfterFunc(f.era, cancel)()
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		by.watching--
	}()
	proxy := f.proxy
	proxy.ModifyResponse = func(answer *http.Response) error {
		answer.Body = &ending{answer.Body, ctx}
		return nil
	}
	proxy.ServeHTTP(w, r.WithContext(ctx))
}

// refuse answers as an API server that has forgotten the version.
func refuse(w http.ResponseWriter) {
	status := apierrors.NewResourceExpired("too old resource version").Status()
	status.Kind, status.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status) // if the client is gone, it needs none
}

// ending is an answer that ends with ctx as if it were complete.
type ending struct {
	io.ReadCloser
	ctx context.Context
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err != nil && e.ctx.Err() != nil {
		err = io.EOF
	}
	return n, err
}

// list passes a list on. It counts if its beginning was asked for after the watch was refused,
// and if all of it was delivered.
func (f *front) list(w http.ResponseWriter, r *http.Request, of collection, beginning bool) {
	f.mu.Lock()
	by := f.followers[of]
	counts := beginning && by != nil && by.refused > 0
	f.mu.Unlock()
	proxy, answered := f.proxy, false
	proxy.ModifyResponse = func(answer *http.Response) error {
		answered = answer.StatusCode == http.StatusOK
		return nil
	}
	proxy.ServeHTTP(w, r) // panics if the answer is cut short
	if counts && answered {
		f.mu.Lock()
		defer f.mu.Unlock()
		by.listed++
	}
}

// expire ends all watches.
func (f *front) expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, by := range f.followers {
		by.expired, by.refused, by.listed = by.watching, 0, 0
	}
	f.endEra()
	f.era, f.endEra = context.WithCancel(context.Background())
}

// relisted returns how often objects of each kind were listed because a watch had expired. It
// is an error if one of them was not, or if a watch does not run again.
func (f *front) relisted() (lists map[string]int, missing error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	lists = map[string]int{}
	for of, by := range f.followers {
		lists[of.path] += by.listed
		if by.listed < by.expired || by.watching < by.expired {
			missing = errors.Join(missing, fmt.Errorf("%+v: of %d watches that expired, %d were refused, %d lists came, and %d run",
				of, by.expired, by.refused, by.listed, by.watching))
		}
	}
	return lists, missing
}
