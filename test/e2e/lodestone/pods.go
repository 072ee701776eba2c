package lodestone

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// Pods are the pods of one component, "controller" or "speaker", that are on a node. Those for
// nodes that exist in the API alone, which a scheduler may not have seen yet, are left out.
func (i *Installation) Pods(ctx context.Context, component string) ([]corev1.Pod, error) {
	list, err := i.Kube.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=" + component,
	})
	if err != nil {
		return nil, fmt.Errorf("list pods of the %s: %w", component, err)
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool {
		return !slices.Contains(i.Lab.Nodes(), pod.Spec.NodeName)
	}), nil
}

// ScaleController sets the number of controllers and waits until exactly so
// many are there and ready.
func (i *Installation) ScaleController(ctx context.Context, replicas int32) error {
	_, err := i.Kube.AppsV1().Deployments(Namespace).UpdateScale(ctx, Controller, &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{Name: Controller, Namespace: Namespace},
		Spec:       autoscalingv1.ScaleSpec{Replicas: replicas},
	}, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("scale the controller: %w", err)
	}
	return Wait(ctx, fmt.Sprintf("%d controllers are ready", replicas), func() error {
		return i.controllersReady(ctx, int(replicas))
	})
}

func (i *Installation) controllersReady(ctx context.Context, want int) error {
	pods, err := i.Pods(ctx, "controller")
	if err != nil {
		return err
	}
	if len(pods) != want {
		return fmt.Errorf("there are %d", len(pods))
	}
	for _, pod := range pods {
		if !Ready(&pod) {
			return fmt.Errorf("%s is not ready", pod.Name)
		}
	}
	if want == 0 {
		return nil
	}
	_, err = i.Leader(ctx)
	return err
}

// Ready reports whether the pod is ready and not about to go.
func Ready(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && pod.DeletionTimestamp == nil
		}
	}
	return false
}

// errNoLeader is returned while no controller leads.
var errNoLeader = errors.New("no controller leads")

// Leader returns the controller that leads, by the controllers' own readiness
// pages.
func (i *Installation) Leader(ctx context.Context) (*corev1.Pod, error) {
	pods, err := i.Pods(ctx, "controller")
	if err != nil {
		return nil, err
	}
	for _, pod := range pods {
		families, err := i.scrape(ctx, &pod)
		if err != nil {
			continue // it is starting or ending
		}
		if v, ok := value(families, "leader_election_master_status", nil); ok && v == 1 {
			return &pod, nil
		}
	}
	return nil, errNoLeader
}

// ForgetLeader deletes the Lease of a leader that is dead, which another one would wait for.
func (i *Installation) ForgetLeader(ctx context.Context) error {
	return i.Kube.CoordinationV1().Leases(Namespace).Delete(ctx, Controller, metav1.DeleteOptions{})
}

// Terminate deletes a pod, as a rolling update or a drain does: by SIGTERM.
func (i *Installation) Terminate(ctx context.Context, pod *corev1.Pod) error {
	return i.Kube.CoreV1().Pods(Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{})
}

// Kill ends the processes of a pod's container by SIGKILL.
func (i *Installation) Kill(ctx context.Context, pod *corev1.Pod) error {
	return i.Signal(ctx, pod, unix.SIGKILL)
}

// Signal sends a signal to the processes of a pod's container.
func (i *Installation) Signal(ctx context.Context, pod *corev1.Pod, signal unix.Signal) error {
	pod, err := i.Kube.CoreV1().Pods(Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	pids, err := i.processes(pod)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal %s to process %d of pod %s: %w", signal, pid, pod.Name, err)
		}
	}
	return nil
}

// InPod runs a program of the machine in the network of a pod of ours.
func (i *Installation) InPod(ctx context.Context, pod *corev1.Pod, args ...string) error {
	pids, err := i.processes(pod)
	if err != nil {
		return err
	}
	if len(pids) == 0 {
		return fmt.Errorf("pod %s does not run", pod.Name)
	}
	args = append([]string{"--net", "--target", strconv.Itoa(pids[0]), "--"}, args...)
	if output, err := exec.CommandContext(ctx, "nsenter", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%q in pod %s: %w: %s", args, pod.Name, err, output)
	}
	return nil
}

// KillSpeaker ends the speaker of a node by SIGKILL, once it runs.
func (i *Installation) KillSpeaker(ctx context.Context, node string) error {
	return Wait(ctx, "the speaker of "+node+" runs and is killed", func() error {
		pods, err := i.Pods(ctx, "speaker")
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if pod.Spec.NodeName == node && pod.Status.ContainerStatuses[0].State.Running != nil {
				return i.Kill(ctx, &pod)
			}
		}
		return errors.New("it does not run")
	})
}

// RestartSpeakers replaces every speaker at once and waits until the new ones
// are ready.
func (i *Installation) RestartSpeakers(ctx context.Context) error {
	return i.replaceSpeakers(ctx, func(old []corev1.Pod) error { return i.terminateAll(ctx, old) })
}

// terminateAll terminates those of the pods that are still there.
func (i *Installation) terminateAll(ctx context.Context, pods []corev1.Pod) error {
	for _, pod := range pods {
		if err := i.Terminate(ctx, &pod); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// RollSpeakers replaces the speakers one after the other, as an upgrade does,
// and waits until the new ones are ready.
func (i *Installation) RollSpeakers(ctx context.Context) error {
	return i.replaceSpeakers(ctx, func([]corev1.Pod) error {
		_, err := i.Kube.AppsV1().DaemonSets(Namespace).Patch(ctx, Speaker, types.MergePatchType, fmt.Appendf(nil,
			`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339Nano)),
			metav1.PatchOptions{})
		return err
	})
}

// replaceSpeakers waits until every speaker is another one after replace.
func (i *Installation) replaceSpeakers(ctx context.Context, replace func(old []corev1.Pod) error) error {
	old, err := i.Pods(ctx, "speaker")
	if err != nil {
		return err
	}
	gone := map[string]bool{} // one that ends already may be there beside its successor
	for _, pod := range old {
		gone[pod.Name] = true
	}
	if err := replace(old); err != nil {
		return fmt.Errorf("replace the speakers: %w", err)
	}
	nodes := len(i.Lab.Nodes())
	for want := range nodes { // they may come one after the other
		err := Wait(ctx, fmt.Sprintf("%d of %d speakers are new ones and ready", want+1, nodes), func() error {
			pods, err := i.Pods(ctx, "speaker")
			if err != nil {
				return err
			}
			fresh := slices.DeleteFunc(pods, func(pod corev1.Pod) bool { return gone[pod.Name] || !Ready(&pod) })
			if len(fresh) <= want {
				return fmt.Errorf("%d are", len(fresh))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Resident is the resident memory in bytes of the pod's largest process.
func (i *Installation) Resident(pod *corev1.Pod) (int64, error) {
	pids, err := i.processes(pod)
	if err != nil {
		return 0, err
	}
	var largest int64
	for _, pid := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			return 0, err
		}
		var total, resident int64
		if _, err := fmt.Sscan(string(raw), &total, &resident); err != nil {
			return 0, fmt.Errorf("read memory of process %d: %w", pid, err)
		}
		largest = max(largest, resident*int64(os.Getpagesize()))
	}
	return largest, nil
}

// CPU is the time on processors that the pod's processes have taken.
func (i *Installation) CPU(pod *corev1.Pod) (sum time.Duration, err error) {
	pids, err := i.processes(pod)
	for _, pid := range pids {
		taken, failed := process.CPU(pid)
		sum, err = sum+taken, errors.Join(err, failed)
	}
	return sum, err
}

// processes lists the processes of the pod's containers.
func (i *Installation) processes(pod *corev1.Pod) ([]int, error) {
	var all []int
	for _, status := range pod.Status.ContainerStatuses {
		_, id, _ := strings.Cut(status.ContainerID, "://")
		pids, err := i.Lab.ContainerPIDs(pod.Spec.NodeName, id)
		if err != nil {
			return nil, err
		}
		all = append(all, pids...)
	}
	return all, nil
}
