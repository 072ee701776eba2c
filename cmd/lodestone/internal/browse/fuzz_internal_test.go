package browse

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/dashboard"
)

type fixedToken string

func (t fixedToken) Token(context.Context) (string, error) { return string(t), nil }

// recorder keeps what would go to the controller.
type recorder struct{ got *http.Request }

func (r *recorder) RoundTrip(request *http.Request) (*http.Response, error) {
	r.got = request
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody, Request: request}, nil
}

// Any web page can have the browser send what it likes to the port. Without the secret nothing goes on to the controller,
// and with it only what reads the dashboard, and no header of the browser's but two.
func FuzzProxy(f *testing.F) {
	var to recorder
	p := NewProxy(&to, fixedToken("good"))
	p.port, p.secret = "8080", "SECRET"
	for _, text := range []string{
		"GET /SECRET" + dashboard.Path + "/ HTTP/1.1\r\nHost: localhost:8080\r\nCookie: a=b\r\nAccept: text/html\r\n\r\n",
		"GET /SECRET" + dashboard.Path + "/../metrics HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n",
		"GET /SECRET" + dashboard.Path + "/%2e%2e/metrics?q=1 HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n",
		"POST /SECRET" + dashboard.Path + "/ HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nContent-Length: 1\r\n\r\na",
		"GET /WRONG" + dashboard.Path + "/ HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n",
		"GET http://evil/SECRET" + dashboard.Path + "/ HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		to.got = nil
		p.ServeHTTP(httptest.NewRecorder(), r)
		if to.got == nil {
			return
		}
		require.Contains(t, r.URL.Path, p.secret)
		require.Contains(t, []string{"127.0.0.1:8080", "localhost:8080"}, r.Host)
		require.Contains(t, []string{http.MethodGet, http.MethodHead}, to.got.Method)
		require.True(t, strings.HasPrefix(to.got.URL.Path, dashboard.Path+"/") && !strings.Contains(to.got.URL.Path, ".."), to.got.URL)
		require.Equal(t, controllerHost, to.got.URL.Host)
		require.Equal(t, "Bearer good", to.got.Header.Get("Authorization"))
		for name := range to.got.Header {
			require.Contains(t, []string{"Authorization", "Accept", "Last-Event-Id", "X-Forwarded-For", "User-Agent"}, name)
		}
	})
}
