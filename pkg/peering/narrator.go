package peering

import (
	"context"
	"fmt"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	coordinationinformers "k8s.io/client-go/informers/coordination/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
)

// Reasons of the Events on Nodes.
const (
	ReasonSessionUp   = "BGPSessionUp"
	ReasonSessionDown = "BGPSessionDown"
)

// Events takes Events on objects; kube.Recorder is one.
type Events interface {
	Event(object runtime.Object, eventType, reason, message string)
}

// Narrator is the task that makes Events on Nodes of what their speakers tell
// of their BGP sessions. What a Lease said when the Narrator started is no
// news.
type Narrator struct {
	events Events
	leases cache.SharedIndexInformer
}

// NewNarrator returns a Narrator of the Leases in the namespace that starts
// with Run.
func NewNarrator(client kubernetes.Interface, namespace string, events Events) (*Narrator, error) {
	n := &Narrator{events: events}
	n.leases = coordinationinformers.NewFilteredLeaseInformer(client, namespace, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
		o.LabelSelector = annotation.LabelComponent + "=" + annotation.ComponentSpeaker
	})
	if err := n.leases.SetTransform(keepSessions); err != nil {
		return nil, fmt.Errorf("set transform: %w", err)
	}
	_, err := n.leases.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, listed bool) {
			if !listed {
				n.tell(nil, obj.(*coordinationv1.Lease))
			}
		},
		UpdateFunc: func(before, after any) { n.tell(before.(*coordinationv1.Lease), after.(*coordinationv1.Lease)) },
	})
	if err != nil {
		return nil, fmt.Errorf("add event handler: %w", err)
	}
	return n, nil
}

// String names the task.
func (n *Narrator) String() string { return "peering" }

// Run tells what changes until ctx ends.
func (n *Narrator) Run(ctx context.Context) error {
	n.leases.RunWithContext(ctx)
	return nil
}

// keepSessions returns what of a Lease is of interest.
func keepSessions(obj any) (any, error) {
	l, ok := obj.(*coordinationv1.Lease)
	if !ok {
		return obj, nil
	}
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: l.Namespace, Name: l.Name, UID: l.UID, ResourceVersion: l.ResourceVersion,
			Annotations: Annotations(Parse(l.Annotations)),
		},
	}, nil
}

// tell makes Events of the sessions that are not as they were. before is nil
// for a speaker that is new.
func (n *Narrator) tell(before, after *coordinationv1.Lease) {
	known := map[string]Session{}
	if before != nil {
		for _, s := range Parse(before.Annotations) {
			known[s.Peer] = s
		}
	}
	name, ok := strings.CutPrefix(after.Name, annotation.SpeakerLeasePrefix)
	if !ok {
		return
	}
	// Events on Nodes name the node in place of a UID, as kubelet's do: that is
	// how kubectl describe finds them.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
	for _, s := range Parse(after.Annotations) {
		was := known[s.Peer]
		switch {
		case s.Established && (!was.Established || !was.Since.Equal(s.Since)):
			n.events.Event(node, corev1.EventTypeNormal, ReasonSessionUp, "BGP session with "+s.name()+" is established")
		case !s.Established && s.Message != "" && s.Message != was.Message:
			n.events.Event(node, corev1.EventTypeWarning, ReasonSessionDown, "no BGP session with "+s.name()+": "+s.Message)
		}
	}
}
