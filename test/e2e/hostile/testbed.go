package hostile

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lock"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/pki"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// machine lets one program at a time have a ground. It ends with its holder, so what the next
// one finds is of a run that was killed.
var machine = lock.New("/run/lodestone-hostile.lock")

// ground is where all of it runs: a switch, which has the API server and the controller on
// it, and nodes, each a network namespace of its own. It needs no lab, and runs beside one.
// The namespaces and the folder have fixed names, by which the next run finds what a killed
// one left. The programs of a killed one end with it.
type ground struct {
	root, dir  string
	progress   func(format string, args ...any)
	authority  *pki.Authority
	helm       string
	nodes      []string
	store, api *exec.Cmd
	serve      []string // the API server's command line
}

// control is the host that is the switch.
const control = "control"

var hosts = map[string]netip.Addr{
	control: netip.MustParseAddr("198.18.0.1"), "n1": netip.MustParseAddr("198.18.0.11"), "n2": netip.MustParseAddr("198.18.0.12"),
	"n3": netip.MustParseAddr("198.18.0.13"),
}

// prepare builds programs and makes the hosts.
func prepare(ctx context.Context, progress func(format string, args ...any)) (g *ground, err error) {
	g = &ground{progress: progress, nodes: []string{"n1", "n2", "n3"}, dir: filepath.Join(os.TempDir(), "lodestone-hostile")}
	if g.root, err = lab.Root(); err != nil {
		return nil, err
	}
	if err := machine.Acquire(ctx, progress); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.end())
		}
	}()
	if err := g.remove(); err != nil {
		return g, fmt.Errorf("remove what a killed run left: %w", err)
	}
	if err := os.Mkdir(g.dir, 0o700); err != nil {
		return g, err
	}
	builder := program.Builder{Root: g.root, Progress: progress}
	all, err := builder.Kubernetes(ctx)
	if err != nil {
		return g, err
	}
	if g.helm, err = builder.Helm(ctx); err != nil {
		return g, err
	}
	if _, err := builder.Lodestone(ctx); err != nil {
		return g, err
	}
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if err := os.Symlink(all, g.path(name)); err != nil {
			return g, err
		}
	}
	return g, g.wire()
}

func (g *ground) path(elem ...string) string {
	return filepath.Join(append([]string{g.dir}, elem...)...)
}

// host is the namespace of a host.
func (g *ground) host(name string) string { return "ls-hostile-" + name }

// end ends all of it, and lets the next run begin.
func (g *ground) end() (failed error) {
	defer machine.Release()
	for _, c := range []*exec.Cmd{g.api, g.store} {
		if c != nil {
			failed = errors.Join(failed, kill(c))
		}
	}
	return errors.Join(failed, g.remove())
}

// remove removes the namespaces and the folder, if they are there.
func (g *ground) remove() (failed error) {
	for name := range hosts {
		failed = errors.Join(failed, netns.Delete(g.host(name)))
	}
	return errors.Join(failed, os.RemoveAll(g.dir))
}

// wire makes the switch and plugs the nodes in.
func (g *ground) wire() error {
	if err := netns.Create(g.host(control)); err != nil {
		return err
	}
	handle, err := netns.Netlink(g.host(control))
	if err != nil {
		return err
	}
	defer handle.Close()
	a := netlink.NewLinkAttrs()
	a.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: a}
	if err := errors.Join(handle.LinkAdd(bridge), up(handle, "br0", hosts[control]), up(handle, "lo", netip.Addr{})); err != nil {
		return fmt.Errorf("make the switch: %w", err)
	}
	for _, name := range g.nodes {
		if err := g.plug(handle, bridge, name); err != nil {
			return fmt.Errorf("plug in %s: %w", name, err)
		}
	}
	return nil
}

func (g *ground) plug(h *netlink.Handle, master netlink.Link, name string) error {
	if err := netns.Create(g.host(name)); err != nil {
		return err
	}
	target, err := os.Open(netns.Path(g.host(name)))
	if err != nil {
		return err
	}
	defer target.Close()
	port := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "eth0", PeerNamespace: netlink.NsFd(target.Fd())}
	port.Name, port.MasterIndex = name, master.Attrs().Index
	inside, err := netns.Netlink(g.host(name))
	if err != nil {
		return err
	}
	defer inside.Close()
	return errors.Join(h.LinkAdd(port), h.LinkSetUp(port), up(inside, "lo", netip.Addr{}), up(inside, "eth0", hosts[name]))
}

// up brings an interface up, with an address if there is one.
func up(h *netlink.Handle, name string, addr netip.Addr) error {
	link, err := h.LinkByName(name)
	if err == nil && addr.IsValid() {
		err = h.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(24, 32)}})
	}
	if err != nil {
		return err
	}
	return h.LinkSetUp(link)
}

// start starts a program on a host. It ends with this process.
func (g *ground) start(host, log string, env []string, args ...string) (*exec.Cmd, error) {
	file, err := os.OpenFile(g.path(log+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd := netns.Command(context.Background(), g.host(host), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), file, file
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", log, err)
	}
	return cmd, nil
}

func kill(c *exec.Cmd) error {
	err := c.Process.Kill()
	_ = c.Wait() // killed
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// tail is the end of what a program logged.
func (g *ground) tail(log string) string {
	raw, _ := os.ReadFile(g.path(log + ".log"))
	return string(raw[max(0, len(raw)-3000):])
}

// serveAPI starts etcd and the API server, with further flags.
func (g *ground) serveAPI(ctx context.Context, flags ...string) (err error) {
	ca, err := pki.NewAuthority(g.dir, "ca")
	if err != nil {
		return err
	}
	g.authority = ca
	server, err := ca.Server("apiserver", []string{"kubernetes"}, hosts[control])
	if err != nil {
		return err
	}
	key := g.path("accounts.key")
	if err := errors.Join(pki.WriteKey(key),
		ca.WriteKubeconfig(g.path("kubeconfig"), "https://198.18.0.1:6443", "admin", "admin", "system:masters")); err != nil {
		return err
	}
	g.store, err = g.start(control, "etcd", nil, g.path("etcd"),
		"--data-dir="+g.path("store"), "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync", "--log-level=warn",
		// Of what was written last, etcd holds that many requests in memory, too.
		fmt.Sprintf("--quota-backend-bytes=%d", int64(storeBytes)), "--snapshot-count=500", "--snapshot-catchup-entries=50",
		// While etcd deletes what was replaced, it answers nobody: 1,000 large objects at once, its default, take it a minute.
		"--compaction-batch-limit=10")
	if err != nil {
		return err
	}
	g.serve = append([]string{
		g.path("kube-apiserver"), "--etcd-servers=http://127.0.0.1:2379", "--advertise-address=198.18.0.1",
		"--service-cluster-ip-range=10.96.0.0/16",
		"--tls-cert-file=" + server.Cert, "--tls-private-key-file=" + server.Key, "--client-ca-file=" + ca.Cert,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + key,
		"--service-account-signing-key-file=" + key,
		"--requestheader-client-ca-file=" + ca.Cert, "--requestheader-allowed-names=nobody", "--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--feature-gates=WatchList=false", // no streaming lists, as before Kubernetes 1.32
		"--etcd-compaction-interval=1m",   // what was replaced takes room
		"--max-requests-inflight=3000", "--max-mutating-requests-inflight=1000", "--profiling=false",
	}, flags...)
	return g.startAPI(ctx)
}

// startAPI starts the API server and waits until it is ready.
func (g *ground) startAPI(ctx context.Context) (err error) {
	if g.api, err = g.start(control, "kube-apiserver", nil, g.serve...); err != nil {
		return err
	}
	config, err := g.config()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	err = wait(ctx, "the API server is ready", func() error {
		_, err := client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
	if err != nil {
		err = fmt.Errorf("%w; its log ends: %s", err, g.tail("kube-apiserver"))
	}
	return err
}

// config is the administrator's configuration of clients.
func (g *ground) config() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", g.path("kubeconfig"))
	if err != nil {
		return nil, err
	}
	config.Dial = netns.Dialer(g.host(control))
	config.QPS = -1 // what is measured is not the client
	return config, nil
}

// install installs the chart with these values. Nobody runs its pods.
func (g *ground) install(ctx context.Context, values string) error {
	cmd := netns.Command(ctx, g.host(control), g.helm, "install", "lodestone", filepath.Join(g.root, "deploy", "chart"),
		"--namespace", lab.LodestoneNamespace, "--create-namespace", "--values", values)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+g.path("kubeconfig"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}

// wait asks until there is nothing wrong.
func wait(ctx context.Context, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		if sleep(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("it never happened that %s: %w", what, err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
