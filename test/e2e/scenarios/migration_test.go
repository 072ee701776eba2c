package scenarios

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// metalLB are the objects of a MetalLB that announces by layer 2.
const metalLB = `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan.v4, namespace: metallb-system}
spec: {addresses: [198.18.0.140-198.18.0.149]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
`

// kubeVIP are objects of a kube-vip that announces by layer 2, and of its cloud
// provider. Its programs are not there.
const kubeVIP = `apiVersion: v1
kind: ConfigMap
metadata: {name: kubevip, namespace: kube-system}
data: {range-global: 198.18.0.150-198.18.0.159}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: kube-vip-cloud-provider, namespace: kube-system}
spec:
  selector: {matchLabels: {app: kube-vip-cloud-provider}}
  template:
    metadata: {labels: {app: kube-vip-cloud-provider}}
    spec: {containers: [{name: provider, image: kube-vip-cloud-provider, imagePullPolicy: Never}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-vip-ds, namespace: kube-system}
spec:
  selector: {matchLabels: {app: kube-vip-ds}}
  template:
    metadata: {labels: {app: kube-vip-ds}}
    spec:
      containers:
        - name: kube-vip
          image: kube-vip
          imagePullPolicy: Never
          args: [manager]
          env: [{name: vip_arp, value: "true"}, {name: vip_interface, value: eth0}, {name: svc_enable, value: "true"}]
`

// Services of kube-vip are moved by the guide, word for word. The test has those parts of
// kube-vip that others notice: its objects, the status of Services, and addresses on an
// interface of a node, which go when it ends.
func TestServicesOfKubeVIPAreTakenOverWithoutLoss(t *testing.T) {
	s := begin(t)
	s.uninstallLodestone()
	s.deploy(kubeVIP)
	s.echo(3)
	const web, shared = "198.18.0.151", "198.18.0.150"
	node, vips := s.Lab.Nodes()[0], map[string]string{"web": web, "dns": shared, "mail": shared}
	for name, number := range map[string]int32{"web": 80, "dns": 80, "mail": 25} {
		s.service(name, port("udp", corev1.ProtocolUDP, number), annotated("kube-vip.io/loadbalancerIPs", vips[name]))
		s.shown(name, vips[name])
	}
	s.announcedByNode(node, web)
	s.announcedByNode(node, shared)
	s.steady(web)
	s.steady(shared)

	g, watched := s.openGuide("migrate.md", "metallb", "migrate metallb", "migrate kube-vip"), s.watchShown(vips)
	g.before["delete daemonset"] = func() {
		for _, vip := range []string{web, shared} {
			// A client that has just asked. One that asks in the next 3 s gives up, see the guide.
			s.onClient("ip", "neighbor", "change", vip, "dev", "eth0", "nud", "reachable")
			s.withdrawnByNode(node, vip)
		}
	}
	s.losesNothing([]string{web, shared}, func() {
		require.Contains(t, g.follow("1. The configuration"), "3 Services that have addresses keep them")
		g.installBeside("web")
		g.follow("4. Layer 2: hand over at once")
		require.Contains(t, s.event(s.namespace, "Service", "web", "Adopted"), web)
		for _, vip := range vips {
			s.oneAnswerer(vip)
		}
		g.follow("6. Look, and clean up")
	})
	require.Empty(t, watched(), "states in which a Service showed something else")
}

// deploy creates objects that go when the story ends.
func (s *story) deploy(manifests string) {
	s.Helper()
	file := filepath.Join(s.TempDir(), "manifests.yaml")
	require.NoError(s, os.WriteFile(file, []byte(manifests), 0o600))
	_, err := s.Lab.Kubectl(s.ctx, "apply", "-f", file)
	require.NoError(s, err)
	s.afterwards(func() {
		_, err := s.Lab.Kubectl(s.ctx, "delete", "--ignore-not-found", "-f", file)
		require.NoError(s, err)
	})
}

// watchShown watches every state of the story's Services from now on. The returned function
// ends that, and returns the Services that had another address.
func (s *story) watchShown(vips map[string]string) (end func() []string) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	services := s.Kube.CoreV1().Services(s.namespace)
	list, err := services.List(ctx, metav1.ListOptions{})
	require.NoError(s, err)
	w, err := services.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	require.NoError(s, err)
	var others []string
	var watching sync.WaitGroup
	watching.Go(func() {
		for event := range w.ResultChan() {
			svc, ok := event.Object.(*corev1.Service)
			switch {
			case !ok && ctx.Err() != nil: // ended below
			case !ok:
				others = append(others, fmt.Sprintf("the watch ended: %v", event.Object))
			case !slices.Equal(addresses(svc), []string{vips[svc.Name]}):
				others = append(others, fmt.Sprintf("%s %q", svc.Name, addresses(svc)))
			}
		}
	})
	end = func() []string { cancel(); w.Stop(); watching.Wait(); return others }
	s.Cleanup(func() { end() })
	return end
}

// uninstallLodestone leaves the lab without Lodestone until somebody installs it,
// at the latest when the story ends.
func (s *story) uninstallLodestone() {
	s.Helper()
	s.afterwards(func() { require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart(), "--install")) })
	_, err := s.Lab.Helm(s.ctx, "uninstall", "lodestone", "--namespace", lodestone.Namespace, "--wait")
	require.NoError(s, err)
}

// guide is a guide that a reader follows in a clone of the repository, on a computer with
// access to the cluster.
type guide struct {
	*story
	text, clone string
	// inTheLab replaces what a reader has, too, but under another name.
	inTheLab *strings.Replacer
	// not is in commands that this reader has no use for.
	not string
	// before is what happens before a command with these words.
	before map[string]func()
}

// openGuide opens a guide. The reader runs the commands without the word not, and makes
// the replacements that the guide asks for, which are given in pairs.
func (s *story) openGuide(name, not string, replace ...string) *guide {
	s.Helper()
	text, err := os.ReadFile(filepath.Join(s.Lab.Root, "docs/guides", name))
	require.NoError(s, err)
	g := &guide{story: s, text: string(text), clone: s.TempDir(), not: not, before: map[string]func(){}}
	require.NoError(s, os.Symlink(filepath.Join(s.Lab.Root, "deploy"), filepath.Join(g.clone, "deploy")))
	// The values that the lab's images need, and no pools.
	var values map[string]any
	raw, err := os.ReadFile(s.Lab.Values())
	require.NoError(s, err)
	require.NoError(s, json.Unmarshal(raw, &values))
	delete(values, "config")
	raw, err = json.Marshal(values)
	require.NoError(s, err)
	file := filepath.Join(g.clone, "values.json")
	require.NoError(s, os.WriteFile(file, raw, 0o600))
	// The lab's namespace is there already, and stays for other stories. The lab's helm is built without the version of
	// Kubernetes that a release of helm has.
	replace = append(replace, "kubectl create namespace", "kubectl get namespace", "helm install", "helm install --values "+file,
		"helm template", "helm template --kube-version 1.31.0")
	g.inTheLab = strings.NewReplacer(replace...)
	return g
}

// installBeside installs Lodestone without pools beside the other load balancer.
func (g *guide) installBeside(service string) {
	g.Helper()
	g.afterwards(func() { // as the lab has it
		_, err := g.Lab.Kubectl(g.ctx, "label", "namespace", lodestone.Namespace, "pod-security.kubernetes.io/enforce-")
		require.NoError(g, err)
	})
	g.follow("2. Install beside it")
	g.eventually("lodestone status shows that all is ready", func() error {
		out, _, err := g.CLI(g.ctx, "", "status") // warns of Services without pools
		if err == nil && (!strings.Contains(out, "3 of 3 nodes ready") || strings.Contains(out, "has not renewed its Lease")) {
			err = errors.New(out)
		}
		return err
	})
	g.always(2*time.Second, "Lodestone touches nothing", func() error {
		if finalizers := g.get(service).Finalizers; len(finalizers) > 0 {
			return fmt.Errorf("it has finalizers %q", finalizers)
		}
		return nil
	})
}

// follow runs the commands of a section and returns what they print.
func (g *guide) follow(section string) string {
	g.Helper()
	_, rest, found := strings.Cut(g.text, "\n## "+section+"\n")
	require.True(g, found, "the guide has no section %q", section)
	body, _, _ := strings.Cut(rest, "\n## ")
	body = strings.ReplaceAll(body, " \\\n", "") // a command may have several lines
	var printed strings.Builder
	commands, console := 0, false
	for line := range strings.Lines(body) {
		command, isCommand := strings.CutPrefix(g.inTheLab.Replace(line), "$ ")
		switch {
		case strings.HasPrefix(line, "```"):
			console = line == "```console\n"
		case console && isCommand && !strings.Contains(command, g.not):
			commands++
			for words, happens := range g.before {
				if strings.Contains(command, words) {
					happens()
				}
			}
			printed.WriteString(g.run(command))
		}
	}
	require.NotZero(g, commands, "commands in section %q", section)
	return printed.String()
}

func (g *guide) run(command string) string {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.ctx, 2*time.Minute)
	defer cancel()
	cmd := g.Lab.Command(ctx, lab.ControlPlane, "bash", "-euo", "pipefail", "-c", command)
	cmd.Dir = g.clone
	began := time.Now()
	output, err := cmd.CombinedOutput()
	g.Logf("%s (%s)\n%s", strings.TrimSpace(command), time.Since(began).Round(time.Millisecond), output)
	require.NoError(g, err, command)
	return string(output)
}

// The wrong order: the old announcer still answers when Lodestone takes over.
// The Service keeps its address, and is served when the announcer is gone.
func TestOldAnnouncerThatStillAnswersMovesNobody(t *testing.T) {
	s := begin(t)
	s.config("\nquarantine: 1s\n")
	s.echo(2)
	const vip = "198.18.0.142"
	node := s.Lab.Nodes()[0]
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	s.givenByMetalLB("web", vip)
	s.announcedByNode(node, vip)
	require.NoError(t, s.Configure(s.ctx, s.migrated()))
	s.holds("web", vip)
	s.refused("web", "AddressConflict")
	require.NoError(t, s.reachUDP(vip), "the old announcer goes on")
	s.withdrawnByNode(node, vip)
	s.eventually("Lodestone announces the address", func() error {
		if text := conditionText(s.get("web")); !strings.HasPrefix(text, "True Allocated") {
			return errors.New(text)
		}
		return s.OneAnswerer(s.ctx, vip)
	})
	s.holds("web", vip)
}

// Services whose address is in no pool, and those of another class, stay as they are.
func TestServicesThatCannotBeTakenOverAreLeftAlone(t *testing.T) {
	s := begin(t)
	s.config("\ncompatibility: [metallb]" + onePool("lan", "198.18.0.140-198.18.0.149"))
	s.service("classy", class("metallb.io/metallb"))
	s.givenByMetalLB("classy", "198.18.0.143")
	s.config("\nquarantine: 1s\n")
	s.service("outside")
	s.givenByMetalLB("outside", "198.18.0.199")
	s.config("\ncompatibility: [metallb]" + onePool("lan", "198.18.0.140-198.18.0.149"))
	require.Contains(t, s.refused("outside", "AddressOutsidePools"), "another load balancer has given it 198.18.0.199")
	s.always(2*time.Second, "both keep their status", func() error {
		return s.showAll(map[string]string{"classy": "198.18.0.143", "outside": "198.18.0.199"})
	})
	require.Empty(t, s.get("classy").Finalizers)
}

// migrated is what lodestone migrate makes of MetalLB's objects.
func (s *story) migrated() string {
	s.Helper()
	out, code, err := s.CLI(s.ctx, metalLB, "migrate", "metallb", "-", "-o", "json")
	require.NoError(s, err)
	require.Zero(s, code, out)
	var answer struct{ Configuration json.RawMessage }
	require.NoError(s, json.Unmarshal([]byte(out), &answer), out)
	return string(answer.Configuration) // JSON is YAML
}

// givenByMetalLB writes the status as MetalLB's controller does.
func (s *story) givenByMetalLB(name, vip string) {
	s.Helper()
	s.patchShown(name, `{"metadata":{"annotations":{"metallb.io/ip-allocated-from-pool":"lan.v4"}},"status":{"loadBalancer":{"ingress":[{"ip":"`+vip+`"}]}}}`)
}

// shown writes the status that users of the Service see.
func (s *story) shown(name, vip string) {
	s.Helper()
	s.patchShown(name, `{"status":{"loadBalancer":{"ingress":[{"ip":"`+vip+`"}]}}}`)
}

func (s *story) patchShown(name, patch string) {
	s.Helper()
	_, err := s.Kube.CoreV1().Services(s.namespace).Patch(s.ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	require.NoError(s, err)
}

// announcedByNode makes the node answer for the VIP: that is all of another announcer that
// clients and speakers notice.
func (s *story) announcedByNode(node, vip string) {
	s.Helper()
	s.on(s.ctx, node, "ip", "address", "add", vip+"/32", "dev", "eth0")
	s.Cleanup(func() { // a story may have done so
		_ = s.Lab.Command(context.WithoutCancel(s.ctx), node, "ip", "address", "delete", vip+"/32", "dev", "eth0").Run()
	})
}

func (s *story) withdrawnByNode(node, vip string) {
	s.Helper()
	s.on(s.ctx, node, "ip", "address", "delete", vip+"/32", "dev", "eth0")
}

// showAll checks what users of the Services see.
func (s *story) showAll(vips map[string]string) error {
	for name, vip := range vips {
		svc, err := s.Kube.CoreV1().Services(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := addresses(svc); !slices.Equal(got, []string{vip}) {
			return fmt.Errorf("%s shows %q", name, got)
		}
	}
	return nil
}
