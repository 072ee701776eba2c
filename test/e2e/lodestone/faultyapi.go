package lodestone

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
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
