// Package servicelb gives the Services of type LoadBalancer their addresses.
//
// The Ledger is the truth about who holds what; it lives in memory, keyed by
// UID, and is rebuilt at start from what Services say. The Controller keeps
// the Service objects in step with it, with one PATCH per change. That PATCH
// carries the UID and the resourceVersion that the decision was made on, so
// that a late one never lands on another incarnation of the Service.
package servicelb

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Scope says which Services are Lodestone's to serve.
type Scope struct {
	// Classless serves Services without a spec.loadBalancerClass.
	Classless bool
	// Classes are the values of spec.loadBalancerClass that are served.
	Classes []string
}

// Covers reports whether the Service is of a kind that Lodestone serves, be
// it about to be deleted or not.
func (s Scope) Covers(svc *corev1.Service) bool {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return false
	}
	if class := svc.Spec.LoadBalancerClass; class != nil {
		return slices.Contains(s.Classes, *class)
	}
	return s.Classless
}

// Serves reports whether the Service is to have addresses.
func (s Scope) Serves(svc *corev1.Service) bool {
	return s.Covers(svc) && svc.DeletionTimestamp == nil
}

// Foreign says why the Service is not served, empty if it is.
func (s Scope) Foreign(svc *corev1.Service) string {
	class := svc.Spec.LoadBalancerClass
	switch {
	case svc.Spec.Type != corev1.ServiceTypeLoadBalancer:
		return fmt.Sprintf("its spec.type is %s, not LoadBalancer", svc.Spec.Type)
	case svc.DeletionTimestamp != nil:
		return "it is being deleted"
	case class != nil && !s.Covers(svc):
		return fmt.Sprintf("its spec.loadBalancerClass is %q, and Lodestone serves %q", *class, s.Classes)
	case !s.Covers(svc):
		return fmt.Sprintf("it has no spec.loadBalancerClass, and Lodestone serves only %q", s.Classes)
	}
	return ""
}

// Keeps reports whether the Service, which is not served any more, keeps the
// addresses that it was given when it was: nobody else has taken it over.
func (s Scope) Keeps(svc *corev1.Service) bool {
	return !s.Covers(svc) && len(kube.VIPs(svc)) > 0
}

// LeftBehind reports whether the Service, which is not served, carries
// something that Lodestone wrote on it. The conventional finalizer alone is
// proof only on a Service that Lodestone would serve: others use it, too.
func (s Scope) LeftBehind(svc *corev1.Service) bool {
	_, assigned := svc.Annotations[annotation.Assigned]
	return assigned || conditionOf(svc) != nil || slices.Contains(svc.Finalizers, annotation.ClassFinalizer) ||
		s.Covers(svc) && slices.Contains(svc.Finalizers, annotation.Finalizer)
}

// finalizerOf is the finalizer that the Service carries while it holds
// addresses.
func finalizerOf(svc *corev1.Service) string {
	if svc.Spec.LoadBalancerClass != nil {
		return annotation.ClassFinalizer
	}
	return annotation.Finalizer
}
