package apiclient

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// late is how much later than it should be something may happen on a busy machine.
const late = 10 * time.Second

// A pod without a token is a pod, and nothing but the error is on its standard error.
func TestWhereTheAPIServerIs(t *testing.T) {
	var log bytes.Buffer
	klog.LogToStderr(false)
	klog.SetOutput(&log)
	defer klog.LogToStderr(true)
	t.Setenv("KUBERNETES_SERVICE_HOST", "203.0.113.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	if _, err := os.Stat("/var/run/secrets/kubernetes.io/serviceaccount/token"); err != nil { // this is no pod
		_, err := Load("", "")
		require.ErrorContains(t, err, "find the API server as a pod does: open /var/run/secrets/kubernetes.io/serviceaccount/token: no such file")
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := Load("", "")
	require.EqualError(t, err, "find the API server: this is no pod: name a file by --kubeconfig")
	config, err := Load("https://203.0.113.1:6443", "")
	require.NoError(t, err)
	require.Equal(t, "https://203.0.113.1:6443", config.Host)
	empty := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	_, err = Load("", empty)
	require.EqualError(t, err, "--kubeconfig: "+empty+" has no cluster in it")
	klog.Flush()
	require.Empty(t, log.String())
}

// servers are the API servers of a cluster, and what chooses one for each connection, by
// turns.
type servers struct {
	t       *testing.T
	all     []*httptest.Server
	host    string   // of that which chooses
	watched chan int // the servers that are asked for a watch

	mu      sync.Mutex
	turn    int
	frozen  map[int]bool      // those that hang: what they are sent waits
	carried map[net.Conn]bool // connections, so that they end with the test
	served  map[int]int       // connections, by server
}

// startServers starts API servers that know their version, and endless watches.
func startServers(t *testing.T, n int) *servers {
	t.Helper()
	s := &servers{t: t, watched: make(chan int, 9), frozen: map[int]bool{}, carried: map[net.Conn]bool{}, served: map[int]int{}}
	for i := range n {
		server := httptest.NewUnstartedServer(answerAs(i, s.watched))
		server.EnableHTTP2 = true
		server.StartTLS()
		s.all = append(s.all, server)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.host = "https://" + listener.Addr().String()
	var running sync.WaitGroup
	running.Go(func() { s.choose(listener, &running) })
	t.Cleanup(func() {
		listener.Close()
		s.mu.Lock()
		for conn := range s.carried {
			conn.Close()
		}
		s.mu.Unlock()
		running.Wait()
		for _, server := range s.all {
			server.CloseClientConnections()
			server.Close()
		}
	})
	return s
}

// answerAs is what API servers do: the version, and a watch of which nothing comes. Which server
// has the watch is not known before: a handshake that takes long has another one beside it.
func answerAs(server int, watched chan<- int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			fmt.Fprint(w, `{"major":"1","minor":"36"}`)
			return
		}
		watched <- server
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

// choose carries each connection to the next server.
func (s *servers) choose(listener net.Listener, running *sync.WaitGroup) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		to := s.turn % len(s.all)
		s.turn++
		s.served[to]++
		s.mu.Unlock()
		server, err := net.Dial("tcp", s.all[to].Listener.Addr().String())
		if err != nil {
			client.Close()
			continue
		}
		s.mu.Lock()
		s.carried[client], s.carried[server] = true, true
		s.mu.Unlock()
		running.Go(func() { s.carry(client, server, to) })
		running.Go(func() { s.carry(server, client, to) })
	}
}

// carry passes on what it reads, unless the server hangs: then that is lost.
func (s *servers) carry(from, to net.Conn, server int) {
	defer from.Close()
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		s.mu.Lock()
		frozen := s.frozen[server]
		s.mu.Unlock()
		if frozen {
			continue
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// freeze has the server hang, or go on.
func (s *servers) freeze(server int, frozen bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen[server] = frozen
}

// connections returns how many a server had so far.
func (s *servers) connections(server int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.served[server]
}

// config returns the configuration of clients.
func (s *servers) config() *rest.Config {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "ca.crt")
	require.NoError(s.t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.all[0].Certificate().Raw}), 0o600))
	return &rest.Config{Host: s.host, BearerToken: "token", TLSClientConfig: rest.TLSClientConfig{CAFile: file}}
}

// use returns a client and its transport.
func use(t *testing.T, config *rest.Config) (kubernetes.Interface, *Transport) {
	t.Helper()
	transport, err := Use(config)
	require.NoError(t, err)
	t.Cleanup(transport.conns.CloseAll)
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	return client, transport
}

// watch returns what is closed when a watch that was opened now ends.
func watch(t *testing.T, client kubernetes.Interface) <-chan time.Time {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := client.CoreV1().RESTClient().Get().Resource("nodes").VersionedParams(&metav1.ListOptions{Watch: true},
		metav1.ParameterCodec).Stream(ctx)
	require.NoError(t, err)
	ended := make(chan time.Time, 1)
	var reading sync.WaitGroup
	reading.Go(func() {
		_, _ = io.Copy(io.Discard, stream)
		ended <- time.Now()
	})
	t.Cleanup(func() { cancel(); stream.Close(); reading.Wait() })
	return ended
}

// version asks for it, and returns how long the answer took.
func version(t *testing.T, client kubernetes.Interface) time.Duration {
	t.Helper()
	start := time.Now()
	_, err := client.Discovery().ServerVersion()
	require.NoError(t, err)
	return time.Since(start)
}

// An API server hangs: its kernel still acknowledges what it is sent. The watch ends within
// SilenceTimeout, and the next request is answered by another server, although the next
// connection, too, leads to the one that hangs.
func TestHangingServer(t *testing.T) {
	t.Parallel()
	s := startServers(t, 2)
	client, _ := use(t, s.config())
	ended, hangs := watch(t, client), <-s.watched
	s.freeze(hangs, true)
	start := time.Now()
	select {
	case at := <-ended:
		assert.Less(t, at.Sub(start), SilenceTimeout+late)
	case <-time.After(SilenceTimeout + late):
		t.Fatal("the watch goes on")
	}
	s.mu.Lock()
	s.turn = hangs
	s.mu.Unlock()
	before, others := s.connections(hangs), s.connections(1-hangs)
	took := version(t, client)
	assert.Greater(t, s.connections(hangs), before, "the next one led to it, too")
	assert.Greater(t, s.connections(1-hangs), others)
	assert.Less(t, took, attemptTimeout, "the first attempt was not waited for")
	assert.GreaterOrEqual(t, took, hedgeDelay)
}

// An API server that does answer, though late, keeps its connection.
func TestSlowServer(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	client, _ := use(t, s.config())
	ended := watch(t, client)
	time.Sleep(SilenceTimeout + time.Second)
	opened := s.connections(0) // with those beside a handshake that took long
	for range 2 {
		version(t, client)
		time.Sleep(SilenceTimeout + time.Second)
	}
	version(t, client)
	assert.Empty(t, ended)
	assert.Equal(t, opened, s.connections(0))
}

// Of two API servers, of which the route to their address chooses one for each connection,
// one loses power: packets are lost, and nobody sends a reset. The watch ends within
// SilenceTimeout, and the next request is answered by the other one.
func TestServerWithoutPower(t *testing.T) {
	t.Parallel()
	segment := testnet.NewSegment(t, 3)
	watched := make(chan int, 1)
	var certificate []byte
	for i, host := range segment.Hosts[:2] {
		server := httptest.NewUnstartedServer(answerAs(i, watched))
		server.EnableHTTP2 = true
		server.Listener.Close()
		host.Run("ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
		require.NoError(t, host.Do(func() (err error) { server.Listener, err = net.Listen("tcp", "192.0.2.1:6443"); return err }))
		server.StartTLS()
		certificate = server.Certificate().Raw
		t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	}
	node := segment.Hosts[2]
	node.Run("sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1")
	node.Run("ip", "route", "add", "192.0.2.1/32", "nexthop", "via", "198.18.0.1", "nexthop", "via", "198.18.0.2")
	config := &rest.Config{Host: "https://192.0.2.1:6443", TLSClientConfig: rest.TLSClientConfig{ServerName: "example.com",
		CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})}}
	config.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = node.Do(func() error { conn, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
		return conn, err
	}
	client, _ := use(t, config)
	ended, lost := watch(t, client), <-watched
	segment.Switch.Run("ip", "link", "set", fmt.Sprintf("p%d", lost+1), "down")
	start := time.Now()
	select {
	case at := <-ended:
		t.Logf("the watch ended after %s", at.Sub(start))
	case <-time.After(SilenceTimeout + late):
		t.Fatal("the watch goes on")
	}
	// All attempts lead to the one that is lost in one case of eight.
	require.Eventually(t, func() bool { _, err := client.Discovery().ServerVersion(); return err == nil }, 9*attemptTimeout, time.Millisecond)
	t.Logf("another server answered %s after the loss", time.Since(start))
}

// A question without an answer is asked again over a connection of its own; if that one is
// answered, watches begin anew.
func TestRenew(t *testing.T) {
	t.Parallel()
	s := startServers(t, 2)
	client, transport := use(t, s.config())
	require.NoError(t, transport.Ask(t.Context()))
	ended, hangs := watch(t, client), <-s.watched
	s.freeze(hangs, true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, transport.Ask(ctx), context.DeadlineExceeded)
	assert.Empty(t, ended, "it is soon for that")
	require.NoError(t, transport.Renew(t.Context()))
	<-ended
	require.NoError(t, transport.Ask(t.Context()))

	s.freeze(1-hangs, true)
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.Error(t, transport.Renew(ctx), "nobody answers")
}

// Certificates may change while the program runs.
func TestFilesAreReadForEachConnection(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	config := s.config()
	client, transport := use(t, config)
	version(t, client)
	transport.conns.CloseAll()
	require.NoError(t, os.WriteFile(transport.config.CAFile, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), 0o600))
	_, err := client.Discovery().ServerVersion()
	require.Error(t, err)
}
