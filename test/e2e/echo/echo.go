// Package echo is the workload of the lab's pods: its answers over TCP and UDP
// name the pod and its node.
package echo

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Answer names the pod that answered. Over HTTP it is the JSON body.
type Answer struct {
	Pod    string `json:"pod"`
	Node   string `json:"node,omitempty"`
	Remote string `json:"remote"` // the client's address as the pod saw it
}

// separator divides the parts of a datagram; names of pods cannot hold it.
const separator = '|'

// Datagram is the answer to a UDP payload: the payload, then who answers.
func (a Answer) Datagram(payload []byte) []byte {
	return fmt.Appendf(bytes.Clone(payload), "|%s|%s|%s", a.Node, a.Pod, a.Remote)
}

// ParseDatagram takes the answer to a UDP payload apart.
func ParseDatagram(datagram []byte) (payload []byte, a Answer, err error) {
	parts := bytes.Split(datagram, []byte{separator})
	if len(parts) < 4 {
		return nil, Answer{}, fmt.Errorf("parse answer %q: want payload|node|pod|remote", datagram)
	}
	last := parts[len(parts)-3:]
	a = Answer{Node: string(last[0]), Pod: string(last[1]), Remote: string(last[2])}
	return bytes.Join(parts[:len(parts)-3], []byte{separator}), a, nil
}

// Termination is what the server does when it is asked to end.
type Termination string

// Terminations.
const (
	Exit   Termination = "exit"   // end at once
	Drain  Termination = "drain"  // not ready any more, serve on for the grace period
	Ignore Termination = "ignore" // serve on, ready, until killed
)

// Server answers on one port, TCP and UDP.
type Server struct {
	Pod, Node   string
	Port        int
	Termination Termination
	Grace       time.Duration

	unready atomic.Bool
}

// Run serves until the context ends, and then ends by the Termination.
func (s *Server) Run(ctx context.Context) error {
	address := fmt.Sprintf(":%d", s.Port)
	packets, err := net.ListenPacket("udp", address)
	if err != nil {
		return fmt.Errorf("listen for datagrams: %w", err)
	}
	// What comes while it has to wait for the processor is answered late, and not lost.
	if err := packets.(*net.UDPConn).SetReadBuffer(4 << 20); err != nil {
		return fmt.Errorf("make room for datagrams: %w", err)
	}
	web := &http.Server{Addr: address, Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}

	group, groupCtx := errgroup.WithContext(context.WithoutCancel(ctx))
	group.Go(web.ListenAndServe)
	group.Go(func() error { return s.ServePackets(packets) })
	group.Go(func() error {
		s.serveOut(ctx, groupCtx)
		return errors.Join(web.Close(), packets.Close())
	})
	err = group.Wait()
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// serveOut returns when it is time to end: asked to, or broken.
func (s *Server) serveOut(asked, broken context.Context) {
	select {
	case <-asked.Done():
	case <-broken.Done():
		return
	}
	switch s.Termination {
	case Drain:
		s.unready.Store(true)
		select {
		case <-time.After(s.Grace):
		case <-broken.Done():
		}
	case Ignore:
		<-broken.Done()
	}
}

// ServePackets answers datagrams until the connection is closed.
func (s *Server) ServePackets(conn net.PacketConn) error {
	buffer := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		answer := s.answer(from.String()).Datagram(buffer[:n])
		if to, err := netip.ParseAddrPort(straightTo(buffer[:n])); err == nil {
			from = net.UDPAddrFromAddrPort(to)
		}
		// A client that has gone is no reason to stop.
		_, _ = conn.WriteTo(answer, from)
	}
}

// straightTo is where the sender of a payload wants the answer, if that is somewhere else: what is after @.
func straightTo(payload []byte) string {
	_, to, _ := bytes.Cut(payload, []byte("@"))
	return string(to)
}

func (s *Server) answer(remote string) Answer {
	return Answer{Pod: s.Pod, Node: s.Node, Remote: remote}
}

// maxPadding is how many blanks an answer may have.
const maxPadding = 4 << 20

// Handler answers GET / once, with as many blanks after the answer as ?padding= asks for,
// and GET /stream line after line, GET /readyz by whether the pod is to get traffic, and PUT
// or DELETE /readyz switch that.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		padding, err := strconv.Atoi(cmp.Or(r.FormValue("padding"), "0"))
		if err != nil || padding < 0 || padding > maxPadding {
			http.Error(w, "padding: want a number of bytes", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(s.answer(r.RemoteAddr))
		_, _ = w.Write(bytes.Repeat([]byte{' '}, padding))
	})
	mux.HandleFunc("GET /stream", s.stream)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if s.unready.Load() {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("PUT /readyz", func(http.ResponseWriter, *http.Request) { s.unready.Store(false) })
	mux.HandleFunc("DELETE /readyz", func(http.ResponseWriter, *http.Request) { s.unready.Store(true) })
	return mux
}

// stream writes an answer every 10 ms for as long as the client listens.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	encoder, control := json.NewEncoder(w), http.NewResponseController(w)
	for {
		if encoder.Encode(s.answer(r.RemoteAddr)) != nil || control.Flush() != nil {
			return
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return
		}
	}
}
