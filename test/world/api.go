package world

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// api is the API server. Its objects are values that nobody modifies, by keys such as "service/default/web-1".
type api struct {
	*World
	objects map[string]any
	watches []*watch
	uids    int
	// edition counts the writes of each object: it is its resourceVersion.
	edition map[string]int
	away    map[string]int // by client: how many faults keep the server from answering
	history []change
	lag     map[string]time.Duration // by client: the lag of the server that it is connected to
	behind  map[string]int           // by client: how many faults delay its watch
	past    *ledger.Ledger           // the ledger of the controller before the world begins, for the Services of that time
	tempted func() map[string]string // the annotations with which the next Service is created
	lease   lease
	book    records        // the ConfigMap, which nobody modifies
	illness [illnesses]int // by way of failing: how many faults make the server do that
}

// change is a write of an object.
type change struct {
	at     time.Duration
	key    string
	object any
}

// watch is what one client has seen of the API server. Changes come late, and in order. A client that was cut off
// for a while lists everything anew, and misses the versions in between.
type watch struct {
	*api
	seen    map[string]any
	changed func(key string)
	client  string
	fresh   bool            // the next list has everything that was written before it
	known   time.Duration   // when the latest seen version was written; a list is not older
	run     func(do func()) // runs do in the client, as soon as the client runs
	synced  bool
	epoch   int           // of the connection
	last    time.Duration // when the last change arrives
}

func newAPI(w *World) *api {
	return &api{World: w, objects: map[string]any{}, edition: map[string]int{}, away: map[string]int{},
		lag: map[string]time.Duration{}, behind: map[string]int{}}
}

// follow returns a client's watch, which begins with a list.
func (a *api) follow(client string, changed func(key string)) *watch {
	w := &watch{api: a, client: client, seen: map[string]any{}, changed: changed, run: func(do func()) { do() }}
	a.watches = append(a.watches, w)
	w.list()
	return w
}

// end ends a watch.
func (w *watch) end() {
	w.epoch++
	w.watches = slices.DeleteFunc(w.watches, func(v *watch) bool { return v == w })
}

// put writes an object, nil deletes it.
func (a *api) put(key string, object any) {
	a.edition[key]++
	if pods, ok := object.([]string); ok {
		a.record("%s on %v", key, pods)
		for _, n := range a.nodes {
			n.podsChanged(strings.TrimPrefix(key, "pods/"), slices.Contains(pods, n.name))
		}
	}
	if object == nil {
		delete(a.objects, key)
	} else {
		a.objects[key] = object
	}
	a.history = append(a.history, change{a.now, key, object})
	for _, w := range a.watches {
		w.hand(a.history[len(a.history)-1])
	}
	if key == "config" || strings.HasPrefix(key, "node/") {
		a.checks.decreed = a.now
	}
	a.data.written(key, object)
	a.routing.wrote(key)
	a.checks.lookWhoIsAble()
}

// hand delivers a change to the client, with a delay.
func (w *watch) hand(c change) {
	epoch := w.epoch
	if w.away[w.client] > 0 {
		return
	}
	delay := w.between(time.Millisecond, 80*time.Millisecond)
	w.last = max(w.last, w.now+delay, c.at+w.lag[w.client]+delay)
	w.after(w.last-w.now, func() {
		if w.epoch == epoch && w.synced {
			w.known = c.at
			w.run(func() { w.take(c.key, c.object) })
		}
	})
}

func (w *watch) take(key string, object any) {
	if object == nil {
		delete(w.seen, key)
	} else {
		w.seen[key] = object
	}
	w.changed(key)
}

// leave makes the server not answer some clients, and returns the function that ends that.
func (a *api) leave(clients ...string) (back func()) {
	count := func(by int) {
		for _, c := range clients {
			a.away[c] += by
			for _, w := range a.watches {
				if w.client == c {
					w.epoch++
					w.list()
				}
			}
		}
	}
	count(1)
	return func() { count(-1) }
}

// upToDate reports whether changes reach the client.
func (a *api) upToDate(client string) bool { return a.away[client]+a.behind[client] == 0 }

// list reads everything, some time later.
func (w *watch) list() {
	epoch := w.epoch
	w.last = max(w.last, w.now+w.between(10*time.Millisecond, 500*time.Millisecond))
	w.after(w.last-w.now, func() {
		if w.away[w.client] > 0 || w.epoch != epoch {
			return
		}
		w.synced = true
		as := w.now
		if !w.fresh {
			as = max(w.known, w.now-w.lag[w.client])
		}
		w.known, w.fresh = as, false
		objects, later := w.asOf(as)
		w.run(func() { w.takeAll(objects) })
		for _, c := range later {
			w.hand(c)
		}
	})
}

// asOf returns the objects as they were at that time, and the changes since then.
func (a *api) asOf(at time.Duration) (objects map[string]any, later []change) {
	if at >= a.now {
		return maps.Clone(a.objects), nil
	}
	objects = map[string]any{}
	for i, c := range a.history {
		switch {
		case c.at > at:
			return objects, a.history[i:]
		case c.object == nil:
			delete(objects, c.key)
		default:
			objects[c.key] = c.object
		}
	}
	return objects, nil
}

// takeAll takes a list.
func (w *watch) takeAll(objects map[string]any) {
	keys := maps.Clone(w.seen)
	maps.Copy(keys, objects)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if now := objects[key]; !reflect.DeepEqual(now, w.seen[key]) {
			w.take(key, now)
		}
	}
	w.changed("")
}

// names returns the names of the objects of a kind, in order.
func named(objects map[string]any, kind string) (names []string) {
	for key := range objects {
		if name, ok := strings.CutPrefix(key, kind+"/"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// subnet and subnet6 are those of the first segment, and subnets those of each. Pools are parts of them.
var (
	subnet, subnet6 = netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/64")
	subnets         = [...][]netip.Prefix{{subnet, subnet6},
		{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:1::/64")}}
)

// segments are what the node is on.
func (n *node) segments() (all []report.Segment) {
	for i, l := range n.lans {
		for _, p := range subnets[i] {
			if n.isOn(n.id, i) && (p.Addr().Is4() || n.Dual) {
				all = append(all, report.Segment{Subnet: p, Interface: l.nic()})
			}
		}
	}
	return all
}

// fill writes the objects that the world begins with.
func (a *api) fill() {
	a.put("config", a.document(-1, 0))
	for i := range a.Nodes {
		name := nodeName(i)
		a.nodes[i].writeNode()
		a.put("lease/"+name, report.Network{Segments: a.nodes[i].segments(), KubeProxy: true})
	}
	past := ledger.New(scope)
	past.Prime(ledger.Start{Situation: ledger.Situation{Config: a.document(-1, 0), Facts: &clusterfacts.Facts{}}}, longAgo)
	for i := range a.Services {
		if a.chance(50) {
			a.past = past
		}
		a.create(serviceName(i))
		a.past = nil
	}
}

// longAgo is when some of the Services that exist at the beginning were given their addresses.
var longAgo = epoch.Add(-time.Hour)

func nodeName(i int) string    { return fmt.Sprintf("n%d", i) }
func serviceName(i int) string { return fmt.Sprintf("default/web-%d", i) }

// document returns a configuration with a preferred node, -1 for none, and one of the sets of pools.
func (a *api) document(prefers, pools int) *config.Config {
	layer2 := []string{fmt.Sprintf("keepOwner: %t", a.Keep)}
	if a.Refresh {
		layer2 = append(layer2, "refreshInterval: 10s")
	}
	if a.Prefer && prefers < 0 {
		prefers = 0
	}
	if prefers >= 0 {
		layer2 = append(layer2, fmt.Sprintf("preferredNodes: [{weight: 10, nodeSelector: {matchLabels: {name: %s}}}]", nodeName(prefers)))
	}
	if a.Direct && a.data.off == 0 {
		layer2 = append(layer2, "forwarding: direct")
	}
	all := poolsOf[pools%len(poolsOf)]
	if a.Segments > 1 {
		all += dmz
	}
	if a.DHCP {
		all += office
	}
	text := "apiVersion: lodestone.io/v1alpha1\nkind: Config\nquarantine: " + a.Quarantine.String() + "\n" + all +
		"advertisements:\n  - {name: all, layer2: {" + strings.Join(layer2, ", ") + "}}\n" + a.routing.document(pools%len(poolsOf) != 1)
	if a.Dual {
		text = strings.ReplaceAll(text, "lan, addresses: [", "lan, addresses: [2001:db8::100-2001:db8::113, ")
	}
	c, err := config.Parse([]byte(text))
	if err != nil {
		panic(err)
	}
	return c
}

// poolsOf are the sets of pools. Some of them lack addresses that others have. No edit of pools may move a Service.
var poolsOf = []string{
	"pools:\n  - {name: lan, addresses: [203.0.113.100-203.0.113.119]}\n  - {name: shop, addresses: [203.0.113.120/31], namespaces: [shop]}\n",
	"pools:\n  - {name: legacy, addresses: [203.0.113.100-203.0.113.104]}\n  - {name: lan, addresses: [203.0.113.105-203.0.113.119]}\n",
	"pools:\n  - {name: lan, addresses: [203.0.113.110-203.0.113.119]}\n",
	"pools:\n  - {name: lan, addresses: [203.0.113.100-203.0.113.119], namespaceQuota: 4}\n",
}

// dmz is the pool of the second segment.
const dmz = "  - {name: dmz, addresses: [198.51.100.100-198.51.100.119, 2001:db8:1::100-2001:db8:1::113]}\n"

// create has a user create a Service, unless there is one of that name.
func (a *api) create(name string) {
	if a.objects["service/"+name] != nil {
		return
	}
	a.uids++
	svc := &corev1.Service{}
	svc.Namespace, svc.Name, _ = strings.Cut(name, "/")
	svc.UID, svc.CreationTimestamp, svc.Generation = types.UID(fmt.Sprint(a.uids)), metav1.NewTime(epoch.Add(a.now)), 1
	svc.Spec.Type, svc.Spec.IPFamilies = corev1.ServiceTypeLoadBalancer, []corev1.IPFamily{corev1.IPv4Protocol}
	if a.Dual {
		svc.Spec.IPFamilies = familiesOf[a.data.random.IntN(len(familiesOf))]
	}
	svc.Spec.Ports = []corev1.ServicePort{{Port: int32(a.uids), Protocol: corev1.ProtocolTCP}}
	if a.Segments > 1 && a.chance(50) {
		svc.Annotations = map[string]string{annotation.AddressPool: "dmz"}
	}
	past := a.past
	if a.DHCP && a.chance(50) {
		svc.Annotations, past = map[string]string{annotation.AddressPool: "office"}, nil
	}
	if a.tempted != nil {
		svc.Annotations = a.tempted()
	}
	if a.chance(30) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if past != nil {
		svc.CreationTimestamp = metav1.NewTime(longAgo)
		v := past.Ensure(svc, nil, longAgo)
		svc = patched(svc, servicelb.Patch(svc, &v, nil, metav1.NewTime(longAgo)))
	}
	a.put("pods/"+name, a.somePods())
	a.putService(name, svc, user)
}

// familiesOf are families of Services.
var familiesOf = [][]corev1.IPFamily{{corev1.IPv4Protocol}, {corev1.IPv6Protocol}, {corev1.IPv4Protocol, corev1.IPv6Protocol}}

// somePods returns the nodes on which the pods of a Service are.
func (a *api) somePods() []string {
	pods := []string{}
	for i := range a.Nodes {
		if a.chance(60) {
			pods = append(pods, nodeName(i))
		}
	}
	if len(pods) == 0 {
		pods = append(pods, nodeName(a.random.IntN(a.Nodes)))
	}
	return pods
}

// service returns a Service as it is now, nil if there is none.
func (a *api) service(name string) *corev1.Service {
	svc, _ := a.objects["service/"+name].(*corev1.Service)
	return svc
}

// edit has a user change a Service.
func (a *api) edit(name string, change func(*corev1.Service)) {
	if svc := a.service(name); svc != nil {
		svc = svc.DeepCopy()
		change(svc)
		svc.Generation++
		a.putService(name, svc, user)
	}
}

// ask has a user set an annotation of a Service.
func (a *api) ask(name, key, value string) {
	a.edit(name, func(svc *corev1.Service) {
		if value == "" {
			delete(svc.Annotations, key)
			return
		}
		metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value)
	})
}

// remove has a user delete a Service, which is gone when it has no finalizers.
func (a *api) remove(name string) {
	a.edit(name, func(svc *corev1.Service) {
		if svc.DeletionTimestamp == nil {
			svc.DeletionTimestamp = new(metav1.NewTime(epoch.Add(a.now)))
		}
	})
}

// writer is who writes.
type writer int

const (
	user writer = iota
	ofController
)

// putService writes a Service.
func (a *api) putService(name string, svc *corev1.Service, by writer) {
	before := a.service(name)
	if svc.DeletionTimestamp != nil && len(svc.Finalizers) == 0 {
		a.put("pods/"+name, nil)
		a.put("service/"+name, nil)
		a.checks.written(name, before, nil, by)
		return
	}
	svc.ResourceVersion = fmt.Sprint(a.edition["service/"+name] + 1)
	a.put("service/"+name, svc)
	a.checks.written(name, before, svc, by)
}
