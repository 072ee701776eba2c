package ledger

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// cluster is a ledger and the Services that it decides about, without API server, queue and
// clock. An object shows the last verdict once it is written.
type cluster struct {
	*Ledger
	situation Situation
	now       time.Time
	services  map[string]*corev1.Service
	verdicts  map[string]Verdict
	uids      int
	leases    map[string]map[string]LeaseState
	// answers is everything that the ledger has answered.
	answers strings.Builder
}

const fourAndSix = "pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n  - {name: six, addresses: ['2001:db8::10/128']}\n"

func newCluster(document string) *cluster {
	c := &cluster{now: time.Unix(1e9, 0), services: map[string]*corev1.Service{}, verdicts: map[string]Verdict{},
		leases: map[string]map[string]LeaseState{}}
	c.configure(document)
	c.restart()
	return c
}

func (c *cluster) configure(document string) {
	cfg, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\nquarantine: 30s\n" + document))
	if err != nil {
		panic(err)
	}
	c.situation.Config = cfg
}

func (c *cluster) restart() {
	c.Ledger, c.verdicts = New(kube.Scope{Classless: true}), map[string]Verdict{}
	none := func(string) map[string]string { return nil }
	duplicates := c.Prime(Start{Situation: c.situation, Services: slices.Collect(maps.Values(c.services)), NamespaceLabels: none}, c.now)
	c.say("duplicates", duplicates)
}

func (c *cluster) say(what string, answer any) {
	text, err := json.Marshal(answer)
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(&c.answers, what, string(text), c.Effects(), c.NextFree().Unix())
}

func (c *cluster) create(name string, changes ...func(*corev1.Service)) {
	if c.services[name] != nil {
		return
	}
	c.uids++
	svc := &corev1.Service{}
	svc.Namespace, svc.Name, _ = strings.Cut(name, "/")
	svc.UID, svc.CreationTimestamp = types.UID(fmt.Sprint(c.uids)), metav1.NewTime(c.now)
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	svc.Spec.Ports = []corev1.ServicePort{{Port: int32(c.uids)}}
	for _, change := range changes {
		change(svc)
	}
	c.services[name] = svc
}

func (c *cluster) follow() { c.Follow(c.situation, c.now) }

func (c *cluster) look(name string) {
	c.follow()
	if svc := c.services[name]; svc != nil {
		c.verdicts[name] = c.Ensure(svc, nil, c.now)
		c.say("ensure "+name+" "+c.verdicts[name].String(), c.verdicts[name].Records)
	} else {
		c.say("departing "+name, c.Departing(name, "", c.now))
		c.say("release "+name, c.Release(name, "", c.now))
	}
}

// write has the object show the last verdict.
func (c *cluster) write(name string) {
	svc, v := c.services[name], c.verdicts[name]
	if svc == nil || c.accounts.of(NameOf(svc), string(svc.UID)) == nil || v.Undecided {
		return
	}
	svc = svc.DeepCopy()
	svc.Status.LoadBalancer.Ingress, svc.Annotations[annotation.Assigned] = nil, kube.JoinAddrs(Addrs(v.Held))
	var leases []string
	for _, a := range Addrs(v.Held) {
		if on := v.Leases[a]; on != "" {
			leases = append(leases, a.String()+"="+on)
		}
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a.String()})
	}
	svc.Annotations[annotation.Leases] = strings.Join(leases, ",")
	if v.Renumbered {
		delete(svc.Annotations, annotation.Renumber)
	}
	c.services[name] = svc
	c.Settle(name, string(svc.UID), v.Held, c.now)
	c.say("settled "+name, nil)
}

// work looks at all whom the ledger names, and writes the answers, until it names nobody to
// whom something is new.
func (c *cluster) work(names []string) {
	for range 20 {
		for _, name := range names {
			c.look(name)
			c.write(name)
		}
		c.follow()
		if names, _ = c.Retry(c.now); len(names) == 0 {
			return
		}
	}
}

// check checks that no address is another Service's, too, and that the ledger, which keeps
// count of the Services that are due, has missed none and has none too many.
func (c *cluster) check(t interface{ Fatalf(string, ...any) }) {
	of := map[netip.Addr]*account{}
	due := map[*account]struct{}{}
	for _, name := range slices.Sorted(maps.Keys(c.accounts)) {
		a := c.accounts[name]
		held := c.held.Holds(a.owner.UID)
		for _, addr := range Addrs(held) {
			if b := of[addr]; b != nil && (a.asked.Sharing == nil || b.asked.Sharing == nil) {
				t.Fatalf("%s and %s hold %s", a.owner.Name, b.owner.Name, addr)
			}
			of[addr] = a
		}
		if a.edition > 0 && (a.edition != c.edition || a.verdict.waits() || !slices.Equal(a.verdict.Held, held) ||
			!slices.EqualFunc(a.verdict.Conflicts, c.conflicts.about(held), clusterfacts.Conflict.Equal)) {
			due[a] = struct{}{}
		}
	}
	if c.waiters.swept && !maps.Equal(due, c.waiters.due) {
		t.Fatalf("%d Services are due, %d are listed", len(due), len(c.waiters.due))
	}
}

func set(key, value string) func(*corev1.Service) {
	return func(svc *corev1.Service) { metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value) }
}

func families(policy corev1.IPFamilyPolicy, f ...corev1.IPFamily) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Spec.IPFamilyPolicy, svc.Spec.IPFamilies = &policy, f }
}

var prefersBoth = families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol)

// history is one random history of the ledger. It returns all answers.
func history(t *rapid.T) string {
	documents := []string{fourAndSix, "compatibility: [metallb]\n" + fourAndSix, "pools:\n  - {name: office, dhcp: {interface: eth1}}\n",
		"pools:\n  - {name: lan, addresses: [203.0.113.11-203.0.113.13], namespaceQuota: 2}\n"}
	wishes := []func(*corev1.Service){
		func(*corev1.Service) {}, prefersBoth, set(annotation.Addresses, "203.0.113.11"), set(annotation.Addresses, "poison"),
		set(annotation.SharingKey, "k"), set(annotation.Renumber, annotation.Renumbering), set(annotation.Assigned, "203.0.113.12"),
		func(svc *corev1.Service) {
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.12"}}
		},
	}
	c := newCluster(fourAndSix)
	c.situation.Facts = &clusterfacts.Facts{}
	names := rapid.Map(rapid.IntRange(0, 5), func(i int) string { return fmt.Sprintf("default/s%d", i) })
	wish := rapid.SampledFrom(wishes)
	for i := range 6 {
		c.create(fmt.Sprintf("default/s%d", i), set("x", ""), wish.Draw(t, "wish"), wish.Draw(t, "another"))
	}
	c.restart()
	c.follow()
	c.work(slices.Sorted(maps.Keys(c.services)))
	t.Repeat(map[string]func(*rapid.T){
		"create": func(t *rapid.T) {
			c.create(names.Draw(t, "name"), set("x", ""), wish.Draw(t, "wish"), wish.Draw(t, "another"))
		},
		"change": func(t *rapid.T) {
			if name := names.Draw(t, "name"); c.services[name] != nil {
				c.services[name] = c.services[name].DeepCopy()
				wish.Draw(t, "wish")(c.services[name])
			}
		},
		"delete":    func(t *rapid.T) { delete(c.services, names.Draw(t, "name")) },
		"look":      func(t *rapid.T) { c.look(names.Draw(t, "name")) },
		"write":     func(t *rapid.T) { c.write(names.Draw(t, "name")) },
		"configure": func(t *rapid.T) { c.configure(rapid.SampledFrom(documents).Draw(t, "document")); c.follow() },
		"time": func(t *rapid.T) {
			c.now = c.now.Add(time.Duration(rapid.IntRange(1, 200).Draw(t, "seconds")) * time.Second)
		},
		"waiting": func(*rapid.T) { c.follow(); c.work(c.Due(c.now)) },
		"retry": func(*rapid.T) {
			c.follow()
			names, _ := c.Retry(c.now)
			c.say("retry", names)
		},
		"restart": func(*rapid.T) {
			c.leases = map[string]map[string]LeaseState{}
			c.restart()
		},
		"conflicts": func(t *rapid.T) {
			c.situation.Facts = &clusterfacts.Facts{}
			for _, last := range rapid.SliceOfNDistinct(rapid.IntRange(10, 13), 0, 3, rapid.ID).Draw(t, "addresses") {
				c.situation.Facts.Conflicts = append(c.situation.Facts.Conflicts, clusterfacts.Conflict{Nodes: []string{"n1"},
					Conflict: report.Conflict{VIP: netip.AddrFrom4([4]byte{203, 0, 113, byte(last)}), Announced: rapid.Bool().Draw(t, "announced")}})
			}
			c.follow()
		},
		"leases": func(t *rapid.T) {
			c.follow()
			want, due, lost := c.FollowLeases(c.leases, c.now)
			c.say("leases", []any{want, due, lost})
			c.leases = map[string]map[string]LeaseState{"eth1": {}}
			if rapid.Bool().Draw(t, "silent") {
				return
			}
			shift := rapid.IntRange(0, 2).Draw(t, "shift")
			for i, client := range want["eth1"] {
				c.leases["eth1"][client.ID] = LeaseState{Addr: netip.AddrFrom4([4]byte{198, 18, 0, byte(i + shift)})}
			}
		},
		"another's": func(t *rapid.T) {
			svc := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new("other")}}
			svc.Namespace, svc.Name = "default", "other"
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.13"}}
			c.SeeForeign(svc, rapid.Bool().Draw(t, "gone"))
		},
		"": func(t *rapid.T) { c.check(t) },
	})
	c.say("in the end", c.Stats(c.now))
	return c.answers.String()
}

func TestHistoriesGiveNoAddressTwice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) { history(t) })
}

// TestTheSameHistoryGivesTheSameAnswers replays histories: the answers are the same, to the
// byte. No order of a Go map, which is another one each time, is to be seen in them.
func TestTheSameHistoryGivesTheSameAnswers(t *testing.T) {
	t.Parallel()
	histories, total := rapid.Custom(history), 0
	for seed := range 100 {
		first := histories.Example(seed)
		require.Equal(t, first, histories.Example(seed), "seed %d", seed)
		total += len(first)
	}
	require.Greater(t, total, 50_000, "something happens")
}

// Services that lack the same family are asked for as one, and the oldest gets what is
// freed. Those that hold an address of another pool may get another answer.
func TestServicesThatLackAFamilyAreOneClass(t *testing.T) {
	t.Parallel()
	c := newCluster("pools:\n  - {name: four, addresses: [203.0.113.0/24]}\n  - {name: more, addresses: [198.51.100.0/24], " +
		"autoAssign: false}\n  - {name: six, addresses: ['2001:db8::1/128']}\n")
	c.create("default/six", set("x", ""), families(corev1.IPFamilyPolicySingleStack, corev1.IPv6Protocol))
	names := []string{"default/six"}
	for i := range 50 {
		names = append(names, fmt.Sprintf("default/web-%d", i))
		c.now = c.now.Add(time.Second)
		c.create(names[i+1], set("x", ""), prefersBoth)
	}
	c.create("default/elsewhere", prefersBoth, set(annotation.AddressPool, "more,six"))
	c.work(append(names, "default/elsewhere"))
	require.Len(t, c.waiters.classes, 2)
	require.Equal(t, ipam.IPv6, c.verdicts["default/web-0"].Missing)
	delete(c.services, "default/six")
	c.look("default/six")
	c.now = c.now.Add(time.Minute)
	c.follow()
	names, _ = c.Retry(c.now)
	require.Equal(t, []string{"default/web-0"}, names)
	require.Len(t, c.waiters.classes, 2)
}
