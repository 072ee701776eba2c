package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

const (
	// manyServices is as many as Lodestone is made for. They take minutes to
	// create, so the benchmarks leave them to one another: see populate.
	manyServices = 10_000
	// usualPool is widePool with the usual quarantine: what is released has
	// to be remembered.
	usualPool = `
pools:
  - {name: wide, addresses: [198.19.0.0/18]}
`
)

// memory reports what the processes have resident, idle and with more and
// more Services that have addresses.
func memory(ctx context.Context, installation *lodestone.Installation) error {
	if err := empty(ctx, installation); err != nil {
		return err
	}
	if err := (load{installation, 0}).restart(ctx); err != nil {
		return err
	}
	for _, services := range []int{0, 2000, manyServices} {
		l := load{installation, services}
		if err := l.populate(ctx); err != nil {
			return err
		}
		if err := l.reportMemory(ctx); err != nil {
			return err
		}
	}
	return nil
}

// restart gives fresh processes, without what earlier benchmarks left.
func (l load) restart(ctx context.Context) error {
	if err := l.ScaleController(ctx, 0); err != nil {
		return err
	}
	if err := l.ScaleController(ctx, 2); err != nil {
		return err
	}
	return l.RestartSpeakers(ctx)
}

func (l load) reportMemory(ctx context.Context) error {
	controller, speaker, err := l.resident(ctx)
	if err != nil {
		return err
	}
	result("memory", "services=%d controller_mb=%.0f speaker_mb=%.0f", l.services, megabytes(controller), megabytes(speaker))
	return nil
}

// resident is the resident size of the leading controller and of the largest
// speaker, in bytes.
func (l load) resident(ctx context.Context) (controller, speaker int64, err error) {
	leader, err := l.Leader(ctx)
	if err != nil {
		return 0, 0, err
	}
	if controller, err = l.Resident(leader); err != nil {
		return 0, 0, err
	}
	speakers, err := l.Pods(ctx, "speaker")
	if err != nil {
		return 0, 0, err
	}
	speaker, err = l.largest(speakers)
	return controller, speaker, err
}

// largest is the largest resident size among the pods.
func (l load) largest(pods []corev1.Pod) (largest int64, err error) {
	for _, pod := range pods {
		size, err := l.Resident(&pod)
		if err != nil {
			return 0, err
		}
		largest = max(largest, size)
	}
	return largest, nil
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }

// empty makes the namespace have no Services. Their addresses have no quarantine.
func empty(ctx context.Context, installation *lodestone.Installation) error {
	l := load{installation, 0}
	if err := l.Configure(ctx, lodestone.Document(widePool)); err != nil {
		return err
	}
	return l.populate(ctx)
}

// populate makes the namespace have exactly these Services and waits until all
// have addresses. What another benchmark left is used.
func (l load) populate(ctx context.Context) error {
	if err := l.makeNamespace(ctx); err != nil {
		return err
	}
	missing, surplus, err := l.compare(ctx)
	if err != nil {
		return err
	}
	left := l.services - len(missing) + len(surplus)
	err = inSteps(surplus, "deleted", func(names []string) error {
		if err := inParallel(ctx, names, l.deleteOne); err != nil {
			return err
		}
		left -= len(names)
		return l.left(ctx, left)
	})
	if err != nil || l.services == 0 {
		return err
	}
	_, err = l.assignments(ctx, func() error {
		return inSteps(missing, "created", func(names []string) error { return inParallel(ctx, names, l.createOne) })
	})
	return err
}

// compare returns which Services the namespace lacks, and which it has beside
// these.
func (l load) compare(ctx context.Context) (missing, surplus []string, err error) {
	list, err := l.Kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, err
	}
	there := map[string]bool{}
	for i := range list.Items {
		there[list.Items[i].Name] = true
	}
	for _, name := range l.names() {
		if !there[name] {
			missing = append(missing, name)
		}
		delete(there, name)
	}
	for name := range there {
		surplus = append(surplus, name)
	}
	return missing, surplus, nil
}

// inSteps prints its progress after every thousand names.
func inSteps(names []string, verb string, do func(names []string) error) error {
	done := 0
	for step := range slices.Chunk(names, 1000) {
		if err := do(step); err != nil {
			return err
		}
		done += len(step)
		fmt.Fprintf(os.Stderr, "%s %d of %d Services\n", verb, done, len(names))
	}
	return nil
}

// controllerRestart measures from the start of a controller until it serves
// 10,000 Services that have addresses, and counts what it writes.
func controllerRestart(ctx context.Context, installation *lodestone.Installation) (err error) {
	const rounds = 5
	l := load{installation, manyServices}
	if err := l.Configure(ctx, lodestone.Document(widePool)); err != nil {
		return err
	}
	if err := l.populate(ctx); err != nil {
		return err
	}
	if err := l.ScaleController(ctx, 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.ScaleController(context.WithoutCancel(ctx), 2)) }()
	var took []time.Duration
	var total startup
	for range rounds {
		s, err := l.startup(ctx)
		if err != nil {
			return err
		}
		result("controller_restart", "services=%d seconds=%.2f writes=%d events=%d", l.services, s.took.Seconds(), s.writes, s.events)
		took = append(took, s.took)
		total.writes, total.events = total.writes+s.writes, total.events+s.events
	}
	result("controller_restart", "services=%d rounds=%d median_seconds=%.2f max_seconds=%.2f writes=%d events=%d", l.services, rounds,
		quantile(took, 0.5).Seconds(), quantile(took, 1).Seconds(), total.writes, total.events)
	return nil
}

// startup is one start of a controller: how long until it served, and how much
// it wrote. Events are counted separately: one names the leader.
type startup struct {
	took           time.Duration
	writes, events int
}

// startup starts a controller and ends it some time after it began to serve.
func (l load) startup(ctx context.Context) (s startup, err error) {
	const settling = 10 * time.Second
	api, err := l.NewCountingAPI()
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, api.Close()) }()
	began := time.Now()
	end, err := l.RunController(ctx, "--kubeconfig="+api.Kubeconfig)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, end(unix.SIGTERM)) }()
	if err := lodestone.Wait(ctx, "the controller serves", func() error { return l.Serves(ctx) }); err != nil {
		return s, err
	}
	s.took = time.Since(began)
	select {
	case <-time.After(settling):
	case <-ctx.Done():
		return s, ctx.Err()
	}
	for what, n := range api.Writes() {
		fmt.Fprintf(os.Stderr, "the controller sent %d times %s\n", n, what)
		if what == "POST events" || what == "PATCH events" {
			s.events += n
		} else {
			s.writes += n
		}
	}
	return s, nil
}

// controllerChurn measures from each Service's creation to its address while
// Services come and go among 10,000 that have addresses, as many as the lab's
// API server stands; and for comparison its answer to the creation.
func controllerChurn(ctx context.Context, installation *lodestone.Installation) error {
	const perSecond, lasts = 5, time.Minute
	l := load{installation, manyServices}
	if err := l.Configure(ctx, lodestone.Document(usualPool)); err != nil {
		return err
	}
	if err := l.populate(ctx); err != nil {
		return err
	}
	turns := perSecond * int(lasts.Seconds())
	born := births{load: l, at: map[string]time.Time{}}
	var took time.Duration
	seen, err := load{installation, l.services + turns}.assignments(ctx, func() error {
		began := time.Now()
		err := born.churn(ctx, turns, time.Second/perSecond)
		took = time.Since(began)
		return err
	})
	if err != nil {
		return err
	}
	rate, waited := float64(turns)/took.Seconds(), born.waited(seen)
	result("controller_churn", "services=%d seconds=%.0f deletes_per_s=%.1f creates_per_s=%.1f p50_ms=%.0f p99_ms=%.0f api_p50_ms=%.0f "+
		"api_p99_ms=%.0f",
		l.services, took.Seconds(), rate, rate, ms(quantile(waited, 0.50)), ms(quantile(waited, 0.99)),
		ms(quantile(born.answered, 0.50)), ms(quantile(born.answered, 0.99)))
	return l.left(ctx, l.services)
}

// churn replaces the first of the Services by new ones, one each interval.
// When the API server takes longer than that for long, it falls behind.
func (b *births) churn(ctx context.Context, turns int, interval time.Duration) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for n := range turns {
		group.Go(func() error { return b.deleteOne(ctx, nameOf(n)) })
		group.Go(func() error { return b.create(ctx, nameOf(b.services+n)) })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return group.Wait()
		}
	}
	return group.Wait()
}
