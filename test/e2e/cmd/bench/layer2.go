package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// segmentPool has addresses of the lab's segment.
const segmentPool = `
pools:
  - {name: lan, addresses: [198.18.0.200-198.18.0.250]}
`

// nodeLoss measures what a client that asks every 5 ms sees when the node that
// owns the VIP loses its power.
func nodeLoss(ctx context.Context, installation *lodestone.Installation) error {
	const trials = 20
	l := load{installation, 1}
	return l.whileServed(ctx, func(vip netip.Addr) error {
		var outages []time.Duration
		for range trials {
			loss, err := l.LoseOwner(ctx, netip.AddrPortFrom(vip, 80))
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "%s lost, %s took over: %s without answers\n", loss.Old, loss.New, loss.Outage.Round(time.Millisecond))
			outages = append(outages, loss.Outage)
		}
		reportNodeLoss(len(l.Lab.Nodes()), outages)
		return nil
	})
}

func reportNodeLoss(nodes int, outages []time.Duration) {
	result("l2_node_loss", "nodes=%d trials=%d p50_ms=%.0f p99_ms=%.0f max_ms=%.0f", nodes, len(outages),
		ms(quantile(outages, 0.5)), ms(quantile(outages, 0.99)), ms(quantile(outages, 1)))
}

// serveEcho creates the one Service of the load for echo pods that are not on
// the node that owns its VIP.
func (l load) serveEcho(ctx context.Context) (vip netip.Addr, err error) {
	if err := l.makeNamespace(ctx); err != nil {
		return vip, err
	}
	if err := l.RunEcho(ctx, namespace, 3); err != nil {
		return vip, err
	}
	svc := echoService()
	seen, err := l.assignments(ctx, func() error {
		_, err := l.Kube.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})
		return err
	})
	if err != nil || len(seen) == 0 {
		return vip, err
	}
	svc, err = l.Kube.CoreV1().Services(namespace).Get(ctx, svc.Name, metav1.GetOptions{})
	if err != nil {
		return vip, err
	}
	vip, err = netip.ParseAddr(svc.Status.LoadBalancer.Ingress[0].IP)
	if err != nil {
		return vip, err
	}
	if err := l.KeepEchoFromOwner(ctx, namespace, 3, vip.String()); err != nil {
		return vip, err
	}
	return vip, l.Steady(ctx, netip.AddrPortFrom(vip, 80))
}

// echoService is a Service for the echo pods.
func echoService() *corev1.Service {
	svc := service(nameOf(0))
	svc.Spec.Selector = map[string]string{"app": lodestone.EchoName}
	svc.Spec.Ports = nil
	for _, protocol := range []corev1.Protocol{corev1.ProtocolUDP, corev1.ProtocolTCP} {
		port := corev1.ServicePort{Name: strings.ToLower(string(protocol)), Port: 80, Protocol: protocol,
			TargetPort: intstr.FromInt32(lodestone.EchoPort)}
		svc.Spec.Ports = append(svc.Spec.Ports, port)
	}
	return svc
}

// plannedMove counts what a client loses while the VIP moves away from its owner and
// back, as operators cause it: datagrams, and TCP connections that it holds open.
func plannedMove(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 1}
	return l.whileServed(ctx, func(vip netip.Addr) error {
		owner, err := l.Owner(ctx, vip.String())
		if err != nil {
			return err
		}
		return errors.Join(
			l.moves(ctx, "label", 20, vip, func() error { return l.moveAwayAndBack(ctx, owner, vip) }),
			l.moves(ctx, "rolling_update", 5, vip, func() error { return l.RollSpeakers(ctx) }),
		)
	})
}

// moves does something again and again that moves the VIP away and back. It reports
// the datagrams that were lost, one every 5 ms, and the TCP connections that broke, of
// 60 opened each time before, with a request every 100 ms on each.
func (l load) moves(ctx context.Context, what string, times int, vip netip.Addr, do func() error) error {
	held := probe.Options{Namespace: l.FromClient().Namespace, Target: netip.AddrPortFrom(vip, 80), Interval: 100 * time.Millisecond}
	var total probe.ConnectionRecord
	seen, err := l.lost(ctx, l.FromClient(), what, times, vip, func() error {
		connections, err := probe.Connect(ctx, held, 60)
		if err != nil {
			return err
		}
		failed := errors.Join(do(), pause(ctx, time.Second)) // each asks once more, at least
		record := connections.Stop()
		total.Opened, total.Requests = total.Opened+record.Opened, total.Requests+record.Requests
		total.Broken, total.WorstPause = append(total.Broken, record.Broken...), max(total.WorstPause, record.WorstPause)
		return failed
	}, nil)
	if err != nil {
		return err
	}
	if len(total.Broken) > 0 {
		fmt.Fprintf(os.Stderr, "%s: the first connection that broke: %s\n", what, total.Broken[0])
	}
	result("l2_planned_move", "case=%s times=%d probes=%d lost_probes=%d connections=%d requests=%d lost_connections=%d worst_pause_ms=%.0f",
		what, times, seen.sent, seen.lost, total.Opened, total.Requests, len(total.Broken), ms(total.WorstPause))
	return nil
}

// excludeLabel keeps a node from having VIPs.
const excludeLabel = "node.kubernetes.io/exclude-from-external-load-balancers"

// moveAwayAndBack moves the VIP away from its owner and back, by a label.
func (l load) moveAwayAndBack(ctx context.Context, owner string, vip netip.Addr) error {
	return errors.Join(
		l.Label(ctx, owner, excludeLabel, "true"), l.Moved(ctx, vip.String(), owner, false),
		l.Label(ctx, owner, excludeLabel, ""), l.Moved(ctx, vip.String(), owner, true),
	)
}

// speakerKill counts the datagrams that are lost when the owner's speaker is
// killed and its node lives.
func speakerKill(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 1}
	return l.whileServed(ctx, func(vip netip.Addr) error {
		return l.loses(ctx, "l2_speaker_kill9", "kill", 20, vip, func() error {
			owner, err := l.Owner(ctx, vip.String())
			if err != nil {
				return err
			}
			return errors.Join(l.KillSpeaker(ctx, owner), l.Moved(ctx, vip.String(), owner, false))
		}, func() error { // fresh pods, which kubelet does not make wait
			return errors.Join(l.RestartSpeakers(ctx),
				lodestone.Wait(ctx, "one speaker answers", func() error { return l.OneAnswerer(ctx, vip.String()) }))
		})
	})
}

// whileServed runs f while there is a Service at the VIP, with pods.
func (l load) whileServed(ctx context.Context, f func(vip netip.Addr) error) error {
	if err := l.Configure(ctx, lodestone.Document(segmentPool)); err != nil {
		return err
	}
	vip, err := l.serveEcho(ctx)
	if err != nil {
		return err
	}
	if err := f(vip); err != nil {
		return err
	}
	return l.delete(ctx)
}

// loses does something again and again and reports how many of the datagrams to
// the VIP were lost meanwhile, one every 5 ms. What after does is not measured.
func (l load) loses(ctx context.Context, name, what string, times int, vip netip.Addr, do, after func() error) error {
	return l.losesFrom(ctx, l.FromClient(), name, what, times, vip, do, after)
}

func (l load) losesFrom(ctx context.Context, where probe.Options, name, what string, times int, vip netip.Addr, do,
	after func() error) error {
	seen, err := l.lost(ctx, where, what, times, vip, do, after)
	if err != nil {
		return err
	}
	result(name, "case=%s times=%d probes=%d lost_probes=%d", what, times, seen.sent, seen.lost)
	return nil
}

// tally counts datagrams.
type tally struct{ sent, lost int }

// lost does what loses does, and returns what it reports.
func (l load) lost(ctx context.Context, where probe.Options, what string, times int, vip netip.Addr, do,
	after func() error) (all tally, err error) {
	target := netip.AddrPortFrom(vip, 80)
	for range times {
		records, err := lodestone.During(ctx, where, []netip.AddrPort{target}, do)
		if err != nil {
			return all, err
		}
		record := records[target]
		if record.Lost() > 0 {
			fmt.Fprintf(os.Stderr, "%s: %d of %d lost, %s\n", what, record.Lost(), record.Sent, record.Outage())
		}
		all.sent, all.lost = all.sent+record.Sent, all.lost+record.Lost()
		if after != nil {
			if err := after(); err != nil {
				return all, err
			}
		}
	}
	return all, nil
}
