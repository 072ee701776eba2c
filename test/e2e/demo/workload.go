package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

const (
	workload          = "echo"
	workloadNamespace = metav1.NamespaceDefault
	replicas          = 3
	servicePort       = 80
	podPort           = 8080
)

var labels = map[string]string{"app": workload}

// deploy creates the pods and their Service, and waits until all pods answer.
func (d *demo) deploy(ctx context.Context) error {
	meta := metav1.ObjectMeta{Name: workload, Labels: labels}
	_, err := d.client.AppsV1().Deployments(workloadNamespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: meta,
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(replicas)),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec()},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = d.client.CoreV1().Services(workloadNamespace).Create(ctx, &corev1.Service{
		ObjectMeta: meta,
		Spec: corev1.ServiceSpec{
			Type:                  corev1.ServiceTypeLoadBalancer,
			Selector:              labels,
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			Ports:                 []corev1.ServicePort{port(corev1.ProtocolTCP), port(corev1.ProtocolUDP)},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	return d.settle(ctx)
}

func port(protocol corev1.Protocol) corev1.ServicePort {
	return corev1.ServicePort{
		Name:       "echo-" + map[corev1.Protocol]string{corev1.ProtocolTCP: "tcp", corev1.ProtocolUDP: "udp"}[protocol],
		Protocol:   protocol,
		Port:       servicePort,
		TargetPort: intstr.FromInt32(podPort),
	}
}

func podSpec() corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{
		Name:            workload,
		Image:           lab.EchoImage,
		ImagePullPolicy: corev1.PullNever,
		Env: []corev1.EnvVar{{Name: "NODE_NAME",
			ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}},
		ReadinessProbe: &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(podPort)}},
			PeriodSeconds: 1,
		},
	}}}
}

// avoid moves the pods to other nodes, a few at a time, and waits until they
// are there.
func (d *demo) avoid(ctx context.Context, node string) error {
	affinity := corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpNotIn, Values: []string{node}},
			}}},
		},
	}}
	spec := map[string]any{"affinity": affinity}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"spec": spec}}})
	if err != nil {
		return err
	}
	_, err = d.client.AppsV1().Deployments(workloadNamespace).Patch(ctx, workload, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return d.settle(ctx)
}

// settle waits until the Deployment's last change is through: the wanted pods
// are there, all ready, and no other.
func (d *demo) settle(ctx context.Context) error {
	return within(ctx, time.Minute, "the pods", func(ctx context.Context) error {
		deployment, err := d.client.AppsV1().Deployments(workloadNamespace).Get(ctx, workload, metav1.GetOptions{})
		if err != nil {
			return err
		}
		status := deployment.Status
		if status.ObservedGeneration < deployment.Generation || status.UpdatedReplicas < replicas ||
			status.AvailableReplicas < replicas || status.Replicas > replicas {
			return fmt.Errorf("%d of %d are available, %d of them as wanted", status.AvailableReplicas, replicas, status.UpdatedReplicas)
		}
		return nil
	})
}
