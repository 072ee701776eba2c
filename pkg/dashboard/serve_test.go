package dashboard

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// door is a listener through which connections come that are sent to it.
type door chan net.Conn

func (d door) Accept() (net.Conn, error) {
	c, ok := <-d
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (d door) Close() error   { close(d); return nil }
func (d door) Addr() net.Addr { return &net.IPAddr{} }

// Who keeps a page open and takes nothing of it loses it.
func TestWhoTakesNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		given := make(chan error, 1)
		server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			s, err := stream{w, http.NewResponseController(w)}, error(nil)
			for chunk := strings.Repeat("x", 1<<20); err == nil; { // until all buffers are full
				err = s.send(chunk)
			}
			given <- err
		})}
		visitors, ended := make(door, 1), make(chan error)
		go func() { ended <- server.Serve(visitors) }()
		ours, theirs := net.Pipe()
		visitors <- theirs
		start := time.Now()
		fmt.Fprint(ours, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.ErrorContains(t, <-given, "timeout")
		require.Equal(t, patience, time.Since(start), "who is slow has some time")
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
}
