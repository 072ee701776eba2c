// Package foreign reads the objects of other load balancers from a cluster.
package foreign

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/migrate"
)

// from is where objects of a cluster are from.
const from = "cluster"

// metalLB are MetalLB's resources, in the newest version that has each.
var metalLB = []schema.GroupVersionResource{
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "ipaddresspools"},
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "addresspools"}, // until v0.13
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "l2advertisements"},
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "bgpadvertisements"},
	{Group: migrate.MetalLBGroup, Version: "v1beta2", Resource: "bgppeers"},
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "bfdprofiles"},
	{Group: migrate.MetalLBGroup, Version: "v1beta1", Resource: "communities"},
}

// MetalLB reads MetalLB's objects from the namespace, and the Services. It fails
// if the cluster has neither its resources nor the ConfigMap of old.
func MetalLB(ctx context.Context, d dynamic.Interface, client kubernetes.Interface, namespace string) ([]migrate.Object, error) {
	var objects []migrate.Object
	absent := 0
	for _, r := range metalLB {
		list, err := d.Resource(r).Namespace(namespace).List(ctx, metav1.ListOptions{})
		if apierrors.IsNotFound(err) {
			absent++
			continue
		}
		if err != nil {
			return nil, unread(err, "list", r.GroupResource().String(), namespace)
		}
		for i := range list.Items {
			item := &list.Items[i]
			gvk := item.GroupVersionKind()
			if err := add(&objects, item, gvk.Kind, gvk.Group); err != nil {
				return nil, err
			}
		}
	}
	found, err := configMap(ctx, client, namespace, migrate.LegacyKey)
	if err != nil {
		return nil, err
	}
	extras, err := configMap(ctx, client, namespace, migrate.ExtrasConfigMap)
	switch {
	case err != nil:
		return nil, err
	case len(objects) == 0 && len(found) == 0 && absent == len(metalLB):
		return nil, fmt.Errorf("the cluster has no MetalLB: neither resources of the group %s, nor the ConfigMap %s/%s; is it another "+
			"cluster (--context), or are the objects in files?", migrate.MetalLBGroup, namespace, migrate.LegacyKey)
	case len(objects) == 0 && len(found) == 0:
		return nil, fmt.Errorf("MetalLB has no objects in namespace %s: name its namespace with --from-namespace", namespace)
	}
	workloads, err := workloads(ctx, client, namespace)
	if err != nil {
		return nil, err
	}
	return withServices(ctx, client, slices.Concat(objects, found, extras, workloads))
}

// workloads returns the Deployments and DaemonSets of the namespace.
func workloads(ctx context.Context, client kubernetes.Interface, namespace string) (objects []migrate.Object, err error) {
	deployments, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unread(err, "list", "deployments.apps", namespace)
	}
	sets, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unread(err, "list", "daemonsets.apps", namespace)
	}
	for i := range deployments.Items {
		err = errors.Join(err, add(&objects, &deployments.Items[i], "Deployment", "apps"))
	}
	for i := range sets.Items {
		err = errors.Join(err, add(&objects, &sets.Items[i], "DaemonSet", "apps"))
	}
	return objects, err
}

// KubeVIP reads the objects of kube-vip and its cloud provider from the
// namespace, and the Services. It fails if there are none.
func KubeVIP(ctx context.Context, client kubernetes.Interface, namespace string) ([]migrate.Object, error) {
	objects, err := configMap(ctx, client, namespace, migrate.KubeVIPConfigMap)
	if err != nil {
		return nil, err
	}
	sets, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unread(err, "list", "daemonsets.apps", namespace)
	}
	for i := range sets.Items {
		if set := &sets.Items[i]; runsKubeVIP(&set.Spec.Template.Spec) {
			if err := add(&objects, set, "DaemonSet", "apps"); err != nil {
				return nil, err
			}
		}
	}
	pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unread(err, "list", "pods", namespace)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if controller := metav1.GetControllerOf(pod); controller != nil && controller.Kind == "DaemonSet" || !runsKubeVIP(&pod.Spec) {
			continue
		}
		if err := add(&objects, pod, "Pod", ""); err != nil {
			return nil, err
		}
	}
	if len(objects) == 0 {
		return nil, fmt.Errorf("there is no kube-vip in namespace %s: neither a DaemonSet, nor Pods, nor the ConfigMap %s; name its "+
			"namespace with --from-namespace", namespace, migrate.KubeVIPConfigMap)
	}
	return withServices(ctx, client, objects)
}

// runsKubeVIP reports whether a container may be kube-vip's; which one it is,
// the migration finds out.
func runsKubeVIP(pod *corev1.PodSpec) bool {
	for i := range pod.Containers {
		if strings.Contains(pod.Containers[i].Image, "kube-vip") {
			return true
		}
	}
	return false
}

// configMap returns a ConfigMap, or nothing.
func configMap(ctx context.Context, client kubernetes.Interface, namespace, name string) (objects []migrate.Object, err error) {
	cm, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, unread(err, "get", "configmaps", namespace)
	}
	err = add(&objects, cm, "ConfigMap", "")
	return objects, err
}

// withServices appends the Services of type LoadBalancer.
func withServices(ctx context.Context, client kubernetes.Interface, objects []migrate.Object) ([]migrate.Object, error) {
	list, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, unread(err, "list", "services", "")
	}
	for i := range list.Items {
		if svc := &list.Items[i]; svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
			if err := add(&objects, svc, "Service", ""); err != nil {
				return nil, err
			}
		}
	}
	return objects, nil
}

// add adds an API object as one to migrate.
func add(to *[]migrate.Object, of metav1.Object, kind, group string) error {
	text, err := json.Marshal(of)
	if err != nil {
		return fmt.Errorf("%s %s/%s: %w", kind, of.GetNamespace(), of.GetName(), err)
	}
	*to = append(*to, migrate.Object{From: from, Kind: kind, Group: group, Namespace: of.GetNamespace(), Name: of.GetName(), JSON: text})
	return nil
}

// unread returns why something cannot be read. If a right is missing, it names the right.
func unread(err error, verb, resource, namespace string) error {
	where := "in the whole cluster"
	if namespace != "" {
		where = "in namespace " + namespace
	}
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("you need the right to %s %s %s", verb, resource, where)
	}
	return fmt.Errorf("%s %s %s: %w", verb, resource, where, err)
}
