package lodestone

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
)

// FaultyAPI is a way to the API server on which requests go wrong at random:
// refused with 409, 429 or 500, or carried out without an answer.
type FaultyAPI struct {
	detour

	mu     sync.Mutex
	random *rand.Rand
	// faulty is how many of 100 requests go wrong.
	faulty int
	// Faults counts what went wrong, by kind.
	faults map[string]int
}

// NewFaultyAPI serves on the control plane's loopback until Close.
func (i *Installation) NewFaultyAPI(faulty int, seed uint64) (*FaultyAPI, error) {
	f := &FaultyAPI{random: rand.New(rand.NewPCG(seed, seed)), faulty: faulty, faults: map[string]int{}}
	return f, f.open(i, f.refusing, func(next http.RoundTripper) http.RoundTripper { return lossy{next, f} })
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

// SkewedAPI is a way to the API server on which its clock seems to be ahead of
// everybody's: the tokens that it makes end later.
type SkewedAPI struct{ detour }

// NewSkewedAPI serves on the control plane's loopback until Close.
func (i *Installation) NewSkewedAPI(ahead time.Duration) (*SkewedAPI, error) {
	s := &SkewedAPI{}
	return s, s.open(i, func(next http.Handler) http.Handler { return next },
		func(next http.RoundTripper) http.RoundTripper { return skewed{next, ahead} })
}

type skewed struct {
	http.RoundTripper
	ahead time.Duration
}

func (s skewed) RoundTrip(r *http.Request) (*http.Response, error) {
	if resourceOf(r.URL.Path) != "serviceaccounts/token" {
		return s.RoundTripper.RoundTrip(r)
	}
	r = r.Clone(r.Context())
	r.Header.Set("Accept", "application/json")
	response, err := s.RoundTripper.RoundTrip(r)
	if err != nil || response.StatusCode != http.StatusCreated {
		return response, err
	}
	defer response.Body.Close()
	var made authenticationv1.TokenRequest
	if err := json.NewDecoder(response.Body).Decode(&made); err != nil {
		return nil, err
	}
	made.Status.ExpirationTimestamp.Time = made.Status.ExpirationTimestamp.Add(s.ahead)
	raw, err := json.Marshal(made)
	if err != nil {
		return nil, err
	}
	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(raw)), int64(len(raw))
	response.Header.Set("Content-Length", strconv.Itoa(len(raw)))
	response.Header.Del("Content-Encoding")
	return response, nil
}
