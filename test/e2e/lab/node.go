package lab

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"text/template"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/pki"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

//go:embed files
var files embed.FS

// ownMachine is a shell script that makes a node a machine of its own for
// everything that runs on it: /sys shows its network interfaces, and /run,
// /var/lib and /var/log are nobody else's. What kubelet sets of the kernel, which no namespace has of its own, goes
// into files: the machine that the lab is on keeps its settings. All mounts are in a mount namespace
// and go with its last process, so there is never one to clean up.
const ownMachine = `set -e
mount --rbind /sys/fs/cgroup "$1/cgroup"
umount --lazy --recursive /sys
mount -t sysfs sysfs /sys
mount --move "$1/cgroup" /sys/fs/cgroup
mount -t tmpfs tmpfs /run
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  mkdir -p "/run/kernel/${setting%/*}"
  cat "/proc/sys/$setting" >"/run/kernel/$setting"
  mount --bind "/run/kernel/$setting" "/proc/sys/$setting"
done
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
mount --make-rshared /
shift
exec "$@"`

// nodeFiles is what the templates in files/ are filled in with.
type nodeFiles struct {
	Dir           string
	PauseImage    string
	Snapshotter   string
	Registries    string
	CgroupRoot    string
	CA            string
	Serving       pki.Pair
	PodCIDRs      []netip.Prefix
	DefaultRoutes []netip.Prefix
}

// startNode starts a node's programs and returns when it is ready for pods.
// Kubelet waits for the control plane, which may start at the same time.
func (c *Cluster) startNode(ctx context.Context, node string, p programs, controlPlane <-chan struct{}) error {
	if err := c.writeNodeFiles(node); err != nil {
		return fmt.Errorf("write files of node %s: %w", node, err)
	}
	runtime, err := c.startContainerd(ctx, node)
	if err != nil {
		return err
	}
	select {
	case <-controlPlane:
	case <-ctx.Done():
		return ctx.Err()
	}
	for _, spec := range []process.Spec{c.kubelet(node, p), c.kubeProxy(node, p)} {
		spec.Args = append([]string{"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", runtime.PID)}, spec.Args...)
		if err := c.startAt(node, spec); err != nil {
			return err
		}
	}
	return c.waitNode(ctx, node)
}

func (c *Cluster) writeNodeFiles(node string) error {
	dir := c.path(node)
	for _, sub := range []string{"cgroup", "cni", "lib", "log"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	fill := nodeFiles{
		Dir:        dir,
		PauseImage: pauseImage, Snapshotter: c.snapshotter,
		Registries: c.Registries(node),
		CgroupRoot: c.place.group().NodeRoot(node),
		CA:         c.certs.ca.Cert,
		Serving:    c.certs.kubelets[node],
		PodCIDRs:   c.podCIDRs(node),
	}
	for _, cidr := range fill.PodCIDRs {
		fill.DefaultRoutes = append(fill.DefaultRoutes, defaultRoute(cidr.Addr()))
	}
	for name, path := range map[string]string{
		"containerd.toml": "containerd.toml",
		"kubelet.yaml":    "kubelet.yaml",
		"cni.conflist":    "cni/10-lab.conflist",
	} {
		if err := fill.write(name, filepath.Join(dir, path)); err != nil {
			return err
		}
	}
	return nil
}

func (f nodeFiles) write(name, path string) error {
	t, err := template.ParseFS(files, "files/"+name)
	if err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(t.Execute(file, f), file.Close())
}

// Registries is the folder that is /etc/containerd/certs.d on a node: what containerd knows of registries.
func (c *Cluster) Registries(node string) string { return c.path(node, "certs.d") }

func (c *Cluster) containerdSocket(node string) string { return c.path(node, "containerd.sock") }

func (c *Cluster) startContainerd(ctx context.Context, node string) (*process.Process, error) {
	dir := c.path(node)
	p, err := c.processes.Start(process.Spec{
		Name:      "containerd-" + node,
		Namespace: c.Namespace(node),
		Args: []string{
			"unshare", "--mount", "--propagation=private", "sh", "-c", ownMachine, "sh", dir,
			"containerd", "--config=" + filepath.Join(dir, "containerd.toml"),
		},
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = poll(ctx, 50*time.Millisecond, func() error {
		if err := p.Check(); err != nil {
			return fatalError{err}
		}
		return dials(c.containerdSocket(node))
	})
	if err != nil {
		return nil, fmt.Errorf("wait for containerd of %s: %w", node, err)
	}
	return p, nil
}

func (c *Cluster) kubelet(node string, p programs) process.Spec {
	return process.Spec{Name: "kubelet-" + node, Args: []string{
		p.kubernetes("kubelet"),
		"--config=" + c.path(node, "kubelet.yaml"),
		"--kubeconfig=" + c.kubeconfigOf("kubelet-"+node),
		"--hostname-override=" + node,
		"--node-ip=" + join(c.ips(node)),
		"--cloud-provider=external",
		"--housekeeping-interval=1h", // nobody reads how much the machine's containers use
	}}
}

// proxyMode is the flag of kube-proxy.
const proxyMode = "--proxy-mode="

// SetProxyMode starts the node's kube-proxy again, in that mode, and waits until
// it is healthy.
func (c *Cluster) SetProxyMode(ctx context.Context, node, mode string) error {
	p, err := c.processes.Get("kube-proxy-" + node)
	if err != nil {
		return err
	}
	if err := p.Kill(ctx); err != nil {
		return err
	}
	for i, arg := range p.Args {
		if strings.HasPrefix(arg, proxyMode) {
			p.Args[i] = proxyMode + mode
		}
	}
	if err := p.Restart(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, func() error { return c.proxyReady(ctx, node) })
}

func (c *Cluster) kubeProxy(node string, p programs) process.Spec {
	return process.Spec{Name: "kube-proxy-" + node, Args: []string{
		p.kubernetes("kube-proxy"),
		"--kubeconfig=" + c.kubeconfigOf("kube-proxy"),
		"--hostname-override=" + node,
		proxyMode + c.ProxyMode,
		"--cluster-cidr=" + join(c.clusterCIDRs()),
		"--healthz-bind-address=0.0.0.0:10256",
		"--conntrack-max-per-core=0", // the limit is the machine's
	}}
}

// waitNode waits until the node and its kube-proxy are ready, and gives the
// node its pod subnets, which no controller of the lab allocates.
func (c *Cluster) waitNode(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	err := poll(ctx, 200*time.Millisecond, func() error { return c.nodeReady(ctx, node) })
	if err != nil {
		return fmt.Errorf("wait for node %s: %w", node, err)
	}
	if err := c.assignPodCIDRs(ctx, node); err != nil {
		return fmt.Errorf("assign pod subnets to node %s: %w", node, err)
	}
	err = poll(ctx, 200*time.Millisecond, func() error { return c.proxyReady(ctx, node) })
	if err != nil {
		return fmt.Errorf("wait for kube-proxy of %s: %w", node, err)
	}
	return nil
}

func (c *Cluster) nodeReady(ctx context.Context, name string) error {
	for _, program := range []string{"kubelet-", "kube-proxy-"} {
		p, err := c.processes.Get(program + name)
		if err == nil {
			err = p.Check()
		}
		if err != nil {
			return fatalError{err}
		}
	}
	client, err := c.Clientset()
	if err != nil {
		return err
	}
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, taint := range node.Spec.Taints { // taken off a moment after the node is ready
		if taint.Key == corev1.TaintNodeNotReady {
			return fmt.Errorf("tainted %s", taint.Key)
		}
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
			return fmt.Errorf("not ready: %s", condition.Message)
		} else if condition.Type == corev1.NodeReady {
			return nil
		}
	}
	return errors.New("no ready condition yet")
}

func (c *Cluster) assignPodCIDRs(ctx context.Context, node string) error {
	var spec corev1.NodeSpec
	for _, cidr := range c.podCIDRs(node) {
		spec.PodCIDRs = append(spec.PodCIDRs, cidr.String())
	}
	spec.PodCIDR = spec.PodCIDRs[0]
	patch, err := json.Marshal(map[string]any{"spec": spec})
	if err != nil {
		return err
	}
	client, err := c.Clientset()
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return err
}

func (c *Cluster) proxyReady(ctx context.Context, node string) error {
	transport := &http.Transport{DialContext: netns.Dialer(c.Namespace(node)), DisableKeepAlives: true}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10256/healthz", nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("health endpoint answers %s", response.Status)
	}
	return nil
}
