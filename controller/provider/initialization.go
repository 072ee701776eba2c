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
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// Initialization is which new nodes Lodestone initializes: it gives them a provider ID, addresses and
// labels, and takes the taint uninitialized away. A provider ID is for ever.
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

// EventReason is a stable code in the Events of Nodes.
type EventReason string

// ReasonNotInitialized is the reason of Events on a Node that keeps its taint.
const ReasonNotInitialized EventReason = "NotInitialized"

// EventReasons explains each EventReason.
func EventReasons() reason.Texts[EventReason] {
	return reason.Texts[EventReason]{
		ReasonNotInitialized: {Cause: "Lodestone does not initialize the new node: another cloud controller manager is at work, which " +
			"does, or something is missing; the message says what.",
			Cure: "Follow the message. Which nodes Lodestone initializes is the chart's controller.nodeInitialization."},
	}
}

// uninitialized reports whether the node waits for a cloud controller manager.
func uninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider })
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
		if isCloudControllerManager(l.Name) && l.Spec.RenewTime != nil && time.Since(l.Spec.RenewTime.Time) < othersTimeout {
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
