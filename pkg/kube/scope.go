package kube

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// Scope is which Services Lodestone serves. The controller and the speakers are started with
// the same one.
type Scope struct {
	// Classless serves Services without a spec.loadBalancerClass.
	Classless bool
	// Classes are the values of spec.loadBalancerClass that are served.
	Classes []string
}

// Covers reports whether the Service is of a kind that Lodestone serves. It may be about to be
// deleted.
func (s Scope) Covers(svc *corev1.Service) bool {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || svc.Annotations[annotation.Ignore] == annotation.Ignored {
		return false
	}
	if class := svc.Spec.LoadBalancerClass; class != nil {
		return slices.Contains(s.Classes, *class)
	}
	return s.Classless
}

// Announces reports whether Lodestone announces the VIPs of the Service: it is in scope, or it
// was when it was given its addresses. The condition in its status shows the latter, because
// the owner of a Service cannot write that. The annotation does not, because the owner can
// write it whatever the class is.
func (s Scope) Announces(svc *corev1.Service) bool {
	c := Allocated(svc)
	return s.Covers(svc) || c != nil && c.Status == metav1.ConditionTrue
}

// Serves reports whether the Service is to have addresses.
func (s Scope) Serves(svc *corev1.Service) bool {
	return s.Covers(svc) && svc.DeletionTimestamp == nil
}

// Foreign returns why the Service is not served, empty if it is.
func (s Scope) Foreign(svc *corev1.Service) string {
	class := svc.Spec.LoadBalancerClass
	switch {
	case svc.Spec.Type != corev1.ServiceTypeLoadBalancer:
		return fmt.Sprintf("its spec.type is %s, not LoadBalancer", svc.Spec.Type)
	case svc.DeletionTimestamp != nil:
		return "it is being deleted"
	case svc.Annotations[annotation.Ignore] == annotation.Ignored:
		return "its annotation " + annotation.Ignore + " leaves it to others"
	case class != nil && !s.Covers(svc):
		return fmt.Sprintf("its spec.loadBalancerClass is %q, and Lodestone serves %q", *class, s.Classes)
	case !s.Covers(svc):
		return fmt.Sprintf("it has no spec.loadBalancerClass, and Lodestone serves only %q", s.Classes)
	}
	return ""
}

// Keeps reports whether a Service that is no longer served keeps its addresses, because nobody
// else has taken it over: its status has no other ones.
func (s Scope) Keeps(svc *corev1.Service) bool {
	return !s.Covers(svc) && len(VIPs(svc)) > 0 && len(Foreign(svc)) == 0
}

// LeftBehind reports whether the Service, which is not served, carries
// something that Lodestone wrote on it. The conventional finalizer alone is
// proof only on a Service that Lodestone would serve: others use it, too.
func (s Scope) LeftBehind(svc *corev1.Service) bool {
	_, assigned := svc.Annotations[annotation.Assigned]
	return assigned || Allocated(svc) != nil || slices.Contains(svc.Finalizers, annotation.ClassFinalizer) ||
		s.Covers(svc) && slices.Contains(svc.Finalizers, annotation.Finalizer)
}
