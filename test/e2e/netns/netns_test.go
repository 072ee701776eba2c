package netns

import (
	"context"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

func newNamespace(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	const name = "ls-test-netns"
	_ = Delete(name)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Delete(name); err != nil {
			t.Error(err)
		}
	})
	return name
}

func TestDoSeesOnlyTheNamespace(t *testing.T) {
	name := newNamespace(t)
	var inside []net.Interface
	if err := Do(name, func() (err error) { inside, err = net.Interfaces(); return err }); err != nil {
		t.Fatal(err)
	}
	if len(inside) != 1 || inside[0].Name != "lo" {
		t.Errorf("interfaces inside = %v, want lo alone", inside)
	}
}

func TestCommandRunsInside(t *testing.T) {
	name := newNamespace(t)
	want, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	out, err := Command(t.Context(), name, "readlink", "/proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got == want {
		t.Errorf("namespace of the command = %s, the test's own", got)
	}
}

func TestDialerConnectsInside(t *testing.T) {
	name := newNamespace(t)
	handle, err := Netlink(name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	var listener net.Listener
	if err := Do(name, func() (err error) { listener, err = net.Listen("tcp", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	conn, err := Dialer(name)(ctx, "tcp", listener.Addr().String())
	if err != nil {
		t.Fatalf("dial inside: %v", err)
	}
	conn.Close()
	if outside, err := net.DialTimeout("tcp", listener.Addr().String(), time.Second); err == nil {
		outside.Close()
		t.Error("the listener answers outside its namespace")
	}
}

func TestDeleteOfAMissingNamespaceIsNoError(t *testing.T) {
	if err := Delete("ls-test-never-made"); err != nil {
		t.Error(err)
	}
}

// A program that is killed between two system calls leaves a name without a namespace.
func TestDeleteOfANameWithoutANamespace(t *testing.T) {
	const name = "ls-test-unmounted"
	if err := os.WriteFile(Path(name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Delete(name); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(Path(name)); !os.IsNotExist(err) {
		t.Errorf("the name is still there: %v", err)
	}
}
