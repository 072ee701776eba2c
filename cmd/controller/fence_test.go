package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
)

func TestFenceLetsReadsThroughAndWritesOnlyWithTheLease(t *testing.T) {
	var served []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { served = append(served, r.Method) }))
	defer server.Close()
	holds := false
	client := http.Client{Transport: fence{http.DefaultTransport, func() bool { return holds }}}
	do := func(method string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 3*look)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, method, server.URL, http.NoBody)
		require.NoError(t, err)
		response, err := client.Do(r)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	for _, method := range []string{http.MethodPatch, http.MethodPut, http.MethodPost, http.MethodDelete} {
		assert.ErrorIs(t, do(method), errFenced, method)
	}
	require.NoError(t, do(http.MethodGet))
	holds = true
	require.NoError(t, do(http.MethodPatch))
	assert.Equal(t, []string{http.MethodGet, http.MethodPatch}, served)
}

// A write that the fence lets through is over before another process can lead.
func TestFenceClosesBeforeTheLeaseEnds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ lease, renewal time.Duration }{{10 * time.Second, 7 * time.Second}, {15 * time.Second, 10 * time.Second},
		{60 * time.Second, 40 * time.Second}} {
		if last := tt.lease - marginOf(tt.lease, tt.renewal); last+servicelb.PatchTimeout > tt.lease {
			t.Errorf("lease of %s: a write that begins after %s may end after it", tt.lease, last)
		}
	}
}
