package provider

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// Initialization is which new nodes Lodestone initializes. The framework's controller of nodes gives them a
// provider ID, addresses and labels, which it asks instances.InstanceMetadata for, and takes the taint
// uninitialized away. A provider ID never changes.
type Initialization string

const (
	// InitializeAuto leaves new nodes to another cloud controller manager while one is at work.
	InitializeAuto Initialization = "auto"
	// InitializeAlways is for clusters whose other cloud controller manager initializes no nodes.
	InitializeAlways Initialization = "always"
	// InitializeNever leaves all nodes alone.
	InitializeNever Initialization = "never"
)

// String implements pflag.Value.
func (i *Initialization) String() string { return string(*i) }

// Set implements pflag.Value.
func (i *Initialization) Set(text string) error {
	all := []Initialization{InitializeAuto, InitializeAlways, InitializeNever}
	if !slices.Contains(all, Initialization(text)) {
		return fmt.Errorf("want one of %s", strings.Trim(fmt.Sprint(all), "[]"))
	}
	*i = Initialization(text)
	return nil
}

// Type implements pflag.Value.
func (i *Initialization) Type() string { return "string" }

// uninitialized reports whether the node waits for a cloud controller manager.
func uninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider })
}

// waits reports whether the node is not to be initialized now, and has an Event about it. The framework asks
// again when it is shown the Node again, each minute; see objects.Share.
func (i instances) waits(ctx context.Context, node *corev1.Node, cfg *config.Config) (bool, error) {
	emit := func(eventType, message string) {
		i.Events.Event(node, eventType, string(ReasonNotInitialized), message)
	}
	if i.Initialization != InitializeAlways {
		other, err := i.others.working(ctx)
		if err != nil {
			emit(corev1.EventTypeWarning, "waits until it is known who else initializes nodes: "+err.Error())
			return true, err
		}
		if other != "" {
			emit(corev1.EventTypeNormal, "left to another cloud controller manager: the Lease "+othersNamespace+"/"+other+
				" has been renewed within the last hour")
			return true, nil
		}
	}
	if cfg == nil {
		emit(corev1.EventTypeWarning, errNoConfig.Error())
		return true, errNoConfig
	}
	if !slices.ContainsFunc(addressesOf(node), func(a corev1.NodeAddress) bool { return a.Type == corev1.NodeInternalIP }) {
		emit(corev1.EventTypeWarning, "the node has no InternalIP, and only its kubelet can know one: start the kubelet with --node-ip")
		return true, nil
	}
	return false, nil
}

const (
	// othersNamespace is where cloud controller managers have their leader Lease, by the framework's default.
	othersNamespace = "kube-system"
	// othersTimeout is how long another cloud controller manager may be away, for an upgrade or by a
	// failure, and new nodes are still left to it.
	othersTimeout = time.Hour
	// othersInterval is how often it is looked for at most, however many nodes come.
	othersInterval = 10 * time.Second
)

// others looks for cloud controller managers that are not Lodestone's.
type others struct {
	client kubernetes.Interface
	own    types.NamespacedName

	mu     sync.Mutex
	looked time.Time
	lease  string
	err    error
}

// working returns the leader Lease of one that is at work. Empty: there is none.
func (o *others) working(ctx context.Context) (lease string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.looked) >= othersInterval {
		o.lease, o.err = o.look(ctx)
		o.looked = time.Now()
	}
	return o.lease, o.err
}

func (o *others) look(ctx context.Context) (working string, err error) {
	err = objects.Leases.Each(ctx, o.client, objects.Scope{Namespace: othersNamespace, Cached: true}, func(l *coordinationv1.Lease) {
		own := o.own == types.NamespacedName{Namespace: othersNamespace, Name: l.Name}
		if !own && isCloudControllerManager(l.Name) && l.Spec.RenewTime != nil && time.Since(l.Spec.RenewTime.Time).Abs() < othersTimeout {
			working = l.Name
		}
	})
	if err != nil {
		return "", fmt.Errorf("look for another cloud controller manager: %w", err)
	}
	return working, nil
}

// isCloudControllerManager goes by the names that the Leases of cloud controller managers have: the
// framework's default, often with the cloud's name before it, or the abbreviation.
func isCloudControllerManager(lease string) bool {
	return strings.Contains(lease, "cloud-controller-manager") || slices.Contains(strings.Split(lease, "-"), "ccm")
}
