package lodestone

import (
	"maps"
	"net/http"
	"regexp"
	"strings"
	"sync"
)

// CountingAPI is a way to the API server on which every write is counted, be
// it one that changes nothing, one that is refused, or one of an Event: a
// watch would not show them, and the API server's metrics do not say whose
// they are.
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
