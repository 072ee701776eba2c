//go:build long

package scenarios

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/kuberouter"
	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// enforce has NetworkPolicies enforced until the story ends.
func (s *story) enforce() {
	s.Helper()
	router, err := kuberouter.Start(s.ctx, s.Lab)
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, router.Stop(s.ctx)) })
}

// policy makes a NetworkPolicy for all pods of the namespace.
func (s *story) policy(namespace, name string, spec networkingv1.NetworkPolicySpec) {
	s.Helper()
	policies := s.Kube.NetworkingV1().NetworkPolicies(namespace)
	_, err := policies.Create(s.ctx, &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec},
		metav1.CreateOptions{})
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, policies.Delete(s.ctx, name, metav1.DeleteOptions{})) })
}

// likeHelmTest runs a pod that policies take for the one of helm test. It stays, and
// takes connections.
func (s *story) likeHelmTest() *corev1.Pod {
	s.Helper()
	pods := s.Kube.CoreV1().Pods(lodestone.Namespace)
	pod, err := pods.Create(s.ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "like-helm-test", Labels: map[string]string{
			"app.kubernetes.io/name": "lodestone", "app.kubernetes.io/instance": "lodestone", "app.kubernetes.io/component": "test",
		}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(0)),
			Containers:                    []corev1.Container{{Name: "echo", Image: lab.EchoImage, ImagePullPolicy: corev1.PullNever}},
		},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, pods.Delete(s.ctx, pod.Name, metav1.DeleteOptions{})) })
	s.eventually("the pod runs", func() error {
		if pod, err = pods.Get(s.ctx, pod.Name, metav1.GetOptions{}); err == nil && !lodestone.Ready(pod) {
			err = fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return err
	})
	return pod
}

// In a namespace whose policies forbid all that is not allowed, helm test passes by the
// chart's policy: its pod reaches only the API server, and nobody reaches the pod. All other
// pods are in the nodes' network, where policies have no effect.
func TestPoliciesConfineThePodOfHelmTest(t *testing.T) {
	built(t, program.Builder.KubeRouter)
	s := begin(t)
	s.echo(2)
	s.enforce()
	pod := s.likeHelmTest()
	echo, err := s.Kube.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, echo.Items)
	reach := func(from func(...string) error, host string, port int) func() error {
		connect := fmt.Sprintf("</dev/tcp/%s/%d", host, port)
		return func() error { return from("timeout", "1", "bash", "-c", connect) }
	}
	fromPod := func(args ...string) error { return s.InPod(s.ctx, pod, args...) }
	afar := s.nodesBut(pod.Spec.NodeName)[0] // its own node may
	fromAfar := func(args ...string) error { return s.Lab.Command(s.ctx, afar, args...).Run() }
	apiServer := reach(fromPod, s.Lab.Addresses(lab.ControlPlane)[0].String(), 6443)
	others := map[string]func() error{
		"to a pod":          reach(fromPod, echo.Items[0].Status.PodIP, lodestone.EchoPort),
		"to a speaker":      reach(fromPod, s.Lab.Addresses(s.Lab.Nodes()[0])[0].String(), 9743),
		"from another node": reach(fromAfar, pod.Status.PodIP, lodestone.EchoPort),
	}
	for name, other := range others {
		s.eventually("without policies there is a way "+name, other)
	}

	s.policy(lodestone.Namespace, "nothing", networkingv1.NetworkPolicySpec{
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
	})
	s.eventually("nothing is allowed", func() error {
		if apiServer() == nil {
			return fmt.Errorf("it reaches the API server")
		}
		return nil
	})
	s.afterwards(func() { require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart())) })
	require.NoError(t, s.Upgrade(s.ctx, s.Lab.Chart(), "--set=networkPolicy.enabled=true"))
	s.eventually("the API server is allowed", apiServer)
	for name, other := range others {
		assert.Error(t, other(), name)
	}
	out, err := s.Lab.Helm(s.ctx, "test", "lodestone", "--namespace", lodestone.Namespace, "--timeout", "3m")
	require.NoError(t, err, out)

	s.service("web")
	vip := s.assigned("web")
	s.eventually("a client reaches the Service", func() error { return s.reachTCP(vip) })
}

// A policy allows clients, and not nodes: clients are served, and an operator who checks from
// a node whether VIPs answer learns why they do not.
func TestDiagnosisOfAPolicyThatForbidsNodes(t *testing.T) {
	built(t, program.Builder.KubeRouter)
	s := begin(t)
	s.echo(int32(len(s.Lab.Nodes())))
	s.enforce()
	client := s.Lab.Addresses(lab.Client)[0].String() + "/32"
	s.policy(s.namespace, "clients", networkingv1.NetworkPolicySpec{
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: client}}}}},
	})
	s.service("web", func(svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	vip := s.assigned("web")
	f := s.finds("vip", "", "--active")
	assert.Contains(t, f.Message, "VIP "+vip+" of node "+s.owner(vip)+": TCP port 80")
	assert.Contains(t, f.Hint, "a NetworkPolicy may forbid nodes what it allows to clients")
	s.eventually("the client reaches it", func() error { return s.reachTCP(vip) })
}
