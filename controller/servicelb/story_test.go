package servicelb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// server is an API server with Services, faithful in what the controller
// relies on: resourceVersion and UID of a patch are honoured, finalizers hold
// a deletion up, a type change wipes the status.
type server struct {
	mu       sync.Mutex
	services map[string]*corev1.Service
	version  int
	uids     int
	patches  int
	// fault, if set, is asked about every patch.
	fault func() fault
	// watch, if set, hears about every change.
	watch func(before, now *corev1.Service)
}

// fault is what goes wrong with a patch.
type fault int

const (
	none       fault = iota
	lost             // the server did not apply it
	unanswered       // the server applied it, the answer was lost
)

var errFault = errors.New("connection reset")

func newServer() *server { return &server{services: map[string]*corev1.Service{}} }

// create creates a LoadBalancer Service, as changed.
func (s *server) create(name string, created time.Time, changes ...func(*corev1.Service)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.services[name] != nil {
		return
	}
	s.uids++
	svc := &corev1.Service{}
	svc.Namespace, svc.Name, _ = strings.Cut(name, "/")
	svc.UID = types.UID(fmt.Sprintf("uid-%d", s.uids))
	svc.CreationTimestamp = metav1.NewTime(created.Truncate(time.Second))
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	for _, change := range changes {
		change(svc)
	}
	s.store(name, svc)
}

// update changes a Service if it is there.
func (s *server) update(name string, changes ...func(*corev1.Service)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.services[name]
	if old == nil {
		return
	}
	svc := old.DeepCopy()
	for _, change := range changes {
		change(svc)
	}
	if old.Spec.Type == corev1.ServiceTypeLoadBalancer && svc.Spec.Type != old.Spec.Type {
		svc.Status.LoadBalancer = corev1.LoadBalancerStatus{}
	}
	s.store(name, svc)
}

// delete deletes a Service; finalizers hold it.
func (s *server) delete(name string, now time.Time) {
	s.update(name, func(svc *corev1.Service) {
		if svc.DeletionTimestamp == nil {
			svc.DeletionTimestamp = &metav1.Time{Time: now}
		}
	})
}

func (s *server) store(name string, svc *corev1.Service) {
	before := s.services[name]
	s.version++
	svc.ResourceVersion = strconv.Itoa(s.version)
	if s.services[name] = svc; svc.DeletionTimestamp != nil && len(svc.Finalizers) == 0 {
		delete(s.services, name)
		svc = nil
	}
	if s.watch != nil {
		s.watch(before, svc)
	}
}

func (s *server) get(name string) *corev1.Service {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.services[name]
}

func (s *server) all() []*corev1.Service {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.services))
}

func (s *server) wrote() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.patches
}

func (s *server) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, 0, len(s.services))
	for name := range s.services {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// PatchStatus implements API.
func (s *server) PatchStatus(_ context.Context, namespace, name string, patch []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.patches++
	happens := none
	if s.fault != nil {
		happens = s.fault()
	}
	if happens == lost {
		return errFault
	}
	key, group := namespace+"/"+name, schema.GroupResource{Resource: "services"}
	old := s.services[key]
	if old == nil {
		return apierrors.NewNotFound(group, name)
	}
	before, _ := json.Marshal(old)
	after, err := strategicpatch.StrategicMergePatch(before, patch, corev1.Service{})
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	svc := &corev1.Service{}
	if err := json.Unmarshal(after, svc); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	switch {
	case svc.ResourceVersion != old.ResourceVersion:
		return apierrors.NewConflict(group, name, errors.New("the object has been modified"))
	case svc.UID != old.UID:
		return apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, name,
			field.ErrorList{field.Invalid(field.NewPath("metadata", "uid"), svc.UID, "field is immutable")})
	}
	svc.Spec = old.Spec
	s.store(key, svc)
	if happens == unanswered {
		return errFault
	}
	return nil
}

// document is a configuration that tests change.
type document struct {
	mu       sync.Mutex
	config   *config.Config
	state    kube.State
	changed  chan struct{}
	warnings []string
	over     []string
}

func (d *document) Warn(message string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.warnings = append(d.warnings, message)
}

func (d *document) WarnOver(message string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.over = append(d.over, message)
}

// surroundings are what a story's cluster has beside Services: the labels of
// its namespaces, and what it uses itself.
type surroundings struct {
	labels  map[string]map[string]string
	unseen  string // a namespace
	facts   *clusterfacts.Facts
	changed chan struct{}
}

func newSurroundings() *surroundings {
	return &surroundings{labels: map[string]map[string]string{}, facts: &clusterfacts.Facts{}, changed: make(chan struct{})}
}

func (s *surroundings) Current() (*clusterfacts.Facts, bool)      { return s.facts, true }
func (s *surroundings) Labels(namespace string) map[string]string { return s.labels[namespace] }
func (s *surroundings) Known(namespace string) bool               { return namespace != s.unseen }
func (s *surroundings) Wait(context.Context) bool                 { return true }
func (s *surroundings) Changed() <-chan struct{}                  { return s.changed }

// shelf is a QuarantineStore that outlives the controllers.
type shelf struct {
	mu      sync.Mutex
	records map[netip.Addr]quarantinestore.Record
	writes  int
	// now is nil if nothing is ever over.
	now func() time.Time
	// fault, if set, is asked about every write.
	fault func() fault
}

func (b *shelf) Load(context.Context) ([]quarantinestore.Record, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.now != nil {
		maps.DeleteFunc(b.records, func(_ netip.Addr, r quarantinestore.Record) bool { return !r.Until.After(b.now()) })
	}
	return slices.SortedFunc(maps.Values(b.records), func(x, y quarantinestore.Record) int { return x.Addr.Compare(y.Addr) }), nil
}

func (b *shelf) Keep(_ context.Context, records ...quarantinestore.Record) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	happens := none
	if b.fault != nil {
		happens = b.fault()
	}
	if happens == lost {
		return errFault
	}
	b.writes++
	for _, r := range records {
		b.records[r.Addr] = r
	}
	if happens == unanswered {
		return errFault
	}
	return nil
}

func (d *document) Current() (*config.Config, kube.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.config, d.state
}

func (d *document) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

// head is how every document begins.
const head = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"

func (d *document) set(pools string) {
	cfg, err := config.Parse([]byte(head + pools))
	if err != nil {
		panic(err)
	}
	d.put(cfg, nil)
}

func (d *document) put(cfg *config.Config, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if cfg != nil {
		d.config = cfg
	}
	d.state.Read, d.state.Err = true, err
	close(d.changed)
	d.changed = make(chan struct{})
}

// events collects Events as "Warning PoolExhausted default/web: message".
type events struct {
	mu  sync.Mutex
	all []string
}

func (e *events) Event(object runtime.Object, eventType, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	svc := object.(*corev1.Service)
	e.all = append(e.all, fmt.Sprintf("%s %s %s/%s: %s", eventType, reason, svc.Namespace, svc.Name, message))
}

func (e *events) take() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.all
	e.all = nil
	return all
}

// meanwhile is an API and a QuarantineStore of a story in which something happens before the next write.
type meanwhile struct {
	*story
	happens func()
}

func (m *meanwhile) act() {
	if happens := m.happens; happens != nil {
		m.happens = nil
		happens()
	}
}

func (m *meanwhile) PatchStatus(ctx context.Context, namespace, name string, patch []byte) error {
	m.act()
	return m.server.PatchStatus(ctx, namespace, name, patch)
}

func (m *meanwhile) Load(ctx context.Context) ([]quarantinestore.Record, error) {
	return m.shelf.Load(ctx)
}

func (m *meanwhile) Keep(ctx context.Context, records ...quarantinestore.Record) error {
	m.act()
	return m.shelf.Keep(ctx, records...)
}

// informed is a ServiceInformer over a plain index.
type informed struct {
	coreinformers.ServiceInformer
	index cache.Indexer
}

func (i informed) Lister() corelisters.ServiceLister { return corelisters.NewServiceLister(i.index) }

// story is one living cluster: a server, a configuration, and a controller
// that sees of the server what the story lets it see, when it lets it.
type story struct {
	failer
	server *server
	config *document
	around *surroundings
	shelf  *shelf
	lessor *lessor
	events *events
	clock  time.Time
	scope  kube.Scope

	*Controller
	index cache.Indexer
	// stale is set if configuration, facts or namespaces have changed and the
	// controller has not noticed yet.
	stale bool
	// since is when Services got what they hold, nil if nobody asks.
	since map[held]time.Time
	// shared are the Services that had a sharing key at some time.
	shared map[string]bool
}

// failer is what testing.T and rapid.T have in common.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

// settling is how long a new address may be taken away again, withholding how long nobody draws one that another host has.
const (
	settling    = 2 * time.Minute
	withholding = 24 * time.Hour
)

const lan = "quarantine: 30s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.19, '2001:db8::10-2001:db8::19']}\n"

func newStory(t failer) *story {
	s := &story{
		failer: t, server: newServer(), events: &events{}, clock: time.Unix(1e9, 0),
		config: &document{changed: make(chan struct{})}, around: newSurroundings(), shared: map[string]bool{},
		shelf:  &shelf{records: map[netip.Addr]quarantinestore.Record{}},
		lessor: newLessor(), scope: kube.Scope{Classless: true, Classes: []string{annotation.DefaultClass}},
	}
	s.shelf.now = func() time.Time { return s.clock }
	s.config.set(lan)
	s.restart()
	return s
}

// still is a queue that adds nothing later: its clock is not the story's.
type still struct {
	workqueue.TypedRateLimitingInterface[string]
}

func (still) AddAfter(string, time.Duration) {}

// restart starts a controller that knows only what is in the API server. The one
// before it was killed.
func (s *story) restart() {
	now := func() time.Time { return s.clock }
	s.index = cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	s.Controller = newController(Options{
		Scope: s.scope, Services: informed{index: s.index}, Namespaces: s.around,
		Config: s.config, Facts: s.around, Quarantine: s.shelf, Leases: s.lessor, API: s.server, Events: s.events,
		Log: slog.New(slog.DiscardHandler),
	})
	s.queue = still{s.queue}
	s.ledger.now, s.stale = now, true
	s.lessor.orphan()
	var all []*corev1.Service
	for _, name := range s.server.names() {
		s.see(name)
		all = append(all, s.seen(name))
	}
	records, _ := s.shelf.Load(context.Background())
	s.prime(all, records)
	s.note()
}

// see brings what the controller knows of a Service up to date.
func (s *story) see(name string) {
	namespace, short, _ := strings.Cut(name, "/")
	stored, had, _ := s.index.GetByKey(name)
	before, _ := stored.(*corev1.Service)
	svc := s.server.get(name)
	switch {
	case svc != nil:
		if w, _ := compat.For(nil).Read(svc); w.SharingKey.Text != "" {
			s.shared[name] = true
		}
		svc = objects.ServicesFor(s.scope.Covers).Project(svc) // all that the cache keeps
		_ = s.index.Update(svc)
		s.enqueue(before, svc)
	case had:
		_ = s.index.Delete(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: short}})
		s.enqueue(before, nil)
	}
}

// once works on one Service of the queue and reports whether there was one.
func (s *story) once() bool {
	s.failer.Helper()
	s.order.add(s.queue, s.woken())
	if s.queue.Len() == 0 {
		return false
	}
	name, _ := s.queue.Get()
	s.queue.Done(name)
	if err := s.reconcile(context.Background(), name); err != nil {
		s.queue.Add(name)
	}
	s.note()
	return true
}

// woken returns whom the controller tries again.
func (s *story) woken() []string {
	select {
	case <-s.ledger.retry:
		if !s.stale {
			names, _ := s.machine().Retry(s.clock)
			return names
		}
	default:
		if !s.stale {
			return nil
		}
	}
	s.stale = false
	s.recordEnds(context.Background())
	return s.due()
}

// rotate puts the first Service of the queue last.
func (s *story) rotate() {
	if s.queue.Len() > 0 {
		name, _ := s.queue.Get()
		s.queue.Done(name)
		s.queue.Add(name)
	}
}

// run lets the controller see everything and work until it has nothing left
// to do.
func (s *story) run() {
	s.failer.Helper()
	for range 10000 {
		for _, key := range slices.Sorted(slices.Values(s.index.ListKeys())) {
			if svc := s.server.get(key); svc == nil || svc.ResourceVersion != s.seen(key).ResourceVersion {
				s.see(key)
			}
		}
		for _, name := range s.server.names() {
			if s.seen(name) == nil {
				s.see(name)
			}
		}
		if !s.once() && len(s.ledger.retry) == 0 && !s.stale && !s.followedLeases() {
			return
		}
	}
	s.Fatalf("the controller does not come to rest")
}

// machine is the ledger, which goes by what is in force now.
func (s *story) machine() *ledger.Ledger {
	l, _ := s.ledger.open()
	s.ledger.close()
	return l
}

func (s *story) holds(uid string) []ipam.Held { return heldBy(s.machine(), uid) }

func heldBy(l *ledger.Ledger, uid string) []ipam.Held {
	held, _ := l.Holds(&corev1.Service{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}})
	return held
}
func (s *story) due() []string { return s.machine().Due(s.clock) }

// ensures has the ledger look at a Service, and nothing written.
func (s *story) ensures(svc *corev1.Service) ledger.Verdict {
	defer s.ledger.close()
	l, now := s.ledger.open()
	return l.Ensure(svc, s.around.Labels(svc.Namespace), now)
}

func (s *story) seen(name string) *corev1.Service {
	obj, ok, _ := s.index.GetByKey(name)
	if !ok {
		return nil
	}
	return obj.(*corev1.Service)
}

// pass lets time pass, and what waits for it happen.
func (s *story) pass(d time.Duration) {
	s.run()
	s.clock = s.clock.Add(d)
	s.rings()
	s.run()
}

// rings has the controller's timer do its work when its time has come.
func (s *story) rings() {
	if at := s.machine().NextFree(); !at.IsZero() && !at.After(s.clock) {
		notify.Wake(s.ledger.retry)
	}
}

// configure changes the configuration.
func (s *story) configure(pools string) {
	s.config.set(pools)
	s.stale = true
	s.run()
}

// The verbs of a user.

func (s *story) creates(name string, changes ...func(*corev1.Service)) {
	s.server.create("default/"+name, s.clock, changes...)
	s.clock = s.clock.Add(time.Second)
	s.run()
}

func (s *story) changes(name string, changes ...func(*corev1.Service)) {
	s.server.update("default/"+name, changes...)
	s.run()
}

func (s *story) deletes(name string) {
	s.server.delete("default/"+name, s.clock)
	s.run()
}

func annotated(key, value string) func(*corev1.Service) {
	return func(svc *corev1.Service) { metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value) }
}

func ofClass(class string) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.LoadBalancerClass = &class }
}

func ofType(t corev1.ServiceType) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.Type = t }
}

func families(policy corev1.IPFamilyPolicy, f ...corev1.IPFamily) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.IPFamilyPolicy, svc.Spec.IPFamilies = &policy, f }
}

func wiped(svc *corev1.Service) { svc.Status.LoadBalancer = corev1.LoadBalancerStatus{} }

// The checks.

// has checks the addresses in the Service's object, and status and reason of its
// condition: "True Allocated".
func (s *story) has(name, addresses, condition string) {
	s.failer.Helper()
	svc := s.server.get("default/" + name)
	if svc == nil {
		s.Fatalf("Service %s is gone", name)
	}
	if got := kube.JoinAddrs(kube.VIPs(svc)); got != addresses {
		s.Errorf("Service %s has %q, want %q", name, got, addresses)
	}
	c := kube.Allocated(svc)
	if c == nil {
		c = &metav1.Condition{}
	}
	if got := strings.TrimSpace(string(c.Status) + " " + c.Reason); got != condition {
		s.Errorf("Service %s is %q (%s), want %q", name, got, c.Message, condition)
	}
	finalizer := slices.Contains(svc.Finalizers, finalizerOf(svc))
	if finalizer != (addresses != "") {
		s.Errorf("Service %s with addresses %q has finalizers %q", name, addresses, svc.Finalizers)
	}
}

// mentions checks that the Service's condition contains the words.
func (s *story) mentions(name, words string) {
	s.failer.Helper()
	c := kube.Allocated(s.server.get("default/" + name))
	if c == nil || !strings.Contains(c.Message, words) {
		s.Errorf("Service %s says %v, want %q", name, c, words)
	}
}

// wantEvents checks the Events since the last look, by prefix.
func (s *story) wantEvents(prefixes ...string) {
	s.failer.Helper()
	got := s.events.take()
	if !slices.EqualFunc(got, prefixes, strings.HasPrefix) {
		s.Errorf("events %q, want %q", got, prefixes)
	}
}

// silent checks that nothing is written while act happens.
func (s *story) silent(what string, act func()) {
	s.failer.Helper()
	before := s.server.patches
	act()
	if n := s.server.patches - before; n > 0 {
		s.Errorf("%s: %d writes", what, n)
	}
}

// unique checks that no address is announced for two Services that do not
// share it. What counts are the terms of the Services as the controller has
// seen them: it cannot forestall an edit.
func (s *story) unique() {
	s.failer.Helper()
	by := map[netip.Addr][]string{}
	for _, name := range s.server.names() {
		for _, a := range kube.VIPs(s.server.get(name)) {
			for _, other := range by[a] {
				if !s.mayShare(name, other) {
					s.Fatalf("%s belongs to %s and to %s", a, other, name)
				}
			}
			by[a] = append(by[a], name)
		}
	}
}

// mayShare reports whether the controller had reason to believe that the two
// may have one address: by what it has seen of them last, or before.
func (s *story) mayShare(name, other string) bool {
	return s.shared[name] && s.shared[other]
}
