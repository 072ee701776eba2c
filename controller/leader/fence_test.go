package leader

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const writeTime = 5 * time.Second

// api is an API server that takes its time, notes what it was asked, and answers as long as somebody waits.
type api struct {
	takes time.Duration
	asked []string
}

func (a *api) RoundTrip(r *http.Request) (*http.Response, error) {
	a.asked = append(a.asked, r.Method)
	select {
	case <-time.After(a.takes):
		return &http.Response{StatusCode: http.StatusOK, Body: answer{strings.NewReader("done"), r.Context()}}, nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// answer is read as long as its request lasts.
type answer struct {
	io.Reader
	ctx context.Context
}

func (a answer) Read(p []byte) (int, error) {
	if err := a.ctx.Err(); err != nil {
		return 0, err
	}
	return a.Reader.Read(p)
}
func (answer) Close() error { return nil }

// send sends a request and reads the answer.
func send(ctx context.Context, by http.RoundTripper, method string) error {
	r, err := http.NewRequestWithContext(ctx, method, "http://api", http.NoBody)
	if err != nil {
		return err
	}
	response, err := by.RoundTrip(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.ReadAll(response.Body)
	return err
}

func TestFenceLetsReadsThroughAndWritesOnlyWithTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var holds atomic.Bool
		to := &api{}
		by := NewFence(holds.Load, writeTime).Wrap(to)
		for _, method := range []string{http.MethodPatch, http.MethodPut, http.MethodPost, http.MethodDelete} {
			ctx, cancel := context.WithTimeout(t.Context(), 3*Look)
			assert.ErrorIs(t, send(ctx, by, method), ErrFenced, method)
			cancel()
		}
		require.NoError(t, send(t.Context(), by, http.MethodGet))
		require.NoError(t, send(t.Context(), by, http.MethodHead))
		time.AfterFunc(time.Hour, func() { holds.Store(true) })
		require.NoError(t, send(t.Context(), by, http.MethodPatch), "waits until this process leads")
		assert.Equal(t, []string{http.MethodGet, http.MethodHead, http.MethodPatch}, to.asked)
	})
}

// A write that began while the process held the lease is given up before the lease ends. A watch lasts for ever.
func TestAWriteIsGivenUpInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		by := NewFence(func() bool { return true }, writeTime).Wrap(&api{takes: time.Hour})
		began := time.Now()
		require.ErrorIs(t, send(t.Context(), by, http.MethodPatch), context.DeadlineExceeded)
		assert.Equal(t, writeTime, time.Since(began))
		require.NoError(t, send(t.Context(), by, http.MethodGet))
	})
}

func TestAClosedFenceHasNoWriteUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := &api{takes: time.Second}
		fence := NewFence(func() bool { return true }, writeTime)
		by := fence.Wrap(to)
		began, wrote := time.Now(), make(chan error, 1)
		go func() { wrote <- send(t.Context(), by, http.MethodPatch) }()
		synctest.Wait()
		fence.Close()
		assert.Equal(t, to.takes, time.Since(began))
		require.NoError(t, <-wrote)

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, send(ctx, by, http.MethodPatch), ErrFenced, "and none begins")
		assert.Len(t, to.asked, 1)
	})
}
