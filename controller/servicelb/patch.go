package servicelb

import (
	"crypto/sha256"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// object is what Lodestone wants a Service's object to show.
type object struct {
	addrs []netip.Addr
	// pools names the pool that each address was asked of, leases the interfaces of the leased
	// addresses, both as the annotations have them. Empty: none.
	pools, leases string
	// condition is our condition. Nil: there is none.
	condition *metav1.Condition
	// keepCondition, keepIngress and keepFinalizers leave these parts of the object as they
	// are.
	keepCondition, keepIngress, keepFinalizers bool
	// renumbered removes the annotation that asked for new addresses.
	renumbered bool
	// upstream leaves the conventional finalizer to Kubernetes' own service controller, or
	// another load balancer.
	upstream bool
}

// objectOf puts the verdict on a Service that is served into its object.
func objectOf(v ledger.Verdict, generation int64) object {
	o := object{addrs: ledger.Addrs(v.Held), pools: poolText(v.Held), leases: leaseText(v.Leases), renumbered: v.Renumbered}
	if v.Undecided {
		o.keepCondition = true
		return o
	}
	o.condition = &metav1.Condition{Type: annotation.ConditionAllocated, Status: metav1.ConditionTrue, ObservedGeneration: generation}
	o.condition.Reason, o.condition.Message = v.Condition()
	if v.Refusal != nil {
		o.condition.Status = metav1.ConditionFalse
		o.keepIngress, o.keepFinalizers = len(v.Foreign) > 0, len(v.Foreign) > 0
	}
	return o
}

// sum is a hash of what the object shows, by which a repeated write is recognized.
func (o object) sum() [sha256.Size]byte {
	shown := make([]byte, 0, 256) // of most objects: no look at one is to cost an allocation
	for _, a := range o.addrs {
		shown = append(a.AppendTo(shown), ' ')
	}
	shown = append(shown, o.leases...)
	for _, flag := range []bool{o.renumbered, o.keepCondition, o.keepIngress} {
		shown = strconv.AppendBool(append(shown, ' '), flag)
	}
	if c := o.condition; c != nil {
		for _, part := range []string{string(c.Status), c.Reason, c.Message} {
			shown = append(append(shown, '\n'), part...)
		}
	}
	return sha256.Sum256(shown)
}

// nothing is the object of a Service that is not served: without anything
// that Lodestone wrote. A status with addresses of others stays.
func nothing(foreign []netip.Addr) object { return object{keepIngress: len(foreign) > 0} }

// Patch returns the strategic merge patch of services/status that makes a Service show the verdict on it, or nothing of
// ours without one, but what is foreign. Nil: it does already. It is what the controller writes while nobody else is at
// work on the Service.
func Patch(svc *corev1.Service, v *ledger.Verdict, foreign []netip.Addr, now metav1.Time) []byte {
	if v == nil {
		return nothing(foreign).patch(svc, now)
	}
	return objectOf(*v, svc.Generation).patch(svc, now)
}

// patch returns the strategic merge patch of services/status that makes the Service show what it
// should, nil if it does already. The API server refuses the patch if the Service has changed in
// the meantime or is another one.
func (o object) patch(svc *corev1.Service, now metav1.Time) []byte {
	meta, status := map[string]any{}, map[string]any{}
	finalizers := o.finalizers(svc)
	if added := without(finalizers, svc.Finalizers); len(added) > 0 {
		meta["finalizers"] = added
	}
	if removed := without(svc.Finalizers, finalizers); len(removed) > 0 {
		meta["$deleteFromPrimitiveList/finalizers"] = removed
	}
	if annotations := o.annotations(svc); len(annotations) > 0 {
		meta["annotations"] = annotations
	}
	if !o.keepIngress && !o.showsAddresses(svc) {
		status["loadBalancer"] = map[string]any{"ingress": ingress(o.addrs)}
	}
	if condition := o.change(svc, now); condition != nil {
		status["conditions"] = []any{condition}
	}
	if len(meta)+len(status) == 0 {
		return nil
	}
	return patchOf(svc, meta, status)
}

// unchanged returns the patch that changes nothing. The API server refuses it, too, if the Service has changed in the meantime.
func unchanged(svc *corev1.Service) []byte { return patchOf(svc, map[string]any{}, map[string]any{}) }

// patchOf returns a patch of this version of the Service.
func patchOf(svc *corev1.Service, meta, status map[string]any) []byte {
	meta["uid"], meta["resourceVersion"] = svc.UID, svc.ResourceVersion
	body, err := json.Marshal(map[string]any{"metadata": meta, "status": status})
	if err != nil {
		panic(err) // maps of strings
	}
	return body
}

// without returns the members of the list that the other one lacks.
func without(list, other []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(other, s) })
}

// annotations returns the annotations to change, nil for one to remove.
func (o object) annotations(svc *corev1.Service) map[string]any {
	changes := map[string]any{}
	for _, is := range [...]struct{ key, text string }{
		{annotation.Assigned, kube.JoinAddrs(o.addrs)}, {annotation.AssignedPools, o.pools}, {annotation.Leases, o.leases},
	} {
		if old, ok := svc.Annotations[is.key]; is.text != "" && old != is.text {
			changes[is.key] = is.text
		} else if is.text == "" && ok {
			changes[is.key] = nil
		}
	}
	if o.renumbered {
		changes[annotation.Renumber] = nil
	}
	return changes
}

// finalizers returns the Service's finalizers, with ours while it holds
// addresses and without when not.
func (o object) finalizers(svc *corev1.Service) []string {
	ours := finalizerOf(svc)
	if o.keepFinalizers { // the conventional one is that of the other load balancer
		return svc.Finalizers
	}
	if len(o.addrs) == 0 {
		_, assigned := svc.Annotations[annotation.Assigned]
		return slices.DeleteFunc(slices.Clone(svc.Finalizers), func(f string) bool {
			return f == annotation.ClassFinalizer || f == annotation.Finalizer && !o.upstream && (assigned || f == ours)
		})
	}
	if slices.Contains(svc.Finalizers, ours) {
		return svc.Finalizers
	}
	return append(slices.Clone(svc.Finalizers), ours)
}

// finalizerOf is the finalizer that the Service carries while it holds
// addresses.
func finalizerOf(svc *corev1.Service) string {
	if svc.Spec.LoadBalancerClass != nil {
		return annotation.ClassFinalizer
	}
	return annotation.Finalizer
}

func (o object) showsAddresses(svc *corev1.Service) bool {
	return slices.EqualFunc(svc.Status.LoadBalancer.Ingress, o.addrs, func(in corev1.LoadBalancerIngress, a netip.Addr) bool {
		return in.IP == a.String() && in.Hostname == "" && in.IPMode != nil && *in.IPMode == corev1.LoadBalancerIPModeVIP
	})
}

// StatusOf is the load balancer status that shows what a Service holds.
func StatusOf(held []ipam.Held) *corev1.LoadBalancerStatus {
	return &corev1.LoadBalancerStatus{Ingress: ingress(ledger.Addrs(held))}
}

func ingress(addrs []netip.Addr) []corev1.LoadBalancerIngress {
	ingress := make([]corev1.LoadBalancerIngress, len(addrs))
	for i, a := range addrs {
		ingress[i] = corev1.LoadBalancerIngress{IP: a.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)}
	}
	return ingress
}

// poolText is the annotation with the pools that the addresses were asked of.
func poolText(held []ipam.Held) string {
	pools := make([]string, len(held))
	for i, h := range held {
		pools[i] = h.Asked
	}
	return strings.Join(pools, ",")
}

// leaseText is the annotation that names leases.
func leaseText(leases map[netip.Addr]string) string {
	var entries []string
	for _, a := range slices.SortedFunc(maps.Keys(leases), netip.Addr.Compare) {
		entries = append(entries, a.String()+"="+leases[a])
	}
	return strings.Join(entries, ",")
}

// change returns the patch of the conditions: ours as it has to be, those of others as they
// are. Nil: nothing changes.
func (o object) change(svc *corev1.Service, now metav1.Time) any {
	old := kube.Allocated(svc)
	if o.keepCondition || o.condition == nil && old == nil {
		return nil
	}
	if o.condition == nil {
		return map[string]string{"$patch": "delete", "type": annotation.ConditionAllocated}
	}
	c := *o.condition
	c.Message = objects.Message(c.Message) // the part that a cache keeps
	if old != nil && c.Status == old.Status && c.Reason == old.Reason && c.Message == old.Message {
		return nil
	}
	c.LastTransitionTime = now
	if old != nil && old.Status == c.Status {
		c.LastTransitionTime = old.LastTransitionTime
	}
	return c
}
