package soak

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// namespace is where the Services and pods of a run are.
const namespace = "soak"

// pods is how many pods answer, two on each node.
const pods = 6

// document is the configuration, with a node that VIPs prefer, or without.
func document(preferred string) string {
	if preferred != "" {
		preferred = fmt.Sprintf("preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}}]", preferred)
	}
	return lodestone.Document(fmt.Sprintf(`
quarantine: 5s
pools:
  - name: lan
    addresses: [198.18.0.200-198.18.0.219]
  - name: lan6
    addresses: ["2001:db8:0:1::200-2001:db8:0:1::21f"]
  - name: direct
    addresses: [198.18.0.220-198.18.0.239]
  - name: routed
    addresses: [198.18.16.0/24]
  - name: many
    addresses: [198.18.17.0/24]
advertisements:
  - name: lan
    serviceSelector: {matchExpressions: [{key: pool, operator: In, values: [lan, lan6]}]}
    layer2: {%[1]s}
  - name: direct
    serviceSelector: {matchLabels: {pool: direct}}
    layer2: {forwarding: direct, %[1]s}
  - name: routers
    serviceSelector: {matchExpressions: [{key: pool, operator: In, values: [routed, many]}]}
    bgp: {}
peers:
  - {name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513}
  - {name: spine, address: 198.18.0.253, localASN: 64512, peerASN: external}
`, preferred))
}

// user is a Service and its clients.
type user struct {
	name, pool string
	local      bool // externalTrafficPolicy
	// connections is how many are kept open. They outlive moves where forwarding is direct.
	connections int
}

func (u user) six() bool    { return u.pool == "lan6" }
func (u user) direct() bool { return u.pool == "direct" }
func (u user) routed() bool { return u.pool == "routed" }

var users = []user{
	{name: "cluster", pool: "lan", connections: 10},
	{name: "local", pool: "lan", local: true},
	{name: "six", pool: "lan6", connections: 5},
	{name: "direct-local", pool: "direct", local: true, connections: 15},
	{name: "direct-cluster", pool: "direct"},
	{name: "routed", pool: "routed"},
}

// clients are the clients of the Services.
type clients struct {
	vips map[string]netip.Addr
	held map[string]*probe.Connections
	// broken counts those that are known to have ended.
	broken map[string]int
}

// prepare configures Lodestone, creates the Services, and opens connections to them.
func (s *soak) prepare(ctx context.Context) error {
	if err := s.Upgrade(ctx, s.Lab.Chart(), "--set=speaker.directForwarding=true"); err != nil {
		return err
	}
	if err := s.Configure(ctx, document("")); err != nil {
		return err
	}
	if err := s.remove(ctx); err != nil { // the last run may have been killed
		return err
	}
	if _, err := s.Kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := s.RunEcho(ctx, namespace, pods); err != nil {
		return err
	}
	s.clients = clients{vips: map[string]netip.Addr{}}
	for _, u := range users {
		if err := s.create(ctx, u.name, u); err != nil {
			return err
		}
	}
	err := lodestone.Wait(ctx, "all Services have addresses", func() error {
		list, err := s.Kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if err := distinct(list.Items); err != nil {
			return err
		}
		for _, svc := range list.Items {
			s.clients.vips[svc.Name] = netip.MustParseAddr(svc.Status.LoadBalancer.Ingress[0].IP)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := lodestone.Wait(ctx, "all VIPs answer", func() error { return s.settled(ctx, nil, nil) }); err != nil {
		return err
	}
	return s.clients.open(ctx, s)
}

// create creates a Service of the user's.
func (s *soak) create(ctx context.Context, name string, u user) error {
	family := corev1.IPv4Protocol
	if u.six() {
		family = corev1.IPv6Protocol
	}
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": u.pool},
			Annotations: map[string]string{"lodestone.io/address-pool": u.pool}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": lodestone.EchoName},
			AllocateLoadBalancerNodePorts: new(false), IPFamilies: []corev1.IPFamily{family},
		},
	}
	if u.local {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: string(protocol[0]+'a'-'A') + "80", Protocol: protocol, Port: 80,
			TargetPort: intstr.FromInt32(lodestone.EchoPort)})
	}
	_, err := s.Kube.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})
	return err
}

// distinct checks that each Service has an address, and none that of another one.
func distinct(services []corev1.Service) error {
	has := map[string]string{}
	for _, svc := range services {
		if len(svc.Status.LoadBalancer.Ingress) != 1 {
			return fmt.Errorf("service %s has %d addresses", svc.Name, len(svc.Status.LoadBalancer.Ingress))
		}
		address := svc.Status.LoadBalancer.Ingress[0].IP
		if other, twice := has[address]; twice {
			return fmt.Errorf("services %s and %s have %s", svc.Name, other, address)
		}
		has[address] = svc.Name
	}
	return nil
}

// target is where the Service answers.
func (c *clients) target(u user) netip.AddrPort { return netip.AddrPortFrom(c.vips[u.name], 80) }

// open opens the connections that a run holds, in place of those that it had.
func (c *clients) open(ctx context.Context, s *soak) error {
	s.verdict.Requests += c.close()
	c.held, c.broken = map[string]*probe.Connections{}, map[string]int{}
	for _, u := range users {
		if u.connections == 0 {
			continue
		}
		var held *probe.Connections
		err := lodestone.Wait(ctx, "connections to "+u.name+" are open", func() (err error) {
			held, err = probe.Connect(ctx, probe.Options{Namespace: s.Lab.Namespace(lab.Client), Target: c.target(u),
				Interval: 300 * time.Millisecond, Timeout: time.Minute}, u.connections)
			return err
		})
		if err != nil {
			return err
		}
		c.held[u.name] = held
		s.verdict.Connections += u.connections
	}
	return nil
}

// close closes all connections and returns how many requests were answered on them.
func (c *clients) close() (requests int) {
	for _, held := range c.held {
		requests += held.Stop().Requests
	}
	return requests
}

// ask lets clients ask all VIPs by datagrams, each in a flow of its own.
func (c *clients) ask(ctx context.Context, s *soak) (map[string]*probe.Probe, error) {
	asking := map[string]*probe.Probe{}
	for _, u := range users {
		from := lab.Client
		if u.routed() {
			from = lab.Remote
		}
		asking[u.name] = probe.UDP(ctx, probe.Options{Namespace: s.Lab.Namespace(from), Target: c.target(u),
			Interval: 20 * time.Millisecond, NewFlows: true})
	}
	var failed error
	for _, p := range asking {
		failed = errors.Join(failed, again(ctx, p))
	}
	return asking, failed
}

// again waits until some more probes are answered: an outage has to end to have a length.
func again(ctx context.Context, p *probe.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, lodestone.Timeout)
	defer cancel()
	return p.WaitAnswers(ctx, 10)
}

// answered ends the asking and returns what the faults do not explain: outages that are too long,
// and connections that have ended.
func (c *clients) answered(ctx context.Context, asking map[string]*probe.Probe, happened faults, s *soak) (found []string, err error) {
	half := false
	for _, u := range users {
		if err := again(ctx, asking[u.name]); err != nil {
			found = append(found, fmt.Sprintf("%s: %s", u.name, err))
		}
		record, err := asking[u.name].Stop()
		if err != nil {
			return nil, err
		}
		s.verdict.Asked += record.Sent
		outage, limit := record.Outage(), happened.outage(u.routed())
		if took := outage.Duration(); took > s.verdict.WorstOutage[happened.names()] {
			s.verdict.WorstOutage[happened.names()] = took
		}
		if outage.Duration() > limit {
			found = append(found, fmt.Sprintf("%s was not answered for longer than %s: %s from %s on", u.name, limit, outage,
				outage.From.Format("15:04:05.000")))
		}
		held := c.held[u.name]
		if held == nil {
			continue
		}
		if err := held.AskAll(ctx); err != nil {
			return nil, err
		}
		broken := held.Snapshot().Broken
		for _, b := range broken[c.broken[u.name]:] {
			if u.direct() && !happened.mayEnd(b.By.Node) || !u.direct() && !happened.move() {
				found = append(found, fmt.Sprintf("%s: a connection ended: %s", u.name, b))
			}
		}
		s.verdict.Ended += len(broken) - c.broken[u.name]
		c.broken[u.name] = len(broken)
		half = half || len(broken) > u.connections/2
	}
	slices.Sort(found)
	if half && len(found) == 0 {
		return nil, c.open(ctx, s)
	}
	return found, nil
}
