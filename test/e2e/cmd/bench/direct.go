package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// direct measures how many TCP connections through one VIP of each family survive, with direct
// forwarding and without.
type direct struct {
	load
	vips  []netip.Addr // IPv4, IPv6
	owner string       // of the first
	held  []*probe.Connections
	round int // of Services
}

// forwarding is a configuration by how packets are forwarded, and which nodes are preferred.
func forwarding(how, preferred string) string {
	if preferred != "" {
		preferred = fmt.Sprintf(", preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}}]", preferred)
	}
	return lodestone.Document(fmt.Sprintf(`
pools:
  - {name: lan, addresses: [198.18.0.200-198.18.0.250, 2001:db8:0:1::200-2001:db8:0:1::250]}
advertisements:
  - {name: lan, layer2: {forwarding: %s%s}}
`, how, preferred))
}

// directCase is something that happens to connections.
type directCase struct {
	name string
	do   func() error
}

// directMove holds connections open while the VIPs move.
func directMove(ctx context.Context, installation *lodestone.Installation) error {
	return directly(ctx, installation, "direct_move", 1000, 6, func(d *direct, how string) []directCase {
		return []directCase{
			{"label", func() error { return d.exclude(ctx, d.owner) }},
			{"configuration", func() error { return d.prefer(ctx, how) }},
			{"rolling_update", func() error { return d.RollSpeakers(ctx) }},
			{"kill9", func() error { return d.kill(ctx) }},
			{"owner_lost_for_3s", func() error { return d.loseOwner(ctx) }},
			{"partition_for_5s", func() error { return d.partition(ctx, 5*time.Second) }},
			// Connections do not wait so long for a node.
			{"partition_for_15s", func() error { return d.partition(ctx, 15*time.Second) }},
		}
	})
}

// membersPods is how many pods there are when nodes and pods begin to change.
const membersPods = 3

// directMembers holds connections open while the nodes and pods change that serve them.
func directMembers(ctx context.Context, installation *lodestone.Installation) error {
	return directly(ctx, installation, "direct_members", 300, membersPods, func(d *direct, _ string) []directCase {
		return []directCase{
			{"endpoints_3_6_3", func() error {
				return errors.Join(d.RunEcho(ctx, namespace, 2*membersPods), d.RunEcho(ctx, namespace, membersPods))
			}},
			{"node_leaves_and_joins", func() error { return errors.Join(d.leave(ctx, d.owner), d.join(ctx, d.owner)) }},
			{"half_a_rollout", func() error { return d.rollout(ctx, 2) }},
			{"node_excluded_and_back", func() error { return d.exclude(ctx, d.others()[0]) }},
			{"ten_changes", func() error { return d.tenChanges(ctx) }},
		}
	})
}

// directly holds so many connections to so many pods open in each case, for each way of forwarding and each
// policy. Each case has VIPs of its own: after a pod has ended without closing its connection,
// conntrack would send the next connection from the client's port to the same pod.
func directly(ctx context.Context, installation *lodestone.Installation, name string, count int, pods int32,
	all func(d *direct, how string) []directCase) (failed error) {
	only, err := regexp.Compile(*cases)
	if err != nil {
		return fmt.Errorf("-cases: %w", err)
	}
	d := &direct{load: load{installation, 1}}
	restore, err := d.begin(ctx)
	defer func() { failed = errors.Join(failed, restore()) }()
	if err != nil {
		return err
	}
	for _, how := range []string{"owner", "direct"} { // what has been direct drains for an hour
		for _, policy := range []corev1.ServiceExternalTrafficPolicy{"Local", "Cluster"} {
			for _, c := range all(d, how) {
				line := fmt.Sprintf("%s forwarding=%s policy=%s case=%s", name, how, policy, c.name)
				if !only.MatchString(line) {
					continue
				}
				if err := errors.Join(d.Configure(ctx, forwarding(how, "")), d.RunEcho(ctx, namespace, pods), pause(ctx, 3*time.Second),
					d.serve(ctx, policy)); err != nil {
					return fmt.Errorf("%s: %w", line, err)
				}
				if err := errors.Join(d.holds(ctx, line, count, c.do), d.delete(ctx)); err != nil {
					return fmt.Errorf("%s: %w", line, err)
				}
			}
		}
	}
	return nil
}

// begin gives the speakers the right to forward directly. The restore function takes it away.
func (d *direct) begin(ctx context.Context) (restore func() error, failed error) {
	restore = func() error {
		return errors.Join(d.Upgrade(context.WithoutCancel(ctx), d.Lab.Chart()), d.Configure(ctx, lodestone.Document(segmentPool)))
	}
	return restore, errors.Join(d.Upgrade(ctx, d.Lab.Chart(), "--set=speaker.directForwarding=true"), d.makeNamespace(ctx),
		d.ForgetConnections()) // runs before this one had the same VIPs
}

// directSpeed compares what goes through a VIP, with direct forwarding and without, by turns. The
// pods are not on the owner.
func directSpeed(ctx context.Context, installation *lodestone.Installation) (failed error) {
	d := &direct{load: load{installation, 1}}
	restore, err := d.begin(ctx)
	defer func() { failed = errors.Join(failed, restore()) }()
	if err != nil {
		return err
	}
	owner := d.Lab.Nodes()[0]
	if err := errors.Join(d.Configure(ctx, forwarding("owner", owner)), d.RunEcho(ctx, namespace, 4, owner), pause(ctx, 3*time.Second),
		d.serve(ctx, corev1.ServiceExternalTrafficPolicyCluster)); err != nil {
		return err
	}
	for _, c := range []struct {
		name        string
		connections int
		padding     int
	}{{"requests", 32, 0}, {"bulk", 4, 1 << 20}} {
		var rates [2][]float64
		for range 5 {
			for i, how := range []string{"owner", "direct"} {
				rate, err := d.rate(ctx, how, owner, c.connections, c.padding)
				if err != nil {
					return fmt.Errorf("direct_speed case=%s forwarding=%s: %w", c.name, how, err)
				}
				rates[i] = append(rates[i], rate)
			}
		}
		without, with := quantile(rates[0], 0.5), quantile(rates[1], 0.5)
		result("direct_speed", "case=%s connections=%d bytes=%d owner_per_s=%.0f direct_per_s=%.0f ratio=%.2f", c.name, c.connections,
			c.padding, without, with, with/without)
	}
	return d.delete(ctx)
}

// rate returns how many requests are answered in a second.
func (d *direct) rate(ctx context.Context, how, owner string, connections, padding int) (float64, error) {
	if err := errors.Join(d.Configure(ctx, forwarding(how, owner)), d.Moved(ctx, d.vips[0].String(), owner, true),
		pause(ctx, 4*time.Second)); err != nil { // until all nodes have rules that follow
		return 0, err
	}
	options := d.FromClient()
	options.Target, options.Interval, options.Padding = netip.AddrPortFrom(d.vips[0], 80), time.Nanosecond, padding
	c, err := probe.Connect(ctx, options, connections)
	if err != nil {
		return 0, err
	}
	start, before := time.Now(), c.Snapshot().Requests
	err = pause(ctx, 5*time.Second)
	n, took := c.Snapshot().Requests-before, time.Since(start)
	record := c.Stop()
	if len(record.Broken) > 0 {
		return 0, record.Broken[0]
	}
	if record.Nodes()[owner] > 0 {
		return 0, fmt.Errorf("%d connections are to pods of the owner %s", record.Nodes()[owner], owner)
	}
	return float64(n) / took.Seconds(), err
}

// serve creates the Service, and waits until all nodes serve it.
func (d *direct) serve(ctx context.Context, policy corev1.ServiceExternalTrafficPolicy) error {
	svc, families := echoService(), corev1.IPFamilyPolicyRequireDualStack
	// Nobody has had the address: of connections through a Service that was deleted, conntrack
	// knows for long that kube-proxy had no endpoint for them.
	d.round++
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, "lodestone.io/addresses",
		fmt.Sprintf("198.18.0.%d,2001:db8:0:1::%d", 210+d.round, 210+d.round))
	svc.Spec.ExternalTrafficPolicy, svc.Spec.IPFamilyPolicy = policy, &families
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if _, err := d.assignments(ctx, func() error {
		_, err := d.Kube.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})
		return err
	}); err != nil {
		return err
	}
	svc, err := d.Kube.CoreV1().Services(namespace).Get(ctx, svc.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	// A client that comes before kube-proxy has its rules leaves an entry in conntrack, which
	// applies to the next client with that port.
	if err := pause(ctx, 2*time.Second); err != nil {
		return err
	}
	d.vips = nil
	for _, in := range svc.Status.LoadBalancer.Ingress {
		vip, err := netip.ParseAddr(in.IP)
		if err != nil {
			return err
		}
		d.vips = append(d.vips, vip)
		if err := lodestone.Wait(ctx, "the VIP answers", func() error {
			_, err := probe.Get(ctx, d.FromClient().Namespace, netip.AddrPortFrom(vip, 80))
			return err
		}); err != nil {
			return err
		}
	}
	slices.SortFunc(d.vips, netip.Addr.Compare)
	d.owner, err = d.Owner(ctx, d.vips[0].String())
	return errors.Join(err, pause(ctx, 3*time.Second)) // until all nodes have reported their rules
}

// holds reports what becomes of so many connections, which are opened before: one in ten has
// much to carry, four are idle, and the others ask every second. Meanwhile 50 new ones are
// opened each second.
func (d *direct) holds(ctx context.Context, line string, count int, do func() error) error {
	d.held = nil
	defer func() {
		for _, c := range d.held {
			c.Stop()
		}
	}()
	for _, vip := range d.vips {
		for _, kind := range []struct {
			tenths   int
			interval time.Duration
			padding  int
		}{{4, time.Hour, 0}, {5, time.Second, 0}, {1, 100 * time.Millisecond, 64 << 10}} {
			options := d.FromClient()
			options.Target, options.Interval, options.Padding = netip.AddrPortFrom(vip, 80), kind.interval, kind.padding
			c, err := probe.Connect(ctx, options, count/len(d.vips)*kind.tenths/10)
			if err != nil {
				return err
			}
			d.held = append(d.held, c)
		}
	}
	fresh := d.FromClient()
	fresh.Target, fresh.Interval, fresh.Timeout = netip.AddrPortFrom(d.vips[0], 80), 20*time.Millisecond, 5*time.Second
	opening := probe.TCP(ctx, fresh)
	defer opening.Stop()
	err := errors.Join(do(), pause(ctx, time.Second), d.ask(ctx)) // those that are idle do not know yet
	opened, failed := opening.Finish()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	var all probe.ConnectionRecord
	for _, c := range d.held {
		record := c.Stop()
		all.Opened, all.Requests = all.Opened+record.Opened, all.Requests+record.Requests
		all.Broken, all.WorstPause = append(all.Broken, record.Broken...), max(all.WorstPause, record.WorstPause)
	}
	lost, err := d.withPod(ctx, all.Broken)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		by := map[string]int{}
		for _, b := range lost {
			by[b.By.Node]++
		}
		fmt.Fprintf(os.Stderr, "%s: the owner was %s; connections that broke, by the node of their pod: %v, the first: %s\n", line,
			d.owner, by, lost[0])
	}
	name, rest, _ := strings.Cut(line, " ")
	result(name, "%s connections=%d requests=%d pods_gone=%d lost_connections=%d worst_pause_ms=%.0f new=%d new_failed=%d new_worst_ms=%.0f",
		rest, all.Opened, all.Requests, len(all.Broken)-len(lost), len(lost), ms(all.WorstPause), opened.Sent, opened.Lost(), ms(opened.Slowest))
	return nil
}

// ask sends one more request on each connection.
func (d *direct) ask(ctx context.Context) error {
	for _, c := range d.held {
		if err := c.AskAll(ctx); err != nil {
			return err
		}
	}
	return nil
}

// withPod returns the breaks of connections whose pod is still there.
func (d *direct) withPod(ctx context.Context, broken []probe.Break) ([]probe.Break, error) {
	pods, err := d.Kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	there := map[string]bool{}
	for _, p := range pods.Items {
		there[p.Name] = p.DeletionTimestamp == nil
	}
	return slices.DeleteFunc(broken, func(b probe.Break) bool { return !there[b.By.Pod] }), nil
}

// prefer moves the VIPs to each other node in turn, and then back.
func (d *direct) prefer(ctx context.Context, how string) error {
	for _, node := range d.Lab.Nodes() {
		if err := errors.Join(d.Configure(ctx, forwarding(how, node)), d.Moved(ctx, d.vips[0].String(), node, true),
			d.Moved(ctx, d.vips[1].String(), node, true), d.ask(ctx)); err != nil {
			return err
		}
	}
	return errors.Join(d.Configure(ctx, forwarding(how, "")), d.Moved(ctx, d.vips[0].String(), d.owner, true))
}

// exclude keeps a node, such as the owner, from owning VIPs for a while.
func (d *direct) exclude(ctx context.Context, node string) error {
	vip := d.vips[0].String()
	return errors.Join(d.Label(ctx, node, excludeLabel, "true"), d.Moved(ctx, vip, node, false), pause(ctx, 3*time.Second), d.ask(ctx),
		d.Label(ctx, node, excludeLabel, ""), d.Moved(ctx, vip, d.owner, true))
}

// others are the nodes but the owner.
func (d *direct) others() []string {
	return slices.DeleteFunc(slices.Clone(d.Lab.Nodes()), func(n string) bool { return n == d.owner })
}

// kill kills the owner's speaker, and waits until it is back.
func (d *direct) kill(ctx context.Context) error {
	vip := d.vips[0].String()
	return errors.Join(d.KillSpeaker(ctx, d.owner), d.Moved(ctx, vip, d.owner, false), d.ask(ctx), d.Moved(ctx, vip, d.owner, true))
}

// loseOwner takes the owner's power away for some seconds.
func (d *direct) loseOwner(ctx context.Context) error {
	vip := d.vips[0].String()
	return errors.Join(d.Lab.NodeLoss(d.owner), d.Moved(ctx, vip, d.owner, false), pause(ctx, 3*time.Second), d.Lab.HealNode(d.owner),
		d.Moved(ctx, vip, d.owner, true))
}

// partition cuts the owner off from the other nodes, and not from the client.
func (d *direct) partition(ctx context.Context, length time.Duration) error {
	return errors.Join(d.Lab.Partition([]string{d.owner}), pause(ctx, length), d.Lab.Heal(),
		d.Moved(ctx, d.vips[0].String(), d.owner, true))
}

// tenChanges takes the pods of a node away and gives it others, five times, and kills its speaker between.
func (d *direct) tenChanges(ctx context.Context) error {
	node := d.others()[0]
	for range 5 {
		if err := errors.Join(d.leave(ctx, node), d.KillSpeaker(ctx, node), d.join(ctx, node)); err != nil {
			return err
		}
	}
	return nil
}

// leave drains a node: others come for its pods elsewhere.
func (d *direct) leave(ctx context.Context, node string) error {
	_, err := d.Lab.Kubectl(ctx, "drain", node, "--ignore-daemonsets", "--pod-selector=app="+lodestone.EchoName, "--timeout=60s")
	return errors.Join(err, d.RunEcho(ctx, namespace, membersPods))
}

// join gives a node that was drained pods again: of the others' pods the youngest go.
func (d *direct) join(ctx context.Context, node string) error {
	_, err := d.Lab.Kubectl(ctx, "uncordon", node)
	return errors.Join(err, d.RunEcho(ctx, namespace, membersPods-1), d.RunEcho(ctx, namespace, membersPods))
}

// rollout replaces so many of the pods, and then stands still.
func (d *direct) rollout(ctx context.Context, pods int32) error {
	deployments := d.Kube.AppsV1().Deployments(namespace)
	patch := func(patch string) error {
		_, err := deployments.Patch(ctx, lodestone.EchoName, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	return errors.Join(patch(`{"spec": {"template": {"metadata": {"annotations": {"rollout": "half"}}}}}`),
		lodestone.Wait(ctx, "some pods are replaced", func() error {
			deployment, err := deployments.Get(ctx, lodestone.EchoName, metav1.GetOptions{})
			if err == nil && deployment.Status.UpdatedReplicas < pods {
				err = fmt.Errorf("%d are", deployment.Status.UpdatedReplicas)
			}
			return err
		}), patch(`{"spec": {"paused": true}}`), pause(ctx, 2*time.Second))
}
