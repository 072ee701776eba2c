package diagnosis

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// implementation is one of Services of type LoadBalancer, and how it shows.
type implementation struct {
	name string
	// images are parts of the names of its images. Those of a whole network
	// plugin are not among them: that it runs proves nothing.
	images []string
	// classed are arguments or variables of a container that takes only
	// Services with its class, or none at all.
	classed []string
	// annotations, finalizers and conditions are what it leaves on the Services
	// that it handles.
	annotations, finalizers, conditions []string
}

var known = []implementation{
	{name: "MetalLB", images: []string{"metallb/controller", "metallb/speaker", "metallb-controller", "metallb-speaker"},
		classed:     []string{"--lb-class="},
		annotations: []string{"metallb.io/ip-allocated-from-pool", "metallb.universe.tf/ip-allocated-from-pool"}},
	{name: "kube-vip", images: []string{"kube-vip/kube-vip"}, classed: []string{"lb_class_only=true", "svc_enable=false"},
		annotations: []string{"kube-vip.io/vipHost"}},
	{name: "the servicelb of k3s (klipper-lb)", images: []string{"klipper-lb"}, finalizers: []string{"svccontroller.k3s.cattle.io/daemonset"}},
	{name: "the LB IPAM of Cilium", conditions: []string{"cilium.io/IPAMRequestSatisfied"}},
	{name: "OpenELB", images: []string{"kubesphere/openelb", "openelb/openelb"}, annotations: []string{"lb.kubesphere.io/v1alpha1"}},
	{name: "PureLB", images: []string{"purelb/allocator", "purelb/lbnodeagent"}, annotations: []string{"purelb.io/allocated-by"}},
}

// implementations looks for others, and notes in c what it cannot see.
func implementations(ctx context.Context, c *diagnose.Cluster, o *cluster.Objects, client kubernetes.Interface) (found []diagnose.Other) {
	pods, err := workloads(ctx, client)
	if err != nil {
		c.Unread = append(c.Unread, err.Error())
		c.Undecided = append(c.Undecided, diagnose.Implementations)
	}
	for _, i := range known {
		var runs []string
		takesAll := false
		for _, w := range pods {
			if is, classed := i.runs(w.spec); is {
				runs, takesAll = append(runs, w.name), takesAll || !classed
			}
		}
		var handled []string
		for _, svc := range o.Services {
			if o.Scope.Covers(svc) && i.handles(svc, len(runs) > 0) {
				handled = append(handled, ledger.NameOf(svc))
			}
		}
		switch {
		case len(handled) > 0:
			found = append(found, diagnose.Other{Name: i.name, Evidence: "it has left its mark on " + output.List(handled, 3), Handles: true})
		case takesAll && o.Scope.Classless:
			found = append(found, diagnose.Other{Name: i.name, Evidence: output.List(runs, 3)})
		}
	}
	return found
}

// workload is what runs pods.
type workload struct {
	name string
	spec corev1.PodSpec
}

// workloads returns what runs pods on nodes or as controllers.
func workloads(ctx context.Context, client kubernetes.Interface) (all []workload, err error) {
	daemonSets, err := client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unlisted("DaemonSets", "daemonsets.apps", err)
	}
	for _, d := range daemonSets.Items {
		all = append(all, workload{"DaemonSet " + d.Namespace + "/" + d.Name, d.Spec.Template.Spec})
	}
	deployments, err := client.AppsV1().Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return all, unlisted("Deployments", "deployments.apps", err)
	}
	for _, d := range deployments.Items {
		all = append(all, workload{"Deployment " + d.Namespace + "/" + d.Name, d.Spec.Template.Spec})
	}
	return all, nil
}

func unlisted(kind, resource string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("you may not read %s, and other implementations may go unseen: you need the right to list %s in the whole cluster",
			kind, resource)
	}
	return fmt.Errorf("list %s: %w", kind, err)
}

// runs reports whether the pods are of the implementation, and whether it leaves
// Services without a class alone.
func (i implementation) runs(spec corev1.PodSpec) (is, classed bool) {
	for _, c := range spec.Containers {
		if !slices.ContainsFunc(i.images, func(part string) bool { return strings.Contains(c.Image, part) }) {
			continue
		}
		is = true
		texts := slices.Concat(c.Command, c.Args)
		for _, v := range c.Env {
			texts = append(texts, v.Name+"="+v.Value)
		}
		classed = classed || slices.ContainsFunc(texts, func(text string) bool {
			return slices.ContainsFunc(i.classed, func(mark string) bool { return strings.HasPrefix(text, mark) })
		})
	}
	return is, classed
}

// handles reports whether the implementation has marked the Service. A mark that
// stayed behind proves nothing: then Lodestone has given all of its addresses, and
// the implementation does not run.
func (i implementation) handles(svc *corev1.Service, running bool) bool {
	marked := slices.ContainsFunc(i.annotations, func(name string) bool { _, ok := svc.Annotations[name]; return ok }) ||
		slices.ContainsFunc(i.finalizers, func(name string) bool { return slices.Contains(svc.Finalizers, name) }) ||
		slices.ContainsFunc(i.conditions, func(name string) bool { return meta.FindStatusCondition(svc.Status.Conditions, name) != nil })
	assigned := kube.Assigned(svc)
	foreign := slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, func(in corev1.LoadBalancerIngress) bool {
		a, err := netip.ParseAddr(in.IP)
		return err != nil || !slices.Contains(assigned, a)
	})
	return marked && (running || foreign)
}
