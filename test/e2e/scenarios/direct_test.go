package scenarios

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

const directForwarding = `
advertisements:
  - name: lan
    layer2: {forwarding: direct%s}
`

// preferring is the part of directForwarding that prefers a node.
func preferring(node string) string {
	return fmt.Sprintf(", preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}}]", node)
}

// With direct forwarding no TCP connection ends because the VIP moves: by label, by the
// configuration, while the speakers are replaced, when one is killed, when kube-proxy starts again,
// when it is switched on or off, and while it drains. Pods see the client's address with policy Local, and more nodes than the owner
// serve. IPv4 and IPv6; some connections are idle meanwhile, others have much to carry. On one
// node kube-proxy is in mode iptables, on the others in mode nftables.
func TestConnectionsOutliveMovesOfTheVIP(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.afterwards(func() { require.NoError(s, s.Lab.SetProxyMode(s.ctx, "n3", lab.NFTables)) })
	require.NoError(t, s.Lab.SetProxyMode(s.ctx, "n3", lab.IPTables))
	s.echo(6)
	s.config(dualPools)
	s.service("local", dualStack, localPolicy)
	s.service("cluster", dualStack)
	local := s.allAddresses("local", 2)
	vips := slices.Concat(local, s.allAddresses("cluster", 2))
	var all []*probe.Connections
	for _, vip := range vips {
		s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
		all = append(all, s.connect(vip, 20, usual))
	}
	s.config(dualPools + fmt.Sprintf(directForwarding, ""))
	s.forwards("")
	for _, vip := range vips {
		some := s.connect(vip, 20, usual)
		if slices.Contains(local, vip) {
			require.Greater(t, len(some.Snapshot().Nodes()), 1, "the owner alone serves")
		}
		all = append(all, some, s.connect(vip, 10, idle), s.connect(vip, 3, bulk))
	}
	lives := func(what string) {
		t.Helper()
		s.askAll(all...)
		for _, c := range all {
			require.Empty(t, c.Snapshot().Broken, what)
		}
	}
	lives("switched on")

	var owner string
	for _, owner = range s.Lab.Nodes() {
		s.config(dualPools + fmt.Sprintf(directForwarding, preferring(owner)))
		for _, vip := range vips {
			s.ownedBy(vip, owner)
		}
		lives("preferred " + owner)
	}
	s.afterwards(func() { s.label(owner, excludeLabel, "") })
	s.label(owner, excludeLabel, "true")
	for _, vip := range vips {
		s.eventually("the VIP moves", func() error { return s.owned(vip, owner, false) })
	}
	lives("excluded the owner")
	s.label(owner, excludeLabel, "")
	for _, vip := range vips {
		s.ownedBy(vip, owner)
	}
	lives("the owner is back")
	require.NoError(t, s.RollSpeakers(s.ctx))
	lives("replaced the speakers")
	for _, vip := range vips {
		s.ownedBy(vip, owner)
	}
	s.killSpeaker(owner)
	lives("killed the owner's speaker")
	s.forwards("")
	for _, vip := range vips {
		s.eventually("somebody owns the VIP", func() error { return s.OneAnswerer(s.ctx, vip) })
	}
	lives("it is back")
	for node, mode := range map[string]string{"n1": lab.NFTables, "n3": lab.IPTables} {
		require.NoError(t, s.Lab.SetProxyMode(s.ctx, node, mode))
		lives("started kube-proxy again on " + node)
	}

	s.config(dualPools)
	settle()
	lives("switched off")
	require.NoError(t, s.RollSpeakers(s.ctx))
	lives("replaced the speakers while it drains")
	for _, c := range all {
		record := c.Stop()
		require.Empty(t, record.Broken)
		t.Logf("%d connections on %v, %d requests, the longest pause %s", record.Opened, record.Nodes(), record.Requests, record.WorstPause)
	}
}

// When the owner loses its power, the connections that depend on it continue if it is back soon, and
// end otherwise: with policy Local those of its pods, with policy Cluster also those that its
// kube-proxy keeps. All others continue. New endpoints change nothing.
func TestConnectionsOutliveTheOwner(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.echo(3)
	owner := s.Lab.Nodes()[0]
	s.config(usualPools + fmt.Sprintf(directForwarding, preferring(owner)))
	s.service("local", localPolicy)
	s.service("cluster")
	local := s.assigned("local")
	vips := []string{local, s.assigned("cluster")}
	s.forwards("")
	var before []*probe.Connections
	for _, vip := range vips {
		s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
		s.ownedBy(vip, owner)
		before = append(before, s.connect(vip, 20, usual))
	}
	s.echo(6)
	settle()
	all, through := map[string]*probe.Connections{}, map[string][]string{}
	for i, vip := range vips {
		all[vip] = s.connect(vip, 60, usual)
		require.Empty(t, before[i].Snapshot().Broken, "endpoints were added")
		through[vip] = s.through(owner, vip, all[vip])
		require.True(t, len(through[vip]) > 0 && len(through[vip]) < 60, "%d of 60 go through %s", len(through[vip]), owner)
	}
	s.afterwards(func() { require.NoError(s, s.Lab.HealNode(owner)) })
	lost := time.Now()
	require.NoError(t, s.Lab.NodeLoss(owner))
	for _, vip := range vips {
		s.eventually("the VIP moves", func() error { return s.owned(vip, owner, false) })
	}
	time.Sleep(time.Until(lost.Add(4 * time.Second))) // they are given up after ten
	require.NoError(t, s.Lab.HealNode(owner))
	for _, vip := range vips {
		s.ownedBy(vip, owner)
	}
	s.askAll(slices.Collect(maps.Values(all))...) // TCP retransmits late by then
	time.Sleep(10 * time.Second)
	for vip, c := range all {
		record := c.Snapshot()
		require.Empty(t, record.Broken, "the owner of %s was back soon", vip)
		t.Logf("%s: the longest pause was %s", vip, record.WorstPause)
	}

	require.NoError(t, s.Lab.NodeLoss(owner))
	for vip, c := range all {
		s.eventually("what goes through it ends", func() error {
			if broken := len(c.Snapshot().Broken); broken < len(through[vip]) {
				return fmt.Errorf("%d of %d connections have", broken, len(through[vip]))
			}
			return nil
		})
	}
	time.Sleep(2 * time.Second)
	onlyThose := func(what string) {
		t.Helper()
		for vip, c := range all {
			broken := c.Snapshot().Broken
			others := slices.DeleteFunc(slices.Clone(broken), func(b probe.Break) bool { return slices.Contains(through[vip], b.From) })
			require.Empty(t, others, "%s; now go through the node %v", what, s.through(owner, vip, c))
			require.Len(t, broken, len(through[vip]), what)
		}
	}
	onlyThose("no other one has")
	// With policy Cluster kube-proxy sends some to the lost node's pods, until Kubernetes misses it.
	require.Zero(t, s.connect(local, 20, usual).Snapshot().Nodes()[owner], "new connections go elsewhere")
	require.NoError(t, s.Lab.HealNode(owner))
	for vip, c := range all {
		s.ownedBy(vip, owner)
		s.askAll(c)
	}
	onlyThose("it is back")
}

// through returns the connections that go through the node, by the client's address: its
// kube-proxy keeps them, or their pod is there.
func (s *story) through(node, vip string, of *probe.Connections) (through []string) {
	s.Helper()
	kept := map[string]bool{}
	require.NoError(s, s.Lab.InNamespace(node, func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		for _, flow := range flows {
			if f := flow.Forward; f.DstIP.String() == vip {
				kept[net.JoinHostPort(f.SrcIP.String(), strconv.Itoa(int(f.SrcPort)))] = true
			}
		}
		return err
	}))
	for from, by := range of.Snapshot().By {
		if kept[from] || by.Node == node {
			through = append(through, from)
		}
	}
	return through
}

// Connections continue while all speakers are killed at once, and while nodes get the right to
// forward directly one by one.
func TestConnectionsOutliveTheSpeakers(t *testing.T) {
	s := begin(t)
	s.speakersChange(appsv1.OnDeleteDaemonSetStrategyType)
	s.forwardDirectly()
	s.afterwards(func() { s.speakersChange(appsv1.RollingUpdateDaemonSetStrategyType) })
	s.echo(6)
	s.config(usualPools + fmt.Sprintf(directForwarding, ""))
	s.service("web", localPolicy)
	vip := s.assigned("web")
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	all := []*probe.Connections{s.connect(vip, 20, usual)}
	lives := func(what string) {
		t.Helper()
		s.askAll(all...)
		for _, c := range all {
			require.Empty(t, c.Snapshot().Broken, what)
		}
	}
	owner := s.owner(vip)
	replace := func(node string) {
		t.Helper()
		pod := s.speakerOf(node)
		require.NoError(t, s.Terminate(s.ctx, &pod))
		s.eventually("another speaker is ready", func() error {
			pods, err := s.Pods(s.ctx, "speaker")
			if err == nil && !slices.ContainsFunc(pods, func(p corev1.Pod) bool {
				return p.Spec.NodeName == node && p.UID != pod.UID && lodestone.Ready(&p)
			}) {
				err = errors.New("it is not")
			}
			return err
		})
	}
	for _, node := range s.nodesBut(owner) {
		replace(node)
		lives("begins on " + node)
		all = append(all, s.connect(vip, 20, usual))
	}
	for _, c := range all { // the owner has no rules yet: these end when the VIP moves
		c.Stop()
	}
	all = nil
	replace(owner)
	s.forwards("")
	s.ownedBy(vip, owner)
	all = append(all, s.connect(vip, 40, usual))

	for _, node := range s.Lab.Nodes() {
		s.killSpeaker(node)
	}
	lives("killed all speakers")
	s.forwards("")
	s.ownedBy(vip, owner)
	lives("they are back")
	s.afterwards(func() { s.label(owner, excludeLabel, "") })
	s.label(owner, excludeLabel, "true")
	s.eventually("the VIP moves", func() error { return s.owned(vip, owner, false) })
	lives("it moved after that")
}

// speakersChange decides how the speakers are replaced when what they are to be changes.
func (s *story) speakersChange(how appsv1.DaemonSetUpdateStrategyType) {
	s.Helper()
	_, err := s.Kube.AppsV1().DaemonSets(lodestone.Namespace).Patch(s.ctx, lodestone.Speaker, types.MergePatchType,
		fmt.Appendf(nil, `{"spec": {"updateStrategy": {"type": %q}}}`, how), metav1.PatchOptions{})
	require.NoError(s, err)
}

// A node that cannot hand connections over does without, and explain has the reason: here its
// kube-proxy seems to be in mode IPVS.
func TestNodeThatCannotForwardDirectly(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.config(usualPools + fmt.Sprintf(directForwarding, ""))
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	s.forwards("")
	s.prints(0, []string{"explain", "vip", vip}, "Connections", "kept by ")
	node := s.nodesBut(s.owner(vip))[0]
	s.withIP(node, "link add kube-ipvs0 type veth peer name kube-ipvs0-peer", "link delete kube-ipvs0")
	f := s.finds("direct-forwarding", node)
	require.Contains(t, f.Message, "kube-proxy is in mode IPVS")
	s.eventually("explain reports it", func() error {
		output, _, err := s.CLI(s.ctx, "", "explain", "vip", vip)
		if want := node + " is handed none: kube-proxy there is in mode IPVS"; err == nil && !strings.Contains(output, want) {
			err = fmt.Errorf("want %q in %q", want, output)
		}
		return err
	})
	s.forwards(node) // what is handed to it until then ends
	s.connect(vip, 20, usual)
}

// Pods and nodes come and go: connections to pods that stay go on, and those to pods that
// end go on as long as their pod does.
func TestConnectionsOutliveChangesOfPods(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.config(usualPools + fmt.Sprintf(directForwarding, ""))
	s.lingering(3)
	s.service("web", localPolicy)
	vip := s.assigned("web")
	s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	s.forwards("")
	thaw := s.missing(s.nodesBut(s.owner(vip))[0])
	s.service("late", localPolicy)
	late := s.assigned("late")
	s.eventually("the VIP answers", func() error { return s.reachTCP(late) })
	all := []*probe.Connections{s.connect(vip, 60, usual), s.connect(late, 60, usual)}
	lives := func(what string, but ...string) {
		t.Helper()
		s.askAll(all...)
		for _, c := range all {
			require.Empty(t, slices.DeleteFunc(c.Snapshot().Broken, func(b probe.Break) bool { return slices.Contains(but, b.By.Pod) }), what)
		}
	}
	s.lingering(6)
	lives("3 pods are 6, and one node has no rules for a Service")
	thaw()
	s.forwards("")
	settle() // it is not asked for what it missed until it is heard for two seconds
	lives("it has them")
	var more *probe.Connections
	s.eventually("all three nodes keep new connections", func() error {
		more = s.connect(vip, 60, usual)
		if nodes := more.Snapshot().Nodes(); len(nodes) != 3 {
			return fmt.Errorf("%d do", len(nodes))
		}
		return nil
	})

	leaving := s.leaving(func() { s.scale(3) })
	require.Len(t, leaving, 3)
	lives("6 pods are 3, and the others still serve what they have")
	s.askAll(more)
	require.Empty(t, more.Snapshot().Broken)
	s.stayingAnswer(vip)
	s.left(leaving)
	lives("they have ended", leaving...)

	s.lingering(6)
	owner := s.owner(vip)
	for _, drained := range []string{s.nodesBut(owner)[0], owner} {
		leaving = append(leaving, s.echoesOn(drained)...)
		s.drain(drained)
		lives("drained "+drained, leaving...)
		s.stayingAnswer(vip)
		s.uncordon(drained)
	}

	// All pods are replaced, one by one: connections to those that stay for now do, too.
	last := s.connect(vip, 40, usual)
	s.restart()
	s.eventually("all pods are replaced", func() error {
		staying := s.echoes(false)
		for _, b := range last.Snapshot().Broken {
			require.NotContains(t, staying, b.By.Pod, "%s", b)
		}
		return s.lingers(6)
	})
	require.Empty(t, s.connect(vip, 20, usual).Snapshot().Broken)
}

// missing makes a node miss changes: its speaker stands still until the returned function is called.
func (s *story) missing(node string) (thaw func()) {
	s.Helper()
	pod := s.speakerOf(node)
	thaw = func() { require.NoError(s, s.Signal(s.ctx, &pod, unix.SIGCONT)) }
	s.afterwards(thaw)
	require.NoError(s, s.Signal(s.ctx, &pod, unix.SIGSTOP))
	for _, other := range s.nodesBut(node) { // what comes before they notice counts as known to it
		speaker := s.speakerOf(other)
		s.eventually(other+" does without it", func() error {
			n, err := s.Metric(s.ctx, &speaker, "lodestone_membership_ready_speakers", nil)
			if err == nil && int(n) != len(s.Lab.Nodes())-1 {
				err = fmt.Errorf("%v speakers are ready", n)
			}
			return err
		})
	}
	return thaw
}

// Where packets are handed over, Kubernetes' promises for a Service with policy Local hold: the
// nodes that serve, the client's address, affinity, source ranges, the health check's port,
// clients inside of the cluster. So do those for a shared VIP.
func TestServicesWithDirectForwarding(t *testing.T) {
	s := begin(t)
	s.forwardDirectly()
	s.config(dualPools + fmt.Sprintf(directForwarding, ""))
	s.echo(2) // one node has none
	s.service("web", dualStack, localPolicy, annotated(sharingKey, "edge"), port("http", corev1.ProtocolTCP, 80))
	s.service("dns", dualStack, localPolicy, annotated(sharingKey, "edge"), port("udp", corev1.ProtocolUDP, 80))
	vips := s.allAddresses("web", 2)
	vip := vips[0]
	for _, vip := range vips {
		s.eventually("the VIP answers", func() error { return s.reachTCP(vip) })
	}
	s.forwards("")
	require.NoError(t, s.reachUDP(vip), "who shares the VIP")
	var serving map[string]int
	for _, vip := range vips {
		serving = s.connect(vip, 30, usual).Snapshot().Nodes()
		require.Len(t, serving, 2, "nodes that have a pod")
		answer, err := probe.Get(s.ctx, s.Lab.Namespace(lab.Client), target(vip))
		require.NoError(t, err)
		require.Contains(t, s.Lab.Addresses(lab.Client), netip.MustParseAddrPort(answer.Remote).Addr(), "the client as the pod sees it")
		for _, node := range s.Lab.Nodes() {
			_, err := probe.Get(s.ctx, s.Lab.Namespace(node), target(vip))
			require.NoError(t, err, "%s itself is a client", node)
			health := fmt.Sprintf("http://%s/healthz",
				netip.AddrPortFrom(s.Lab.Addresses(node)[0], uint16(s.get("web").Spec.HealthCheckNodePort)))
			s.eventually("kube-proxy of "+node+" reports whether it has a pod", func() error {
				code, _, err := s.fetch(health, "")
				if err == nil && (code == http.StatusOK) != (serving[node] > 0) {
					err = fmt.Errorf("it answers %d", code)
				}
				return err
			})
		}
		pods, err := s.Kube.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{LabelSelector: "app=" + lodestone.EchoName})
		require.NoError(t, err)
		for _, p := range pods.Items {
			require.NoError(t, s.InPod(s.ctx, &p, "curl", "-sf", "--max-time", "3", "http://"+target(vip).String()), "pods that serve are clients")
		}
	}

	s.change("web", affinity(corev1.ServiceAffinityClientIP))
	var chosen []string
	s.eventually("one pod serves the client", func() error {
		if chosen = s.answerers(vip, 20); len(chosen) > 1 {
			return fmt.Errorf("%q do", chosen)
		}
		return nil
	})
	settle()
	for node := range serving {
		s.config(dualPools + fmt.Sprintf(directForwarding, preferring(node)))
		s.ownedBy(vip, node)
		require.Equal(t, chosen, s.answerers(vip, 20), "%s owns the VIP", node)
	}
	s.change("web", affinity(corev1.ServiceAffinityNone))
	s.eventually("both serve again", func() error {
		if pods := s.answerers(vip, 20); len(pods) < 2 {
			return fmt.Errorf("%q alone does", pods)
		}
		return nil
	})

	for ranges, serves := range map[string]bool{"192.0.2.0/24": false, s.Lab.Addresses(lab.Client)[0].String() + "/32": true} {
		s.change("web", func(svc *corev1.Service) { svc.Spec.LoadBalancerSourceRanges = []string{ranges} })
		timeout := 300 * time.Millisecond // of those that are to be dropped
		if serves {
			timeout = 5 * time.Second
		}
		s.eventually("the source ranges hold on all nodes", func() error {
			if accepted := s.connections(vip, 20, timeout); (accepted == 20) != serves || (accepted == 0) == serves {
				return fmt.Errorf("%d of 20 connections from the client are accepted with the ranges %s", accepted, ranges)
			}
			return nil
		})
	}
}

func affinity(a corev1.ServiceAffinity) option {
	return func(svc *corev1.Service) { svc.Spec.SessionAffinity = a }
}

// answerers are the pods that answer so many new connections of the client.
func (s *story) answerers(vip string, n int) []string {
	s.Helper()
	pods := map[string]bool{}
	for range n {
		answer, err := probe.Get(s.ctx, s.Lab.Namespace(lab.Client), target(vip))
		require.NoError(s, err)
		pods[answer.Pod] = true
	}
	return slices.Sorted(maps.Keys(pods))
}

// stayingAnswer waits until new connections go to pods that stay alone.
func (s *story) stayingAnswer(vip string) {
	s.Helper()
	s.eventually("pods that stay answer, and no other", func() error {
		staying := s.echoes(false)
		for _, pod := range s.answerers(vip, 30) {
			if !slices.Contains(staying, pod) {
				return fmt.Errorf("%s does, and %q stay", pod, staying)
			}
		}
		return nil
	})
}

// grace is how long pods continue to serve when they are terminated.
const grace = 15 * time.Second

// lingering gives the story so many echo pods, which continue to serve for a while when they are
// terminated.
func (s *story) lingering(replicas int32) {
	s.Helper()
	deployments := s.Kube.AppsV1().Deployments(s.namespace)
	if _, err := deployments.Get(s.ctx, lodestone.EchoName, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		s.echo(1)
		_, err = deployments.Patch(s.ctx, lodestone.EchoName, types.StrategicMergePatchType, fmt.Appendf(nil,
			`{"spec": {"template": {"spec": {"terminationGracePeriodSeconds": %d, "containers": [{"name": %q, "args": ["-on-term=ignore"]}]}}}}`,
			int(grace.Seconds()), lodestone.EchoName), metav1.PatchOptions{})
		require.NoError(s, err)
	}
	s.scale(replicas)
	s.eventually("the pods are there", func() error { return s.lingers(replicas) })
	settle()
}

// settle gives all nodes time to write rules after a change: between two changes they rest for up
// to a second.
func settle() { time.Sleep(3 * time.Second) }

// lingers checks that there are so many pods, with the wanted settings.
func (s *story) lingers(replicas int32) error {
	d, err := s.Kube.AppsV1().Deployments(s.namespace).Get(s.ctx, lodestone.EchoName, metav1.GetOptions{})
	if now := d.Status; err == nil && (now.ObservedGeneration != d.Generation || now.AvailableReplicas != replicas ||
		now.Replicas != replicas || now.UpdatedReplicas != replicas) {
		err = fmt.Errorf("status %+v", now)
	}
	return err
}

func (s *story) scale(replicas int32) {
	s.Helper()
	s.patchEcho(fmt.Sprintf(`{"spec": {"replicas": %d}}`, replicas))
}

// restart replaces the pods, as kubectl rollout restart does.
func (s *story) restart() {
	s.Helper()
	s.patchEcho(fmt.Sprintf(`{"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": %q}}}}}`,
		time.Now().Format(time.RFC3339)))
}

func (s *story) patchEcho(patch string) {
	s.Helper()
	_, err := s.Kube.AppsV1().Deployments(s.namespace).Patch(s.ctx, lodestone.EchoName, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{})
	require.NoError(s, err)
}

// echoes are the story's echo pods that are not about to end, or those that are.
func (s *story) echoes(ending bool) (names []string) {
	s.Helper()
	pods, err := s.Kube.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{LabelSelector: "app=" + lodestone.EchoName})
	require.NoError(s, err)
	for _, p := range pods.Items {
		if (p.DeletionTimestamp != nil) == ending {
			names = append(names, p.Name)
		}
	}
	return names
}

// echoesOn are the story's echo pods on a node.
func (s *story) echoesOn(node string) (names []string) {
	s.Helper()
	pods, err := s.Kube.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	require.NoError(s, err)
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	require.NotEmpty(s, names, "pods on %s", node)
	return names
}

// leaving returns the pods that are about to end a moment after do.
func (s *story) leaving(do func()) []string {
	s.Helper()
	do()
	s.eventually("pods are about to end", func() error {
		if len(s.echoes(true)) == 0 {
			return errors.New("none is")
		}
		return nil
	})
	settle()
	return s.echoes(true)
}

// left waits until the pods have ended, and all of those that came for them.
func (s *story) left(pods []string) {
	s.Helper()
	s.eventually("the pods have ended", func() error {
		if ending := s.echoes(true); len(ending) > 0 {
			return fmt.Errorf("%q have not", ending)
		}
		return nil
	})
}

// drain takes the node out of service, until the test ends.
func (s *story) drain(node string) {
	s.Helper()
	s.afterwards(func() { s.uncordon(node) })
	_, err := s.Lab.Kubectl(s.ctx, "drain", node, "--ignore-daemonsets", "--pod-selector=app="+lodestone.EchoName, "--timeout=60s")
	require.NoError(s, err)
}

func (s *story) uncordon(node string) {
	s.Helper()
	_, err := s.Lab.Kubectl(s.ctx, "uncordon", node)
	require.NoError(s, err)
}

// forwardDirectly gives the speakers the right to forward directly, until the test ends.
func (s *story) forwardDirectly() {
	s.Helper()
	s.afterwards(func() {
		if s.Failed() {
			s.dump(s.ctx) // what these speakers have logged, before others are there
		}
		require.NoError(s, s.Reinstall(s.ctx, s.Lab.Chart()))
		s.forgetForwarding()
	})
	require.NoError(s, s.Reinstall(s.ctx, s.Lab.Chart(), "--set=speaker.directForwarding=true"))
}

// forgetForwarding removes draining Services from the nodes: the next speaker with the right would inherit them.
func (s *story) forgetForwarding() {
	s.Helper()
	for _, node := range s.Lab.Nodes() {
		require.NoError(s, s.DeleteForwarding(s.ctx, node))
	}
}

// forwards waits until all nodes but the one, "" for none, have the rules, know which others have them, reach those
// at each of their addresses, and may own VIPs.
func (s *story) forwards(but string) {
	s.Helper()
	able := s.nodesBut(but)
	s.eventually("all nodes forward", func() error {
		for _, node := range able {
			pod, others := s.speakerOf(node), 0
			for _, other := range able {
				if other != node {
					others += len(s.Lab.Addresses(other))
				}
			}
			n, err := s.Metric(s.ctx, &pod, "lodestone_direct_neighbours", lodestone.Labels{"state": "reachable"})
			if err == nil && int(n) != others {
				err = fmt.Errorf("%s reaches its neighbours at %v of %d addresses", node, n, others)
			}
			if err != nil {
				return err
			}
		}
		return s.speakersReady(true)
	})
}

// use is the traffic of a connection.
type use struct {
	interval time.Duration
	padding  int
}

var (
	usual = use{interval: 250 * time.Millisecond}
	idle  = use{interval: time.Hour}
	bulk  = use{interval: 50 * time.Millisecond, padding: 256 << 10}
)

// connect opens TCP connections to the VIP with that traffic until the test ends.
func (s *story) connect(vip string, n int, u use) *probe.Connections {
	s.Helper()
	options := probe.Options{Namespace: s.Lab.Namespace(lab.Client), Target: target(vip), Interval: u.interval, Padding: u.padding}
	c, err := probe.Connect(s.ctx, options, n)
	require.NoError(s, err)
	s.Cleanup(func() { c.Stop() })
	return c
}

// askAll sends one more request on each connection.
func (s *story) askAll(all ...*probe.Connections) {
	s.Helper()
	for _, c := range all {
		require.NoError(s, c.AskAll(s.ctx))
	}
}
