// Package leaseevents makes Events from what speakers write on their Leases: BGP sessions that
// come and go, VIPs that change hands, and advertisements that match no interface. One process
// makes them for all speakers, so that speakers need not be allowed to write anything but
// their Leases.
//
//	leaseevents.go  Emitter: compares each Lease with what it was before
//	reasons.go      the reasons of these Events
package leaseevents

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// byVIP is the index of Services by their addresses.
const byVIP = "vip"

// Events takes Events on objects; kube.Recorder is one.
type Events interface {
	Event(object runtime.Object, eventType, reason, message string)
	// Once is Event, except that nothing happens when there was an Event with the id.
	Once(object runtime.Object, eventType, reason, message, id string)
}

// recent is how long ago a VIP may have moved for a new leader to make an Event of it. The
// leader before may have gone with the node that had the VIP. The bound is needed because the
// Lease of a lost node keeps its last text for ever.
const recent = 10 * time.Minute

// Options are what an Emitter needs.
type Options struct {
	Client kubernetes.Interface
	// Namespace is where the speakers' Leases are.
	Namespace string
	// Services knows all Services, and has not been started yet.
	Services cache.SharedIndexInformer
	Events   Events
}

// Emitter is the task that makes the Events. It makes none about what Leases contain when it
// starts, except about VIPs that have moved recently.
type Emitter struct {
	events   Events
	leases   cache.SharedIndexInformer
	services cache.SharedIndexInformer
}

// New returns an Emitter that starts with Run.
func New(o Options) (*Emitter, error) {
	if err := o.Services.AddIndexers(cache.Indexers{byVIP: vipsOf}); err != nil {
		return nil, fmt.Errorf("index Services: %w", err)
	}
	n := &Emitter{events: o.Events, services: o.Services}
	n.leases = objects.Informer(objects.Leases, o.Client, objects.Speakers(o.Namespace),
		objects.View[*coordinationv1.Lease, *coordinationv1.Lease]{Derive: keepLease}, cache.SharedIndexInformerOptions{})
	_, err := n.leases.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, listed bool) {
			if l := obj.(*coordinationv1.Lease); listed {
				n.emitRecent(l)
			} else {
				n.emit(nil, l)
			}
		},
		UpdateFunc: func(before, after any) { n.emit(before.(*coordinationv1.Lease), after.(*coordinationv1.Lease)) },
	})
	if err != nil {
		return nil, fmt.Errorf("add event handler: %w", err)
	}
	return n, nil
}

// Run emits Events of what changes until ctx ends.
func (n *Emitter) Run(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), n.services.HasSynced) { // emitMove looks them up
		n.leases.RunWithContext(ctx)
	}
	return nil
}

// keepLease returns the part of a Lease that is used, within bounds.
func keepLease(l *coordinationv1.Lease) *coordinationv1.Lease {
	r := report.Of(l.Annotations)
	kept := &coordinationv1.Lease{ObjectMeta: objects.Identity(l)}
	kept.Annotations = report.Report{Sessions: r.Sessions, Moves: r.Moves, Unmatched: r.Unmatched}.Annotations()
	return kept
}

// vipsOf is the index function of byVIP.
func vipsOf(obj any) ([]string, error) {
	var vips []string
	for _, vip := range kube.VIPs(obj.(*corev1.Service)) {
		vips = append(vips, vip.String())
	}
	return vips, nil
}

// emit makes Events of changes. before is nil for a speaker that is new.
func (n *Emitter) emit(before, after *coordinationv1.Lease) {
	name, ok := report.NodeOf(after.Name)
	if !ok {
		return
	}
	// Events on Nodes name the node in place of a UID, as kubelet's do: that is
	// how kubectl describe finds them.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
	was, is := report.Report{}, report.Of(after.Annotations)
	if before != nil { // the moves of a Lease that somebody deleted are old
		was = report.Of(before.Annotations)
		for _, m := range report.NewMoves(was.Moves, is.Moves) {
			n.emitMove(name, m)
		}
	}
	n.emitSessions(node, was.Sessions, is.Sessions)
	n.emitUnmatched(node, was.Unmatched, is.Unmatched)
}

// emitSessions makes Events of the sessions that are not as they were.
func (n *Emitter) emitSessions(node *corev1.Node, before, after []report.Session) {
	known := map[string]report.Session{}
	for _, s := range before {
		known[s.Peer] = s
	}
	for _, s := range after {
		was := known[s.Peer]
		if s.Established && (!was.Established || !was.Since.Equal(s.Since)) {
			n.events.Event(node, corev1.EventTypeNormal, string(ReasonSessionUp), "BGP session with "+s.Title()+" is established")
		}
		switch {
		case s.Message == "" || s.Message == was.Message:
		case s.Established:
			n.events.Event(node, corev1.EventTypeWarning, string(ReasonSessionFlawed), "BGP session with "+s.Title()+": "+s.Message)
		default:
			n.events.Event(node, corev1.EventTypeWarning, string(ReasonSessionDown), "no BGP session with "+s.Title()+": "+s.Message)
		}
	}
}

// emitRecent makes Events of the VIPs that had moved shortly before the start.
func (n *Emitter) emitRecent(l *coordinationv1.Lease) {
	for _, m := range report.Of(l.Annotations).Moves {
		if time.Since(m.At).Abs() < recent {
			n.emitMove(strings.TrimPrefix(l.Name, annotation.SpeakerLeasePrefix), m)
		}
	}
}

// emitMove makes one Event for each Service whose VIPs have moved to one node.
func (n *Emitter) emitMove(reporter string, m report.Move) {
	for _, to := range slices.Sorted(maps.Keys(m.To)) {
		services, vips := map[types.UID]*corev1.Service{}, map[types.UID][]string{}
		for _, vip := range m.To[to] {
			for _, svc := range n.servicesAt(vip) {
				services[svc.UID] = svc
				vips[svc.UID] = append(vips[svc.UID], vip.String())
			}
		}
		for _, uid := range slices.Sorted(maps.Keys(services)) {
			text := report.Describe(strings.Join(vips[uid], " and "), m.From, to, m.Why)
			id := fmt.Sprintf("%s %s %s %q %q %s", uid, reporter, m.At.UTC().Format(time.RFC3339Nano), m.From, to, m.Why)
			switch {
			case to == "":
				n.events.Once(services[uid], corev1.EventTypeWarning, string(ReasonNoOwner), text, id)
			case m.Why == report.FirstOwner:
				n.events.Once(services[uid], corev1.EventTypeNormal, string(ReasonAnnounced), text, id)
			default:
				n.events.Once(services[uid], corev1.EventTypeNormal, string(ReasonOwnerChanged), text, id)
			}
		}
	}
}

// servicesAt returns the Services that have the VIP.
func (n *Emitter) servicesAt(vip netip.Addr) (all []*corev1.Service) {
	objects, err := n.services.GetIndexer().ByIndex(byVIP, vip.String())
	if err != nil {
		return nil // the index exists
	}
	for _, obj := range objects {
		all = append(all, obj.(*corev1.Service))
	}
	return all
}

// emitUnmatched makes Events of advertisements that match no interface of a node
// any more, or one again.
func (n *Emitter) emitUnmatched(node *corev1.Node, before, after []string) {
	for _, name := range after {
		if !slices.Contains(before, name) {
			n.events.Event(node, corev1.EventTypeWarning, string(ReasonInterfaceMissing), fmt.Sprintf(
				"advertisement %q announces on none of this node's interfaces, and so announces nothing here. Compare its layer2.interfaces "+
					"with ip link on the node, or leave the node out by its nodeSelector", name))
		}
	}
	for _, name := range before {
		if !slices.Contains(after, name) {
			n.events.Event(node, corev1.EventTypeNormal, string(ReasonInterfaceMissingOver), fmt.Sprintf(
				"advertisement %q has an interface on this node again, or does not need one any more", name))
		}
	}
}
