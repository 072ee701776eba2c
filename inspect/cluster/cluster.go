// Package cluster reads from the API server how Lodestone is: once, for commands,
// or again and again, for the dashboard. It lists what it could not read, and why, and has the rest.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/controller/quarantine"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// ElectionLease is the Lease by which the controller's replicas elect a leader.
const ElectionLease = "lodestone-controller"

// Labels of the pods.
const (
	labelName      = "app.kubernetes.io/name"
	labelComponent = "app.kubernetes.io/component"
)

// Place is where Lodestone is in a cluster, and what it serves.
type Place struct {
	Namespace, ConfigName string
	// Scope is what it serves. ScopeAsRunning: if there is a controller, the scope of its flags
	// replaces it.
	Scope          kube.Scope
	ScopeAsRunning bool
}

// ConfigMap names the ConfigMap for people.
func (p Place) ConfigMap() string { return "ConfigMap " + p.Namespace + "/" + p.ConfigName }

// Objects are what was read.
type Objects struct {
	Place
	// Config is the configuration; nil when there is none, or when ConfigErr is
	// what is wrong with it.
	Config    *config.Config
	ConfigErr error

	Services   []*corev1.Service
	Namespaces []*corev1.Namespace
	Nodes      []*corev1.Node
	// Leases are the speakers'; Election is the controller's, nil when there is
	// none.
	Leases   []*coordinationv1.Lease
	Election *coordinationv1.Lease
	// Controllers and Speakers are the components' pods.
	Controllers, Speakers []*corev1.Pod
	// Slices are those of all Services; only All reads them.
	Slices  []*discoveryv1.EndpointSlice
	Records []quarantine.Record
	Now     time.Time

	facts clusterfacts.Objects
	mu    sync.Mutex
	// unread is why what was to be read is not there, by what it is.
	unread map[string]error
}

// Kinds of objects, as they are named to people.
const (
	Services   = "Services"
	Nodes      = "Nodes"
	Leases     = "the speakers' Leases"
	Slices     = "EndpointSlices"
	Pods       = "the Pods of Lodestone"
	Election   = "the Lease of the leading controller"
	ConfigMaps = "the configuration"

	namespaces        = "Namespaces"
	apiServer         = "the API server's EndpointSlices"
	serviceCIDRs      = "ServiceCIDRs"
	releasedAddresses = "the released addresses"
)

// What has to be read for parts of an answer.
var (
	// ForAddresses is what it takes to decide which Service gets which address.
	ForAddresses = []string{Services, namespaces, ConfigMaps, Nodes, Leases, apiServer, serviceCIDRs, releasedAddresses}
	// ForSessions is what it takes to list the BGP sessions.
	ForSessions = []string{ConfigMaps, Nodes, Leases, Pods}
	// ForVIPs is what it takes to decide who announces which VIP.
	ForVIPs = append([]string{Services, Slices}, ForSessions...)
)

// Unread returns why things could not be read, one sentence each, sorted.
func (o *Objects) Unread() []string {
	var all []string
	for _, err := range o.unread {
		all = append(all, err.Error())
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Err returns what could not be read as one error: of these kinds, or of all if
// none is named; nil if there is nothing.
func (o *Objects) Err(kinds ...string) error {
	var all []string
	for kind, err := range o.unread {
		if len(kinds) == 0 || slices.Contains(kinds, kind) {
			all = append(all, err.Error())
		}
	}
	slices.Sort(all)
	if len(all) == 0 {
		return nil
	}
	return errors.New(strings.Join(all, "; "))
}

// Absent returns an error if there is nothing of Lodestone in its namespace: it is in another one, if anywhere.
func (o *Objects) Absent() error {
	if !o.Has(ConfigMaps, Pods) || o.Config != nil || o.ConfigErr != nil || len(o.Controllers)+len(o.Speakers) > 0 {
		return nil
	}
	return fmt.Errorf("there is neither %s nor a pod of Lodestone in its namespace: is it installed in another one (--lodestone-namespace)?",
		o.ConfigMap())
}

// Unclear returns why it is not known which configuration controllers and speakers go by; nil: they go by the
// one in the cluster. It is not known if that one is invalid, or if there is none although speakers are ready:
// no speaker is ready without one.
func (o *Objects) Unclear() error {
	const then = "controllers and speakers that run go by the last valid one, those that start by its copy in ConfigMap " +
		config.LastValidName + ", if there is one"
	switch {
	case o.ConfigErr != nil:
		return fmt.Errorf("%s is invalid, repair it: %s", o.ConfigMap(), then)
	case o.Config == nil && o.Has(ConfigMaps) && slices.ContainsFunc(o.Speakers, IsReady):
		return fmt.Errorf("there is no %s, create it: %s", o.ConfigMap(), then)
	}
	return nil
}

// Omit has a kind count as not read, for this reason.
func (o *Objects) Omit(kind string, why error) { o.unread[kind] = why }

// Has reports whether all of these have been read.
func (o *Objects) Has(kinds ...string) bool {
	return !slices.ContainsFunc(kinds, func(kind string) bool { return o.unread[kind] != nil })
}

// Cluster returns what the controller decides by.
func (o *Objects) Cluster() *simulation.Cluster {
	c := &simulation.Cluster{
		Scope: o.Scope, Services: o.Services, Config: o.Config, Nodes: o.Nodes, NamespaceLabels: map[string]map[string]string{},
		Records: o.Records, Now: o.Now,
	}
	for _, ns := range o.Namespaces {
		c.NamespaceLabels[ns.Name] = ns.Labels
	}
	facts := o.facts
	facts.Nodes, facts.Leases = o.Nodes, o.Leases
	for _, svc := range o.Services {
		if svc.Namespace == metav1.NamespaceDefault && svc.Name == "kubernetes" {
			facts.Kubernetes = svc
		}
	}
	c.Facts = clusterfacts.Collect(facts)
	return c
}

// Network returns what the speakers decide by.
func (o *Objects) Network() *simulation.Network {
	ready := map[string]bool{}
	for _, p := range o.Speakers {
		if IsReady(p) {
			ready[p.Spec.NodeName] = true
		}
	}
	return simulation.NewNetwork(simulation.Announcers{
		Scope: o.Scope, Config: o.Config, Services: o.Services, Slices: o.Slices, Nodes: o.Nodes, Leases: o.Leases, Ready: ready,
	})
}

// SpeakerByNode returns the speaker's pod of each node that has one: of several one that is ready, if there is one.
func (o *Objects) SpeakerByNode() map[string]*corev1.Pod {
	pods := map[string]*corev1.Pod{}
	for _, p := range o.Speakers {
		if before := pods[p.Spec.NodeName]; p.Spec.NodeName != "" && (before == nil || !IsReady(before)) {
			pods[p.Spec.NodeName] = p
		}
	}
	return pods
}

// IsReady reports whether the pod is ready.
func IsReady(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// refused returns why a source cannot be read. If a right is missing, it names the right.
func refused(s source, err error) error {
	if apierrors.IsUnauthorized(err) {
		return errors.New("the API server does not accept your credentials, or they have expired: log in again, or see --context and " +
			"--kubeconfig")
	}
	if !apierrors.IsForbidden(err) {
		return fmt.Errorf("%s %s: %w", s.verb, s.kind, err)
	}
	where := "in the whole cluster"
	if s.namespace != "" {
		where = "in namespace " + s.namespace
	}
	return fmt.Errorf("you may not read %s: you need the right to %s %s %s", s.kind, s.verb, s.resource, where)
}

// source is one thing to read.
type source struct {
	kind, verb, resource, namespace string
	read                            func(ctx context.Context) error
}

// Allocation reads what the controller decides by.
func Allocation(ctx context.Context, client kubernetes.Interface, p Place) *Objects {
	o := newObjects(p)
	o.readAll(ctx, append(o.allocation(client), o.pods(client)))
	return o
}

// All reads what controller and speakers decide by, and how they are. It fails if it can read nothing at all.
func All(ctx context.Context, client kubernetes.Interface, p Place) (*Objects, error) {
	o := newObjects(p)
	sources := append(o.allocation(client), o.announcement(client)...)
	o.readAll(ctx, sources)
	if len(o.unread) == len(sources) {
		return nil, errors.New(o.Unread()[0])
	}
	return o, nil
}

func newObjects(p Place) *Objects {
	return &Objects{Place: p, Now: time.Now(), unread: map[string]error{}}
}

// readAll reads at once what there is to read.
func (o *Objects) readAll(ctx context.Context, sources []source) {
	var group sync.WaitGroup
	for _, s := range sources {
		group.Go(func() { o.read(ctx, s) })
	}
	group.Wait()
	if o.ScopeAsRunning && len(o.Controllers) > 0 {
		runs := max(0, slices.IndexFunc(o.Controllers, IsReady))
		o.Scope = scopeOf(o.Controllers[runs], o.Scope)
	}
}

// scopeOf returns what a controller serves by the flags of its pod. The rest is as in scope.
func scopeOf(pod *corev1.Pod, scope kube.Scope) kube.Scope {
	for _, c := range pod.Spec.Containers {
		for _, arg := range c.Args {
			if value, ok := strings.CutPrefix(arg, "--handle-classless="); ok {
				scope.Classless = value == "true"
			}
			if value, ok := strings.CutPrefix(arg, "--load-balancer-classes="); ok {
				scope.Classes = strings.Split(value, ",")
			}
		}
	}
	return scope
}

// read reads a source, or notes why that cannot be.
func (o *Objects) read(ctx context.Context, s source) {
	if err := s.read(ctx); err != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.unread[s.kind] = refused(s, err)
	}
}

// allocation are the sources of what the controller decides by.
func (o *Objects) allocation(client kubernetes.Interface) []source {
	const list, get = "list", "get"
	all := objects.Scope{}
	return []source{
		{Services, list, "services", "", func(ctx context.Context) error {
			// Whole: diagnose looks for the marks of other implementations.
			l, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			o.Services = pointers(l.Items)
			// Only after the Services: of a Service that was deleted before, the addresses are on record by now.
			o.read(ctx, source{releasedAddresses, get, "configmaps", o.Namespace, func(ctx context.Context) (err error) {
				o.Records, err = quarantine.New(client, o.Namespace, slog.New(slog.DiscardHandler)).Load(ctx)
				return err
			}})
			return nil
		}},
		{namespaces, list, "namespaces", "", func(ctx context.Context) (err error) {
			o.Namespaces, err = once(objects.Namespaces.List(ctx, client, all))
			return err
		}},
		{ConfigMaps, get, "configmaps", o.Namespace, func(ctx context.Context) error {
			cm, err := client.CoreV1().ConfigMaps(o.Namespace).Get(ctx, o.ConfigName, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err == nil {
				o.Config, o.ConfigErr = config.Parse([]byte(cm.Data[config.Key]))
			}
			return err
		}},
		{Nodes, list, "nodes", "", func(ctx context.Context) (err error) {
			o.Nodes, err = once(objects.Nodes.List(ctx, client, all))
			return err
		}},
		{Leases, list, "leases.coordination.k8s.io", o.Namespace, func(ctx context.Context) (err error) {
			o.Leases, err = once(objects.Leases.List(ctx, client, objects.Speakers(o.Namespace)))
			return err
		}},
		{apiServer, list, "endpointslices.discovery.k8s.io", metav1.NamespaceDefault, func(ctx context.Context) (err error) {
			o.facts.APIServer, err = once(objects.EndpointSlices.List(ctx, client,
				objects.Scope{Namespace: metav1.NamespaceDefault, Labels: discoveryv1.LabelServiceName + "=kubernetes"}))
			return err
		}},
		{serviceCIDRs, list, "servicecidrs.networking.k8s.io", "", func(ctx context.Context) error {
			found, err := once(objects.ServiceCIDRs.List(ctx, client, all))
			if apierrors.IsNotFound(err) { // before Kubernetes v1.33
				return nil
			}
			o.facts.ServiceCIDRs = found
			return err
		}},
	}
}

// announcement are the other sources that speakers decide by, and those of how the components are.
func (o *Objects) announcement(client kubernetes.Interface) []source {
	return []source{
		{Slices, "list", "endpointslices.discovery.k8s.io", "", func(ctx context.Context) (err error) {
			o.Slices, err = once(objects.EndpointSlices.List(ctx, client, objects.Scope{}))
			return err
		}},
		o.pods(client),
		{Election, "get", "leases.coordination.k8s.io", o.Namespace, func(ctx context.Context) error {
			l, err := client.CoordinationV1().Leases(o.Namespace).Get(ctx, ElectionLease, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err == nil {
				o.Election = l
			}
			return err
		}},
	}
}

// pods is Lodestone's own pods.
func (o *Objects) pods(client kubernetes.Interface) source {
	return source{Pods, "list", "pods", o.Namespace, func(ctx context.Context) error {
		pods, err := once(objects.Pods.List(ctx, client, objects.Scope{Namespace: o.Namespace, Labels: labelName + "=lodestone"}))
		o.sortPods(pods)
		return err
	}}
}

// sortPods sorts the pods by component.
func (o *Objects) sortPods(pods []*corev1.Pod) {
	for _, p := range pods {
		switch p.Labels[labelComponent] {
		case "controller":
			o.Controllers = append(o.Controllers, p)
		case "speaker":
			o.Speakers = append(o.Speakers, p)
		}
	}
}

// once returns the error without its outer text: the caller writes what could not be read.
func once[T any](all []T, err error) ([]T, error) { return all, errors.Unwrap(err) }

func pointers[T any](items []T) []*T {
	all := make([]*T, len(items))
	for i := range items {
		all[i] = &items[i]
	}
	return all
}
