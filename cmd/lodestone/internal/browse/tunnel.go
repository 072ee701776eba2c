package browse

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
)

// Tunnel connects to a controller through the API server, as kubectl
// port-forward does, but opens no port on this machine.
type Tunnel struct {
	Client    kubernetes.Interface
	Config    *rest.Config
	Namespace string
}

// Transport returns the transport of requests through the tunnel. A controller makes its own certificate, so the
// API server and the kubelet vouch for who answers.
func (t *Tunnel) Transport() *http.Transport {
	return &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return t.dial(ctx) },
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, //nolint:gosec // see above
		TLSHandshakeTimeout: 10 * time.Second,
		IdleConnTimeout:     time.Minute,
	}
}

// dial connects to a controller that is ready.
func (t *Tunnel) dial(ctx context.Context) (net.Conn, error) {
	pod, port, err := t.controller(ctx)
	if err != nil {
		return nil, err
	}
	dialer, err := t.dialer(pod)
	if err != nil {
		return nil, err
	}
	connection, protocol, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, fmt.Errorf("forward a port to pod %s: %w", pod, err)
	}
	if protocol != portforward.PortForwardProtocolV1Name {
		connection.Close()
		return nil, fmt.Errorf("forward a port to pod %s: the API server speaks protocol %q", pod, protocol)
	}
	c, err := open(connection, port)
	if err != nil {
		connection.Close()
		return nil, fmt.Errorf("forward port %d to pod %s: %w", port, pod, err)
	}
	return c, nil
}

// controller returns a pod of the controller that is ready, and its port.
func (t *Tunnel) controller(ctx context.Context) (pod string, port int, err error) {
	list, err := t.Client.CoreV1().Pods(t.Namespace).List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=lodestone,app.kubernetes.io/component=controller"})
	if err != nil {
		return "", 0, fmt.Errorf("list the pods of the controller: %w", err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		if port := cluster.HTTPSPort(p); port != 0 && cluster.IsReady(p) {
			return p.Name, port, nil
		}
	}
	return "", 0, fmt.Errorf("namespace %s has no pod of the controller that is ready (of %d); lodestone status needs none", t.Namespace,
		len(list.Items))
}

// dialer returns what asks the API server for the connection: over WebSocket,
// or SPDY where something in between does not understand that.
func (t *Tunnel) dialer(pod string) (httpstream.Dialer, error) {
	url := t.Client.CoreV1().RESTClient().Post().Resource("pods").Namespace(t.Namespace).Name(pod).SubResource("portforward").URL()
	socket, err := portforward.NewSPDYOverWebsocketDialerForStreaming(url, t.Config)
	if err != nil {
		return nil, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(t.Config)
	if err != nil {
		return nil, err
	}
	plain := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	return portforward.NewFallbackDialerForStreaming(socket, plain, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	}), nil
}

// conn is a connection to a port of a pod.
type conn struct {
	httpstream.Stream
	connection httpstream.Connection
	failure    httpstream.Stream
	heard      bool
}

// open asks for a connection to the port.
func open(connection httpstream.Connection, port int) (*conn, error) {
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	failure, err := connection.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	failure.Close() // nothing is written to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := connection.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	return &conn{Stream: data, connection: connection, failure: failure}, nil
}

// Read reads. If nothing came, its error is why.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Stream.Read(b)
	if n > 0 {
		c.heard = true
	}
	if errors.Is(err, io.EOF) && !c.heard {
		if why, _ := io.ReadAll(io.LimitReader(c.failure, 1<<10)); len(why) > 0 {
			err = errors.New(string(why))
		}
	}
	return n, err
}

// Close ends the connection.
func (c *conn) Close() error { return c.connection.Close() }

// LocalAddr and RemoteAddr implement net.Conn.
func (c *conn) LocalAddr() net.Addr  { return &net.TCPAddr{} }
func (c *conn) RemoteAddr() net.Addr { return &net.TCPAddr{} }

// SetDeadline, SetReadDeadline and SetWriteDeadline implement net.Conn.
func (c *conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
