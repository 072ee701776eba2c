package lab

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// These tests bring the machine's lab up and down: one that is up is replaced.

const nodePort = 30080 // of testdata/echo.yaml

func bringUp(t *testing.T, options Options) *Cluster {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	options.NoLodestone, options.Place = true, 1
	options.Progress = t.Logf
	c, err := Up(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return c
}

func deployEcho(t *testing.T, c *Cluster) {
	t.Helper()
	for _, args := range [][]string{
		{"apply", "-f", "testdata/echo.yaml"},
		{"rollout", "status", "--timeout=180s", "daemonset/echo"},
	} {
		if _, err := c.Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
}

// answers fails the test unless the pod of that very node answers the client.
func answers(t *testing.T, c *Cluster, node string, address netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := poll(ctx, 100*time.Millisecond, func() error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		answer, err := probe.Get(ctx, c.Namespace(Client), netip.AddrPortFrom(address, nodePort))
		if err == nil && answer.Node != node {
			t.Fatalf("%s answers for %s", answer.Node, node)
		}
		return err
	})
	if err != nil {
		t.Fatalf("get from %s: %v", node, err)
	}
}

func TestALabFromUpToDown(t *testing.T) {
	kept := keepsKernelSetting(t)
	c := bringUp(t, Options{})
	deployEcho(t, c)

	t.Run("the machine keeps its settings", kept)
	t.Run("nodes wait for a cloud provider and know their pod subnets", func(t *testing.T) { testNodes(t, c) })
	t.Run("pods answer on every node", func(t *testing.T) {
		for _, node := range c.Nodes() {
			answers(t, c, node, c.Addresses(node)[0])
		}
	})
	t.Run("a component has its own rights and no others", func(t *testing.T) { testIdentities(t, c) })
	t.Run("the loss of a node is an outage as long as it lasts", func(t *testing.T) { testNodeLoss(t, c) })
	t.Run("partitions and blocked ports hold until healed", func(t *testing.T) { testWire(t, c) })
	t.Run("the API server comes back from a crash", func(t *testing.T) { testAPIServer(t, c) })
	t.Run("another program finds the lab", func(t *testing.T) { testOpen(t) })
	t.Run("a lab takes the place of the one before", func(t *testing.T) {
		deployEcho(t, bringUp(t, Options{Nodes: 1}))
	})
	t.Run("down leaves nothing", func(t *testing.T) { testDown(t, c) })
}

// keepsKernelSetting makes a setting of the machine's kernel one that kubelet does not want, until the test ends, and returns the test
// that it is still that.
func keepsKernelSetting(t *testing.T) func(*testing.T) {
	const setting, unwanted = "/proc/sys/kernel/panic_on_oops", "0\n"
	before, err := os.ReadFile(setting)
	if err == nil {
		err = os.WriteFile(setting, []byte(unwanted), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(setting, before, 0o644); err != nil {
			t.Error(err)
		}
	})
	return func(t *testing.T) {
		if now, err := os.ReadFile(setting); err != nil || string(now) != unwanted {
			t.Errorf("%s is %q, %v", setting, now, err)
		}
	}
}

func testNodes(t *testing.T, c *Cluster) {
	client, err := c.Clientset()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, name := range c.Nodes() {
		// The node lifecycle controller acts on what it saw some seconds ago:
		// its taint may come, and go, after the node is ready.
		err := poll(ctx, 100*time.Millisecond, func() error {
			node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err == nil && (len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != uninitializedTaint) {
				err = fmt.Errorf("taints = %v, want %s alone", node.Spec.Taints, uninitializedTaint)
			}
			if want := c.podCIDRs(name)[0].String(); err == nil && node.Spec.PodCIDR != want {
				err = fmt.Errorf("pod subnet = %q, want %s", node.Spec.PodCIDR, want)
			}
			return err
		})
		if err != nil {
			t.Errorf("node %s: %v", name, err)
		}
	}
}

func testIdentities(t *testing.T, c *Cluster) {
	for _, tt := range []struct{ component, verb, resource, want string }{
		{"kubelet-n1", "list", "secrets", "no - can only read namespaced object of this type"},
		{"kubelet-n1", "create", "tokenreviews.authentication.k8s.io", "yes"},
		{"kube-proxy", "list", "endpointslices.discovery.k8s.io", "yes"},
		{"kube-proxy", "list", "secrets", "no"},
		{scheduler, "update", "nodes", "no"},
	} {
		answer, _ := c.Command(t.Context(), ControlPlane, "kubectl", "--kubeconfig", c.kubeconfigOf(tt.component),
			"auth", "can-i", tt.verb, tt.resource, "--all-namespaces").Output()
		if got := strings.TrimSpace(string(answer)); got != tt.want {
			t.Errorf("%s may %s %s: %q, want %s", tt.component, tt.verb, tt.resource, got, tt.want)
		}
	}
	if status := kubeletStatus(t, c); status != http.StatusUnauthorized {
		t.Errorf("kubelet answers a stranger with %d, want %d", status, http.StatusUnauthorized)
	}
}

func kubeletStatus(t *testing.T, c *Cluster) int {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DialContext:     netns.Dialer(c.Namespace(Client)),
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the stranger's view
	}}
	response, err := client.Get("https://" + c.Addresses("n1")[0].String() + ":10250/pods")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode
}

func testNodeLoss(t *testing.T, c *Cluster) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	asking := probe.UDP(ctx, probe.Options{
		Namespace: c.Namespace(Client),
		Target:    netip.AddrPortFrom(c.Addresses("n2")[0], nodePort),
	})
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	step(asking.WaitAnswers(ctx, 50))
	step(c.NodeLoss("n2"))
	const lasts = 300 * time.Millisecond
	time.Sleep(lasts) // the fault is the passing of time
	step(c.HealNode("n2"))
	step(asking.WaitAnswers(ctx, 50))
	record, err := asking.Stop()
	step(err)
	outage := record.Outage()
	if outage.Duration() < lasts || outage.Before.Node != "n2" || outage.After.Node != "n2" {
		t.Errorf("outage = %s, want at least %s of n2", outage, lasts)
	}
	if owner, err := c.Owner(c.Addresses("n2")[0]); err != nil || owner != "n2" {
		t.Errorf("owner of the address of n2 = %q, %v", owner, err)
	}
}

// reaches reports whether a TCP connection from the host to the node's kubelet
// is accepted within the time.
func reaches(c *Cluster, from, node string, within time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	conn, err := netns.Dialer(c.Namespace(from))(ctx, "tcp", netip.AddrPortFrom(c.Addresses(node)[0], 10250).String())
	if err == nil {
		conn.Close()
	}
	return err == nil
}

func testWire(t *testing.T, c *Cluster) {
	for _, step := range []struct {
		name  string
		do    func() error
		holds map[[2]string]bool
	}{
		{"partition n1 from the other nodes", func() error { return c.Partition([]string{"n1"}) },
			map[[2]string]bool{{"n1", "n2"}: false, {"n3", "n1"}: false, {"n2", "n3"}: true, {ControlPlane, "n1"}: true}},
		{"heal", c.Heal, map[[2]string]bool{{"n1", "n2"}: true, {"n3", "n1"}: true}},
		{"partition the client and n1 from n2", func() error { return c.Partition([]string{Client, "n1"}, []string{"n2"}) },
			map[[2]string]bool{{Client, "n2"}: false, {"n1", "n2"}: false, {"n3", "n2"}: true, {Client, "n1"}: true}},
		{"heal", c.Heal, map[[2]string]bool{{Client, "n2"}: true}},
		{"block a port", func() error { return c.BlockPort("tcp", 10250) }, map[[2]string]bool{{"n1", "n2"}: false}},
		{"heal", c.Heal, map[[2]string]bool{{"n1", "n2"}: true}},
		{"lose everything", func() error { return c.Lose(100) }, map[[2]string]bool{{Client, "n3"}: false}},
		{"heal", c.Heal, map[[2]string]bool{{Client, "n3"}: true}},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		for pair, want := range step.holds {
			within := 500 * time.Millisecond
			if want { // Linux repeats an ARP request or a SYN after a second
				within = 30 * time.Second
			}
			if got := reaches(c, pair[0], pair[1], within); got != want {
				t.Fatalf("%s: %s reaches %s = %v", step.name, pair[0], pair[1], got)
			}
		}
	}
	if err := c.NodeLoss("n9"); err == nil || !strings.Contains(err.Error(), `unknown host "n9"`) {
		t.Errorf("loss of an unknown node: %v", err)
	}
}

func testAPIServer(t *testing.T, c *Cluster) {
	if err := c.StopAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubectl(t.Context(), "get", "nodes"); err == nil {
		t.Error("the API server answers though it was stopped")
	}
	if err := c.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubectl(t.Context(), "get", "nodes"); err != nil {
		t.Error(err)
	}
}

func testOpen(t *testing.T) {
	c, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.checkProcesses(); err != nil {
		t.Error(err)
	}
	if output, err := c.Kubectl(t.Context(), "get", "nodes", "-o", "name"); err != nil || strings.Count(output, "node/") != len(c.Nodes()) {
		t.Errorf("nodes = %q, %v; want %d", output, err, len(c.Nodes()))
	}
}

func testDown(t *testing.T, c *Cluster) {
	if err := c.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, c)
}

func nothingLeft(t *testing.T, c *Cluster) {
	t.Helper()
	for _, host := range append(c.HostNames(), "lan") {
		if _, err := os.Stat(netns.Path(c.Namespace(host))); err == nil {
			t.Errorf("namespace of %s is still there", host)
		}
	}
	group := string(c.place.group())
	for _, pattern := range []string{"/sys/fs/cgroup/" + group, "/sys/fs/cgroup/*/" + group, c.dir} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("still there: %v", left)
		}
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		if raw, _ := os.ReadFile(path); strings.Contains(string(raw), c.dir+"/") {
			t.Errorf("still runs: %q", raw)
		}
	}
	if _, err := Open(c.Root); err == nil {
		t.Error("a lab that is down can be opened")
	}
}

// bringUpInChild is set in a child that only brings a lab up and gets killed.
const bringUpInChild = "LAB_TEST_BRING_UP"

func TestWhatAKilledUpLeavesIsCleanedUp(t *testing.T) {
	if os.Getenv(bringUpInChild) != "" {
		bringUp(t, Options{})
		return
	}
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	c := &Cluster{Options: Options{Nodes: 3, Place: 1}}
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	c, err := newCluster(c.Options)
	if err != nil {
		t.Fatal(err)
	}
	// Killed with the network up, with containerd up, with kubelet up.
	for _, milestone := range []string{"kubeconfig", "run/containerd-n1.json", "run/kubelet-n1.json"} {
		t.Run(milestone, func(t *testing.T) {
			killUpAt(t, c.path(milestone))
			if err := c.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t, c)
		})
	}
}

// killUpAt brings a lab up in a child and kills it when the file is there.
func killUpAt(t *testing.T, file string) {
	t.Helper()
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestWhatAKilledUpLeavesIsCleanedUp$")
	child.Env = append(os.Environ(), bringUpInChild+"=1")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	waiting := poll(ctx, 5*time.Millisecond, func() error { _, err := os.Stat(file); return err })
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // the error is that it was killed
	if waiting != nil {
		t.Fatal(waiting)
	}
}
