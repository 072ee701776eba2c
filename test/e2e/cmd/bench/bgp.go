package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// routedPool has addresses that no segment has, announced to the lab's routers, FRR and BIRD,
// by every node. More keys of the peers follow.
const routedPool = `
quarantine: 0s
pools:
  - {name: routed, addresses: [198.18.16.0/24]}
advertisements:
  - {name: routers, bgp: {}}
peers:
  - {name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513, %[1]s}
  - {name: spine, address: 198.18.0.253, localASN: 64512, peerASN: external, %[1]s}
`

const (
	fastBFD    = "bfd: {transmitInterval: 100ms, receiveInterval: 100ms, detectMultiplier: 3}"
	fastestBFD = "bfd: {transmitInterval: 50ms, receiveInterval: 50ms, detectMultiplier: 3}"
)

// routerLoss measures what clients behind a router see when a node loses its
// power, with BFD and, for the record, by the hold time alone.
func routerLoss(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 1}
	only, err := regexp.Compile(*cases)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		name, keys string
		trials     int
	}{{"bfd=50x3", fastestBFD, 20}, {"bfd=100x3", fastBFD, 20}, {"hold=9s", "holdTime: 9s", 3}} {
		if !only.MatchString(c.name) {
			continue
		}
		err := l.whileRouted(ctx, c.keys, func(vip netip.Addr) error {
			var outages []time.Duration
			for range c.trials {
				// A session that does not last 10 s makes the next one wait.
				if err := pause(ctx, 10*time.Second); err != nil {
					return err
				}
				outage, err := l.loseNodeBehind(ctx, l.Lab.Nodes()[0], vip)
				if err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "%s: %s without answers\n", c.name, outage.Round(time.Millisecond))
				outages = append(outages, outage)
			}
			result("bgp_node_loss", "%s trials=%d p50_ms=%.0f max_ms=%.0f", c.name, c.trials, ms(quantile(outages, 0.5)), ms(quantile(outages, 1)))
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// loseNodeBehind cuts the node's power and returns the longest time that one of
// many flows through the router had no answers.
func (l load) loseNodeBehind(ctx context.Context, node string, vip netip.Addr) (outage time.Duration, err error) {
	const flows, before = 16, 100 // answers
	var probes []*probe.Probe
	for range flows {
		probes = append(probes, probe.UDP(ctx, probe.Options{Namespace: l.Lab.Namespace(lab.Remote), Target: netip.AddrPortFrom(vip, 80)}))
	}
	defer func() {
		for _, p := range probes {
			record, stopped := p.Stop() // what is lost is no outage to the end
			outage, err = max(outage, record.Outage().Duration()), errors.Join(err, stopped)
		}
		err = errors.Join(err, l.Lab.HealNode(node), l.knownTo(ctx, vip, l.Lab.Nodes()...),
			l.SteadyFrom(ctx, lab.Remote, netip.AddrPortFrom(vip, 80)))
	}()
	for _, p := range probes {
		if err := p.WaitAnswers(ctx, before); err != nil {
			return 0, err
		}
		p.Begin()
	}
	if err := l.Lab.NodeLoss(node); err != nil {
		return 0, err
	}
	if err := l.knownTo(ctx, vip, l.Lab.Nodes()[1:]...); err != nil {
		return 0, err
	}
	for _, p := range probes {
		if err := p.WaitAnswers(ctx, before); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// knownTo waits until the router sends the VIP's traffic to these nodes.
func (l load) knownTo(ctx context.Context, vip netip.Addr, nodes ...string) error {
	return lodestone.Wait(ctx, fmt.Sprintf("the router sends traffic for %s to %q", vip, nodes), func() error {
		got, err := l.NextHops(lab.Router, vip.String())
		if err == nil && !slices.Equal(got, nodes) {
			err = fmt.Errorf("it sends it to %q", got)
		}
		return err
	})
}

// routerMoves counts what clients behind a router lose while the speakers are
// replaced and while a node is taken out.
func routerMoves(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 1}
	node := l.Lab.Nodes()[0]
	for _, c := range []struct{ name, keys string }{{"graceful_restart", "gracefulRestart: {}"}, {"graceful_shutdown", fastBFD}} {
		err := l.whileRouted(ctx, c.keys, func(vip netip.Addr) error {
			return l.losesFrom(ctx, l.FromRemote(), "bgp_upgrade", c.name, 3, vip, func() error {
				return errors.Join(l.RollSpeakers(ctx), l.knownTo(ctx, vip, l.Lab.Nodes()...))
			}, nil)
		})
		if err != nil {
			return err
		}
	}
	return l.whileRouted(ctx, fastBFD, func(vip netip.Addr) error {
		return l.losesFrom(ctx, l.FromRemote(), "bgp_drain", "label", 10, vip, func() error {
			return errors.Join(
				l.Label(ctx, node, excludeLabel, "true"), l.knownTo(ctx, vip, l.Lab.Nodes()[1:]...),
				l.Label(ctx, node, excludeLabel, ""), l.knownTo(ctx, vip, l.Lab.Nodes()...),
			)
		}, nil)
	})
}

// whileRouted runs f while there is a Service at a VIP behind the router, whose
// pods are not on the first node.
func (l load) whileRouted(ctx context.Context, keys string, f func(vip netip.Addr) error) error {
	nodes := l.Lab.Nodes()
	if err := errors.Join(l.Configure(ctx, lodestone.Document(fmt.Sprintf(routedPool, keys))), l.makeNamespace(ctx),
		l.RunEcho(ctx, namespace, 2, nodes[0])); err != nil {
		return err
	}
	vip, err := l.createRouted(ctx, map[string]string{"app": lodestone.EchoName})
	if err != nil {
		return err
	}
	return errors.Join(l.knownTo(ctx, vip, nodes...), l.SteadyFrom(ctx, lab.Remote, netip.AddrPortFrom(vip, 80)), f(vip), l.delete(ctx))
}

func (l load) createRouted(ctx context.Context, selector map[string]string) (vip netip.Addr, err error) {
	svc := service(nameOf(0))
	svc.Spec.Selector = selector
	svc.Spec.Ports = []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(lodestone.EchoPort)}}
	_, err = l.assignments(ctx, func() error {
		_, err := l.Kube.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return vip, err
	}
	svc, err = l.Kube.CoreV1().Services(namespace).Get(ctx, svc.Name, metav1.GetOptions{})
	if err != nil {
		return vip, err
	}
	return netip.ParseAddr(svc.Status.LoadBalancer.Ingress[0].IP)
}

// routerHears measures from a Service's only endpoint that becomes ready, or
// ceases to be, in the API to the route in the router's kernel.
func routerHears(ctx context.Context, installation *lodestone.Installation) error {
	const times = 100
	l := load{installation, 1}
	if err := errors.Join(l.Configure(ctx, lodestone.Document(fmt.Sprintf(routedPool, fastBFD))), l.makeNamespace(ctx)); err != nil {
		return err
	}
	vip, err := l.createRouted(ctx, nil)
	if err != nil {
		return err
	}
	endpoints := l.Kube.DiscoveryV1().EndpointSlices(namespace)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: nameOf(0), Labels: map[string]string{discoveryv1.LabelServiceName: nameOf(0)}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"198.18.0.100"}, NodeName: &l.Lab.Nodes()[0]}},
	}
	if _, err := endpoints.Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return err
	}
	took := map[string]map[bool][]time.Duration{lab.Router: {}, lab.Router2: {}}
	for i := range 2 * times {
		ready := i%2 == 1
		slice.Endpoints[0].Conditions.Ready, slice.Endpoints[0].Conditions.Serving = &ready, &ready
		began, want := time.Now(), l.Lab.Nodes()
		if !ready {
			want = nil
		}
		if _, err := endpoints.Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
			return err
		}
		for waiting := []string{lab.Router, lab.Router2}; len(waiting) > 0; time.Sleep(time.Millisecond) {
			for _, router := range slices.Clone(waiting) {
				got, err := l.NextHops(router, vip.String())
				if err != nil {
					return err
				}
				if slices.Equal(got, want) {
					took[router][ready] = append(took[router][ready], time.Since(began))
					waiting = slices.DeleteFunc(waiting, func(r string) bool { return r == router })
				} else if time.Since(began) > lodestone.Timeout {
					return fmt.Errorf("%s sends traffic for %s to %q, want %q", router, vip, got, want)
				}
			}
		}
	}
	fmt.Fprintln(os.Stderr, "all three nodes announce and withdraw; the last of them counts")
	for router, daemon := range map[string]string{lab.Router: "frr", lab.Router2: "bird"} {
		for _, ready := range []bool{true, false} {
			name, some := map[bool]string{true: "bgp_announce", false: "bgp_withdraw"}[ready], took[router][ready][1:] // the sessions are up
			result(name, "router=%s times=%d p50_ms=%.0f p99_ms=%.0f", daemon, len(some), ms(quantile(some, 0.5)), ms(quantile(some, 0.99)))
		}
	}
	return errors.Join(endpoints.Delete(ctx, slice.Name, metav1.DeleteOptions{}), l.delete(ctx))
}
