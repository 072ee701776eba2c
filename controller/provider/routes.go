package provider

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	cloudprovider "k8s.io/cloud-provider"

	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// routes implements cloudprovider.Routes. Speakers make the routes from the Nodes, and write
// on their Leases to which of their node's pod CIDRs there are routes. This type passes that
// on to the framework, which sets the Nodes' condition NetworkUnavailable. ListRoutes reads
// the Leases, CreateRoute checks that the Lease names the route, and DeleteRoute leaves it to
// the speakers.
type routes struct {
	*Cloud
	mu       sync.Mutex
	reported map[types.NodeName]reported // when the routes were listed last
}

// reported is what a speaker reports on its Lease about routes to the pods of its node.
type reported struct {
	// known is set if it reports anything about them.
	known bool
	// cidrs are the pod CIDRs that have routes.
	cidrs []netip.Prefix
}

// Routes implements cloudprovider.Interface. There are routes if the configuration has them
// when the framework asks, which it does once at the start. Without --cluster-cidr there are
// none, because the framework would end the process.
func (c *Cloud) Routes() (cloudprovider.Routes, bool) {
	cfg, _ := c.Config.Current()
	switch {
	case cfg == nil || cfg.Routes == nil:
		c.Log.Warn("no routes to pods: the configuration has no routes; the Nodes' condition NetworkUnavailable is left alone until " +
			"the controller is restarted with one")
		return nil, false
	case c.ClusterCIDR == "":
		c.Log.Error("the Nodes' condition NetworkUnavailable is left alone: set --cluster-cidr to the pod CIDRs of the cluster")
		return nil, false
	}
	return &routes{Cloud: c}, true
}

// ListRoutes returns the pod CIDRs of nodes that have routes.
func (r *routes) ListRoutes(ctx context.Context, _ string) ([]*cloudprovider.Route, error) {
	if cfg, _ := r.Config.Current(); cfg == nil || cfg.Routes == nil {
		return nil, errors.New("the configuration has no routes any more: restart the controller, the Nodes' condition NetworkUnavailable " +
			"stays as it is")
	}
	speakers, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	nodes, err := r.nodes.Lister().List(labels.Everything())
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var all []*cloudprovider.Route
	for _, node := range nodes {
		for _, cidr := range node.Spec.PodCIDRs {
			if of, ok := speakers[types.NodeName(node.Name)]; ok && routed(node, cidr, of) {
				all = append(all, &cloudprovider.Route{Name: node.Name + " " + cidr, TargetNode: types.NodeName(node.Name), DestinationCIDR: cidr})
			}
		}
	}
	return all, nil
}

// list reads the Leases of the speakers, from the API server's cache.
func (r *routes) list(ctx context.Context) (map[types.NodeName]reported, error) {
	scope := objects.Speakers(r.Namespace)
	scope.Cached = true
	all := map[types.NodeName]reported{}
	if err := objects.Leases.Each(ctx, r.Client, scope, func(l *coordinationv1.Lease) {
		if node, ok := report.NodeOf(l.Name); ok {
			of := report.Of(l.Annotations)
			all[types.NodeName(node)] = reported{of.PodRoutes != "", of.RoutedPodCIDRs}
		}
	}); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reported = all
	return all, nil
}

// routed reports whether the CIDR of the node counts as routed. A speaker that reports nothing
// about routes is older than the configuration or this version. Its node then stays as it is,
// so that an upgrade does not make the network of every node unavailable.
func routed(node *corev1.Node, cidr string, of reported) bool {
	if !of.known {
		return !slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue
		})
	}
	return of.has(cidr)
}

// has reports whether the speaker names the CIDR as routed.
func (of reported) has(cidr string) bool {
	prefix, err := netip.ParsePrefix(cidr)
	return err == nil && slices.Contains(of.cidrs, prefix.Masked())
}

// CreateRoute fails as long as the Lease of the node's speaker does not name the CIDR. The
// framework asks again, and its Event on the Node has the reason.
func (r *routes) CreateRoute(_ context.Context, _, _ string, route *cloudprovider.Route) error {
	r.mu.Lock()
	of, exists := r.reported[route.TargetNode]
	r.mu.Unlock()
	switch {
	case !exists:
		return fmt.Errorf("node %s has no speaker, and so no routes to its pods: does the DaemonSet lodestone-speaker run there?",
			route.TargetNode)
	case !of.has(route.DestinationCIDR):
		return fmt.Errorf("the speaker of node %s does not report routes to %s: its log and /status have the reason", route.TargetNode,
			route.DestinationCIDR)
	}
	return nil
}

// DeleteRoute has nothing to do: speakers remove routes to CIDRs that no Node has any more.
func (r *routes) DeleteRoute(context.Context, string, *cloudprovider.Route) error { return nil }
