package scenarios

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// finding is one of lodestone diagnose.
type finding struct {
	Check, Severity, Message, Hint string
	Nodes                          []string
}

// diagnose runs the command and returns what is not well.
func (s *story) diagnose(args ...string) (found []finding, code int) {
	s.Helper()
	out, code, err := s.CLI(s.ctx, "", append([]string{"diagnose", "-o", "json"}, args...)...)
	require.NoError(s, err)
	var d struct{ Findings []finding }
	require.NoError(s, json.NewDecoder(strings.NewReader(out)).Decode(&d), "%s", out)
	for _, f := range d.Findings {
		if f.Severity != "ok" {
			found = append(found, f)
		}
	}
	return found, code
}

// faults returns what diagnose finds, but for speakers that were taken for lost in the last hour: other stories do that,
// and so does a busy machine.
func (s *story) faults(args ...string) []finding {
	s.Helper()
	found, _ := s.diagnose(args...)
	return slices.DeleteFunc(found, func(f finding) bool { return f.Check == "heartbeats" })
}

// finds checks that the diagnosis has a finding of that check about the node, ""
// for any, and returns it.
func (s *story) finds(check, node string, args ...string) (f finding) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s is found on %s", check, node), func() error {
		found, code := s.diagnose(args...)
		i := slices.IndexFunc(found, func(f finding) bool { return f.Check == check && (node == "" || slices.Contains(f.Nodes, node)) })
		if i < 0 {
			return fmt.Errorf("found %+v, exit code %d", found, code)
		}
		f = found[i]
		return nil
	})
	return f
}

// on runs a program on a node.
func (s *story) on(ctx context.Context, node string, args ...string) {
	s.Helper()
	out, err := s.Lab.Command(ctx, node, args...).CombinedOutput()
	require.NoError(s, err, "%s: %q: %s", node, args, out)
}

// findsAll waits until one diagnosis has a finding of each of the checks, about the
// node that is given; "" is any.
func (s *story) findsAll(want map[string]string, args ...string) {
	s.Helper()
	s.eventually("each fault is found", func() error {
		found, code := s.diagnose(args...)
		for check, node := range want {
			if !slices.ContainsFunc(found, func(f finding) bool {
				return f.Check == check && (node == "" || slices.Contains(f.Nodes, node))
			}) {
				return fmt.Errorf("check %s finds nothing about node %q; found %+v, exit code %d", check, node, found, code)
			}
		}
		return nil
	})
}

// sysctl sets a sysctl of a node, until the test ends.
func (s *story) sysctl(node, name, value string) {
	s.Helper()
	before, err := s.Lab.Command(s.ctx, node, "sysctl", "-n", name).Output()
	require.NoError(s, err)
	s.afterwards(func() { s.on(s.ctx, node, "sysctl", "-qw", name+"="+strings.TrimSpace(string(before))) })
	s.on(s.ctx, node, "sysctl", "-qw", name+"="+value)
}

// withIP runs ip on a node, and again otherwise when the test ends.
func (s *story) withIP(node string, do, undo string) {
	s.Helper()
	s.afterwards(func() { s.on(s.ctx, node, append([]string{"ip"}, strings.Fields(undo)...)...) })
	s.on(s.ctx, node, append([]string{"ip"}, strings.Fields(do)...)...)
}

// The operator asks what is wrong: nothing, then all that the test has done.
func TestDiagnosisFindsWhatIsWrong(t *testing.T) {
	s := begin(t)
	nodes := s.Lab.Nodes()
	require.GreaterOrEqual(t, len(nodes), 3)
	n1, n2, n3 := nodes[0], nodes[1], nodes[2]
	s.echo(int32(len(nodes)))
	s.service("web")
	vip := s.assigned("web")
	s.eventually("the client reaches it", func() error { return s.reachTCP(vip) })

	s.eventually("a healthy cluster is silent", func() error {
		if found := s.faults("--active"); len(found) > 0 {
			return fmt.Errorf("%+v", found)
		}
		return nil
	})

	// Faults of nodes.
	s.sysctl(n2, "net.ipv4.ip_forward", "0")
	s.sysctl(n3, "net.ipv4.conf.eth0.rp_filter", "1")
	s.withIP(n3, "link add planted up type veth peer name planted-peer", "link delete planted")
	s.on(s.ctx, n3, "ip", "link", "set", "planted-peer", "up")
	if route := strings.TrimSpace(s.ip(n3, "route", "show", "default")); route != "" {
		s.afterwards(func() { s.ip(n3, append([]string{"route", "replace"}, strings.Fields(route)...)...) })
	}
	s.ip(n3, "route", "replace", "default", "dev", "planted")
	s.withIP(n3, "link set eth0 mtu 1600", "link set eth0 mtu 1500") // less would stop what is sent to it
	s.withIP(n3, "link add kube-ipvs0 type veth peer name kube-ipvs0-peer", "link delete kube-ipvs0")
	s.on(s.ctx, n3, "ip", "address", "add", "198.18.0.249/32", "dev", "kube-ipvs0")
	s.withIP(n1, "address add 192.0.2.1/24 dev eth0", "address delete 192.0.2.1/24 dev eth0")
	owner := s.owner(vip)
	other := nodes[slices.IndexFunc(nodes, func(n string) bool { return n != owner })]
	s.withIP(other, "address add "+vip+"/32 dev eth0", "address delete "+vip+"/32 dev eth0")
	var daemon net.Listener // of BGP, and not ours
	require.NoError(t, s.Lab.InNamespace(n2, func() (err error) {
		daemon, err = net.Listen("tcp4", ":179")
		return err
	}))
	s.afterwards(func() { daemon.Close() })

	// Faults of the configuration, of Services, and of what else runs.
	s.config(`
quarantine: 0s
pools:
  - {name: lan, addresses: [198.18.0.200-198.18.0.248]}
  - {name: lonely, addresses: [192.0.2.10], autoAssign: false}
peers:
  - {name: gone, address: 198.18.0.251, localASN: 64512, peerASN: 64513, bfd: {}, nodeSelector: {matchLabels: {kubernetes.io/hostname: ` + n1 + `}}}
  - {name: caller, address: 198.18.0.252, localASN: 64512, peerASN: 64513, passive: true, nodeSelector: {matchLabels: {kubernetes.io/hostname: ` + n2 + `}}}
`)
	s.service("lonely", annotated(poolAnnotation, "lonely"))
	s.service("idle", func(svc *corev1.Service) { svc.Spec.Selector = map[string]string{"app": "nobody"} })
	s.service("limited", annotated(rateLimit, "5"))
	s.service("refusing", func(svc *corev1.Service) {
		svc.Spec.Ports = []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(9)}}
	})
	s.register("spare", nil)
	s.plantPod()
	s.plantMetalLB()
	s.allAssigned()
	s.findsAll(map[string]string{
		"ip-forward": n2, "rp-filter": n3, "mtu": "", "kube-proxy": n3, "segment": n1, "arp": other, "bgp-port": n2,
		"bgp": n1, "bfd": n1, "announced": "", "capabilities": n1, "vip": "",
		"other-implementation": "", "versions": "", "controller": "", "speakers": "", "complete": "spare",
	}, "--active")
	f := s.finds("ip-forward", n2)
	assert.Equal(t, []string{n2}, f.Nodes)
	assert.Equal(t, "error", f.Severity)
	assert.Equal(t, "sysctl -w net/ipv4/ip_forward=1", f.Hint)
	assert.Contains(t, s.finds("arp", other).Message, "VIP "+vip+" is configured on eth0")

	// The nodes have the clock of the machine. So has the API server, except for clients that
	// go this way.
	api, err := s.NewSkewedAPI(3 * time.Minute)
	require.NoError(t, err)
	s.afterwards(func() { require.NoError(t, api.Close()) })
	f = s.finds("clock", n3, "--kubeconfig="+api.Kubeconfig)
	assert.Equal(t, "error", f.Severity)
	assert.Regexp(t, `^the clock is (2m5\d|3m\d)(\.\d)?s behind that of the API server`, f.Message)

	// A firewall around a node, which answers no ARP either.
	s.afterwards(func() { s.on(s.ctx, n2, "nft", "add table ip diagnosed; delete table ip diagnosed") })
	s.on(s.ctx, n2, "nft", fmt.Sprintf("add table ip diagnosed; add chain ip diagnosed input { type filter hook input priority -10; }; "+
		"add rule ip diagnosed input tcp dport %[1]d drop; add rule ip diagnosed input udp dport %[1]d drop", lab.GossipPort))
	s.sysctl(n2, "net.ipv4.conf.eth0.arp_ignore", "8")
	s.findsAll(map[string]string{"membership": n1, "membership-port": n1, "neighbours": n1}, "--active")
	f = s.finds("membership-port", n1, "--active")
	assert.Contains(t, f.Message, "the speaker of node "+n2+" does not answer")
	assert.Contains(t, f.Message, "TCP")
	assert.Contains(t, f.Message, "UDP")
}

// plantPod makes a pod that looks like a controller of an old version that does not
// start; nobody takes it in.
func (s *story) plantPod() {
	s.Helper()
	pods := s.Kube.CoreV1().Pods(lodestone.Namespace)
	_, err := pods.Create(s.ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "planted",
			Labels: map[string]string{"app.kubernetes.io/name": "lodestone", "app.kubernetes.io/component": "controller"}},
		Spec: corev1.PodSpec{SchedulerName: "nobody",
			Containers: []corev1.Container{{Name: "controller", Image: "lodestone.invalid/lodestone-controller:v0.0.1"}}},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
	s.afterwards(func() {
		require.NoError(s, pods.Delete(s.ctx, "planted", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	})
}

// plantMetalLB makes a DaemonSet of MetalLB, on no node.
func (s *story) plantMetalLB() {
	s.Helper()
	labels := map[string]string{"app": "metallb"}
	_, err := s.Kube.AppsV1().DaemonSets(s.namespace).Create(s.ctx, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "speaker"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{NodeSelector: map[string]string{"planted": "nowhere"}, Containers: []corev1.Container{{
				Name: "speaker", Image: "quay.io/metallb/speaker:v0.16.0",
			}}},
		}},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
}

// A speaker that hangs is named, and the reports of the others are there.
func TestDiagnosisWithoutASpeaker(t *testing.T) {
	s := begin(t)
	node := s.Lab.Nodes()[1]
	pod := s.speakerOf(node)
	s.afterwards(func() { require.NoError(t, s.Signal(context.WithoutCancel(s.ctx), &pod, unix.SIGCONT)) })
	require.NoError(t, s.Signal(s.ctx, &pod, unix.SIGSTOP))
	found, code := s.diagnose()
	assert.Equal(t, 3, code, "the diagnosis is not complete")
	i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "complete" })
	require.GreaterOrEqual(t, i, 0, "%+v", found)
	assert.Equal(t, []string{node}, found[i].Nodes)
	assert.Contains(t, found[i].Message, "does not answer")

	// When it goes on, it knows that the others took it for lost, and why.
	require.NoError(t, s.Signal(s.ctx, &pod, unix.SIGCONT))
	assert.Contains(t, s.finds("heartbeats", node).Message, "its loop was")
}

// The bundle for a ticket is complete, and has no secret of the cluster in it.
func TestBundleForATicket(t *testing.T) {
	s := begin(t)
	s.service("web")
	s.assigned("web")
	secrets, err := s.Kube.CoreV1().Secrets(lodestone.Namespace).List(s.ctx, metav1.ListOptions{})
	require.NoError(t, err)
	name := filepath.Join(t.TempDir(), "ticket.tar.gz")
	_, _, err = s.CLI(s.ctx, "", "diagnose", "--bundle", name)
	require.NoError(t, err)
	files := unpack(t, name)
	for _, want := range []string{"config.yaml", "leases.json", "events.json", "status.json", "versions.json", "speakers/" +
		s.Lab.Nodes()[0] + ".json"} {
		assert.Contains(t, files, want)
	}
	assert.Contains(t, files["services.json"], s.namespace)
	for file, content := range files {
		assert.False(t, strings.HasPrefix(file, "logs/") && content == "", "%s is empty", file)
		for _, secret := range secrets.Items {
			for key, value := range secret.Data {
				if len(value) >= 16 && !strings.HasPrefix(secret.Name, "sh.helm.release") {
					assert.NotContains(t, content, string(value), "%s has %s of Secret %s", file, key, secret.Name)
				}
			}
		}
	}
}

// unpack returns the files of an archive.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.Command("tar", "--extract", "--gzip", "--strip-components=1", "--directory="+dir, "--file="+name).CombinedOutput()
	require.NoError(t, err, "%s", out)
	files := map[string]string{}
	require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(filepath.Join(dir, file))
		files[file] = string(content)
		return err
	}))
	return files
}
