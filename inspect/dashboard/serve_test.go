package dashboard

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/status"
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

// A client that asks for a view and does not read it is disconnected, so that it takes no place of others. One
// connection can carry more than one request.
func TestViewsThatAreNotTakenAreGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := New(Options{})
		d.show(&State{Status: &status.Status{}, ClusterID: strings.Repeat("x", 1<<16)})
		server := http.Server{Handler: d.Handler()}
		visitors, ended := make(door, 1), make(chan error)
		go func() { ended <- server.Serve(visitors) }()
		ours, theirs := net.Pipe()
		visitors <- theirs
		answers := bufio.NewReader(ours)
		for range 2 {
			fmt.Fprint(ours, "GET /dashboard/view HTTP/1.1\r\nHost: x\r\n\r\n")
			answer, err := http.ReadResponse(answers, nil)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, answer.Body)
			require.NoError(t, err)
			time.Sleep(2 * writeTimeout)
		}
		fmt.Fprint(ours, "GET /dashboard/view HTTP/1.1\r\nHost: x\r\n\r\n")
		synctest.Wait()
		require.Equal(t, 1, d.count())
		time.Sleep(writeTimeout + time.Second)
		require.Zero(t, d.count())
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
}

// A client that keeps a page open and does not read is disconnected.
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
		require.Equal(t, writeTimeout, time.Since(start), "who is slow has some time")
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
}

// reader takes all that it is sent.
type reader struct{ *httptest.ResponseRecorder }

func (reader) SetWriteDeadline(time.Time) error { return nil }

// A page that is sent changes for long enough is asked to come again, which is no loss of the connection.
func TestAPageComesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, began := New(Options{}), time.Now()
		d.show(state(VIP{Owner: "a"}))
		r := reader{httptest.NewRecorder()}
		d.events(r, httptest.NewRequest(http.MethodGet, Path+"/events", nil))
		require.Equal(t, streamLife, time.Since(began))
		require.True(t, strings.HasSuffix(r.Body.String(), "event: again\ndata: again\n\n"))
	})
}
