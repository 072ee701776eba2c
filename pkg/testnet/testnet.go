// Package testnet gives tests fresh network namespaces: hosts, cables between
// them and segments. All is gone when the test ends; what a killed run left
// behind is removed by the next one.
//
//	testnet.go  Host, Connect and Segment
//	log.go      Log: the output of a program, read while it runs
package testnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	directory = "/run/netns"
	prefix    = "ls-t-"
)

var (
	removeStale = sync.OnceValue(func() error { return removeOf(directory, gone) })
	sequence    atomic.Int64
)

// Host is a network namespace.
type Host struct {
	// Name is its name to `ip netns`: ls-t-<name>-<pid>-<start>-<number>.
	Name   string
	t      testing.TB
	handle netns.NsHandle
}

// NewHost makes a host whose only interface is lo. Without root it fails the test, because a
// skipped test proves nothing.
func NewHost(t testing.TB, name string) *Host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("network namespaces need root")
	}
	if err := removeStale(); err != nil {
		t.Fatal(err)
	}
	start, err := startTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{Name: fmt.Sprintf("%s%s-%d-%s-%d", prefix, name, os.Getpid(), start, sequence.Add(1)), t: t}
	err = onThread(func() (err error) {
		if h.handle, err = netns.NewNamed(h.Name); err != nil {
			return err
		}
		return up("lo")
	})
	if err != nil {
		t.Fatalf("create namespace %s: %v", h.Name, err)
	}
	t.Cleanup(func() {
		if err := netns.DeleteNamed(h.Name); err != nil {
			t.Errorf("delete namespace %s: %v", h.Name, err)
		}
		h.handle.Close()
	})
	return h
}

// up brings an interface of the thread's namespace up. Here and below the kernel is asked without ip(8): tests make
// thousands of interfaces, and a program takes ten times as long to start.
func up(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

// Handle returns the namespace, valid until the test ends.
func (h *Host) Handle() *netns.NsHandle { return &h.handle }

// Do runs f on a thread inside the namespace. Sockets that f opens stay
// inside; goroutines that it starts are outside.
func (h *Host) Do(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(h.handle); err != nil {
			return fmt.Errorf("enter namespace %s: %w", h.Name, err)
		}
		return f()
	})
}

// Command returns a program to be run inside the namespace. Not through `ip
// netns exec`, which replaces /sys.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + filepath.Join(directory, h.Name), name}, args...)...)
}

// Run runs a program inside the namespace and returns its output. The test
// fails if the program does.
func (h *Host) Run(name string, args ...string) string {
	h.t.Helper()
	out, err := h.Command(context.Background(), name, args...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("%s: %s %s: %v\n%s", h.Name, name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// must is Do for what cannot fail.
func (h *Host) must(what string, f func() error) {
	h.t.Helper()
	if err := h.Do(f); err != nil {
		h.t.Fatalf("%s: %s: %v", h.Name, what, err)
	}
}

// Address gives an interface addresses with their prefix lengths, without duplicate address detection.
func (h *Host) Address(name string, addrs ...string) {
	h.t.Helper()
	h.must("address "+name, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, text := range addrs {
			addr, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			if addr.Broadcast = net.IPv4zero; addr.IP.To4() == nil { // that is none
				addr.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(link, addr); err != nil {
				return fmt.Errorf("%s: %w", text, err)
			}
		}
		return nil
	})
}

// Connect lays a cable between two hosts and brings both ends up.
func Connect(a *Host, aName string, b *Host, bName string) {
	a.t.Helper()
	connect(a, aName, b, bName, "")
}

// connect is Connect with the end on the first host a port of a bridge, if one is named.
func connect(a *Host, aName string, b *Host, bName, bridge string) {
	a.t.Helper()
	a.must("connect "+aName, func() error {
		cable := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: bName, PeerNamespace: netlink.NsFd(b.handle)}
		cable.Name, cable.Flags = aName, net.FlagUp
		if bridge != "" {
			master, err := netlink.LinkByName(bridge)
			if err != nil {
				return err
			}
			cable.MasterIndex = master.Attrs().Index
		}
		return netlink.LinkAdd(cable)
	})
	b.must("connect "+bName, func() error { return up(bName) })
}

// Segment is a switch with hosts.
type Segment struct {
	// Switch is the host of the bridge br0. Port p<number> leads to the
	// interface plugged in as that number, from 1.
	Switch *Host
	Hosts  []*Host
	ports  int
}

// NewSegment makes a switch with n hosts. Host i, from 0, is on port p<i+1>
// by its interface eth0 with addresses 198.18.0.<i+1>/24 and
// 2001:db8::<i+1>/64.
func NewSegment(t testing.TB, n int) *Segment {
	t.Helper()
	s := &Segment{Switch: NewHost(t, "switch")}
	s.Switch.Run("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	s.Switch.Run("ip", "link", "set", "br0", "up")
	for i := 1; i <= n; i++ {
		h := NewHost(t, "h"+strconv.Itoa(i))
		s.Plug(h, "eth0")
		h.Address("eth0", fmt.Sprintf("198.18.0.%d/24", i), fmt.Sprintf("2001:db8::%x/64", i))
		s.Hosts = append(s.Hosts, h)
	}
	return s
}

// Plug gives a host a new interface on the segment and returns the switch's
// port.
func (s *Segment) Plug(h *Host, name string) (port string) {
	h.t.Helper()
	s.ports++
	port = "p" + strconv.Itoa(s.ports)
	connect(s.Switch, port, h, name, "br0")
	return port
}

// onThread runs f on a thread of its own, which ends with f: nobody inherits
// its namespace. An f that fails the test there ends as well.
func onThread(f func() error) error {
	ended := make(chan error, 2)
	go func() {
		runtime.LockOSThread()
		defer func() { ended <- errors.New("the function ended the thread that it ran on") }()
		ended <- f()
	}()
	return <-ended
}

// removeOf removes our namespaces in dir whose process is gone.
func removeOf(dir string, gone func(pid, start string) bool) error {
	paths, err := filepath.Glob(filepath.Join(dir, prefix+"*"))
	if err != nil {
		return err
	}
	for _, p := range paths {
		parts := strings.Split(filepath.Base(p), "-")
		if len(parts) < 6 { // ls, t, a name that may have dashes, pid, start, number
			continue
		}
		if !gone(parts[len(parts)-3], parts[len(parts)-2]) {
			continue
		}
		err := netns.DeleteNamed(filepath.Base(p))
		if errors.Is(err, unix.EINVAL) { // another test's process has unmounted it already
			err = os.Remove(p)
		}
		if errors.Is(err, unix.EBUSY) { // ip netns add has mounted the folder over itself: what is below stays
			continue
		}
		if err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("delete stale namespace %s: %w", p, err)
		}
	}
	return nil
}

// gone reports whether the process that started at start no longer runs.
func gone(pid, start string) bool {
	id, err := strconv.Atoi(pid)
	if err != nil {
		return false // not a name of ours
	}
	now, err := startTime(id)
	return os.IsNotExist(err) || err == nil && now != start
}

// startTime returns when a process started, in ticks since the machine did
// (proc(5), /proc/pid/stat field 22).
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(string(stat), ") ") // the name before may hold anything
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", fmt.Errorf("read start of process %d: %d fields", pid, len(fields))
	}
	return fields[19], nil
}
