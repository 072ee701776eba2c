// Package provider is Lodestone as a Kubernetes cloud provider: it answers
// the cloud controller framework's questions about load balancers and nodes.
//
// Load balancers are addresses in the ledger of controller/servicelb, which Lodestone's own
// service controller uses, too. Facts about nodes come from the Nodes and from the
// configuration. Facts about routes to pods come from the speakers.
package provider

import (
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

// Name is the name of the cloud provider and the scheme of its provider IDs.
const Name = "lodestone"

// Options are what the provider needs.
type Options struct {
	Config servicelb.ConfigSource
	// Services gives Services their addresses. It has to run, too.
	Services *servicelb.Controller
	// Client reads the Leases of speakers in Namespace, and those in kube-system.
	Client    kubernetes.Interface
	Namespace string
	// Initialization is which new nodes the provider initializes. Empty: InitializeAuto.
	Initialization Initialization
	// ClusterCIDR is the value of --cluster-cidr. Empty: there are no routes to pods.
	ClusterCIDR string
	Events      Events
	Log         *slog.Logger
}

// Events takes Events on objects; kube.Recorder is one.
type Events interface {
	Event(object runtime.Object, eventType, reason, message string)
}

// Cloud implements cloudprovider.Interface and cloudprovider.InformerUser.
type Cloud struct {
	Options
	nodes  coreinformers.NodeInformer
	others others
}

var (
	_ cloudprovider.Interface    = &Cloud{}
	_ cloudprovider.InformerUser = &Cloud{}
	_ cloudprovider.LoadBalancer = loadBalancer{}
	_ cloudprovider.InstancesV2  = instances{}
	_ cloudprovider.Routes       = &routes{}
)

// New returns the provider.
func New(o Options) *Cloud { return &Cloud{Options: o, others: others{client: o.Client}} }

// Initialize implements cloudprovider.Interface. There is nothing to start.
func (c *Cloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}

// SetInformers implements cloudprovider.InformerUser.
func (c *Cloud) SetInformers(factory informers.SharedInformerFactory) {
	c.nodes = factory.Core().V1().Nodes()
	c.nodes.Informer()
}

// LoadBalancer implements cloudprovider.Interface.
func (c *Cloud) LoadBalancer() (cloudprovider.LoadBalancer, bool) { return loadBalancer{c}, true }

// InstancesV2 implements cloudprovider.Interface. Without it the framework leaves nodes alone.
func (c *Cloud) InstancesV2() (cloudprovider.InstancesV2, bool) {
	return instances{c}, c.Initialization != InitializeNever
}

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

// loadBalancer implements cloudprovider.LoadBalancer. Kubernetes' own service controller calls
// it for Services without a class, adds the finalizer before, and writes the status that it
// returns. It has no call for changes that come from elsewhere: an address becomes free for a
// Service that waits, a pool goes, a lease ends, a speaker reports something. The controller
// of controller/servicelb handles these, as for all other Services.
type loadBalancer struct{ *Cloud }

// startTimeout is how long a call waits until the Services, the configuration and the
// addresses that the cluster itself uses are read.
const startTimeout = 10 * time.Second

// ready returns once it is known what the cluster's Services hold.
func (l loadBalancer) ready(ctx context.Context) error {
	select {
	case <-l.Services.Primed():
		return nil
	case <-ctx.Done():
	case <-time.After(startTimeout):
	}
	return api.NewRetryError("the cluster's Services and the configuration are being read", time.Second)
}

// ours reports whether the Service is one for this interface to serve. Those with a
// class never are: Kubernetes' service controller leaves them to others, and so
// does this interface.
func (l loadBalancer) ours(svc *corev1.Service) bool {
	return svc.Spec.LoadBalancerClass == nil && l.Services.Scope.Classless
}

// GetLoadBalancer returns which addresses the Service holds.
func (l loadBalancer) GetLoadBalancer(ctx context.Context, _ string, svc *corev1.Service) (*corev1.LoadBalancerStatus, bool, error) {
	if !l.ours(svc) {
		return nil, false, nil
	}
	if err := l.ready(ctx); err != nil {
		return nil, false, err
	}
	held := l.Services.Holds(svc)
	return servicelb.StatusOf(held), len(held) > 0, nil
}

// GetLoadBalancerName returns <clusterID>-<namespace>-<service>.
func (l loadBalancer) GetLoadBalancerName(_ context.Context, clusterName string, svc *corev1.Service) string {
	if cfg, _ := l.Config.Current(); cfg != nil {
		clusterName = cfg.ClusterID
	}
	return ledger.LoadBalancerName(clusterName, svc)
}

// EnsureLoadBalancer gives the Service its addresses. The error is the
// refusal, if it is refused; it keeps what it holds then.
func (l loadBalancer) EnsureLoadBalancer(ctx context.Context, _ string, svc *corev1.Service,
	_ []*corev1.Node) (*corev1.LoadBalancerStatus, error) {
	if !l.ours(svc) {
		return nil, cloudprovider.ImplementedElsewhere
	}
	if err := l.ready(ctx); err != nil {
		return nil, err
	}
	held, err := l.Services.Provide(ctx, svc)
	if err != nil {
		return nil, err
	}
	return servicelb.StatusOf(held), nil
}

// UpdateLoadBalancer has nothing to do: speakers choose among the nodes
// themselves.
func (l loadBalancer) UpdateLoadBalancer(_ context.Context, _ string, svc *corev1.Service, _ []*corev1.Node) error {
	if !l.ours(svc) {
		return cloudprovider.ImplementedElsewhere
	}
	return nil
}

// EnsureLoadBalancerDeleted takes the addresses off the Service, and frees them.
func (l loadBalancer) EnsureLoadBalancerDeleted(ctx context.Context, _ string, svc *corev1.Service) error {
	if !l.ours(svc) {
		return nil
	}
	if err := l.ready(ctx); err != nil {
		return err
	}
	return l.Services.Withdraw(ctx, svc)
}
