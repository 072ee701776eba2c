package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile is the machine's, not the repository's: the namespaces and the
// cgroup have fixed names.
const lockFile = "/run/lodestone-lab.lock"

// lock waits until no other program is bringing a lab up or down. The lock
// ends with its holder, however that ends.
func lock(ctx context.Context, progress func(string, ...any)) (release func(), err error) {
	file, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for waited := false; ; waited = true {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", lockFile, err)
		}
		if !waited {
			progress("another program is bringing the machine's lab up or down: waiting")
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("wait for lock %s: %w", lockFile, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Root looks for the main module from the working directory upwards.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		raw, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(raw), "module github.com/lodestone-lb/lodestone\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("find repository root: no go.mod of lodestone here or above")
		}
	}
}

// env describes the lab to shell scripts.
func (c *Cluster) env() string {
	return fmt.Sprintf("KUBECONFIG=%s\nNODES=%q\nCLIENT=%s\nCONTROL_PLANE=%s\nVIPS=%q\n",
		c.Kubeconfig(), strings.Join(c.nodes, " "), c.namespace(Client), c.namespace(ControlPlane),
		strings.Join(c.vips(), " "))
}

// poll tries until the condition holds or the context ends, and then returns
// the condition's last complaint.
func poll(ctx context.Context, interval time.Duration, condition func() error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		var fatal fatalError
		if errors.As(err, &fatal) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-ticker.C:
		}
	}
}

// fatalError ends a poll early: waiting will not help.
type fatalError struct{ error }

func (e fatalError) Unwrap() error { return e.error }
