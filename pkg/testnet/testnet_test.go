package testnet

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
)

func TestSegment(t *testing.T) {
	t.Parallel()
	s := NewSegment(t, 2)
	s.Hosts[0].Run("ping", "-c1", "-W10", "198.18.0.2")
	s.Hosts[0].Run("ping", "-c1", "-W10", "2001:db8::2")

	s.Plug(s.Hosts[0], "eth1")
	s.Hosts[0].Run("ip", "link", "show", "eth1")
}

func TestDoRunsInsideAndLeavesNoTrace(t *testing.T) {
	t.Parallel()
	outside, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHost(t, "do")
	for range 50 {
		err := h.Do(func() error {
			interfaces, err := net.Interfaces()
			if err == nil && len(interfaces) != 1 {
				t.Errorf("interfaces inside: %v, want lo alone", interfaces)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if now, _ := os.Readlink("/proc/thread-self/ns/net"); now != outside {
			t.Fatalf("the caller is in %s, was in %s", now, outside)
		}
	}
	if in := strings.TrimSpace(h.Run("readlink", "/proc/self/ns/net")); in == outside {
		t.Error("a command runs outside")
	}
}

// A function that fails the test on its thread does not hang who called it.
func TestDoEnds(t *testing.T) {
	t.Parallel()
	err := NewHost(t, "h").Do(func() error {
		runtime.Goexit()
		return nil
	})
	if err == nil {
		t.Error("no error")
	}
}

// A killed run leaves its namespaces; one that still runs keeps them.
func TestStaleNamespacesAreRemoved(t *testing.T) {
	t.Parallel()
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	live := NewHost(t, "live-one")
	start, err := startTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	stale := prefix + "stale-" + strconv.Itoa(dead.Process.Pid) + "-1-1"
	reused := prefix + "reused-" + strconv.Itoa(os.Getpid()) + "-" + start + "9-1"
	for _, name := range []string{stale, reused} {
		if err := onThread(func() error { h, err := netns.NewNamed(name); h.Close(); return err }); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeOf(directory, gone); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{stale: false, reused: false, live.Name: true} {
		if _, err := os.Stat(filepath.Join(directory, name)); (err == nil) != want {
			t.Errorf("%s: exists is %v, want %v", name, err == nil, want)
		}
	}
}
