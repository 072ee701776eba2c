package debughttp

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/listenlimit"
)

const (
	// MaxConns is how many connections a port has, of some 30 KB each, and
	// MaxConnsOfSource how many of them one address has: a browser opens six.
	MaxConns         = 128
	MaxConnsOfSource = 16

	// asksPerSecond and asksOfSource bound how many tokens that were not accepted before the
	// API server is asked about in a second: in all, and for one address.
	asksPerSecond = 64
	asksOfSource  = 16
)

// Limit returns a listener that bounds the connections of the port.
func Limit(l net.Listener) net.Listener {
	return listenlimit.New(listenlimit.Limits{All: MaxConns, OfSource: MaxConnsOfSource}).Bound(l)
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

// WithConn is the ConnContext of an http.Server that serves a bounded listener. Authenticated connections then outlast others.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, connKey{}, c)
}

// trust makes the connection outlast those without a valid token.
func trust(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(*listenlimit.Conn); ok {
		c.Trust()
	}
}

// sourceOf returns the address that the request comes from. A host has all IPv6 addresses of a /64: it is one source with any of them.
func sourceOf(r *http.Request) netip.Addr {
	from, _ := netip.ParseAddrPort(r.RemoteAddr)
	addr := from.Addr().Unmap().WithZone("")
	if addr.Is6() {
		addr = netip.PrefixFrom(addr, 64).Masked().Addr()
	}
	return addr
}

// budget bounds the questions to the API server that strangers can cause.
type budget struct {
	mu    sync.Mutex
	since time.Time
	asked int
	of    map[netip.Addr]int
}

// take reports whether another question is within the bounds of this second.
func (b *budget) take(source netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); b.of == nil || now.Sub(b.since) >= time.Second {
		b.since, b.asked, b.of = now, 0, map[netip.Addr]int{}
	}
	if b.asked == asksPerSecond || b.of[source] == asksOfSource {
		return false
	}
	b.asked++
	b.of[source]++
	return true
}

// Throttle bounds the questions to the API server that strangers can cause, for a handler that
// asks it by itself. Before wraps that handler, and After wraps the one behind it.
type Throttle struct {
	budget   budget
	mu       sync.Mutex
	accepted map[key]time.Time // when, by token
}

// tokenKey is the key of a request's token in its context.
type tokenKey struct{}

// webSocketToken is the header in which clients of WebSockets may have a token.
const webSocketToken = "Sec-WebSocket-Protocol"

// Before passes on requests whose token was accepted lately, and as many others as the budget
// allows. Paths that are open to everybody cost no question: the token of a request for one is dropped.
func (t *Throttle) Before(next http.Handler, open ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		isOpen := slices.Contains(open, r.URL.Path)
		if isOpen {
			r.Header.Del("Authorization")
			r.Header.Del(webSocketToken)
		}
		token := r.Header.Get("Authorization")
		// The API server is not asked about certificates, but about a token beside one.
		certified := r.TLS != nil && len(r.TLS.PeerCertificates) > 0 && token == "" && r.Header.Get(webSocketToken) == ""
		k := key(sha256.Sum256([]byte(token)))
		if !isOpen && !certified && !t.knows(k) && !t.budget.take(sourceOf(r)) {
			http.Error(w, ErrBusy.Error(), http.StatusTooManyRequests)
			return
		}
		if token != "" { // whoever accepts the request takes the header away
			r = r.WithContext(context.WithValue(r.Context(), tokenKey{}, k))
		}
		next.ServeHTTP(w, r)
	})
}

// After notes that the request was accepted. The connection of one with a token outlasts those of strangers.
func (t *Throttle) After(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k, ok := r.Context().Value(tokenKey{}).(key); ok {
			t.mu.Lock()
			if t.accepted == nil {
				t.accepted = map[key]time.Time{}
			}
			keepAccepted(t.accepted, k)
			t.mu.Unlock()
			trust(r.Context())
		}
		next.ServeHTTP(w, r)
	})
}

func (t *Throttle) knows(k key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	since, ok := t.accepted[k]
	return ok && time.Since(since) < knownTime
}
