package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// source is one kind of objects. read reads them once. informer and take follow them.
type source struct {
	kind, verb, resource, namespace string
	optional                        bool // as of its objects.Kind

	read     func(ctx context.Context, o *Objects) error
	informer func() cache.SharedIndexInformer
	take     func(o *Objects, f *kube.Follower)
}

// sources are all that there is to read.
func (p Place) sources(client kubernetes.Interface) []source {
	all, document := objects.Scope{}, objects.Scope{Namespace: p.Namespace}
	election, pods := document, document
	pods.Labels = labelName + "=lodestone"
	document.Fields = fields.OneTermEqualSelector(metav1.ObjectNameField, p.ConfigName).String()
	election.Fields = fields.OneTermEqualSelector(metav1.ObjectNameField, ElectionLease).String()
	const endpointSlices, leases = "endpointslices.discovery.k8s.io", "leases.coordination.k8s.io"

	services := of(client, Services, "services", objects.ServicesFor(concernsUs), all,
		func(o *Objects, found []*corev1.Service) { o.Services = found })
	services.read = func(ctx context.Context, o *Objects) error {
		// Whole: diagnose looks for the marks of other implementations.
		l, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range l.Items {
			o.Services = append(o.Services, &l.Items[i])
		}
		// After the Services: the addresses of a Service that was deleted before are on record by then.
		o.read(ctx, p.records(client))
		return nil
	}
	return []source{
		services,
		of(client, namespaces, "namespaces", objects.Namespaces, all, func(o *Objects, found []*corev1.Namespace) { o.Namespaces = found }),
		get(of(client, ConfigMaps, "configmaps", objects.ConfigMaps, document, p.takeDocument), p.takeDocument,
			func(ctx context.Context) (*corev1.ConfigMap, error) {
				return client.CoreV1().ConfigMaps(p.Namespace).Get(ctx, p.ConfigName, metav1.GetOptions{})
			}),
		of(client, Nodes, "nodes", objects.Nodes, all, func(o *Objects, found []*corev1.Node) { o.Nodes = found }),
		of(client, Leases, leases, objects.Leases, objects.Speakers(p.Namespace),
			func(o *Objects, found []*coordinationv1.Lease) { o.Leases = found }),
		of(client, apiServer, endpointSlices, objects.EndpointSlices, clusterfacts.APIServer,
			func(o *Objects, found []*discoveryv1.EndpointSlice) { o.facts.APIServer = found }),
		of(client, serviceCIDRs, "servicecidrs.networking.k8s.io", objects.ServiceCIDRs, all,
			func(o *Objects, found []*networkingv1.ServiceCIDR) { o.facts.ServiceCIDRs = found }),
		of(client, Slices, endpointSlices, objects.EndpointSlices, all,
			func(o *Objects, found []*discoveryv1.EndpointSlice) { o.Slices = found }),
		of(client, Pods, "pods", objects.Pods, pods, (*Objects).takePods),
		get(of(client, Election, leases, objects.Leases, election, (*Objects).takeElection), (*Objects).takeElection,
			func(ctx context.Context) (*coordinationv1.Lease, error) {
				return client.CoordinationV1().Leases(p.Namespace).Get(ctx, ElectionLease, metav1.GetOptions{})
			}),
	}
}

// records is the source of the addresses in quarantine, which are read now and then, and not followed.
func (p Place) records(client kubernetes.Interface) source {
	return source{kind: inQuarantine, verb: "get", resource: "configmaps", namespace: p.Namespace,
		read: func(ctx context.Context, o *Objects) (err error) {
			o.Records, err = quarantinestore.New(client, p.Namespace, slog.New(slog.DiscardHandler)).Load(ctx)
			return err
		}}
}

// of is the source of a kind of objects. put notes those that were found.
func of[E any, P objects.Decodable[E]](client kubernetes.Interface, kind, resource string, of objects.Kind[E, P], scope objects.Scope,
	put func(*Objects, []P)) source {
	return source{
		kind: kind, verb: "list", resource: resource, namespace: scope.Namespace, optional: of.Optional,
		read: func(ctx context.Context, o *Objects) error {
			found, err := of.List(ctx, client, scope)
			if of.Optional && apierrors.IsNotFound(err) {
				return nil
			}
			put(o, found)
			return errors.Unwrap(err) // the outer text is that of refused
		},
		informer: func() cache.SharedIndexInformer {
			return of.Informer(client, scope, cache.SharedIndexInformerOptions{})
		},
		take: func(o *Objects, f *kube.Follower) { put(o, kube.Listed[P](f)) },
	}
}

// get has a source read its only object by name.
func get[P any](s source, put func(*Objects, []P), get func(context.Context) (P, error)) source {
	s.verb = "get"
	s.read = func(ctx context.Context, o *Objects) error {
		found, err := get(ctx)
		if kube.Missing(err) {
			return nil
		}
		if err == nil {
			put(o, []P{found})
		}
		return err
	}
	return s
}

func (p Place) takeDocument(o *Objects, found []*corev1.ConfigMap) {
	for _, cm := range found {
		if cm.Name == p.ConfigName {
			o.document = new(cm.Data[config.Key])
		}
	}
}

func (o *Objects) takeElection(found []*coordinationv1.Lease) {
	for _, l := range found {
		if l.Name == ElectionLease {
			o.Election = l
		}
	}
}

// takePods sorts the pods by component.
func (o *Objects) takePods(found []*corev1.Pod) {
	for _, p := range found {
		switch p.Labels[labelComponent] {
		case "controller":
			o.Controllers = append(o.Controllers, p)
		case "speaker":
			o.Speakers = append(o.Speakers, p)
		}
	}
}

// concernsUs reports whether more is needed of a Service than its addresses.
func concernsUs(s *corev1.Service) bool {
	_, assigned := s.Annotations[annotation.Assigned]
	return assigned || s.Spec.Type == corev1.ServiceTypeLoadBalancer
}

// read reads a source, or notes why that cannot be.
func (o *Objects) read(ctx context.Context, s source) {
	if err := s.read(ctx, o); err != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.unread[s.kind] = refused(s, err)
	}
}

// ErrCredentials is why nothing can be read if the API server does not accept the credentials.
var ErrCredentials = errors.New("the API server does not accept your credentials, or they have expired: log in again, or see " +
	"--context and --kubeconfig")

// refused returns why a source cannot be read. If a right is missing, it names the right.
func refused(s source, err error) error {
	if apierrors.IsUnauthorized(err) {
		return ErrCredentials
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
