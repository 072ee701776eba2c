package debughttp

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// dial opens a connection from one of loopback's addresses.
func dial(t *testing.T, s *Server, from string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 20 * time.Second}
	c, err := d.Dial("tcp", s.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// scraper is who keeps a connection, as Prometheus does.
type scraper struct {
	conn *tls.Conn
	in   *bufio.Reader
}

func newScraper(t *testing.T, s *Server, from string) *scraper {
	t.Helper()
	c := tls.Client(dial(t, s, from), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is self-signed
	require.NoError(t, c.HandshakeContext(t.Context()))
	return &scraper{c, bufio.NewReader(c)}
}

func (s *scraper) scrape(t *testing.T) {
	t.Helper()
	_, err := io.WriteString(s.conn, "GET /metrics HTTP/1.1\r\nHost: n1\r\nAuthorization: Bearer good\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(s.in, nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

// Strangers open connections, and hold them, or send headers that are too long: the port
// never has more than its bounds, and the scraper's connection and the kubelet's probes
// go on.
func TestStrangersAtThePort(t *testing.T) {
	t.Parallel()
	s := start(t)
	prometheus := newScraper(t, s, "127.0.0.2")
	prometheus.scrape(t)
	limiter := s.listener.(interface{ Count() int })
	for range 3 * MaxConnsOfSource {
		dial(t, s, "127.0.4.1")
	}
	code, body := get(t, s, "/healthz", "") // it comes after all of them
	require.Equal(t, 200, code, body)
	require.LessOrEqual(t, limiter.Count(), MaxConnsOfSource+2, "one address, the scraper and this")
	for i := range 2 * MaxConns {
		dial(t, s, fmt.Sprintf("127.0.1.%d", 1+i%(MaxConns/2)))
		if i%MaxConnsOfSource == 0 {
			prometheus.scrape(t)
			code, body := get(t, s, "/healthz", "") // from this host, as the kubelet does
			require.Equal(t, 200, code, body)
		}
	}
	require.LessOrEqual(t, limiter.Count(), MaxConns)
	assert.Greater(t, limiter.Count(), MaxConns/2, "the bound was reached")
	prometheus.scrape(t)

	long := tls.Client(dial(t, s, "127.0.3.1"), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is self-signed
	// The server need not read all before it answers and closes.
	_, _ = io.WriteString(long, "GET /metrics HTTP/1.1\r\nHost: n1\r\nX: "+strings.Repeat("x", 2*MaxHeader))
	resp, err := http.ReadResponse(bufio.NewReader(long), nil)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusRequestHeaderFieldsTooLarge, resp.StatusCode)
	state := tls.Client(dial(t, s, "127.0.3.2"),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}}) //nolint:gosec // as above
	require.NoError(t, state.HandshakeContext(t.Context()))
	assert.Equal(t, "http/1.1", state.ConnectionState().NegotiatedProtocol, "one connection is one request at a time")
	prometheus.scrape(t)
}

// reviews is an API server that knows one token, and counts what it is asked.
func reviews(asked *atomic.Int64) *fake.Clientset {
	client := testapi.New()
	client.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		r := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		r.Status.Authenticated = strings.HasPrefix(r.Spec.Token, "good")
		return true, r, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		r := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		r.Status.Allowed = true
		return true, r, nil
	})
	return client
}

// Strangers show tokens without end for two minutes, from a thousand addresses. The API
// server is asked about a few of them, what is remembered is bounded, and the scraper is
// answered at once, though its own acceptance has to be renewed.
func TestStrangersDoNotStarveScrapes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		d := NewDelegate(reviews(&asked))
		prometheus := netip.MustParseAddr("192.0.2.1")
		require.NoError(t, d.Authorize(t.Context(), prometheus, "good", "/metrics"))
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 20 {
			go func() {
				for n := 0; ctx.Err() == nil; n++ {
					from := netip.AddrFrom4([4]byte{203, 0, byte(n % 50), byte(i)})
					assert.Error(t, d.Authorize(ctx, from, fmt.Sprintf("bad %d %d", i, n), "/metrics"))
					time.Sleep(20 * time.Millisecond)
				}
			}()
		}
		const minutes = 2
		time.Sleep(time.Second / 2) // in the middle of a second the strangers have used it up
		for range minutes * 2 {
			time.Sleep(30 * time.Second)
			began := time.Now()
			require.NoError(t, d.Authorize(t.Context(), prometheus, "good", "/metrics"))
			assert.Less(t, time.Since(began), time.Second)
		}
		cancel()
		synctest.Wait()
		assert.LessOrEqual(t, asked.Load(), int64(minutes*60*asksPerSecond+2*asksPerSecond))
		assert.LessOrEqual(t, len(d.refused), maxRefused)

		// One address has its share of the strangers' questions.
		time.Sleep(time.Minute)
		before := asked.Load()
		for n := range 100 {
			assert.Error(t, d.Authorize(t.Context(), netip.MustParseAddr("203.0.113.1"), fmt.Sprint("bad ", n), "/metrics"))
		}
		assert.Less(t, asked.Load()-before, int64(3*asksOfSource))
		assert.NoError(t, d.Authorize(t.Context(), netip.MustParseAddr("203.0.113.2"), "good too", "/metrics"), "a scraper that is new")
	})
}

// slowReviews is an API server that does not answer about the tokens of strangers.
type slowReviews struct {
	kubernetes.Interface
	authenticationclient.AuthenticationV1Interface
	authenticationclient.TokenReviewInterface
	asked   atomic.Int64
	waiting atomic.Int64 // questions that have no answer yet
	away    atomic.Bool  // it does not answer about any token
}

func (s *slowReviews) AuthenticationV1() authenticationclient.AuthenticationV1Interface { return s }
func (s *slowReviews) TokenReviews() authenticationclient.TokenReviewInterface          { return s }
func (s *slowReviews) Create(ctx context.Context, r *authenticationv1.TokenReview, o metav1.CreateOptions,
) (*authenticationv1.TokenReview, error) {
	if s.away.Load() || strings.HasPrefix(r.Spec.Token, "bad") {
		s.asked.Add(1)
		s.waiting.Add(1)
		defer s.waiting.Add(-1)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return s.Interface.AuthenticationV1().TokenReviews().Create(ctx, r, o)
}

// Strangers have all places for questions about their tokens, and the API server does not answer these. Whoever was
// accepted before does not wait for them when the acceptance has to be renewed.
func TestScrapesDoNotWaitForStrangers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := &slowReviews{Interface: reviews(&atomic.Int64{})}
		d, prometheus := NewDelegate(api), netip.MustParseAddr("192.0.2.1")
		require.NoError(t, d.Authorize(t.Context(), prometheus, "good", "/metrics"))
		time.Sleep(rememberYes)
		for i := range 2 * asksAtOnce {
			go func() {
				assert.Error(t, d.Authorize(t.Context(), netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), fmt.Sprint("bad ", i), "/metrics"))
			}()
		}
		synctest.Wait()
		require.EqualValues(t, asksAtOnce, api.asked.Load(), "the others wait")
		began := time.Now()
		require.NoError(t, d.Authorize(t.Context(), prometheus, "good", "/metrics"))
		assert.Zero(t, time.Since(began))
		time.Sleep(askTimeout)
		synctest.Wait()
	})
}

// The API server does not answer, and refuses no connection either. Whoever was accepted within the hour waits for
// renewWait at most, and is asked about once at a time. Nobody else passes, and a later answer counts.
func TestScrapesDoNotWaitForTheAPIServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := &slowReviews{Interface: reviews(&atomic.Int64{})}
		d := NewDelegate(api)
		asks := func(token string) error { return d.Authorize(t.Context(), netip.Addr{}, token, "/metrics") }
		require.NoError(t, asks("good"))
		api.away.Store(true)
		accepted := time.Now()
		time.Sleep(rememberYes)
		for range 2 * asksAtOnce {
			go func() { assert.NoError(t, asks("good")) }()
		}
		synctest.Wait()
		require.EqualValues(t, 1, api.asked.Load(), "one renewal of a token at a time")
		time.Sleep(2 * askTimeout)
		synctest.Wait()
		require.Zero(t, api.waiting.Load())

		began := time.Now()
		require.NoError(t, asks("good"))
		require.LessOrEqual(t, time.Since(began), renewWait)
		require.Error(t, asks("good too"), "a scraper that is new")
		time.Sleep(knownTime - time.Since(accepted))
		require.Error(t, asks("good"), "for an hour")

		api.away.Store(false)
		require.NoError(t, asks("good"))
		api.away.Store(true)
		time.Sleep(rememberYes)
		ended, end := context.WithCancel(t.Context())
		end()
		require.NoError(t, d.Authorize(ended, netip.Addr{}, "good", "/metrics"), "whoever ends his request stops no renewal")
		require.EqualValues(t, 1, api.waiting.Load())
		time.Sleep(askTimeout)
		synctest.Wait()
	})
}

// What is remembered is bounded, whoever is accepted.
func TestAcceptedAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		d := NewDelegate(reviews(&asked))
		for n := range 3 * maxAccepted {
			require.NoError(t, d.Authorize(t.Context(), netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}), fmt.Sprint("good ", n), "/metrics"))
			time.Sleep(20 * time.Millisecond)
		}
		assert.Len(t, d.accepted, maxAccepted)
		before := asked.Load()
		require.NoError(t, d.Authorize(t.Context(), netip.Addr{}, fmt.Sprint("good ", 3*maxAccepted-1), "/metrics"))
		assert.Equal(t, before, asked.Load(), "the last one is remembered")
	})
}

// Where the framework asks by itself, strangers have a share of it, and those that it
// accepted have no bound.
func TestThrottle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		throttle, asked := &Throttle{}, 0
		served := throttle.After(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		h := throttle.Before(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked++
			if strings.HasPrefix(r.Header.Get("Authorization"), "Bearer good") {
				r.Header.Del("Authorization") // as the framework does
				served.ServeHTTP(w, r)
				return
			}
			w.WriteHeader(http.StatusUnauthorized)
		}), "/healthz")
		ask := func(from, path, token string) int {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil)
			r.RemoteAddr = from + ":1000"
			r.Header.Set("Authorization", token)
			h.ServeHTTP(w, r)
			return w.Code
		}
		require.Equal(t, 200, ask("192.0.2.1", "/metrics", "Bearer good"))
		asked = 0
		for n := range 1000 {
			ask(fmt.Sprintf("203.0.113.%d", n%200), fmt.Sprint("/", n), fmt.Sprint("Bearer ", n))
		}
		assert.LessOrEqual(t, asked, asksPerSecond)
		assert.Equal(t, http.StatusTooManyRequests, ask("203.0.113.201", "/metrics", "Bearer good too"))
		assert.Equal(t, 200, ask("192.0.2.1", "/metrics", "Bearer good"))
		assert.Equal(t, 401, ask("203.0.113.1", "/healthz", ""), "which goes to the framework")
		time.Sleep(time.Second)
		assert.Equal(t, 200, ask("203.0.113.201", "/metrics", "Bearer good too"))
		for n := range 3 * maxAccepted {
			ask("192.0.2.1", "/", fmt.Sprint("Bearer good ", n))
			time.Sleep(time.Second)
		}
		assert.LessOrEqual(t, len(throttle.accepted), maxAccepted)
	})
}

// A host has all addresses of a /64, and is one source with any of them.
func TestSources(t *testing.T) {
	t.Parallel()
	for from, want := range map[string]string{"203.0.113.1:80": "203.0.113.1", "[::ffff:203.0.113.1]:80": "203.0.113.1",
		"[2001:db8::1:2]:80": "2001:db8::", "[2001:db8::1:3]:81": "2001:db8::", "[fe80::1%eth0]:80": "fe80::"} {
		require.Equal(t, want, sourceOf(&http.Request{RemoteAddr: from}).String(), from)
	}
}
