package servicelb

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

const (
	// firstRetry and lastRetry bound the time between attempts to write a Service that the API
	// server refused.
	firstRetry = 5 * time.Millisecond
	lastRetry  = 30 * time.Second
	// PatchTimeout bounds one PATCH. It is shorter than the leader election's renew deadline, so
	// that no PATCH of a former leader arrives after it has lost the lead.
	PatchTimeout = 5 * time.Second
	// loadRetry is the time between attempts to read which addresses are in quarantine.
	loadRetry = 2 * time.Second
	// namespaceRetry is the time between looks whether the namespace of a Service is known.
	namespaceRetry = 100 * time.Millisecond
	// shortestWait is the least time until Services that wait are tried again because the next
	// address becomes free.
	shortestWait = 50 * time.Millisecond
	// After they were tried again, nothing is tried for restFactor times as long as that took, a second at most: a tenant with
	// thousands that wait could have it done all the time, while nobody else gets the ledger.
	restFactor = 9
)

// API writes to Services.
type API interface {
	// PatchStatus applies a strategic merge patch to services/status.
	PatchStatus(ctx context.Context, namespace, name string, patch []byte) error
}

// ConfigSource returns the configuration in force, nil if there is none, and the state of the
// document.
type ConfigSource interface {
	Current() (*config.Config, kube.State)
}

// Config returns the configuration and signals its changes; kube.ConfigWatcher is one.
type Config interface {
	ConfigSource
	Changed() <-chan struct{}
	// Warn warns the operator about the document, and WarnOver ends the warning.
	Warn(message string)
	WarnOver(message string)
}

// Namespaces returns the labels of namespaces and signals their changes; kube.Namespaces is
// one.
type Namespaces interface {
	Labels(namespace string) map[string]string
	// Known reports whether the labels are known. A Service may be heard of before its namespace.
	Known(namespace string) bool
	// Wait waits until all are known; false: the context has ended.
	Wait(ctx context.Context) bool
	Changed() <-chan struct{}
}

// Facts returns the addresses that the cluster itself uses and signals their changes;
// clusterfacts.Watcher is one.
type Facts interface {
	// Current returns them, and whether they are known yet.
	Current() (facts *clusterfacts.Facts, ready bool)
	Changed() <-chan struct{}
}

// QuarantineStore keeps what must survive the controller; quarantinestore.Store is one.
type QuarantineStore interface {
	// Load returns the records. It is called once, before all else.
	Load(ctx context.Context) ([]quarantinestore.Record, error)
	// Keep returns when the records are durable.
	Keep(ctx context.Context, records ...quarantinestore.Record) error
}

// Options are what a Controller works with.
type Options struct {
	Scope      kube.Scope
	Services   coreinformers.ServiceInformer
	Namespaces Namespaces
	Config     Config
	Facts      Facts
	Quarantine QuarantineStore
	// Leases leases the addresses of pools with DHCP. Nil: they are not leased.
	Leases Leases
	API    API
	Events kube.Events
	// Upstream is set when Kubernetes' own service controller drives the Services without a
	// class, by Provide and Withdraw.
	Upstream bool
	// Workers is how many Services are worked on at a time.
	Workers int
	Log     *slog.Logger
}

// Controller keeps the Service objects in step with the ledger.
type Controller struct {
	Options
	queue   workqueue.TypedRateLimitingInterface[string]
	order   *order // of the queue
	handler cache.ResourceEventHandlerRegistration
	ledger  *lockedLedger
	// primed is closed once decisions can be made.
	primed  chan struct{}
	repairs repairs
	metrics metrics
	emit    emitter
	// warned are the warnings that were given, and warnedFrom is what they followed from. Only
	// retryWaiting uses them.
	warned     []string
	warnedFrom warningInputs
}

// New returns a controller that starts with Run; it listens to Services from
// now on.
func New(opts Options) (*Controller, error) {
	c := newController(opts)
	var err error
	c.handler, err = opts.Services.Informer().AddEventHandler(objects.Handler(c.enqueue))
	return c, err
}

func newController(opts Options) *Controller {
	m, o := newMetrics(), &order{aged: map[string]bool{}}
	return &Controller{
		Options: opts, order: o,
		ledger: newLockedLedger(opts.Scope, opts.Config, opts.Facts),
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry),
			workqueue.TypedRateLimitingQueueConfig[string]{
				DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{
					Name: Name, Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[string]{Name: Name, Queue: o})})}),
		primed:  make(chan struct{}),
		metrics: m,
		emit:    emitter{opts.Log, opts.Events, m},
	}
}

// Name implements the framework's controller.Interface.
func (c *Controller) Name() string { return Name }

// Run serves until the context ends, and finishes the writes that are under way then.
func (c *Controller) Run(ctx context.Context) error {
	if !c.begin(ctx) {
		return nil
	}
	var tasks sync.WaitGroup
	for range c.Workers {
		tasks.Go(func() { c.work(ctx) })
	}
	tasks.Go(func() { c.retryWaiting(ctx) })
	if c.Leases != nil {
		tasks.Go(func() { c.keepLeases(ctx) })
	}
	<-ctx.Done()
	c.queue.ShutDown()
	tasks.Wait()
	return nil
}

// begin waits until everything is known that decisions depend on, and imports what Services
// have. Nothing may be allocated before.
func (c *Controller) begin(ctx context.Context) bool {
	start := c.ledger.now()
	if !cache.WaitFor(ctx, "", c.handler.HasSyncedChecker()) || !c.Namespaces.Wait(ctx) ||
		!await(ctx, c.Config.Changed, func() bool { _, state := c.Config.Current(); return state.Read }) ||
		!await(ctx, c.Facts.Changed, func() bool { _, ready := c.Facts.Current(); return ready }) {
		return false
	}
	// The records are read after the Services, so that they contain what a Service has given
	// back in between.
	records, ok := load(ctx, c.Quarantine, c.Log)
	if !ok {
		return false
	}
	services, err := c.Services.Lister().List(labels.Everything())
	if err != nil {
		c.Log.Error("list services", "err", err)
		return false
	}
	c.prime(services, records)
	cfg, state := c.Config.Current()
	c.Log.Info("primed", "services", len(services), "quarantined", len(records), "took", c.ledger.now().Sub(start), "configured", cfg != nil)
	if cfg == nil {
		c.Log.Error("nothing is allocated until there is a valid configuration", "err", state.Err)
	}
	return true
}

// prime has the ledger import what Services have.
func (c *Controller) prime(services []*corev1.Service, records []quarantinestore.Record) {
	l, now := c.ledger.open()
	duplicates := l.Prime(ledger.Start{Situation: c.ledger.situation(), Services: services, NamespaceLabels: c.Namespaces.Labels,
		Records: records}, now)
	c.ledger.close()
	c.emit.duplicates(duplicates)
	close(c.primed)
}

// load reads which addresses are in quarantine, and tries until it succeeds. Without the
// records the controller would give some of these addresses away too early.
func load(ctx context.Context, store QuarantineStore, log *slog.Logger) (records []quarantinestore.Record, ok bool) {
	for {
		records, err := store.Load(ctx)
		if err == nil {
			return records, true
		}
		log.Error("nothing is allocated until it is known which addresses are in quarantine", "err", err)
		select {
		case <-ctx.Done():
			return nil, false
		case <-time.After(loadRetry):
		}
	}
}

// await waits until done returns true. It asks again after each change. It returns false when
// the context has ended.
func await(ctx context.Context, changed func() <-chan struct{}, done func() bool) bool {
	for {
		signal := changed()
		if done() {
			return true
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return false
		}
	}
}

// enqueue puts a Service that Lodestone serves, or served before, into the queue. Of other
// Services it records the addresses in their status.
func (c *Controller) enqueue(before, after *corev1.Service) {
	svc := cmp.Or(after, before)
	c.ledger.seeForeign(svc, after == nil)
	ours := func(svc *corev1.Service) bool { return svc != nil && (c.Scope.Covers(svc) || c.Scope.LeftBehind(svc)) }
	if ours(before) || ours(after) { // may be two of one name
		c.queue.Add(ledger.NameOf(svc))
	}
}

func (c *Controller) get(name string) (*corev1.Service, error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(name)
	if err != nil {
		return nil, err
	}
	return c.Services.Lister().Services(namespace).Get(name)
}

func (c *Controller) work(ctx context.Context) {
	for {
		name, shutdown := c.queue.Get()
		if shutdown || ctx.Err() != nil {
			return
		}
		err := c.reconcile(context.WithoutCancel(ctx), name)
		switch {
		case err == nil:
			c.queue.Forget(name)
		case apierrors.IsConflict(err): // decided on an old object
			c.queue.AddRateLimited(name)
		default:
			c.Log.Error("service not reconciled, retrying", "service", name, "err", err)
			c.queue.AddRateLimited(name)
		}
		c.queue.Done(name)
	}
}

// retryWaiting tries Services that wait again as soon as something changed for them. When an
// address was freed or its quarantine ended, it tries those that get something. When the
// labels of a namespace changed, it tries those of the namespace, too. When the configuration or
// the facts changed, it tries all of them.
func (c *Controller) retryWaiting(ctx context.Context) {
	config, facts, namespaces := c.Config.Changed(), c.Facts.Changed(), c.Namespaces.Changed()
	due, longer := finder(allDue), true
	for {
		if longer { // after Changed: no configuration is missed
			c.recordEnds(ctx)
		}
		var free <-chan time.Time
		start := time.Now()
		next := c.tryAgain(due)
		rested := time.After(min(restFactor*time.Since(start), time.Second))
		if !next.IsZero() {
			free = time.After(max(next.Sub(c.ledger.now()), shortestWait))
		}
		select {
		case <-ctx.Done():
			return
		case <-config:
		case <-facts:
		case <-namespaces:
		case <-c.ledger.retry:
		case <-free:
		}
		select {
		case <-ctx.Done():
			return
		case <-rested:
		}
		ofConfig, ofFacts, ofNamespaces := config, facts, namespaces
		config, facts, namespaces = c.Config.Changed(), c.Facts.Changed(), c.Namespaces.Changed() // before the look: none is missed
		longer, due = notify.Closed(ofConfig), finderAfter(ofConfig, ofFacts, ofNamespaces, c.Namespaces.Labels)
	}
}

// finder finds the Services that are due. undecided is set if older ones have to come first, because what they get is not decided yet.
type finder func(*ledger.Ledger, time.Time) (names []string, undecided bool)

// allDue finds all that may get a better answer.
func allDue(l *ledger.Ledger, now time.Time) (names []string, undecided bool) {
	return l.Due(now), true
}

// finderAfter returns what finds the Services that are due after these changes, or because something became free. Both may
// have happened: what has become free is not reported again.
func finderAfter(config, facts, namespaces <-chan struct{}, labels func(namespace string) map[string]string) finder {
	switch {
	case notify.Closed(config) || notify.Closed(facts):
		return allDue
	case notify.Closed(namespaces):
		return func(l *ledger.Ledger, now time.Time) ([]string, bool) {
			names, undecided := l.Retry(now)
			relabeled := l.Relabeled(labels)
			return append(relabeled, names...), undecided || len(relabeled) > 0
		}
	}
	return (*ledger.Ledger).Retry
}

// tryAgain puts the Services that are due into the queue, and warns the operator. It returns
// when the next address becomes free, or the zero time if none will.
func (c *Controller) tryAgain(due finder) (next time.Time) {
	l, now := c.ledger.open()
	names, undecided := due(l, now)
	overrun, next := l.Overrun(), l.NextFree()
	c.ledger.close()
	if undecided {
		c.order.add(c.queue, names)
	} else { // one namespace may have very many, which get another answer all the time
		for _, name := range names {
			c.queue.Add(name)
		}
	}
	c.warn(overrun)
	return next
}

// Describe implements prometheus.Collector.
func (c *Controller) Describe(ch chan<- *prometheus.Desc) { c.metrics.describe(ch) }

// Collect implements prometheus.Collector.
func (c *Controller) Collect(ch chan<- prometheus.Metric) {
	c.metrics.collect(c.ledger, notify.Closed(c.primed), ch)
}

// Stats counts what the ledger has. It means little before Primed.
func (c *Controller) Stats() ledger.Stats { return c.ledger.stats() }

// warningInputs are what warnings follow from: a configuration and a cluster, of which both are
// immutable, and what the ledger has run into.
type warningInputs struct {
	config *config.Config
	facts  *clusterfacts.Facts
	// overrun are the sentences of Ledger.Overrun.
	overrun string
}

// warn warns the operator, once each, about settings that make no sense in this cluster.
func (c *Controller) warn(overrun []string) {
	cfg, _ := c.Config.Current()
	facts, ready := c.Facts.Current()
	now := warningInputs{cfg, facts, strings.Join(overrun, "\n")}
	if cfg == nil || !ready || now == c.warnedFrom {
		return
	}
	c.warnedFrom = now
	warnings := append(clusterfacts.Warnings(cfg, facts), overrun...)
	for _, w := range warnings {
		if !slices.Contains(c.warned, w) {
			c.Log.Warn("configuration", "warning", w)
			c.Config.Warn(w)
		}
	}
	for _, w := range c.warned {
		if !slices.Contains(warnings, w) {
			c.Log.Info("configuration: over", "warning", w)
			c.Config.WarnOver(w)
		}
	}
	c.warned = warnings
	c.metrics.warnings.Set(float64(len(warnings)))
}

// ordinaryAnswer is longer than the JSON of most Services, in bytes.
const ordinaryAnswer = 64 << 10

// RESTAPI writes through a Kubernetes REST client of the core group.
type RESTAPI struct{ Client rest.Interface }

// PatchStatus implements API.
func (a RESTAPI) PatchStatus(ctx context.Context, namespace, name string, patch []byte) error {
	ctx, cancel := context.WithTimeout(ctx, PatchTimeout)
	defer cancel()
	answer, err := a.Client.Patch(types.StrategicMergePatchType).Namespace(namespace).Resource("services").Name(name).SubResource("status").
		Body(patch).Stream(ctx)
	if err != nil {
		return err //nolint:wrapcheck // its kind counts
	}
	// The answer is the whole Service, which its owner can make very large. It is not needed,
	// because the watch brings the Service, too. One of ordinary size is read all the same,
	// because the API server logs answers that it cannot write.
	_, _ = io.CopyN(io.Discard, answer, ordinaryAnswer)
	_ = answer.Close() // the patch is written
	return nil
}
