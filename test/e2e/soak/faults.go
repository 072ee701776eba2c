package soak

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

const (
	// soon is what a loss, or a busy machine, may cost a VIP. It is generous: how long it takes
	// is measured by benchmarks, and here nothing may be out for ever.
	soon = 3 * time.Second
	// steady is for what must not cost anything: a busy machine's client alone is late.
	steady = 1500 * time.Millisecond
	// held is for how long what goes through a lost node by direct forwarding surely waits for it: it is
	// answered by reset after 10 s.
	held = 7 * time.Second
)

// kind is what a fault is about. Two at a time are one of the wire and one of programs.
type kind int

const (
	wire kind = iota
	program
	people // who need an API server that answers, and nodes that can be reached
	api
)

// fault is something that happens to a node, or to all of them.
type fault struct {
	name string
	kind kind
	// min and max bound how long it lasts; 0: until begin returns.
	min, max time.Duration
	// outage is how long a VIP may be without an answer, and routed one that routers have.
	outage, routed time.Duration
	// moves is set if owners may change.
	moves bool
	// unled is set if a leader may lose its lease, and end for that.
	unled bool
	// ends is which connections may end that VIPs with direct forwarding have.
	ends ends
	// begin makes it happen, and returns what undoes it, if anything.
	begin func(ctx context.Context, s *soak, node string) (undo func(context.Context) error, err error)
}

type ends int

const (
	none       ends = iota
	ofLostNode      // those of the node's pods, unless it is back soon
	ofCutNode       // any, unless the link is back soon: each side of a cut is lost to the other
	ofAnyPod        // those of any pod
)

var all = []fault{
	{name: "power loss", kind: wire, unled: true, moves: true, min: time.Second, max: 40 * time.Second, outage: soon, routed: soon,
		ends: ofLostNode,
		begin: func(_ context.Context, s *soak, node string) (func(context.Context) error, error) {
			return func(context.Context) error { return s.Lab.HealNode(node) }, s.Lab.NodeLoss(node)
		}},
	{name: "link flaps", kind: wire, unled: true, outage: soon, routed: soon, moves: true, ends: none, begin: flap},
	{name: "partition", kind: wire, unled: true, moves: true, min: time.Second, max: 30 * time.Second, outage: soon, routed: soon,
		ends: ofCutNode,
		begin: func(_ context.Context, s *soak, node string) (func(context.Context) error, error) {
			return s.healed, s.Lab.Partition([]string{node})
		}},
	{name: "deaf node", kind: wire, unled: true, moves: true, min: time.Second, max: 20 * time.Second, outage: soon, routed: soon,
		ends: ofCutNode,
		begin: func(_ context.Context, s *soak, node string) (func(context.Context) error, error) {
			return s.healed, s.Lab.Deafen(node)
		}},
	{name: "a tenth of all frames is lost", kind: wire, unled: true, min: 5 * time.Second, max: 20 * time.Second, outage: soon, routed: soon,
		moves: true, ends: none,
		begin: func(_ context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return s.healed, s.Lab.Lose(10)
		}},
	{name: "no gossip", kind: wire, min: 5 * time.Second, max: 20 * time.Second, outage: soon, routed: soon, moves: true, ends: none,
		begin: func(_ context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return s.healed, s.Lab.BlockGossip()
		}},

	{name: "speaker killed", kind: program, outage: soon, routed: soon, moves: true,
		begin: func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
			return nil, s.KillSpeaker(ctx, node)
		}},
	{name: "speaker stopped", kind: program, min: 50 * time.Millisecond, max: 8 * time.Second, outage: soon, routed: soon, moves: true,
		begin: func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
			pod, err := s.speaker(ctx, node)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context) error { return s.Signal(ctx, pod, unix.SIGCONT) }, s.Signal(ctx, pod, unix.SIGSTOP)
		}},
	{name: "leader killed", kind: program, outage: steady, routed: steady,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			pod, err := s.leader(ctx)
			if err != nil {
				return nil, err
			}
			return nil, s.Kill(ctx, pod)
		}},
	{name: "leader stopped", kind: program, unled: true, min: time.Second, max: 25 * time.Second, outage: steady, routed: steady,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			pod, err := s.leader(ctx)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context) error { return s.Signal(ctx, pod, unix.SIGCONT) }, s.Signal(ctx, pod, unix.SIGSTOP)
		}},
	{name: "kube-proxy killed", kind: program, min: time.Second, max: 10 * time.Second, outage: soon, routed: soon, moves: true,
		begin: restarting("kube-proxy-NODE")},
	{name: "kubelet killed", kind: program, min: time.Second, max: 20 * time.Second, outage: steady, routed: steady,
		begin: restarting("kubelet-NODE")},
	{name: "router killed", kind: program, min: time.Second, max: 10 * time.Second, outage: steady, routed: time.Minute,
		begin: restarting("bgpd-" + lab.Router)},
	{name: "rules of direct forwarding deleted", kind: program, outage: soon, routed: steady, ends: ofAnyPod,
		begin: func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
			return nil, s.DeleteForwarding(ctx, node)
		}},

	{name: "API server away", kind: api, unled: true, min: time.Second, max: 30 * time.Second, outage: steady, routed: steady,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return s.Lab.StartAPIServer, s.Lab.StopAPIServer(ctx)
		}},
	{name: "API server hangs", kind: api, unled: true, min: time.Second, max: 30 * time.Second, outage: steady, routed: steady,
		begin: func(_ context.Context, s *soak, _ string) (func(context.Context) error, error) {
			p, err := s.Lab.Process("kube-apiserver")
			if err != nil {
				return nil, err
			}
			return func(context.Context) error { return p.Thaw() }, p.Freeze()
		}},

	{name: "excluded by label", kind: people, min: time.Second, max: 10 * time.Second, outage: steady, routed: steady, moves: true,
		begin: func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
			return func(ctx context.Context) error { return s.Label(ctx, node, corev1.LabelNodeExcludeBalancers, "") },
				s.Label(ctx, node, corev1.LabelNodeExcludeBalancers, "true")
		}},
	{name: "drain", kind: people, min: time.Second, max: 5 * time.Second, outage: soon, routed: soon, moves: true,
		ends: ofAnyPod, begin: drain},
	{name: "speakers replaced", kind: people, outage: soon, routed: soon, moves: true,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return nil, s.RollSpeakers(ctx)
		}},
	{name: "pods replaced", kind: people, outage: soon, routed: soon, moves: true, ends: ofAnyPod, begin: replacePods},
	{name: "fewer pods", kind: people, min: time.Second, max: 10 * time.Second, outage: soon, routed: soon, moves: true, ends: ofAnyPod,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return func(ctx context.Context) error { return s.RunEcho(ctx, namespace, pods) }, s.RunEcho(ctx, namespace, pods/2)
		}},
	{name: "another node preferred", kind: people, min: time.Second, max: 10 * time.Second, outage: steady, routed: steady, moves: true,
		begin: func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
			return func(ctx context.Context) error { return s.Configure(ctx, document("")) }, s.Configure(ctx, document(node))
		}},
	{name: "invalid configuration", kind: people, min: time.Second, max: 10 * time.Second, outage: steady, routed: steady,
		begin: func(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
			return func(ctx context.Context) error { return s.Configure(ctx, document("")) },
				s.WriteConfig(ctx, document("")+"\nunknown: {}\n")
		}},
	{name: "a hundred Services", kind: people, outage: steady, routed: steady, begin: hundred},
}

// drawn is a fault that happens to a node, for so long.
type drawn struct {
	fault
	node string
	last time.Duration
}

type faults []drawn

func (f faults) String() string {
	var texts []string
	for _, d := range f {
		texts = append(texts, fmt.Sprintf("%s (%s, %s)", d.name, d.node, d.last))
	}
	return strings.Join(texts, " with ")
}

// names are the kinds of faults, without targets and durations.
func (f faults) names() string {
	var names []string
	for _, d := range f {
		names = append(names, d.name)
	}
	return strings.Join(names, " with ")
}

func (f faults) lasts() (longest time.Duration) {
	for _, d := range f {
		longest = max(longest, d.last)
	}
	return longest
}

// choose draws what happens in a step: each fault once in as many steps as there are faults, and with one of the
// wire at times one of programs.
func choose(seed uint64, step int, nodes []string) faults {
	round, i := (step-1)/len(all), (step-1)%len(all)
	first := all[rand.New(rand.NewPCG(seed, uint64(round))).Perm(len(all))[i]]
	random := rand.New(rand.NewPCG(seed, math.MaxUint64-uint64(step)))
	chosen := faults{first.draw(random, nodes)}
	if first.kind != wire || random.IntN(3) > 0 {
		return chosen
	}
	for {
		if second := all[random.IntN(len(all))]; second.kind == program {
			return append(chosen, second.draw(random, nodes))
		}
	}
}

// draw draws to which node the fault happens, and for how long.
func (f fault) draw(random *rand.Rand, nodes []string) drawn {
	last := f.min
	if f.max > f.min {
		last += time.Duration(random.Int64N(int64(f.max - f.min)))
	}
	return drawn{f, nodes[random.IntN(len(nodes))], last.Round(time.Millisecond)}
}

// mayEnd reports whether a connection may end that the node's pod answers, or nobody as yet.
func (f faults) mayEnd(node string) bool {
	for _, d := range f {
		switch d.ends {
		case ofLostNode:
			if node == d.node && f.lasts() > held {
				return true
			}
		case ofCutNode:
			if f.lasts() > held {
				return true
			}
		case ofAnyPod:
			return true
		}
	}
	return false
}

func (f faults) move() bool { return slices.ContainsFunc(f, func(d drawn) bool { return d.moves }) }

func (f faults) unled() bool {
	return slices.ContainsFunc(f, func(d drawn) bool { return d.fault.unled })
}

// outage is how long a VIP may be without an answer.
func (f faults) outage(routed bool) (longest time.Duration) {
	for _, d := range f {
		longest += map[bool]time.Duration{false: d.outage, true: d.routed}[routed]
	}
	return longest
}

func (s *soak) healed(context.Context) error { return s.Lab.Heal() }

// flap takes the node's link away and back, five times within seconds.
func flap(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
	heal := func(context.Context) error { return s.Lab.HealNode(node) }
	for i := range 5 {
		if err := s.Lab.NodeLoss(node); err != nil {
			return heal, err
		}
		if err := pause(ctx, time.Duration(i+1)*100*time.Millisecond); err != nil {
			return heal, err
		}
		if err := errors.Join(s.Lab.HealNode(node), pause(ctx, 400*time.Millisecond)); err != nil {
			return heal, err
		}
	}
	return nil, nil
}

// restarting kills a program of the lab and starts it again. In its name NODE stands for the node.
func restarting(name string) func(context.Context, *soak, string) (func(context.Context) error, error) {
	return func(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
		p, err := s.Lab.Process(strings.ReplaceAll(name, "NODE", node))
		if err != nil {
			return nil, err
		}
		return func(context.Context) error { return p.Restart() }, p.Kill(ctx)
	}
}

func drain(ctx context.Context, s *soak, node string) (func(context.Context) error, error) {
	_, err := s.Lab.Kubectl(ctx, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
	return func(ctx context.Context) error {
		_, err := s.Lab.Kubectl(ctx, "uncordon", node)
		return errors.Join(err, s.replaceEcho(ctx)) // on all nodes again
	}, err
}

func replacePods(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
	return nil, s.replaceEcho(ctx)
}

// replaceEcho has other pods answer, spread over all nodes.
func (s *soak) replaceEcho(ctx context.Context) error {
	_, err := s.Kube.AppsV1().Deployments(namespace).Patch(ctx, lodestone.EchoName, types.StrategicMergePatchType, fmt.Appendf(nil,
		`{"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": %q}}}}}`,
		time.Now().Format(time.RFC3339Nano)), metav1.PatchOptions{})
	if err != nil {
		return err
	}
	_, err = s.Lab.Kubectl(ctx, "-n", namespace, "rollout", "status", "deployment/"+lodestone.EchoName, "--timeout=60s")
	return err
}

// hundred creates a hundred Services, waits for their addresses, and deletes them.
func hundred(ctx context.Context, s *soak, _ string) (func(context.Context) error, error) {
	const many = 100
	name := func(i int) string { return fmt.Sprintf("many-%d", i) }
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i := range many {
		group.Go(func() error { return s.create(groupCtx, name(i), user{pool: "many"}) })
	}
	remove := func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(8)
		for i := range many {
			group.Go(func() error { return s.Kube.CoreV1().Services(namespace).Delete(ctx, name(i), metav1.DeleteOptions{}) })
		}
		return group.Wait()
	}
	if err := group.Wait(); err != nil {
		return remove, err
	}
	return remove, lodestone.Wait(ctx, "a hundred Services have addresses", func() error {
		list, err := s.Kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		return distinct(list.Items)
	})
}

// speaker is the speaker's pod on the node.
func (s *soak) speaker(ctx context.Context, node string) (*corev1.Pod, error) {
	pods, err := s.Pods(ctx, "speaker")
	if err != nil {
		return nil, err
	}
	for _, pod := range pods {
		if pod.Spec.NodeName == node {
			return &pod, nil
		}
	}
	return nil, fmt.Errorf("node %s has no speaker", node)
}

// leader waits for a leader: the last one may have just been killed.
func (s *soak) leader(ctx context.Context) (pod *corev1.Pod, err error) {
	return pod, lodestone.Wait(ctx, "a controller leads", func() (err error) {
		pod, err = s.Leader(ctx)
		return err
	})
}
