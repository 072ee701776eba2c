package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// podRoute is a route of a node to the pods of another.
type podRoute struct{ node, cidr, via string }

// podRoutes returns the routes that the nodes need to reach each other's pods.
func (s *story) podRoutes() []podRoute {
	s.Helper()
	list, err := s.Kube.CoreV1().Nodes().List(s.ctx, metav1.ListOptions{})
	require.NoError(s, err)
	var all []podRoute
	for _, from := range s.Lab.Nodes() {
		for _, to := range list.Items {
			for _, cidr := range to.Spec.PodCIDRs {
				if to.Name != from {
					all = append(all, podRoute{from, cidr, internalIP(s, to, cidr)})
				}
			}
		}
	}
	return all
}

// internalIP returns the node's address of the CIDR's family.
func internalIP(s *story, node corev1.Node, cidr string) string {
	s.Helper()
	prefix, err := netip.ParsePrefix(cidr)
	require.NoError(s, err)
	for _, a := range node.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP && ip.Is4() == prefix.Addr().Is4() {
			return a.Address
		}
	}
	require.Fail(s, "no address", "of node %s for %s", node.Name, cidr)
	return ""
}

// ip runs ip(8) on a node.
func (s *story) ip(node string, args ...string) string {
	s.Helper()
	out, err := s.Lab.Command(s.ctx, node, append([]string{"ip"}, args...)...).CombinedOutput()
	require.NoError(s, err, "%s", out)
	return string(out)
}

// ours waits until exactly these of the nodes' routes are Lodestone's.
func (s *story) ours(want []podRoute) {
	s.Helper()
	s.eventually(fmt.Sprintf("%d routes to pods are ours", len(want)), func() error {
		var got []podRoute
		for _, node := range s.Lab.Nodes() {
			for _, family := range []string{"-4", "-6"} {
				for line := range strings.Lines(s.ip(node, family, "route", "show", "proto", "76")) {
					f := strings.Fields(line)
					got = append(got, podRoute{node, f[0], f[2]})
				}
			}
		}
		for _, r := range want {
			if !slices.Contains(got, r) {
				return fmt.Errorf("%+v is not among %+v", r, got)
			}
		}
		if len(got) != len(want) {
			return fmt.Errorf("they are %+v", got)
		}
		return nil
	})
}

// Lodestone's routes replace the lab's static routes to pods. While the static routes are
// there, they are left alone, and reported as a problem; without them pods of all nodes serve by
// Lodestone's routes only.
func routesToPodsAreOurs(t *testing.T) {
	s := begin(t)
	s.echo(int32(len(s.Lab.Nodes())))
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.steady(vip)
	all := s.podRoutes()

	s.config(usualPools + "\nroutes: {mode: kernel}\n")
	first := s.speakerOf(s.Lab.Nodes()[0])
	s.eventually("the static routes are reported as a problem", func() error {
		n, err := s.Metric(s.ctx, &first, "lodestone_route_problems", lodestone.Labels{"reason": "RoutedByOthers"})
		if err == nil && n != float64(len(all)/len(s.Lab.Nodes())) {
			err = fmt.Errorf("%v problems", n)
		}
		return err
	})
	s.ours(nil)

	s.afterwards(func() {
		s.config(usualPools)
		s.ours(nil)
		for _, r := range all {
			s.ip(r.node, "route", "replace", r.cidr, "via", r.via)
		}
	})
	for _, r := range all {
		s.ip(r.node, "route", "del", r.cidr, "via", r.via)
	}
	s.ours(all)
	s.steady(vip)
	s.ip(all[0].node, "route", "flush", "proto", "76")
	s.ours(all)
	s.killSpeaker(all[0].node)
	s.ours(all)
	s.steady(vip)
}

// With mode bgp a router knows every node's pods, also those of one that takes
// no traffic for VIPs.
func TestRoutersKnowThePods(t *testing.T) {
	s := begin(t)
	const router = "\npeers:" + torWithoutBFD + "}\n" // a node without processor time for a moment is not what this is about
	s.config(routed + router + "routes: {mode: bgp, peers: [tor]}\n")
	all := s.podRoutes()
	for _, r := range all {
		s.eventually("the router knows "+r.cidr, func() error { return s.routerKnows(r) })
	}
	excluded := s.Lab.Nodes()[0]
	s.label(excluded, excludeLabel, "true")
	s.afterwards(func() { s.label(excluded, excludeLabel, "") })
	s.always(4*time.Second, "the routes stay", func() error {
		var errs []error
		for _, r := range all {
			errs = append(errs, s.routerKnows(r))
		}
		return errors.Join(errs...)
	})
	s.config(routed + router)
	for _, r := range all {
		s.eventually("the router forgets "+r.cidr, func() error {
			if s.routerKnows(r) == nil {
				return errors.New("it has a route")
			}
			return nil
		})
	}
}

// routerKnows checks that the router has a route to the CIDR; in IPv6 the next
// hop may be a link-local address.
func (s *story) routerKnows(r podRoute) error {
	v6, family := strings.Contains(r.cidr, ":"), "-4"
	if v6 {
		family = "-6"
	}
	route := s.ip(lab.Router, family, "route", "show", r.cidr)
	if !strings.Contains(route, " via ") || !v6 && !strings.Contains(route, " via "+r.via+" ") {
		return fmt.Errorf("route to %s: %q, want one via %s", r.cidr, route, r.via)
	}
	return nil
}
