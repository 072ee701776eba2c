package leader

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFenceLetsReadsThroughAndWritesOnlyWithTheLease(t *testing.T) {
	var served []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { served = append(served, r.Method) }))
	defer server.Close()
	holds := false
	client := http.Client{Transport: Fence{http.DefaultTransport, func() bool { return holds }}}
	do := func(ctx context.Context, method string) error {
		r, err := http.NewRequestWithContext(ctx, method, server.URL, http.NoBody)
		require.NoError(t, err)
		response, err := client.Do(r)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	for _, method := range []string{http.MethodPatch, http.MethodPut, http.MethodPost, http.MethodDelete} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*Look)
		assert.ErrorIs(t, do(ctx, method), ErrFenced, method)
		cancel()
	}
	require.NoError(t, do(t.Context(), http.MethodGet))
	holds = true
	require.NoError(t, do(t.Context(), http.MethodPatch))
	assert.Equal(t, []string{http.MethodGet, http.MethodPatch}, served)
}
