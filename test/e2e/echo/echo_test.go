package echo

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

func TestDatagramSurvivesAPayloadWithSeparators(t *testing.T) {
	want := Answer{Pod: "echo-7f", Node: "n2", Remote: "[2001:db8::1]:4000"}
	payload, got, err := ParseDatagram(want.Datagram([]byte("a|b|")))
	if err != nil || string(payload) != "a|b|" || got != want {
		t.Errorf("ParseDatagram = %q, %+v, %v", payload, got, err)
	}
	if _, _, err := ParseDatagram([]byte("stray")); err == nil {
		t.Error("a datagram of somebody else was accepted")
	}
}

func TestPacketsAreAnsweredWithNames(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go (&Server{Pod: "p", Node: "n1"}).ServePackets(conn)

	client, err := net.Dial("udp", conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Write([]byte("17")); err != nil {
		t.Fatal(err)
	}
	client.SetReadDeadline(time.Now().Add(30 * time.Second))
	buffer := make([]byte, 100)
	n, err := client.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	payload, got, err := ParseDatagram(buffer[:n])
	want := Answer{Pod: "p", Node: "n1", Remote: client.LocalAddr().String()}
	if err != nil || string(payload) != "17" || got != want {
		t.Errorf("answer = %q, %+v, %v", payload, got, err)
	}
}

func TestReadinessIsSwitchedByRequest(t *testing.T) {
	handler := (&Server{}).Handler()
	status := func(method string) int {
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequest(method, "/readyz", nil))
		return recorder.Code
	}
	for _, step := range []struct {
		method string
		want   int
	}{
		{http.MethodGet, http.StatusOK},
		{http.MethodDelete, http.StatusOK},
		{http.MethodGet, http.StatusServiceUnavailable},
		{http.MethodPut, http.StatusOK},
		{http.MethodGet, http.StatusOK},
	} {
		if got := status(step.method); got != step.want {
			t.Fatalf("%s /readyz = %d, want %d", step.method, got, step.want)
		}
	}
}

func TestStreamGoesOn(t *testing.T) {
	server := httptest.NewServer((&Server{Node: "n3"}).Handler())
	defer server.Close()
	response, err := http.Get(server.URL + "/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for i := range 3 {
		var answer Answer
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &answer) != nil || answer.Node != "n3" {
			t.Fatalf("line %d = %q", i, lines.Text())
		}
	}
}

func TestTermination(t *testing.T) {
	const grace = 50 * time.Millisecond
	for _, tt := range []struct {
		how       Termination
		ends      bool
		atLeast   time.Duration
		unreadied bool
	}{
		{Exit, true, 0, false},
		{Drain, true, grace, true},
		{Ignore, false, 0, false},
	} {
		t.Run(string(tt.how), func(t *testing.T) {
			asked, ask := context.WithCancel(t.Context())
			timeout := 5 * grace
			if tt.ends {
				timeout = time.Minute
			}
			broken, breakIt := context.WithTimeout(t.Context(), timeout)
			defer breakIt()
			server := &Server{Termination: tt.how, Grace: grace}
			ask()
			started := time.Now()
			server.serveOut(asked, broken)
			if ended := broken.Err() == nil; ended != tt.ends || time.Since(started) < tt.atLeast {
				t.Errorf("ended = %v after %s", ended, time.Since(started))
			}
			if got := server.unready.Load(); got != tt.unreadied {
				t.Errorf("unready = %v", got)
			}
		})
	}
}
