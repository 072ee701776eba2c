package lab

import (
	"cmp"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/image"
	"github.com/lodestone-lb/lodestone/test/e2e/lock"
)

// stock gives every node a folder for containerd that has the images already. Unpacking them takes each containerd some seconds of a
// processor, so it is done once, and the nodes have links to the files.
func (c *Cluster) stock(ctx context.Context, images []image.Image) error {
	key, err := stockKey(images, c.snapshotter)
	if err != nil {
		return err
	}
	cache := filepath.Join(c.Root, ".cache", "lab")
	of := filepath.Join(cache, fmt.Sprintf("images-%d-", len(images))) // labs without Lodestone have fewer
	held, err := lock.First(ctx, c.Progress, lock.New(filepath.Join(cache, ".images.lock")))
	if err != nil {
		return err
	}
	defer held.Release()
	if _, err := os.Stat(of + key); err != nil {
		old, _ := filepath.Glob(of + "*")
		for _, dir := range old {
			if err := os.RemoveAll(dir); err != nil {
				return fmt.Errorf("remove old images: %w", err)
			}
		}
		if err := c.unpack(ctx, images, of+key); err != nil {
			return err
		}
	}
	for _, node := range c.nodes {
		if err := errors.Join(os.MkdirAll(c.path(node), 0o755), linkAll(of+key, c.path(node, "containerd"))); err != nil {
			return err
		}
	}
	return nil
}

// stockKey identifies the images by what the Go command knows their programs by.
func stockKey(images []image.Image, snapshotter string) (string, error) {
	hash := sha256.New()
	fmt.Fprintln(hash, snapshotter)
	for _, i := range slices.SortedFunc(slices.Values(images), func(i, j image.Image) int { return cmp.Compare(i.Ref, j.Ref) }) {
		binary, err := elf.Open(i.Binary)
		if err != nil {
			return "", fmt.Errorf("read %s: %w", i.Binary, err)
		}
		defer binary.Close()
		section := binary.Section(".note.go.buildid")
		if section == nil {
			return "", fmt.Errorf("read %s: it has no build ID of Go", i.Binary)
		}
		id, err := section.Data()
		if err != nil {
			return "", fmt.Errorf("read the build ID of %s: %w", i.Binary, err)
		}
		fmt.Fprintf(hash, "%s %s %x\n", i.Ref, i.User, id)
	}
	return fmt.Sprintf("%x", hash.Sum(nil)[:8]), nil
}

// unpack makes a folder of containerd with the images. The folder is there when all has worked.
func (c *Cluster) unpack(ctx context.Context, images []image.Image, dir string) (err error) {
	partial := filepath.Join(filepath.Dir(dir), ".images")
	root, socket := filepath.Join(partial, "root"), filepath.Join(partial, "containerd.sock")
	if err := errors.Join(os.RemoveAll(partial), os.MkdirAll(partial, 0o755)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(partial)) }()
	archives, err := write(images, partial)
	if err != nil {
		return err
	}
	config := filepath.Join(partial, "containerd.toml")
	if err := os.WriteFile(config, []byte("version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n"), 0o600); err != nil {
		return err
	}
	log := &strings.Builder{}
	runtime := exec.Command("containerd", "--config="+config, "--root="+root, "--state="+filepath.Join(partial, "state"), "--address="+socket)
	runtime.SysProcAttr, runtime.Stderr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}, log
	if err := runtime.Start(); err != nil {
		return err
	}
	running, over := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		defer over()
		ended <- runtime.Wait()
	}()
	end := sync.OnceValue(func() error {
		runtime.Process.Signal(unix.SIGTERM) //nolint:errcheck // it has ended, perhaps
		return <-ended
	})
	defer func() {
		if err != nil {
			err = fmt.Errorf("unpack images: %w: %s", errors.Join(err, end()), log)
		}
	}()
	up, cancel := context.WithTimeout(running, time.Minute)
	defer cancel()
	if err := poll(up, 50*time.Millisecond, func() error { return dials(socket) }); err != nil {
		return err
	}
	if err := c.importInto(running, socket, archives); err != nil {
		return err
	}
	if err := end(); err != nil {
		return err
	}
	return os.Rename(root, dir)
}

// dials reports whether a program listens on the socket.
func dials(socket string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// linkAll makes a folder like another one, whose files are never written to, but for databases.
func linkAll(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return errors.Join(os.Mkdir(target, 0o700), os.Chmod(target, info.Mode().Perm()))
		}
		if filepath.Ext(path) != ".db" && os.Link(path, target) == nil {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return errors.Join(os.WriteFile(target, content, 0o600), os.Chmod(target, info.Mode().Perm()))
	})
}
