package lodestone

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// Echo pods have the label app=echo and answer on EchoPort, TCP and UDP.
const (
	EchoName = "echo"
	EchoPort = 8080
)

// RunEcho makes the namespace have that many echo pods, spread over the nodes
// except those to avoid, and waits until they are ready and no others are left.
func (i *Installation) RunEcho(ctx context.Context, namespace string, replicas int32, avoid ...string) error {
	deployments := i.Kube.AppsV1().Deployments(namespace)
	want := echoDeployment(namespace, replicas, avoid)
	_, err := deployments.Create(ctx, want, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = deployments.Update(ctx, want, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("deploy echo: %w", err)
	}
	return Wait(ctx, fmt.Sprintf("%d echo pods are ready", replicas), func() error {
		d, err := deployments.Get(ctx, EchoName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := d.Status
		if s.ObservedGeneration != d.Generation || s.UpdatedReplicas != replicas || s.AvailableReplicas != replicas || s.Replicas != replicas {
			return fmt.Errorf("%d of %d are up to date and %d available", s.UpdatedReplicas, s.Replicas, s.AvailableReplicas)
		}
		return nil
	})
}

// KeepEchoFromOwner moves the echo pods away from the node that owns the VIP.
// A node that dies takes its pods with it, and kube-proxy sends them traffic
// until Kubernetes notices, 40 s later: that is not what a measurement of the
// VIP's failover is about.
func (i *Installation) KeepEchoFromOwner(ctx context.Context, namespace string, replicas int32, vip string) error {
	var owner string
	err := Wait(ctx, "somebody owns "+vip, func() (err error) {
		owner, err = i.Owner(ctx, vip)
		return err
	})
	if err != nil {
		return err
	}
	return i.RunEcho(ctx, namespace, replicas, owner)
}

// Steady waits until every node's kube-proxy knows the endpoints of the VIP:
// from each node, every one of many flows is answered.
func (i *Installation) Steady(ctx context.Context, target netip.AddrPort) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range i.Lab.Nodes() {
		group.Go(func() error { return i.SteadyFrom(ctx, node, target) })
	}
	return group.Wait()
}

// SteadyFrom waits until every one of many flows from the host is answered.
func (i *Installation) SteadyFrom(ctx context.Context, host string, target netip.AddrPort) error {
	return Wait(ctx, "all flows from "+host+" to "+target.String()+" are answered", func() error {
		return i.answersAll(ctx, i.Lab.Namespace(host), target)
	})
}

func (i *Installation) answersAll(ctx context.Context, from string, target netip.AddrPort) error {
	const flows, inFlight = 60, 5
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	asking := probe.UDP(ctx, probe.Options{Namespace: from, Target: target, NewFlows: true})
	err := asking.WaitAnswers(ctx, flows)
	record, stopped := asking.Stop()
	if lost := record.Lost(); lost > inFlight {
		err = errors.Join(err, fmt.Errorf("%d of %d were not", lost, record.Sent))
	}
	return errors.Join(err, stopped, i.answeredByTheLiving(ctx, record))
}

// answeredByTheLiving checks that each answer is from a pod that is there and stays: a kube-proxy that is late sends to pods
// that have been deleted and still answer for a moment, also to those of the Service that had the address before.
func (i *Installation) answeredByTheLiving(ctx context.Context, record probe.Record) error {
	namespaces, err := i.Kube.CoreV1().Namespaces().List(ctx,
		metav1.ListOptions{FieldSelector: "status.phase=" + string(corev1.NamespaceActive)})
	if err != nil {
		return fmt.Errorf("list namespaces: %w", err)
	}
	living := map[string]bool{}
	for _, namespace := range namespaces.Items {
		pods, err := i.Kube.CoreV1().Pods(namespace.Name).List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("list pods: %w", err)
		}
		for _, pod := range pods.Items {
			if pod.DeletionTimestamp == nil {
				living[pod.Name] = true
			}
		}
	}
	for _, a := range record.Answers {
		if !living[a.Pod] {
			return fmt.Errorf("pod %s answers, which goes or has gone", a.Pod)
		}
	}
	return nil
}

func echoDeployment(namespace string, replicas int32, avoid []string) *appsv1.Deployment {
	labels := map[string]string{"app": EchoName}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: EchoName, Namespace: namespace},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					Affinity:                      notOn(avoid),
					TerminationGracePeriodSeconds: new(int64(0)),
					Containers:                    []corev1.Container{echoContainer()},
					TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{
						MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
						LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
					}},
				},
			},
		},
	}
}

// EchoPod is an echo pod on the node, with the label app=name: not one of RunEcho's.
func EchoPod(name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{echoContainer()}},
	}
}

func notOn(nodes []string) *corev1.Affinity {
	if len(nodes) == 0 {
		return nil
	}
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{
				Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpNotIn, Values: nodes,
			}},
		}}},
	}}
}

func echoContainer() corev1.Container {
	return corev1.Container{
		Name:            EchoName,
		Image:           lab.EchoImage,
		ImagePullPolicy: corev1.PullNever,
		Env: []corev1.EnvVar{{Name: "NODE_NAME",
			ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}},
		// On a busy node it is neither starved nor taken for broken.
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}},
		ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(EchoPort)},
		}},
	}
}
