package dashboard

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Who keeps a page open and takes nothing of it loses it.
func TestWhoTakesNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	given := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s, err := stream{w, http.NewResponseController(w)}, error(nil)
		for chunk := strings.Repeat("x", 1<<20); err == nil; { // until all buffers are full
			err = s.send(chunk)
		}
		given <- err
	}))
	defer server.Close()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	start := time.Now()
	select {
	case err := <-given:
		require.ErrorContains(t, err, "timeout")
		require.GreaterOrEqual(t, time.Since(start), patience-time.Second, "who is slow has some time")
	case <-time.After(6 * patience):
		require.FailNow(t, "it is still sent")
	}
}
