package lab

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/image"
)

// Images of the lab. The registry does not exist; package registry has one that does.
const (
	registry   = "lab.local"
	pauseImage = registry + "/pause:1"
	// EchoImage is the workload: see package echo.
	EchoImage = registry + "/echo:dev"
)

// unprivileged is the user of images whose program needs no rights.
const unprivileged = "65532:65532"

// programs is what was built before anything starts.
type programs struct {
	bin    string
	images []image.Image
}

// kubernetes returns the path by which the one binary is that program.
func (p programs) kubernetes(name string) string { return filepath.Join(p.bin, name) }

// build makes the programs and the images.
func (c *Cluster) build(ctx context.Context) (programs, error) {
	p := programs{bin: c.path("bin")}
	if err := c.linkPrograms(ctx, p.bin); err != nil {
		return p, err
	}
	for name, ref := range map[string]string{"pause": pauseImage, "echo": EchoImage} {
		binary, err := c.builder.Own(ctx, name)
		if err != nil {
			return p, err
		}
		p.images = append(p.images, image.Image{Ref: ref, Binary: binary, User: unprivileged})
	}
	if c.NoLodestone {
		return p, nil
	}
	ours, err := c.lodestoneImages(ctx)
	p.images = append(p.images, ours...)
	return p, err
}

// linkPrograms fills the folder that Command puts in front of the PATH.
func (c *Cluster) linkPrograms(ctx context.Context, bin string) error {
	kubernetes, err := c.builder.Kubernetes(ctx)
	if err != nil {
		return err
	}
	helm, err := c.builder.Helm(ctx)
	if err != nil {
		return err
	}
	return link(bin, map[string]string{
		etcd: kubernetes, apiServer: kubernetes, controllerManager: kubernetes, scheduler: kubernetes,
		"kubelet": kubernetes, "kube-proxy": kubernetes, "kubectl": kubernetes,
		"helm":      helm,
		"lodestone": filepath.Join(c.Root, "bin", "lodestone"),
	})
}

func link(dir string, targets map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("link programs: %w", err)
	}
	for name, target := range targets {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("link programs: %w", err)
		}
	}
	return nil
}

// Import gives every node the images, as if it had pulled them.
func (c *Cluster) Import(ctx context.Context, images ...image.Image) error {
	dir, err := os.MkdirTemp(c.dir, "images-")
	if err != nil {
		return fmt.Errorf("import images: %w", err)
	}
	defer os.RemoveAll(dir)
	archives, err := write(images, dir)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range c.nodes {
		group.Go(func() error { return c.importInto(ctx, c.containerdSocket(node), archives) })
	}
	return group.Wait()
}

// write writes archives of the images into the folder.
func write(images []image.Image, dir string) (archives []string, err error) {
	for _, i := range images {
		archive := filepath.Join(dir, filepath.Base(i.Binary)+".tar")
		if err := i.Write(archive); err != nil {
			return nil, err
		}
		archives = append(archives, archive)
	}
	return archives, nil
}

// importInto gives a containerd the images.
func (c *Cluster) importInto(ctx context.Context, socket string, archives []string) error {
	for _, archive := range archives {
		cmd := exec.CommandContext(ctx, "ctr", "--address", socket, "--namespace", "k8s.io",
			"images", "import", "--snapshotter", c.snapshotter, archive)
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("import %s by %s: %w: %s", filepath.Base(archive), socket, err, output)
		}
	}
	return nil
}

// findSnapshotter returns what keeps the files of containers in a folder: overlayfs, which copies none of them, or native, which
// works everywhere, and so also where the folder is on an overlay itself.
func findSnapshotter(dir string) (string, error) {
	trial, err := os.MkdirTemp(dir, ".overlay-")
	if err != nil {
		return "", fmt.Errorf("try overlayfs: %w", err)
	}
	defer os.RemoveAll(trial)
	parts := map[string]string{}
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		parts[name] = filepath.Join(trial, name)
		if err := os.Mkdir(parts[name], 0o700); err != nil {
			return "", fmt.Errorf("try overlayfs: %w", err)
		}
	}
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", parts["lower"], parts["upper"], parts["work"])
	if unix.Mount("overlay", parts["merged"], "overlay", 0, layers) != nil {
		return "native", nil
	}
	return "overlayfs", unix.Unmount(parts["merged"], 0)
}
