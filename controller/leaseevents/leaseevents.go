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
	"sync"
	"time"

	"golang.org/x/time/rate"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

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

const (
	// lookInterval is the time between two looks at one Lease: whoever has the token of a node may write its Lease all the time.
	lookInterval = 200 * time.Millisecond
	// Of one Lease there are mostEvents at a time, which is what a speaker that has lost all its VIPs reports, and then few a second.
	mostEvents      = report.MaxVIPs
	eventsPerSecond = 5
)

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
	namespace string
	events    Events
	leases    cache.SharedIndexInformer
	services  cache.SharedIndexInformer
	changed   workqueue.TypedDelayingInterface[string] // names of Leases
	speakers  map[string]*speaker                      // by the name of the Lease
}

// speaker is what is known of the Lease of one.
type speaker struct {
	node   string
	last   *report.Report // as it was at the last look. Nil: there was no Lease
	looked time.Time
	room   *rate.Limiter // for Events
}

// New returns an Emitter that starts with Run.
func New(o Options) (*Emitter, error) {
	if err := o.Services.AddIndexers(cache.Indexers{byVIP: vipsOf}); err != nil {
		return nil, fmt.Errorf("index Services: %w", err)
	}
	n := &Emitter{namespace: o.Namespace, events: o.Events, services: o.Services, speakers: map[string]*speaker{}}
	n.leases = objects.Informer(objects.Leases, o.Client, objects.Speakers(o.Namespace),
		objects.View[*coordinationv1.Lease, *coordinationv1.Lease]{Derive: keepLease}, cache.SharedIndexInformerOptions{})
	note := func(obj any) {
		if key, err := cache.DeletionHandlingObjectToName(obj); err == nil {
			n.changed.Add(key.Name)
		}
	}
	_, err := n.leases.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: note, UpdateFunc: func(_, after any) { note(after) }, DeleteFunc: note})
	if err != nil {
		return nil, fmt.Errorf("add event handler: %w", err)
	}
	return n, nil
}

// Run emits Events of what changes until ctx ends.
func (n *Emitter) Run(ctx context.Context) error {
	n.changed = workqueue.NewTypedDelayingQueue[string]() // it has a goroutine, and a replica may never lead
	defer n.changed.ShutDown()
	if !cache.WaitForCacheSync(ctx.Done(), n.services.HasSynced) { // emitMove looks them up
		return nil
	}
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { n.leases.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), n.leases.HasSynced) {
		return nil
	}
	for _, obj := range n.leases.GetStore().List() {
		n.begin(obj.(*coordinationv1.Lease))
	}
	tasks.Go(func() { <-ctx.Done(); n.changed.ShutDown() })
	for {
		name, ended := n.changed.Get()
		if ended {
			return nil
		}
		if again := n.look(name, time.Now()); again > 0 {
			n.changed.AddAfter(name, again)
		}
		n.changed.Done(name)
	}
}

// speaker returns the record of a Lease. It adds one if there is none.
func (n *Emitter) speaker(lease, node string) *speaker {
	s := n.speakers[lease]
	if s == nil {
		s = &speaker{node: node, room: rate.NewLimiter(eventsPerSecond, mostEvents)}
		n.speakers[lease] = s
	}
	return s
}

// look makes Events of what has changed on a Lease since the last look. It returns when to look again, zero: when the Lease changes.
func (n *Emitter) look(lease string, now time.Time) (again time.Duration) {
	node, ok := report.NodeOf(lease)
	if !ok {
		return 0
	}
	s := n.speaker(lease, node)
	if early := lookInterval - now.Sub(s.looked); early > 0 {
		return early
	}
	s.looked = now
	obj, exists, err := n.leases.GetStore().GetByKey(n.namespace + "/" + lease)
	switch {
	case err == nil && exists:
		is := report.Of(obj.(*coordinationv1.Lease).Annotations)
		n.emit(s, is)
		s.last = &is
	case s.room.TokensAt(now) < mostEvents: // who deletes a Lease and writes it again has no more room for Events
		s.last = nil
		return mostEvents / eventsPerSecond * time.Second
	default:
		delete(n.speakers, lease)
	}
	return 0
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

// emit makes Events of what is not as it was.
func (n *Emitter) emit(s *speaker, is report.Report) {
	// Events on Nodes name the node in place of a UID, as kubelet's do: that is
	// how kubectl describe finds them.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.node, UID: types.UID(s.node)}}
	var was report.Report
	if s.last != nil { // the moves of a Lease that somebody deleted are old
		was = *s.last
		for _, m := range report.NewMoves(was.Moves, is.Moves) {
			n.emitMove(s, m)
		}
	}
	n.emitSessions(s, node, was.Sessions, is.Sessions)
	n.emitUnmatched(s, node, was.Unmatched, is.Unmatched)
}

// emitSessions makes Events of the sessions that are not as they were.
func (n *Emitter) emitSessions(s *speaker, node *corev1.Node, before, after []report.Session) {
	known := map[string]report.Session{}
	for _, session := range before {
		known[session.Peer] = session
	}
	for _, session := range after {
		was := known[session.Peer]
		if session.Established && (!was.Established || !was.Since.Equal(session.Since)) {
			n.event(s, node, corev1.EventTypeNormal, ReasonSessionUp, "BGP session with "+session.Title()+" is established")
		}
		switch {
		case session.Message == "" || session.Message == was.Message:
		case session.Established:
			n.event(s, node, corev1.EventTypeWarning, ReasonSessionFlawed, "BGP session with "+session.Title()+": "+session.Message)
		default:
			n.event(s, node, corev1.EventTypeWarning, ReasonSessionDown, "no BGP session with "+session.Title()+": "+session.Message)
		}
	}
}

// event makes an Event on the Node of a speaker, if there is room for one.
func (n *Emitter) event(s *speaker, node *corev1.Node, eventType string, because EventReason, message string) {
	if s.room.Allow() {
		n.events.Event(node, eventType, string(because), message)
	}
}

// begin takes what a Lease has as known, and makes Events of the VIPs that have moved shortly before.
func (n *Emitter) begin(l *coordinationv1.Lease) {
	node, ok := report.NodeOf(l.Name)
	if !ok {
		return
	}
	s, is := n.speaker(l.Name, node), report.Of(l.Annotations)
	s.last = &is
	for _, m := range is.Moves {
		if time.Since(m.At).Abs() < recent {
			n.emitMove(s, m)
		}
	}
}

// emitMove makes one Event for each Service whose VIPs have moved to one node, as long as there is room.
func (n *Emitter) emitMove(s *speaker, m report.Move) {
	for _, to := range slices.Sorted(maps.Keys(m.To)) {
		if s.room.Tokens() < 1 {
			return // a thousand Services may have one VIP
		}
		services, vips := map[types.UID]*corev1.Service{}, map[types.UID][]string{}
		for _, vip := range m.To[to] {
			for _, svc := range n.servicesAt(vip) {
				services[svc.UID] = svc
				vips[svc.UID] = append(vips[svc.UID], vip.String())
			}
		}
		for _, uid := range slices.Sorted(maps.Keys(services)) {
			if !s.room.Allow() {
				return
			}
			text := report.Describe(strings.Join(vips[uid], " and "), m.From, to, m.Why)
			id := fmt.Sprintf("%s %s %s %q %q %s", uid, s.node, m.At.UTC().Format(time.RFC3339Nano), m.From, to, m.Why)
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
func (n *Emitter) emitUnmatched(s *speaker, node *corev1.Node, before, after []string) {
	for _, name := range after {
		if !slices.Contains(before, name) {
			n.event(s, node, corev1.EventTypeWarning, ReasonInterfaceMissing, fmt.Sprintf(
				"advertisement %q announces on none of this node's interfaces, and so announces nothing here. Compare its layer2.interfaces "+
					"with ip link on the node, or leave the node out by its nodeSelector", name))
		}
	}
	for _, name := range before {
		if !slices.Contains(after, name) {
			n.event(s, node, corev1.EventTypeNormal, ReasonInterfaceMissingOver, fmt.Sprintf(
				"advertisement %q has an interface on this node again, or does not need one any more", name))
		}
	}
}
