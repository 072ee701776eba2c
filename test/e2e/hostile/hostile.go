// Package hostile fills a real API server with the worst objects that it takes, runs a
// controller and speakers beside it, and measures what they need: memory at start, in service
// and when they list everything anew, and how long another tenant's Services wait meanwhile.
//
// The API server has no streaming lists, as before Kubernetes 1.32: a list is one answer. There are
// etcd, an API server and hosts, and no lab, so that no kubelet or other program holds these objects,
// too. The programs run as the chart has them, with its arguments, its environment and its accounts'
// tokens.
//
// The files, from the outside in:
//
//	hostile.go   Run: the phases, and what is measured in each
//	tenant.go    the other tenant, and how long its Services wait
//	relist.go    all programs list everything anew
//	fill.go      writes the worst objects
//	objects.go   what they are, at the bounds of the API server
//	programs.go  the controller and the speakers, as the chart has them
//	apiproxy.go  a proxy before the API server, which makes watches expire
//	testbed.go   the hosts, etcd and the API server
package hostile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Options are the numbers of objects.
type Options struct {
	// Small and Large are how many Services there are of about 20 KiB and of about 1.2 MiB.
	Small, Large int
	// Slices are EndpointSlices of 1,000 addresses.
	Slices int
	// Leases are Leases of speakers that an administrator forged, of nodes that are not there.
	// One more is forged by the token of a speaker, as far as the API server lets it.
	Leases int
	// Progress gets messages about the progress.
	Progress func(format string, args ...any)
}

// Phases of a run, by which Result has its figures.
const (
	Filling = "filling" // while the objects are created
	Start   = "start"   // of all programs, with all objects there
	Service = "service" // while every object is changed once
	Relist  = "relist"  // while everything is listed anew, because all watches expire
)

// Peaks are the most that programs had resident, in bytes, by phase.
type Peaks map[string]int64

// Max is the largest of them.
func (p Peaks) Max() (largest int64) {
	for _, size := range p {
		largest = max(largest, size)
	}
	return largest
}

// Result is what was measured.
type Result struct {
	// Speaker is of the largest of the speakers.
	Speaker, Controller Peaks
	// SpeakerLimit and ControllerLimit are the chart's limits of memory, in bytes.
	SpeakerLimit, ControllerLimit int64
	// Usual is how long another tenant's Services waited before there was anything hostile,
	// Quiet with it, Busy while all of it was changed, and Relisted when it was listed anew.
	Usual, Quiet, Busy, Relisted Waits
	// Lists is how often objects of a kind were listed anew, by kind, and Relisting how long it
	// took until all were.
	Lists     map[string]int
	Relisting time.Duration
	// Bytes is what the API server holds of the hostile objects, in its own encoding.
	Bytes int64
	// Renewals are how long the API server took for each renewal of the leader's Lease, by phase.
	Renewals map[string][]time.Duration
	// Processor is how much time on a processor each program took, by phase and name.
	Processor map[string]map[string]time.Duration
	// Ended is how often a program ended by itself, and was started again, by phase.
	Ended map[string]int
}

// Nodes with a speaker, and the node whose speaker's token forges a Lease.
const (
	victims = 2 // n1 and n2
	forger  = "n3"
	// samples is how many Services of another tenant are measured at a time.
	samples = 100
	// settle is how long a phase goes on when all has been seen.
	settle = 3 * time.Second
	// storeBytes is the most that etcd takes.
	storeBytes = 8 << 30
)

// cluster is the lab with all that runs in it.
type cluster struct {
	Options
	*ground
	kube     kubernetes.Interface
	front    *front
	programs []*daemon
	result   *Result
	watched  *watcher
	tenants  int // Services of the other tenant so far
}

// Run makes the cluster, measures, and takes it away.
func Run(ctx context.Context, o Options) (result *Result, err error) {
	g, err := prepare(ctx, o.Progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.end()) }()
	if err := g.serveAPI(ctx); err != nil {
		return nil, err
	}
	config, err := g.config()
	if err != nil {
		return nil, err
	}
	config.ContentType, config.WarningHandler = "application/vnd.kubernetes.protobuf", rest.NoWarnings{}
	c := &cluster{Options: o, ground: g, result: &Result{Speaker: Peaks{}, Controller: Peaks{}, Ended: map[string]int{},
		Renewals: map[string][]time.Duration{}, Processor: map[string]map[string]time.Duration{}}}
	if c.kube, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	if c.front, err = g.openFront(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.killAll(), c.front.close()) }()
	if err := c.install(ctx); err != nil {
		return nil, fmt.Errorf("install: %w", err)
	}
	ctx, end := context.WithCancel(ctx)
	watching, err := c.watch(ctx)
	if err != nil {
		end()
		return nil, err
	}
	defer func() { end(); err = errors.Join(err, watching()) }()
	return c.result, c.measure(ctx)
}

// killAll ends all programs.
func (c *cluster) killAll() (failed error) {
	for _, p := range c.programs {
		failed = errors.Join(failed, p.kill())
	}
	return failed
}

// measure goes through the phases.
func (c *cluster) measure(ctx context.Context) (err error) {
	if err := c.phase(ctx, "", c.startAll); err != nil {
		return err
	}
	if c.result.Usual, err = c.serve(ctx, samples); err != nil {
		return err
	}
	if err := c.phase(ctx, Filling, c.fill); err != nil {
		return err
	}
	if err := c.phase(ctx, Start, c.restart); err != nil {
		return err
	}
	if c.result.Quiet, err = c.serve(ctx, samples); err != nil {
		return err
	}
	if err := c.phase(ctx, Service, c.change); err != nil {
		return err
	}
	return c.phase(ctx, Relist, c.relist)
}

// phase notes how much memory the programs need while do runs, and some time longer, and how
// often they end.
func (c *cluster) phase(ctx context.Context, name string, do func(context.Context) error) error {
	for _, p := range c.programs {
		p.reset()
	}
	c.front.takeRenewals()
	began, spent := time.Now(), c.spent()
	err := do(ctx)
	if err == nil {
		err = sleep(ctx, settle)
	}
	for _, p := range c.programs {
		peak, ended := p.measured()
		c.result.Ended[name] += ended
		c.Progress("%s: %s had %d MB resident", name, p.name, peak/1e6)
		if name == "" {
			continue
		}
		of := c.result.Speaker
		if p.component == controller {
			of = c.result.Controller
		}
		of[name] = max(of[name], peak)
	}
	c.Progress("%s took %s", name, time.Since(began).Round(time.Second))
	c.result.Renewals[name] = c.front.takeRenewals()
	c.Progress("%s: the leader's Lease was renewed %d times, in %s at most", name, len(c.result.Renewals[name]),
		Quantile(c.result.Renewals[name], 1).Round(time.Millisecond))
	c.result.Processor[name] = c.spent()
	for program, before := range spent {
		c.result.Processor[name][program] -= before
	}
	c.Progress("%s: time on processors: %v", name, c.result.Processor[name])
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// spent is how much time on a processor each program has taken so far.
func (c *cluster) spent() map[string]time.Duration {
	spent := map[string]time.Duration{"etcd": processor(c.store.Process.Pid), "kube-apiserver": processor(c.api.Process.Pid)}
	for _, p := range c.programs {
		spent[p.name] = p.processor()
	}
	return spent
}

// startAll starts all programs and waits until the first Service is announced.
func (c *cluster) startAll(ctx context.Context) error {
	for _, p := range c.programs {
		if err := p.run(ctx); err != nil {
			return err
		}
	}
	_, err := c.serve(ctx, 1)
	return err
}

// restart ends all programs as a crash would and starts them anew.
func (c *cluster) restart(ctx context.Context) error {
	if err := c.killAll(); err != nil {
		return err
	}
	if err := c.startAll(ctx); err != nil {
		return err
	}
	return c.ready(ctx)
}

// change changes every object once, while another tenant creates Services.
func (c *cluster) change(ctx context.Context) error {
	changed := make(chan error, 1)
	go func() { changed <- c.touch(ctx) }()
	var err error
	c.result.Busy, err = c.serve(ctx, samples)
	return errors.Join(err, <-changed)
}

// Waits are how long another tenant's Services waited, since the request for their creation.
type Waits struct {
	// Created is until the API server answered, which does not depend on Lodestone.
	Created []time.Duration
	// Address is until the Service had an address.
	Address []time.Duration
	// Announced is until a host on the segment heard of the address.
	Announced []time.Duration
}

// Own returns what of the wait for the announcement came after the API server's answer.
func (w Waits) Own() []time.Duration {
	own := make([]time.Duration, len(w.Announced))
	for i := range own {
		own[i] = w.Announced[i] - w.Created[i]
	}
	return own
}

// Quantile returns the one of them that a share q of them do not exceed.
func Quantile(of []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
