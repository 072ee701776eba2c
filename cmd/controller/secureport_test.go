package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// webhook is the name that the API server asks for.
const webhook = "lodestone-admission.ls.svc"

// securePort is a controller's secure port on loopback.
type securePort struct {
	*testing.T
	address string
}

func serveSecurePort(t *testing.T, change ...func(*process, *config.CompletedConfig)) securePort {
	t.Helper()
	p := newProcess(t.Context())
	p.flags.admission, p.flags.configNamespace, p.flags.configName = true, "ls", "lodestone-config"
	p.log, p.client = slog.New(slog.DiscardHandler), testapi.New()
	p.election = &election{won: make(chan struct{}), ended: make(chan struct{}), health: leaderelection.NewLeaderHealthzAdaptor(time.Minute)}
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: p.client, Log: p.log})
	p.config = kube.NewConfigWatcher(p.client, kube.ConfigOptions{Log: p.log})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := (&config.Config{SecureServing: &server.SecureServingInfo{Listener: listener}}).Complete()
	c.Authentication.Authenticator = authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: "system:anonymous"}}, true, nil
	})
	c.Authorization.Authorizer = authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision,
		string, error) {
		if a.GetPath() == "/readyz" { // which --authorization-always-allow-paths has
			return authorizer.DecisionAllow, "", nil
		}
		return authorizer.DecisionDeny, "", nil
	})
	for _, f := range change {
		f(p, c)
	}
	require.NoError(t, p.serveHTTPS(c))
	t.Cleanup(func() { p.cancel(); _ = p.tasks.Wait() })
	return securePort{t, listener.Addr().String()}
}

// dial opens a connection from one of loopback's addresses.
func (p securePort) dial(from string) net.Conn {
	p.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 20 * time.Second}
	c, err := d.DialContext(p.Context(), "tcp", p.address)
	require.NoError(p, err)
	p.Cleanup(func() { c.Close() })
	return c
}

// sends opens a TLS connection from an address and sends text on it.
func (p securePort) sends(from, text string) net.Conn {
	p.Helper()
	raw := p.dial(from)
	c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, ServerName: webhook}) //nolint:gosec // its certificate is not what is tested
	if err := c.HandshakeContext(p.Context()); err == nil {
		_, _ = io.WriteString(c, text) // the port may close it meanwhile
	}
	return raw
}

// apiServer is a client with connections from one address, which asks as the API server does.
func (p securePort) apiServer(from string) func() (code int, body string) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{ // it may be long until a busy machine runs the port
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: webhook}, //nolint:gosec // as above
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(ctx, network, address)
		},
	}}
	p.Cleanup(client.CloseIdleConnections)
	return func() (int, string) {
		p.Helper()
		r, err := http.NewRequestWithContext(p.Context(), http.MethodPost, "https://"+p.address+"/admission/config", strings.NewReader(reviewed))
		require.NoError(p, err)
		r.Header["Idempotency-Key"] = nil // asked again if the connection was closed to make room
		return answer(p.T, client, r)
	}
}

func answer(t *testing.T, client *http.Client, r *http.Request) (code int, body string) {
	t.Helper()
	response, err := client.Do(r)
	if !assert.NoError(t, err) {
		return 0, ""
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(raw)
}

const reviewed = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","namespace":"ls","name":"lodestone-config",
	"operation":"UPDATE","resource":{"version":"v1","resource":"configmaps"},"object":{"data":{"config.yaml":"apiVersion: lodestone.io/v1alpha1\nkind: Config\n"}}}}`

// open counts the connections that the port has not closed. The port takes them in order: when it
// has answered a new one, it has taken all before, and closed those that had to make room.
func (p securePort) open(conns []net.Conn) (n int) {
	p.Helper()
	next := tls.Client(p.dial("127.0.6.1"), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // as above
	require.NoError(p, next.HandshakeContext(p.Context()))
	next.Close()
	buffer := make([]byte, 1<<10)
	for _, c := range conns {
		raw, err := c.(*net.TCPConn).SyscallConn()
		require.NoError(p, err)
		require.NoError(p, raw.Control(func(fd uintptr) {
			read := 1
			for read > 0 {
				read, err = unix.Read(int(fd), buffer)
			}
		}))
		if errors.Is(err, unix.EAGAIN) { // neither the end nor a reset is there
			n++
		}
	}
	return n
}

// Strangers open connections to the webhook's port and hold them, silent, in the middle of a
// header, or in the middle of a review. The port never has more than its bounds, the API
// server's reviews are answered in their time, and so are the kubelet's probes.
func TestStrangersAtTheSecurePort(t *testing.T) {
	p := serveSecurePort(t)
	ask := p.apiServer("127.0.0.2")
	kubelet := &http.Client{Timeout: 30 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // as the kubelet
	t.Cleanup(kubelet.CloseIdleConnections)
	goesOn := func() {
		t.Helper()
		code, body := ask()
		require.Equal(t, http.StatusOK, code, body)
		require.Contains(t, body, `"allowed":true`)
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+p.address+"/readyz", nil)
		require.NoError(t, err)
		code, body = answer(t, kubelet, r)
		require.Equal(t, http.StatusOK, code, body)
	}
	goesOn()
	var all []net.Conn
	for i := range 3 * debughttp.MaxConns {
		from := fmt.Sprintf("127.0.1.%d", 1+i%(debughttp.MaxConns/2))
		if i%8 > 0 {
			all = append(all, p.dial(from))
		} else {
			all = append(all, p.sends(from, "POST /admission/config HTTP/1.1\r\nHost: x\r\nX: "))
		}
		if i%debughttp.MaxConnsOfSource == 0 {
			goesOn()
		}
	}
	held := p.open(all)
	require.LessOrEqual(t, held, debughttp.MaxConns)
	require.Greater(t, held, debughttp.MaxConns/2, "the bound was reached")
	goesOn()

	var one []net.Conn
	for range 3 * debughttp.MaxConnsOfSource {
		one = append(one, p.dial("127.0.3.1"))
	}
	require.LessOrEqual(t, p.open(one), debughttp.MaxConnsOfSource)

	// Reviews that never end take the places of the others, as long as somebody sends them.
	ctx, stop := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		for ctx.Err() == nil {
			p.sends("127.0.4.1", "POST /admission/config HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
			time.Sleep(50 * time.Millisecond)
		}
	})
	assert.Eventually(t, func() bool { code, _ := ask(); return code == http.StatusServiceUnavailable }, time.Minute, 10*time.Millisecond,
		"both places are taken")
	stop()
	sending.Wait()
	begin := time.Now()
	require.Eventually(t, func() bool { code, _ := ask(); return code == http.StatusOK }, time.Minute, 10*time.Millisecond)
	require.Less(t, time.Since(begin), 30*time.Second, "a review may take 3 s to arrive")
	goesOn()
}

// A connection whose requests have a valid token, such as one that streams to the dashboard, outlasts those of strangers, even
// of strangers behind the same proxy.
func TestAnAuthenticatedConnectionOutlastsOthers(t *testing.T) {
	p := serveSecurePort(t, func(_ *process, c *config.CompletedConfig) {
		anonymous, rules := c.Authentication.Authenticator, c.Authorization.Authorizer
		c.Authentication.Authenticator = authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
			if r.Header.Get("Authorization") != "Bearer good" {
				return anonymous.AuthenticateRequest(r)
			}
			r.Header.Del("Authorization")
			return &authenticator.Response{User: &user.DefaultInfo{Name: "prometheus"}}, true, nil
		})
		c.Authorization.Authorizer = authorizer.AuthorizerFunc(func(ctx context.Context, a authorizer.Attributes) (authorizer.Decision,
			string, error) {
			if a.GetUser().GetName() == "prometheus" {
				return authorizer.DecisionAllow, "", nil
			}
			return rules.Authorize(ctx, a)
		})
	})
	c := tls.Client(p.dial("127.0.0.2"), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // as above
	in := bufio.NewReader(c)
	scrape := func() {
		t.Helper()
		_, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n")
		require.NoError(t, err)
		response, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		defer response.Body.Close()
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode)
	}
	scrape()
	var all []net.Conn
	for range 3 * debughttp.MaxConnsOfSource {
		all = append(all, p.dial("127.0.0.2"))
	}
	require.Equal(t, debughttp.MaxConnsOfSource-1, p.open(all))
	scrape()
}

// Strangers send headers and reviews as long as they are let, on every connection that they
// get: what the controller keeps of them is a fraction of its memory.
func TestStrangersFillNoMemory(t *testing.T) {
	p := serveSecurePort(t)
	before, most := testcost.Live(), int64(0)
	var all []net.Conn
	long := "GET /readyz HTTP/1.1\r\nHost: x\r\nX: " + string(bytes.Repeat([]byte("x"), 1<<20-200))
	for i := range debughttp.MaxConns {
		all = append(all, p.sends(fmt.Sprintf("127.0.5.%d", 1+i/debughttp.MaxConnsOfSource), long))
		most = max(most, testcost.Live()-before)
	}
	t.Logf("%d connections open, peak %d MiB", p.open(all), most>>20)
	require.Less(t, most, int64(32<<20), "a fraction of the chart's limit of 512 MiB")
}

// Strangers send what is no TLS, invented tokens, and certificates of their own, whose numbers may be as long as they like. All of
// that is for debugging. The framework would log each such request, with the numbers.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	create := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		require.NoError(t, err)
		return f
	}
	logged, framework := create("ours"), create("framework's")
	klog.LogToStderr(false)
	klog.SetOutput(framework)
	t.Cleanup(func() { klog.LogToStderr(true) })
	p := serveSecurePort(t, func(p *process, c *config.CompletedConfig) {
		p.log = slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
		c.Authentication.Authenticator = authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
			return nil, false, errors.New("verifying certificate SN=forged failed")
		})
	})
	for range 20 {
		raw := p.dial("127.0.7.1")
		_, err := io.WriteString(raw, "no TLS\n")
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, raw)
		require.NoError(t, err)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // as above
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+p.address+"/metrics", nil)
		require.NoError(t, err)
		code, body := answer(t, client, r)
		require.Contains(t, []int{http.StatusUnauthorized, http.StatusTooManyRequests}, code, body)
	}
	text, err := os.ReadFile(framework.Name())
	require.NoError(t, err)
	assert.NotContains(t, string(text), "forged")
	text, err = os.ReadFile(logged.Name())
	require.NoError(t, err)
	for what, least := range map[string]int{"TLS handshake error": 20, "SN=forged": 10} {
		n := 0
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, what) {
				assert.Contains(t, line, "level=DEBUG")
				n++
			}
		}
		assert.GreaterOrEqual(t, n, least, what)
	}
}
