package provider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

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
	if !l.ours(svc) || !l.Services.Scope.Covers(svc) { // an annotation may leave it to others
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
