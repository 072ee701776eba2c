// Package provider is Lodestone as a Kubernetes cloud provider: it answers
// the cloud controller framework's questions about load balancers and nodes.
//
// Load balancers are addresses in the ledger of pkg/servicelb, the same that
// Lodestone's own service controller works with. Nodes are what they say of
// themselves, plus what the configuration says of them. Routes to pods are what
// speakers say of them.
package provider

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/pkg/servicelb"
)

// Name is the name of the cloud provider and the scheme of its provider IDs.
const Name = "lodestone"

// Cloud implements cloudprovider.Interface and cloudprovider.InformerUser.
type Cloud struct {
	config   servicelb.ConfigSource
	ledger   *servicelb.Ledger
	book     servicelb.Book
	pods     PodRoutes
	services coreinformers.ServiceInformer
	nodes    coreinformers.NodeInformer
}

var (
	_ cloudprovider.Interface    = &Cloud{}
	_ cloudprovider.InformerUser = &Cloud{}
	_ cloudprovider.LoadBalancer = loadBalancer{}
	_ cloudprovider.InstancesV2  = instances{}
	_ cloudprovider.Routes       = &routes{}
)

// New returns the provider that allocates from the ledger and remembers
// releases in the book.
func New(config servicelb.ConfigSource, ledger *servicelb.Ledger, book servicelb.Book, pods PodRoutes) *Cloud {
	return &Cloud{config: config, ledger: ledger, book: book, pods: pods}
}

// Initialize implements cloudprovider.Interface. There is nothing to start.
func (c *Cloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}

// SetInformers implements cloudprovider.InformerUser.
func (c *Cloud) SetInformers(factory informers.SharedInformerFactory) {
	c.services = factory.Core().V1().Services()
	c.services.Informer()
	c.nodes = factory.Core().V1().Nodes()
	c.nodes.Informer()
}

// LoadBalancer implements cloudprovider.Interface.
func (c *Cloud) LoadBalancer() (cloudprovider.LoadBalancer, bool) { return loadBalancer{c}, true }

// InstancesV2 implements cloudprovider.Interface.
func (c *Cloud) InstancesV2() (cloudprovider.InstancesV2, bool) { return instances{c.config}, true }

// Instances is deprecated in favour of InstancesV2.
func (c *Cloud) Instances() (cloudprovider.Instances, bool) { return nil, false }

// Zones is deprecated in favour of InstancesV2.
func (c *Cloud) Zones() (cloudprovider.Zones, bool) { return nil, false }

// Clusters implements cloudprovider.Interface: there is only this one.
func (c *Cloud) Clusters() (cloudprovider.Clusters, bool) { return nil, false }

// ProviderName implements cloudprovider.Interface.
func (c *Cloud) ProviderName() string { return Name }

// HasClusterID implements cloudprovider.Interface: the configuration always
// names the cluster.
func (c *Cloud) HasClusterID() bool { return true }

// loadBalancer implements cloudprovider.LoadBalancer over the ledger.
type loadBalancer struct{ *Cloud }

// retryPriming is when to ask again while Services are being listed.
const retryPriming = time.Second

// prime makes sure that the ledger knows what the cluster's Services hold.
func (l loadBalancer) prime(ctx context.Context) error {
	if l.ledger.Primed() {
		return nil
	}
	if !l.ledger.Informed() || l.services == nil || !l.services.Informer().HasSynced() {
		return api.NewRetryError("the cluster's Services and the configuration are being read", retryPriming)
	}
	services, err := l.services.Lister().List(labels.Everything())
	if err != nil {
		return fmt.Errorf("list services: %w", err)
	}
	records, err := l.book.Load(ctx)
	if err != nil {
		return err
	}
	l.ledger.Prime(services, records)
	return nil
}

// GetLoadBalancer tells which addresses the Service holds.
func (l loadBalancer) GetLoadBalancer(ctx context.Context, _ string, svc *corev1.Service) (*corev1.LoadBalancerStatus, bool, error) {
	if err := l.prime(ctx); err != nil {
		return nil, false, err
	}
	held := l.ledger.Holds(string(svc.UID))
	return servicelb.StatusOf(held), len(held) > 0, nil
}

// GetLoadBalancerName returns <clusterID>-<namespace>-<service>.
func (l loadBalancer) GetLoadBalancerName(_ context.Context, clusterName string, svc *corev1.Service) string {
	if cfg, _ := l.config.Current(); cfg != nil {
		clusterName = cfg.ClusterID
	}
	return clusterName + "-" + svc.Namespace + "-" + svc.Name
}

// EnsureLoadBalancer gives the Service its addresses. The error is the
// refusal, if it is refused; it keeps what it holds then.
func (l loadBalancer) EnsureLoadBalancer(ctx context.Context, _ string, svc *corev1.Service, _ []*corev1.Node) (*corev1.LoadBalancerStatus, error) {
	if err := l.prime(ctx); err != nil {
		return nil, err
	}
	v, _ := l.ledger.Ensure(svc)
	if v.Refusal != nil {
		return nil, v.Refusal
	}
	return servicelb.StatusOf(v.Held), nil
}

// UpdateLoadBalancer has nothing to do: speakers choose among the nodes
// themselves.
func (l loadBalancer) UpdateLoadBalancer(context.Context, string, *corev1.Service, []*corev1.Node) error {
	return nil
}

// EnsureLoadBalancerDeleted frees the Service's addresses.
func (l loadBalancer) EnsureLoadBalancerDeleted(ctx context.Context, _ string, svc *corev1.Service) error {
	if err := l.prime(ctx); err != nil {
		return err
	}
	name, uid := servicelb.NameOf(svc), string(svc.UID)
	if err := l.ledger.Remember(ctx, l.book, name, uid, true); err != nil {
		return err
	}
	l.ledger.Release(name, uid)
	return nil
}
