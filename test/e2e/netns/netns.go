// Package netns runs code and programs inside the lab's named network
// namespaces, the ones `ip netns` lists.
package netns

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

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const directory = "/run/netns"

// Path returns the file that keeps the namespace alive.
func Path(name string) string { return filepath.Join(directory, name) }

// Create makes the namespace and leaves the caller where it was.
func Create(name string) error {
	return onOwnThread(func() error {
		handle, err := netns.NewNamed(name)
		if err != nil {
			return fmt.Errorf("create namespace %s: %w", name, err)
		}
		return handle.Close()
	})
}

// Delete removes the namespace's name; the namespace goes with its last
// process. A namespace that is not there is no error, nor is a name without one: a
// program that was killed left it, or another mount hides the namespace.
func Delete(name string) error {
	err := netns.DeleteNamed(name)
	if errors.Is(err, unix.EINVAL) { // nothing is mounted there
		err = os.Remove(Path(name))
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("delete namespace %s: %w", name, err)
	}
	return nil
}

// Kill ends all processes inside the namespace.
func Kill(name string) error {
	var inside unix.Stat_t
	if err := unix.Stat(Path(name), &inside); err != nil {
		return fmt.Errorf("look at namespace %s: %w", name, err)
	}
	all, failed := filepath.Glob("/proc/[0-9]*")
	for _, process := range all {
		var of unix.Stat_t
		if unix.Stat(process+"/ns/net", &of) != nil || of.Dev != inside.Dev || of.Ino != inside.Ino { // it may have ended
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(process))
		if err == nil {
			err = unix.Kill(pid, unix.SIGKILL)
		}
		if !errors.Is(err, unix.ESRCH) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// Do runs fn inside the namespace, on a thread of its own. Goroutines that fn
// starts are not inside.
func Do(name string, fn func() error) error {
	return onOwnThread(func() error {
		target, err := netns.GetFromName(name)
		if err != nil {
			return fmt.Errorf("open namespace %s: %w", name, err)
		}
		defer target.Close()
		if err := netns.Set(target); err != nil {
			return fmt.Errorf("enter namespace %s: %w", name, err)
		}
		return fn()
	})
}

// onOwnThread runs fn on a thread that may change its namespace. A thread that
// could not be brought back is left locked, so that it ends with its goroutine.
func onOwnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		origin, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("read own namespace: %w", err)
			return
		}
		defer origin.Close()
		err = fn()
		if netns.Set(origin) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Dialer returns a dial function whose sockets live in the namespace. The
// address must be numeric: resolving a name would leave the thread.
func Dialer(name string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		var conn net.Conn
		err := Do(name, func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}

// Command returns a command that will run inside the namespace. Unlike `ip
// netns exec` it leaves the mounts alone: kubelet needs to see the cgroups.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + Path(name), "--"}, args...)...)
}

// Netlink opens a netlink handle inside the namespace; the caller closes it.
func Netlink(name string) (*netlink.Handle, error) {
	target, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	defer target.Close()
	handle, err := netlink.NewHandleAt(target)
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", name, err)
	}
	return handle, nil
}
