package main

import (
	"context"
	"errors"
	"time"

	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/lodestone-lb/lodestone/controller/provider"
)

// ledCloud is our provider, initialized only in the process that leads.
type ledCloud struct {
	*provider.Cloud
	p *process
}

// Initialize is the first thing that the framework calls, before it starts controllers and
// informers. It returns once this process leads. If the process is stopped before that, it
// never returns.
func (c ledCloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {
	c.p.stand()
	select {
	case <-c.p.election.won:
	case <-c.p.stopped.Done():
		select {}
	}
	legacyregistry.RawMustRegister(c.p.config, c.p.quarantine)
	c.p.start(c.p.events.Run)
	c.p.start(c.p.config.Run)
	c.p.start(c.p.facts.Run)
	c.p.startUntil(c.p.stopped, c.p.leases.Run) // extended while the API server is away, too: two replicas may extend the same ones
	c.p.start(c.p.leaseEvents.Run)
}

// configTimeout is how long the framework is kept waiting for the configuration.
const configTimeout = 10 * time.Second

// Routes waits for the configuration, on which depends whether there are routes, because the
// framework asks only once. Ours does not need the framework's informers, which start later.
func (c ledCloud) Routes() (cloudprovider.Routes, bool) {
	late := time.After(configTimeout)
	for {
		changed := c.p.config.Changed()
		if _, state := c.p.config.Current(); state.Read {
			return c.Cloud.Routes()
		}
		select {
		case <-changed:
		case <-c.p.working.Done():
			return nil, false
		case <-late:
			c.p.log.Error("no routes to pods: the configuration could not be read; restart the controller", "waited", configTimeout)
			return nil, false
		}
	}
}

// stand stands for election. A leader that loses the lease stops writing at once, because
// another one may write from now on, and ends as soon as the API server answers. As long as
// the API server does not answer, a restart would fail, and the kubelet would delay each
// further one for longer.
func (p *process) stand() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = p.election
	go func() {
		p.election.run()
		if p.election.ctx.Err() != nil {
			return
		}
		p.cancel()
		p.leases.ExtendOnly()
		p.log.Error("the leader lease is lost")
		for !p.reachable() {
			time.Sleep(time.Second)
		}
		p.fatal(errors.New("the leader lease is lost"))
	}()
}

// reachable reports whether the API server answers. A refusal is an answer.
func (p *process) reachable() bool {
	var code int
	p.client.Discovery().RESTClient().Get().AbsPath("/readyz").Timeout(time.Second).Do(p.election.ctx).StatusCode(&code)
	return code != 0
}

// start runs a task until the process is asked to stop or has lost the lease.
func (p *process) start(run func(context.Context) error) { p.startUntil(p.working, run) }

// startUntil runs a task until the context ends, which is stopped or working.
func (p *process) startUntil(end context.Context, run func(context.Context) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tasks.Go(func() error { return run(end) })
}

// end waits until our tasks have finished, then gives the lease back. No write of this process
// is on its way when the next leader takes it.
func (p *process) end() {
	p.mu.Lock() // nothing starts any more
	if err := p.tasks.Wait(); err != nil {
		p.log.Error("task failed", "err", err)
	}
	if p.running != nil {
		p.running.resign()
	}
}
