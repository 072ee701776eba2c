// Package cluster reads the state of Lodestone from the API server: once, for commands, or continuously, for
// the dashboard. If it cannot read something, it has the rest, and lists what is missing and why.
//
//	cluster.go  Objects: what was read, and what could not be
//	source.go   the kinds of objects
//	watch.go    Watcher: follows the objects
package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
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
	Records []quarantinestore.Record
	Now     time.Time

	facts clusterfacts.Objects
	// document is the text of the configuration; nil: there is none.
	document *string
	mu       sync.Mutex
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

	namespaces   = "Namespaces"
	apiServer    = "the API server's EndpointSlices"
	serviceCIDRs = "ServiceCIDRs"
	inQuarantine = "the addresses in quarantine"
)

// What has to be read for parts of an answer.
var (
	// ForAddresses is what it takes to decide which Service gets which address.
	ForAddresses = []string{Services, namespaces, ConfigMaps, Nodes, Leases, apiServer, serviceCIDRs, inQuarantine}
	// ForSessions is what it takes to list the BGP sessions.
	ForSessions = []string{ConfigMaps, Nodes, Leases, Pods}
	// ForVIPs is what it takes to decide who announces which VIP.
	ForVIPs = append([]string{Services, Slices}, ForSessions...)
)

// Unread returns why things could not be read, one sentence each, sorted.
func (o *Objects) Unread() (all []string) {
	for _, err := range o.reasons() {
		all = append(all, err.Error())
	}
	return slices.Compact(all)
}

// Err returns what could not be read as one error: of these kinds, or of all if
// none is named; nil if there is nothing.
func (o *Objects) Err(kinds ...string) error {
	all := o.reasons(kinds...)
	if len(all) == 0 {
		return nil
	}
	one := all[0]
	for _, err := range all[1:] {
		one = fmt.Errorf("%w; %w", one, err)
	}
	return one
}

// reasons returns why things of these kinds could not be read, sorted. Without a kind: of all kinds.
func (o *Objects) reasons(kinds ...string) (all []error) {
	for kind, err := range o.unread {
		if len(kinds) == 0 || slices.Contains(kinds, kind) {
			all = append(all, err)
		}
	}
	slices.SortFunc(all, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return all
}

// Absent returns an error if there is nothing of Lodestone in the namespace. It may be in another one.
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
		for _, p := range slices.Concat(o.Controllers, o.Speakers) {
			if name, ok := flagOf(p, "config-name"); ok && name != o.ConfigName {
				return fmt.Errorf("there is no %s: controllers and speakers read another one, so add --config-name=%s", o.ConfigMap(), name)
			}
		}
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
		Scope: o.Scope, Services: o.Services, Config: o.Config, NamespaceLabels: map[string]map[string]string{},
		Records: o.Records, Now: o.Now,
	}
	for _, ns := range o.Namespaces {
		c.NamespaceLabels[ns.Name] = ns.Labels
	}
	facts := o.facts
	facts.Nodes, facts.Leases = o.Nodes, o.Leases
	for _, svc := range o.Services {
		if svc.Namespace == metav1.NamespaceDefault && svc.Name == objects.KubernetesService {
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

// SpeakerByNode returns the speaker's pod of each node that has one. Of several pods it takes a ready one, if there is one.
func (o *Objects) SpeakerByNode() map[string]*corev1.Pod {
	pods := map[string]*corev1.Pod{}
	for _, p := range o.Speakers {
		if before := pods[p.Spec.NodeName]; p.Spec.NodeName != "" && (before == nil || !IsReady(before)) {
			pods[p.Spec.NodeName] = p
		}
	}
	return pods
}

// ContainerOf returns the name of our container in a pod, in which others may have put further ones.
func ContainerOf(p *corev1.Pod) string { return p.Labels[labelComponent] }

// IsReady reports whether the pod is ready.
func IsReady(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// HTTPSPort returns the port of the pod that its component names https. Zero: it names none.
func HTTPSPort(p *corev1.Pod) int {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == "https" {
				return int(port.ContainerPort)
			}
		}
	}
	return 0
}

// Allocation reads what the controller decides by.
func Allocation(ctx context.Context, client kubernetes.Interface, p Place) *Objects {
	o := newObjects(p)
	o.readAll(ctx, slices.DeleteFunc(p.sources(client), func(s source) bool {
		return s.kind != Pods && !slices.Contains(ForAddresses, s.kind)
	}))
	return o
}

// All reads what controller and speakers decide by, and how they are. It fails if it can read nothing at all.
func All(ctx context.Context, client kubernetes.Interface, p Place) (*Objects, error) {
	o := newObjects(p)
	sources := p.sources(client)
	o.readAll(ctx, sources)
	if len(o.unread) == len(sources) {
		return nil, o.reasons()[0]
	}
	return o, nil
}

func newObjects(p Place) *Objects {
	return &Objects{Place: p, Now: time.Now(), unread: map[string]error{}}
}

// readAll reads all sources concurrently.
func (o *Objects) readAll(ctx context.Context, sources []source) {
	var group sync.WaitGroup
	for _, s := range sources {
		group.Go(func() { o.read(ctx, s) })
	}
	group.Wait()
	o.Config, o.ConfigErr = parse(o.document)
	if o.ScopeAsRunning && len(o.Controllers) > 0 {
		runs := max(0, slices.IndexFunc(o.Controllers, IsReady))
		o.Scope = scopeOf(o.Controllers[runs], o.Scope)
	}
}

func parse(document *string) (*config.Config, error) {
	if document == nil {
		return nil, nil
	}
	return config.Parse([]byte(*document))
}

// scopeOf returns what a controller serves by the flags of its pod. The rest is as in scope.
func scopeOf(pod *corev1.Pod, scope kube.Scope) kube.Scope {
	if value, ok := flagOf(pod, "handle-classless"); ok {
		scope.Classless = value == "true"
	}
	if value, ok := flagOf(pod, "load-balancer-classes"); ok {
		scope.Classes = strings.Split(value, ",")
	}
	return scope
}

// flagOf returns the value of a flag that a container of the pod has; of several the last.
func flagOf(pod *corev1.Pod, name string) (value string, ok bool) {
	for _, c := range pod.Spec.Containers {
		for _, arg := range c.Args {
			if v, has := strings.CutPrefix(arg, "--"+name+"="); has {
				value, ok = v, true
			}
		}
	}
	return value, ok
}
