// Package provider is Lodestone as a Kubernetes cloud provider: it answers
// the cloud controller framework's questions about load balancers and nodes.
//
// Load balancers are addresses in the ledger of controller/servicelb, which Lodestone's own
// service controller uses, too. Facts about nodes come from the Nodes and from the
// configuration. Facts about routes to pods come from the speakers.
//
//	provider.go        Cloud: which interfaces there are
//	loadbalancer.go    LoadBalancer: a Service's addresses, for Kubernetes' own service controller
//	nodemetadata.go    InstancesV2: provider ID, addresses, zone and region of a node
//	initialization.go  which new nodes get them from Lodestone
//	routes.go          Routes: which nodes have routes to their pods
//	reasons.go         the reasons of Events on Nodes
package provider

import (
	"log/slog"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	cloudprovider "k8s.io/cloud-provider"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/kube"
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
	// Lease is the leader Lease of this controller, which is not that of another cloud controller manager.
	Lease types.NamespacedName
	// Initialization is which new nodes the provider initializes. Empty: InitializeAuto.
	Initialization Initialization
	// ClusterCIDR is the value of --cluster-cidr. Empty: there are no routes to pods.
	ClusterCIDR string
	Events      kube.Events
	Log         *slog.Logger
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
func New(o Options) *Cloud { return &Cloud{Options: o, others: others{client: o.Client, own: o.Lease}} }

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
