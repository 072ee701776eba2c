package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

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
		c.Kubeconfig(), strings.Join(c.nodes, " "), c.Namespace(Client), c.Namespace(ControlPlane),
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
