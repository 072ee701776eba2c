package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
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
	if err := l.Configure(ctx, lodestone.Document(segmentPool)); err != nil {
		return err
	}
	vip, err := l.serveEcho(ctx)
	if err != nil {
		return err
	}
	var outages []time.Duration
	for range trials {
		loss, err := l.LoseOwner(ctx, netip.AddrPortFrom(vip, 80))
		if err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "%s lost, %s took over: %s without answers\n", loss.Old, loss.New, loss.Outage.Round(time.Millisecond))
		outages = append(outages, loss.Outage)
	}
	result("l2_node_loss", "trials=%d p50_ms=%.0f max_ms=%.0f", trials, ms(quantile(outages, 0.5)), ms(quantile(outages, 1)))
	return l.delete(ctx)
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
	svc := service("web-00000")
	svc.Spec.Selector = map[string]string{"app": lodestone.EchoName}
	svc.Spec.Ports = []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(lodestone.EchoPort)}}
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
