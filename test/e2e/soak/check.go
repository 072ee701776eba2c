package soak

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// owners are the nodes that answer for the VIPs of the segment.
func (s *soak) owners(ctx context.Context) (map[string]string, error) {
	owners := map[string]string{}
	for _, u := range users {
		if u.routed() {
			continue
		}
		owner, err := s.Owner(ctx, s.clients.vips[u.name].String())
		if err != nil {
			return nil, err
		}
		owners[u.name] = owner
	}
	return owners, nil
}

// settled checks that all is as it was: nodes and programs are ready, no program ended by itself,
// Services have the addresses that they had, one node answers for each VIP, the same one unless
// VIPs may have moved, both routers have a route through each node, and people are shown no warning.
func (s *soak) settled(ctx context.Context, owners map[string]string, happened faults) error {
	if err := s.running(ctx, happened); err != nil {
		return err
	}
	list, err := s.Kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if err := distinct(list.Items); err != nil {
		return err
	}
	if len(list.Items) != len(users) {
		return fmt.Errorf("there are %d Services of %d", len(list.Items), len(users))
	}
	for _, svc := range list.Items {
		if had := s.clients.vips[svc.Name].String(); svc.Status.LoadBalancer.Ingress[0].IP != had {
			return fmt.Errorf("service %s had %s and has %s", svc.Name, had, svc.Status.LoadBalancer.Ingress[0].IP)
		}
	}
	for _, u := range users {
		if err := s.served(ctx, u, owners[u.name], happened); err != nil {
			return fmt.Errorf("%s: %w", u.name, err)
		}
	}
	shown, code, err := s.CLI(ctx, "", "status")
	if err == nil && code != 0 {
		err = fmt.Errorf("lodestone status still has warnings:\n%s", shown)
	}
	return err
}

// served checks which nodes announce the VIP of a Service, and that all nodes serve it that should.
func (s *soak) served(ctx context.Context, u user, had string, happened faults) error {
	vip := s.clients.vips[u.name].String()
	if u.routed() {
		for _, router := range []string{lab.Router, lab.Router2} {
			nodes, err := s.NextHops(router, vip)
			if err == nil && !slices.Equal(nodes, s.Lab.Nodes()) {
				err = fmt.Errorf("%s forwards to %q", router, nodes)
			}
			if err != nil {
				return err
			}
		}
		return s.SteadyFrom(ctx, lab.Remote, s.clients.target(u))
	}
	if err := s.OneAnswerer(ctx, vip); err != nil {
		return err
	}
	owner, err := s.Owner(ctx, vip)
	if err != nil {
		return err
	}
	if had != "" && owner != had && !happened.move() {
		return fmt.Errorf("%s owned it, and %s does, though nothing happened to a node", had, owner)
	}
	return s.SteadyFrom(ctx, lab.Client, s.clients.target(u))
}

// running checks that all nodes and programs of Lodestone are ready, and that none has ended by itself.
func (s *soak) running(ctx context.Context, happened faults) error {
	nodes, err := s.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, node := range nodes.Items {
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				return fmt.Errorf("node %s is not ready", node.Name)
			}
		}
	}
	for component, want := range map[string]int{"controller": 2, "speaker": len(s.Lab.Nodes())} {
		pods, err := s.Pods(ctx, component)
		if err != nil {
			return err
		}
		if len(pods) != want {
			return fmt.Errorf("there are %d pods of the %s", len(pods), component)
		}
		for _, pod := range pods {
			if err := s.ended(pod, happened); err != nil {
				return err
			}
			if !lodestone.Ready(&pod) {
				return fmt.Errorf("pod %s is not ready", pod.Name)
			}
		}
	}
	_, err = s.Leader(ctx)
	return err
}

// allNotReady reports whether Kubernetes has made all nodes not ready in this step.
func (s *soak) allNotReady(ctx context.Context) (bool, error) {
	list, err := s.Kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=NodeNotReady"})
	if err != nil {
		return false, err
	}
	notReady := map[string]bool{}
	for _, e := range list.Items {
		if !e.LastTimestamp.Time.Before(s.began.Truncate(time.Second)) {
			notReady[e.InvolvedObject.Name] = true
		}
	}
	return len(notReady) == len(s.Lab.Nodes()), nil
}

// ended returns an error if a container of the pod has ended by itself in this step. Faults end them by SIGKILL, as a lack of memory
// does, or SIGTERM, and a controller that has lost its lease ends with status 1.
func (s *soak) ended(pod corev1.Pod, happened faults) error {
	for _, status := range pod.Status.ContainerStatuses {
		last := status.LastTerminationState.Terminated
		if last == nil || last.FinishedAt.Time.Before(s.began.Truncate(time.Second)) {
			continue
		}
		killed := last.ExitCode == 128+9 && last.Reason != "OOMKilled"
		unled := last.ExitCode == 1 && happened.unled() && pod.Labels["app.kubernetes.io/component"] == "controller"
		if killed || unled || last.ExitCode == 0 || last.ExitCode == 128+15 {
			continue
		}
		return fmt.Errorf("pod %s ended at %s with status %d: %s", pod.Name, last.FinishedAt.Format("15:04:05"), last.ExitCode, last.Message)
	}
	return nil
}

// measureMemory compares what the programs need with what they needed after the first step.
func (s *soak) measureMemory(ctx context.Context) {
	now := map[string]int64{}
	for _, component := range []string{"controller", "speaker"} {
		pods, err := s.Pods(ctx, component)
		if err != nil {
			return // of use only if all are there
		}
		for _, pod := range pods {
			resident, err := s.Resident(&pod)
			if err != nil {
				return
			}
			now[component] = max(now[component], resident)
		}
	}
	if s.resident == nil {
		s.resident = now
	}
	for component, resident := range now {
		s.verdict.Grown = max(s.verdict.Grown, resident-s.resident[component])
	}
}

// leave deletes what the run has made, and checks that nothing of it stays.
func (s *soak) leave(ctx context.Context) error {
	s.verdict.Requests += s.clients.close()
	if err := s.remove(ctx); err != nil {
		return err
	}
	left := lodestone.Wait(ctx, "nobody answers for the VIPs any more", func() error {
		for _, u := range users {
			if err := s.released(ctx, u); err != nil {
				return err
			}
		}
		return nil
	})
	if left != nil {
		s.verdict.Findings = append(s.verdict.Findings, left.Error())
		s.evidence(ctx, filepath.Join(s.Dir, "end"))
	}
	return nil
}

// remove deletes the namespace of a run, and waits until nothing of it is left.
func (s *soak) remove(ctx context.Context) error {
	return lodestone.Wait(ctx, "the namespace "+namespace+" is gone", func() error {
		err := s.Kube.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return cmp.Or(err, errors.New("it is there"))
	})
}

func (s *soak) released(ctx context.Context, u user) error {
	vip := s.clients.vips[u.name].String()
	if !u.routed() {
		macs, err := s.Ask(ctx, vip, 2)
		if err == nil && len(macs) > 0 {
			err = fmt.Errorf("%q answer for %s", macs, vip)
		}
		return err
	}
	hops, err := s.NextHops(lab.Router, vip)
	if err == nil && len(hops) > 0 {
		err = fmt.Errorf("the router forwards %s to %q", vip, hops)
	}
	return err
}

// evidence collects what one has to see to understand what was found.
func (s *soak) evidence(ctx context.Context, dir string) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.note("  no evidence: %s", err)
		return
	}
	keep := func(name string, cmd *exec.Cmd) {
		raw, err := cmd.CombinedOutput()
		if err != nil {
			raw = fmt.Appendf(raw, "\n%s\n", err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o644); err != nil {
			s.note("  no evidence: %s", err)
		}
	}
	kubectl := func(name string, args ...string) {
		keep(name, s.Lab.Command(ctx, lab.ControlPlane, append([]string{"kubectl"}, args...)...))
	}
	for _, what := range []string{"nodes", "leases", "services", "endpointslices", "pods", "events", "configmaps"} {
		kubectl(what+".yaml", "get", what, "-A", "-o", "yaml")
	}
	for _, component := range []string{"controller", "speaker"} {
		pods, err := s.Pods(ctx, component)
		if err != nil {
			s.note("  no logs: %s", err)
		}
		for _, pod := range pods {
			kubectl(pod.Name+".log", "-n", lodestone.Namespace, "logs", pod.Name)
			kubectl(pod.Name+".before.log", "-n", lodestone.Namespace, "logs", "--previous", pod.Name)
		}
	}
	for _, command := range []string{"status", "diagnose"} {
		output, _, err := s.CLI(ctx, "", command)
		if err := errors.Join(err, os.WriteFile(filepath.Join(dir, command+".txt"), []byte(output), 0o644)); err != nil {
			s.note("  no %s: %s", command, err)
		}
	}
	for _, host := range append(s.Lab.Nodes(), lab.Client, lab.Router) {
		for name, command := range map[string]string{"neighbours": "ip neigh", "addresses": "ip addr", "routes": "ip route",
			"rules": "nft list ruleset", "connections": "conntrack -L"} {
			keep(host+"-"+name+".txt", s.Lab.Command(ctx, host, strings.Fields(command)...))
		}
	}
}
