package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// Components, by the names of their binaries, accounts and workloads.
const (
	controller = "lodestone-controller"
	speaker    = "lodestone-speaker"
)

// tokenSeconds is longer than any run.
const tokenSeconds = 6 * 3600

// values are the chart's: a pool for the tenant whose Services are measured, and one for
// everybody. An account that is there reads the metrics.
func (c *cluster) values() map[string]any {
	scraper := map[string]any{"name": controller, "namespace": lab.LodestoneNamespace}
	return map[string]any{"monitoring": map[string]any{"scraper": scraper}, "config": map[string]any{
		"quarantine": "0s",
		"pools": []any{
			map[string]any{"name": "shop", "addresses": []string{"198.18.0.110-198.18.0.250"}, "namespaces": []string{tenant}},
			map[string]any{"name": "wide", "addresses": []string{"198.19.0.0/18"}, "namespaces": []string{hostile}},
		},
	}}
}

// install installs the chart, whose pods nobody runs, and prepares the programs that would run in them.
func (c *cluster) install(ctx context.Context) error {
	raw, err := json.Marshal(c.values()) // JSON is YAML
	if err != nil {
		return err
	}
	values := c.path("values.yaml")
	if err := os.WriteFile(values, raw, 0o600); err != nil {
		return err
	}
	if err := c.ground.install(ctx, values); err != nil {
		return err
	}
	for _, name := range []string{tenant, hostile} {
		if _, err := c.kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	for _, node := range c.nodes {
		if err := c.register(ctx, node); err != nil {
			return err
		}
	}
	workload, err := c.kube.AppsV1().Deployments(lab.LodestoneNamespace).Get(ctx, controller, metav1.GetOptions{})
	if err != nil {
		return err
	}
	template := &workload.Spec.Template.Spec.Containers[0]
	c.result.ControllerLimit = template.Resources.Limits.Memory().Value()
	if err := c.add(ctx, controller, control, template); err != nil {
		return err
	}
	daemons, err := c.kube.AppsV1().DaemonSets(lab.LodestoneNamespace).Get(ctx, speaker, metav1.GetOptions{})
	if err != nil {
		return err
	}
	template = &daemons.Spec.Template.Spec.Containers[0]
	c.result.SpeakerLimit = template.Resources.Limits.Memory().Value()
	key, err := c.membershipKey(ctx)
	if err != nil {
		return err
	}
	for _, node := range c.nodes[:victims] {
		if err := c.add(ctx, speaker, node, template, "--membership-key-file="+key, "--kube-proxy-healthz-url="); err != nil {
			return err
		}
	}
	return nil
}

// register makes the Node, and the pod of its speaker, by which the API server knows the
// speaker's token.
func (c *cluster) register(ctx context.Context, node string) error {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: hosts[node].String()}}}}
	if _, err := c.kube.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return err
	}
	return c.makePod(ctx, speaker, node)
}

func (c *cluster) makePod(ctx context.Context, component, node string) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: component + "-" + node}, Spec: corev1.PodSpec{
		NodeName: node, ServiceAccountName: component, Containers: []corev1.Container{{Name: "pause", Image: "pause"}}}}
	_, err := c.kube.CoreV1().Pods(lab.LodestoneNamespace).Create(ctx, pod, metav1.CreateOptions{})
	return err
}

func (c *cluster) membershipKey(ctx context.Context) (path string, err error) {
	secret, err := c.kube.CoreV1().Secrets(lab.LodestoneNamespace).Get(ctx, "lodestone-membership", metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	path = c.path("membership-key")
	return path, os.WriteFile(path, secret.Data["key"], 0o600)
}

// token returns one of the component's account, as the pod on the node has it.
func (c *cluster) token(ctx context.Context, component, node string) (string, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenSeconds))}}
	if component == speaker {
		pod, err := c.kube.CoreV1().Pods(lab.LodestoneNamespace).Get(ctx, component+"-"+node, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	made, err := c.kube.CoreV1().ServiceAccounts(lab.LodestoneNamespace).CreateToken(ctx, component, request, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return made.Status.Token, nil
}

// as returns a configuration of clients that have the component's token.
func (c *cluster) as(ctx context.Context, component, node string) (*rest.Config, error) {
	config, err := c.config()
	if err != nil {
		return nil, err
	}
	config = rest.AnonymousClientConfig(config)
	config.BearerToken, err = c.token(ctx, component, node)
	return config, err
}

// kubeconfig writes a file by which the program reaches the API server as its pod would.
func (c *cluster) kubeconfig(ctx context.Context, component, node string) (path string, err error) {
	config, err := c.as(ctx, component, node)
	if err != nil {
		return "", err
	}
	authority := config.CAData
	if len(authority) == 0 {
		if authority, err = os.ReadFile(config.CAFile); err != nil {
			return "", err
		}
	}
	path = c.path(component + "-" + node + ".kubeconfig")
	return path, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"lab": {Server: "https://" + frontAddress, CertificateAuthorityData: authority}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"pod": {Token: config.BearerToken}},
		Contexts:  map[string]*clientcmdapi.Context{"pod": {Cluster: "lab", AuthInfo: "pod"}}, CurrentContext: "pod",
	}, path)
}

// daemon is one that is measured.
type daemon struct {
	*ground
	name, component, node string
	env, args             []string
	url                   string
	done                  sync.WaitGroup
	stop                  context.CancelFunc

	mu      sync.Mutex
	cmd     *exec.Cmd     // nil: it does not run
	gone    chan struct{} // closed when it has ended
	most    int64
	crashes int
	spent   time.Duration // on a processor, by those that have ended
	last    time.Duration // by the one that runs, when it was looked at
}

// add prepares a program by the container's template.
func (c *cluster) add(ctx context.Context, component, host string, template *corev1.Container, flags ...string) error {
	kubeconfig, err := c.kubeconfig(ctx, component, host)
	if err != nil {
		return err
	}
	environment := map[string]string{
		"NODE_NAME": host, "NODE_IP": hosts[host].String(), "POD_NAME": component + "-" + host, "POD_NAMESPACE": lab.LodestoneNamespace,
		"GOMEMLIMIT": strconv.FormatInt(template.Resources.Limits.Memory().Value(), 10),
	}
	var env []string
	for _, e := range template.Env {
		value, known := environment[e.Name]
		if e.ValueFrom == nil {
			value, known = e.Value, true
		}
		if !known {
			return fmt.Errorf("%s: the chart sets %s, which this test does not know", component, e.Name)
		}
		env = append(env, e.Name+"="+value)
	}
	args := []string{filepath.Join(c.root, "bin", component)}
	for _, arg := range template.Args {
		for name, value := range environment {
			arg = strings.ReplaceAll(arg, "$("+name+")", value)
		}
		args = append(args, arg)
	}
	args = append(append(args, "--kubeconfig="+kubeconfig), flags...)
	port := template.Ports[0].HostPort
	c.programs = append(c.programs, &daemon{
		ground: c.ground, name: component + "-" + host, component: component, node: host, env: env, args: args,
		url: fmt.Sprintf("https://%s", netip.AddrPortFrom(hosts[host], uint16(port))),
	})
	return nil
}

// run starts the program. If it ends by itself it is started anew, as by a kubelet.
func (p *daemon) run(ctx context.Context) error {
	p.mu.Lock()
	err := p.launch()
	p.mu.Unlock()
	if err != nil {
		return err
	}
	ctx, p.stop = context.WithCancel(ctx)
	p.done.Go(func() {
		for sleep(ctx, 50*time.Millisecond) == nil {
			p.look()
		}
	})
	return nil
}

// launch starts the program. The caller holds mu.
func (p *daemon) launch() (err error) {
	cmd, err := p.ground.start(p.node, p.name, p.env, p.args...)
	if err != nil {
		return err
	}
	gone := make(chan struct{})
	p.cmd, p.gone = cmd, gone
	go func() { defer close(gone); _ = cmd.Wait() }() // how it ended is in its log; kill waits
	return nil
}

// look notes how large the program has been.
func (p *daemon) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gone:
		p.crashes++
		p.spent, p.last = p.spent+p.last, 0
		p.progress("%s has ended; its log ends: %s", p.name, p.tail(p.name))
		_ = p.launch() // the next look shows whether it runs
	default:
		p.most, p.last = max(p.most, highWater(p.cmd.Process.Pid)), processor(p.cmd.Process.Pid)
	}
}

// highWater is the most that the process has had resident, as far as is known.
func highWater(pid int) int64 {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range bytes.Lines(raw) {
		if fields := bytes.Fields(line); len(fields) == 3 && string(fields[0]) == "VmHWM:" {
			kilobytes, _ := strconv.ParseInt(string(fields[1]), 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

// processor is how much time on a processor the process has taken, as far as is known.
func processor(pid int) time.Duration {
	taken, _ := process.CPU(pid)
	return taken
}

// processor is how much time on a processor the program has taken, over all its starts.
func (p *daemon) processor() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.spent + p.last
}

// kill ends the program as a crash would, if it runs.
func (p *daemon) kill() error {
	if p.stop == nil {
		return nil
	}
	p.stop()
	p.done.Wait()
	p.stop = nil
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.gone
	p.spent, p.last = p.spent+p.last, 0
	return nil
}

// reset forgets how large the program has been, and how often it has ended.
func (p *daemon) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.most, p.crashes = 0, 0
	if p.cmd != nil {
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.cmd.Process.Pid), []byte("5"), 0) // proc(5); else the peak is that of before
	}
}

// measured returns the most that the program had resident, and how often it ended by itself.
func (p *daemon) measured() (peak int64, ended int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.most, p.crashes
}

// ready waits until all programs are ready.
func (c *cluster) ready(ctx context.Context) error {
	for _, p := range c.programs {
		if err := wait(ctx, p.name+" is ready", func() error { return p.ready(ctx) }); err != nil {
			return err
		}
	}
	return nil
}

func (p *daemon) ready(ctx context.Context) error {
	_, err := p.get(ctx, "/readyz", "")
	return err
}

// get asks the program, with a token if there is one.
func (p *daemon) get(ctx context.Context, path, token string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// self-signed
	transport := &http.Transport{DialContext: netns.Dialer(p.host(p.node)), TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, body)
	}
	return body, err
}
