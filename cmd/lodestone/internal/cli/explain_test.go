package cli

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/explain"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

func TestStoriesOfAHealthyCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ask("explain-service.txt", ExitOK, "explain", "service", "local")
	w.ask("explain-service-routed.txt", ExitOK, "explain", "service", "shop/api")
	w.ask("explain-vip.txt", ExitOK, "explain", "vip", "203.0.113.11")
	w.ask("explain-vip-routed.txt", ExitOK, "explain", "vip", "198.51.100.1")
	w.ask("explain-vip-free.txt", ExitOK, "explain", "vip", "203.0.113.19")
	w.ask("explain-node.txt", ExitOK, "explain", "node", "n2")
	w.ask("explain-pool.txt", ExitOK, "explain", "pool", "lan")
	w.ask("explain-peer.txt", ExitOK, "explain", "peer", "tor-b")
}

// The application is gone, and the node is taken out: both are in the story.
func TestStoriesOfTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.drop("local-1")
	w.drop("lodestone-speaker-n1")
	object[*corev1.Node](w, "n1").Labels[corev1.LabelNodeExcludeBalancers] = ""
	w.add(pod("speaker", "n1", "v0.4.0", false),
		lease("n1", map[string]string{annotation.Report: `{"conflicts": ["203.0.113.11 02:00:00:00:00:0c withheld"]}`}))
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = header + `pools:
  - {name: late, addresses: [203.0.113.20-203.0.113.29], priority: 10, namespaces: [shop], requesters: [], namespaceQuota: 3, advertise: [segment]}
  - {name: lan, addresses: [203.0.113.10/31], serviceSelector: {matchLabels: {tier: web}}, advertise: [segment]}
  - {name: spare, addresses: [203.0.113.1-203.0.113.3], state: draining, advertise: [segment]}
advertisements: [{name: segment, layer2: {}}]
peers: [{name: far, address: 192.0.2.9, peerASN: 64513, localASN: 64512, nodeSelector: {matchLabels: {rack: z}}, gracefulRestart: {restartTime: 60s}}]
`
	w.ask("explain-service-trouble.txt", ExitFound, "explain", "service", "local")
	w.ask("explain-vip-trouble.txt", ExitFound, "explain", "vip", "203.0.113.11")
	w.ask("explain-node-trouble.txt", ExitFound, "explain", "node", "n1")
	w.ask("explain-pool-late.txt", ExitOK, "explain", "pool", "late")
	w.ask("explain-pool-spare.txt", ExitFound, "explain", "pool", "spare")
	w.ask("explain-peer-trouble.txt", ExitFound, "explain", "peer", "far")
}

// configure replaces the configuration, or a part of it.
func (w *world) configure(oldnew ...string) {
	cm := object[*corev1.ConfigMap](w, config.ConfigMapName)
	cm.Data[config.Key] = strings.NewReplacer(oldnew...).Replace(cm.Data[config.Key])
	w.client = nil
}

// unready has the pod of the node's speaker run and not be ready.
func (w *world) unready(node string) {
	object[*corev1.Pod](w, "lodestone-speaker-"+node).Status.Conditions[0].Status = corev1.ConditionFalse
}

// silence is a VIP that three nodes do not announce, each for a reason of its own.
func silence(t *testing.T) *world {
	w := newWorld(t)
	w.configure("layer2: {}", "layer2: {nodeSelector: {matchLabels: {rack: a}}}")
	object[*corev1.Node](w, "n1").Labels[corev1.LabelNodeExcludeBalancers] = ""
	w.unready("n2")
	return w
}

// Each node has its reason, and each reason its cure; the keys are in one line.
func TestStoryOfSeveralReasonsAtOnce(t *testing.T) {
	t.Parallel()
	w := silence(t)
	w.ask("explain-vip-reasons.txt", ExitFound, "explain", "vip", "203.0.113.10")
	w.ask("explain-service-reasons.txt", ExitFound, "explain", "service", "web")
	w.ask("explain-node-reasons.txt", ExitOK, "explain", "node", "n3")
}

// Both addresses of a Service are silent for one reason: what helps is there once.
func TestAdviceIsGivenOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.configure("203.0.113.10-203.0.113.19", "203.0.113.10-203.0.113.19, \"2001:db8::10-2001:db8::19\"")
	web := object[*corev1.Service](w, "web")
	web.Annotations[annotation.Assigned] += ",2001:db8::10"
	web.Status.LoadBalancer.Ingress = append(web.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: "2001:db8::10"})
	web.Spec.IPFamilies = append(web.Spec.IPFamilies, corev1.IPv6Protocol)
	w.drop("web-1")
	text := w.ask("", ExitFound, "explain", "service", "web")
	assert.Contains(t, text, "Silent      203.0.113.10 not from n1, n2, n3: NoServingEndpoint")
	assert.Contains(t, text, "            2001:db8::10 not from n1, n2, n3: NoServingEndpoint")
	assert.Equal(t, 1, strings.Count(text, "Find out why no pod is ready"), text)
}

// How long an address is in quarantine, the configuration decides, whatever it was when the
// address was released.
func TestStoryOfAVIPInQuarantine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	released := ago(10 * time.Minute)
	w.add(configMap(quarantinestore.ConfigMapName, quarantinestore.Key, "version 1\n"+quarantinestore.Record{
		Addr: netip.MustParseAddr("203.0.113.19"), Service: "shop/gone", Since: released, Until: released.Add(time.Hour)}.String()+"\n"))
	asks := service("asks", "")
	asks.Annotations = map[string]string{annotation.Addresses: "203.0.113.19"}
	w.add(asks)
	assert.NotContains(t, w.ask("", ExitOK, "explain", "vip", "203.0.113.19"), "quarantine", "it is 30 s long unless the configuration has it")

	w.configure("pools:", "quarantine: 1h\npools:")
	w.ask("explain-vip-quarantine.txt", ExitOK, "explain", "vip", "203.0.113.19")
	text := w.ask("", ExitFound, "explain", "service", "asks")
	assert.Contains(t, text, "Refused     AddressQuarantined: ")
	assert.Contains(t, text, "\nKeys        quarantine, pools[].keepFor\n")

	w.configure("quarantine: 1h", "quarantine: 1m", "name: lan,", "name: lan, keepFor: 30m,")
	assert.Contains(t, w.ask("", ExitOK, "explain", "vip", "203.0.113.19"), "it is in quarantine for another 19m")
	w.configure("keepFor: 30m", "keepFor: 30m, exclude: [203.0.113.19]")
	assert.NotContains(t, w.ask("", ExitOK, "explain", "vip", "203.0.113.19"), "in quarantine", "keepFor is for addresses that the pool gives")
	w.configure("keepFor: 30m, exclude: [203.0.113.19]", "keepFor: 5m")
	assert.NotContains(t, w.ask("", ExitOK, "explain", "vip", "203.0.113.19"), "in quarantine")
}

// What a speaker reported long ago is shown with its age.
func TestStoryOfANodeWhoseReportIsStale(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.unready("n2")
	l := object[*coordinationv1.Lease](w, annotation.SpeakerLeasePrefix+"n2")
	l.Spec.RenewTime = new(metav1.NewMicroTime(ago(42 * time.Minute)))
	w.ask("explain-node-stale.txt", ExitFound, "explain", "node", "n2")
}

// A session is down, another cannot be: each has its reason, and the peer the keys.
func TestStoryOfAPeerThatIsDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.configure("tor-a, localASN: 64512", "tor-a")
	for _, name := range []string{"n1", "n3"} {
		object[*corev1.Node](w, name).Annotations = map[string]string{annotation.BGPASN: "64512"}
	}
	l := object[*coordinationv1.Lease](w, annotation.SpeakerLeasePrefix+"n1")
	r := report.Of(l.Annotations)
	r.Sessions[0] = report.Session{Peer: "tor-a", Since: ago(7 * time.Minute), BFD: "Down",
		Message: "hold timer expired: the router was not heard for 1m30s"}
	l.Annotations = r.Annotations()
	w.ask("explain-peer-down.txt", ExitFound, "explain", "peer", "tor-a")
	assert.Contains(t, w.ask("", ExitFound, "explain", "node", "n2"), "\nKeys        peers[].localASN, lodestone.io/bgp-asn\n")
	assert.NotContains(t, w.ask("", ExitFound, "explain", "node", "n1"), "Keys")

	var all bgp.Sessions
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "bgp", "peers", "--node", "n2", "-o", "json")), &all))
	assert.Equal(t, plan.NoLocalASN, all.Sessions[0].Reason)
}

// A Service waits: status counts it under its reason, and explain has what helps and the keys.
func TestStoriesOfServicesThatWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.configure("autoAssign: false", "autoAssign: false, namespaceQuota: 1",
		"203.0.113.10-203.0.113.19]", "203.0.113.10-203.0.113.11]",
		"pools:\n", "pools:\n  - {name: ops, addresses: [192.0.2.64/30], namespaces: [ops], "+
			"serviceSelector: {matchLabels: {tier: web}}, advertise: [segment]}\n")
	for name, pool := range map[string]string{"full": "lan", "quota": "edge", "closed": "ops", "typo": "lam", "typing": "lam"} {
		svc := service(name, "")
		svc.Annotations = map[string]string{annotation.AddressPool: pool}
		w.add(svc)
	}
	w.ask("status-waiting.txt", ExitFound, "status")
	w.ask("explain-service-waits.txt", ExitFound, "explain", "service", "closed")
	for name, want := range map[string]string{
		"full": "\nKeys        quarantine, pools[].keepFor\n", "quota": "\nKeys        pools[].namespaceQuota\n",
	} {
		assert.Contains(t, w.ask("", ExitFound, "explain", "service", name), want)
	}
	assert.NotContains(t, w.ask("", ExitFound, "explain", "service", "typo"), "Keys")
}

func TestStoriesForPrograms(t *testing.T) {
	t.Parallel()
	var v explain.VIP
	require.NoError(t, json.Unmarshal([]byte(newWorld(t).ask("", ExitOK, "explain", "vip", "203.0.113.11", "-o", "json")), &v))
	assert.Equal(t, "n2", v.Owner)
	assert.Equal(t, []explain.Sharer{{Service: "shop/local", Policy: "Local", Serving: true, Nodes: []string{"n2"}}}, v.Services)
}

// The story of a Service has those of its VIPs in it, and the reasons as codes.
func TestStoryOfAServiceForPrograms(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	asks := service("asks", "")
	asks.Annotations = map[string]string{annotation.AddressPool: "nowhere"}
	w.add(asks, service("new", ""))
	var s, same explain.Service
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "explain", "service", "local", "-o", "json")), &s))
	require.NoError(t, yaml.Unmarshal([]byte(w.ask("", ExitOK, "explain", "service", "local", "-o", "yaml")), &same))
	assert.Equal(t, s, same)
	require.Len(t, s.VIPs, 1)
	var v explain.VIP
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "explain", "vip", "203.0.113.11", "-o", "json")), &v))
	assert.Equal(t, v, s.VIPs[0])
	assert.Equal(t, "n2", v.Owner)

	var refused, fresh explain.Service
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "explain", "service", "asks", "-o", "json")), &refused))
	assert.Equal(t, ipam.PoolNotFound, refused.Refusal.Reason)
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "explain", "service", "new", "-o", "json")), &fresh))
	assert.Equal(t, []string{"203.0.113.12 not yet: the controller has not written it into the Service"}, fresh.Unwritten)
}

// A developer who may not see the speakers reads all the rest, and what is
// missing.
func TestStoryOfAServiceWithoutTheSpeakers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.refuse("list", "pods")
	text := w.ask("", ExitFailed, "explain", "service", "web")
	assert.Contains(t, text, "Has        203.0.113.10 from pool \"lan\"")
	assert.Contains(t, text, "Announced  not known, for something was not read:\n           you may not read the Pods of Lodestone: you "+
		"need the right to list pods in namespace lodestone-system")
	assert.Contains(t, text, "lodestone: the answer is not complete: 1 thing was not read")
}

// Who may not read what a question is not about is answered all the same.
func TestStoriesReadNoMoreThanTheyShow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.refuse("list", "pods")
	w.ask("explain-pool.txt", ExitOK, "explain", "pool", "lan")
	assert.Contains(t, w.ask("", ExitFailed, "explain", "node", "n1"), "you need the right to list pods in namespace lodestone-system")
	w.refuse("list", "servicecidrs")
	w.ask("explain-node.txt", ExitOK, "explain", "node", "n2")
	w.ask("explain-peer.txt", ExitOK, "explain", "peer", "tor-b")
	assert.Contains(t, w.ask("", ExitFailed, "explain", "pool", "lan"),
		"you need the right to list servicecidrs.networking.k8s.io in the whole cluster")
}

// Names in the cluster are completed, and what cannot be read completes nothing.
func TestNamesAreCompleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for want, args := range map[string][]string{
		"n1\nn2\nn3\n:4\n":                 {"explain", "node", ""},
		"lan\n:4\n":                        {"explain", "pool", "l"},
		"tor-a\ntor-b\n:4\n":               {"explain", "peer", ""},
		"203.0.113.10\n203.0.113.11\n:4\n": {"explain", "vip", "203"},
		"shop/api\n:4\n":                   {"explain", "service", "shop/a"},
		"n1\nn2\nn3\n:4\nCompletion ended with directive": {"simulate", "drain", ""},
	} {
		assert.Contains(t, w.ask("", ExitOK, append([]string{"__complete"}, args...)...), want)
	}
	w.refuse("*", "*")
	assert.Contains(t, w.ask("", ExitOK, "__complete", "explain", "node", ""), ":4\n")
}

func TestStoriesOfWhatIsNotThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for want, args := range map[string][]string{
		`there is no node "n9"; there are: n1, n2, n3`:      {"node", "n9"},
		`there is no pool "dmz"; there are: lan, edge`:      {"pool", "dmz"},
		`there is no BGP peer "x"; there are: tor-a, tor-b`: {"peer", "x"},
		`"web" is not an address, such as 203.0.113.7`:      {"vip", "web"},
		`there is no node ""; there are: n1, n2, n3`:        {"node", ""},
		`there is no BGP peer ""; there are: tor-a, tor-b`:  {"peer", ""},
	} {
		assert.Contains(t, w.ask("", ExitFailed, append([]string{"explain"}, args...)...), want)
	}
	assert.Contains(t, w.ask("", ExitFailed, "simulate", "drain", ""), `there is no node ""; there are: n1, n2, n3`,
		"a variable that is not set")
	empty := &world{t: t}
	for _, args := range [][]string{{"explain", "pool", "lan"}, {"explain", "vip", "203.0.113.7"}, {"bgp", "routes"}} {
		assert.Equal(t, "lodestone: there is neither ConfigMap lodestone-system/lodestone-config nor a pod of Lodestone in its namespace: "+
			"is it installed in another one (--lodestone-namespace)?\n",
			empty.ask("", ExitFailed, args...))
	}
	empty.add(configMap(config.ConfigMapName, config.Key, header))
	empty.client = nil
	assert.Contains(t, empty.ask("", ExitFailed, "explain", "pool", "lan"), `there is no pool "lan", nor any other`)
	assert.Contains(t, empty.ask("", ExitOK, "explain", "vip", "203.0.113.7"), "Lodestone has assigned it to no Service")

}

// Speakers that are ready have a configuration, which need not be the one in the cluster:
// without theirs, the story has nothing of what they do.
func TestNoStoriesWithoutTheConfigurationInForce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	questions := [][]string{{"explain", "vip", "203.0.113.10"}, {"explain", "node", "n1"}, {"explain", "service", "web"},
		{"simulate", "lose", "n1"}, {"bgp", "peers"}, {"bgp", "routes"}}
	const know = " controllers and speakers that run go by the last valid one, those that start by its copy in ConfigMap " +
		"lodestone-config-last-valid, if there is one"
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = "nonsense: true\n"
	for _, args := range questions {
		text := w.ask("", ExitInvalid, args...)
		assert.Contains(t, text, "ConfigMap lodestone-system/lodestone-config is invalid, repair it:"+know)
		assert.Contains(t, text, `unknown key "nonsense"`)
	}
	w.drop(config.ConfigMapName)
	w.client = nil
	for _, args := range questions {
		assert.Contains(t, w.ask("", ExitFailed, args...), "there is no ConfigMap lodestone-system/lodestone-config, create it:"+know)
	}
	text := w.ask("", ExitFound, "status")
	assert.Contains(t, text, "there is no ConfigMap lodestone-system/lodestone-config, create it:"+know)
	object[*corev1.Pod](w, "lodestone-controller-n1").Spec.Containers[0].Args = []string{"--config-name=mine"}
	w.client = nil
	assert.Contains(t, w.ask("", ExitFailed, questions[0]...), "there is no ConfigMap lodestone-system/lodestone-config: controllers and "+
		"speakers read another one, so add --config-name=mine")
	w.client = nil
	text = w.ask("", ExitFound, "status")
	assert.NotContains(t, text, "announced by nobody")

	// They have all started anew.
	for _, name := range []string{"n1", "n2", "n3"} {
		object[*corev1.Pod](w, "lodestone-speaker-"+name).Status.Conditions = nil
	}
	w.client = nil
	assert.Contains(t, w.ask("", ExitFound, "explain", "vip", "203.0.113.10"),
		"nobody announces it: NoAdvertisement: no configuration is in force")
}

// With direct forwarding the story of a VIP has who keeps its connections, and why others do
// not.
func TestWhoKeepsConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = strings.Replace(configured, "layer2: {}",
		"layer2: {forwarding: direct}", 1)
	for _, name := range []string{"web", "local"} {
		object[*corev1.Service](w, name).Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}}
	}
	says := func(node, more string) {
		w.drop(annotation.SpeakerLeasePrefix + node) // which is the pod's name, too
		report := `{"segments": ["203.0.113.0/24 eth0"]` + more + `}`
		w.add(pod("speaker", node, "v0.4.0", true), lease(node, map[string]string{annotation.Report: report}))
	}
	add := func(name, address, more string) {
		w.add(node(name, address, nil))
		says(name, more)
	}
	says("n1", `, "forwards": true`)
	says("n2", `, "forwards": true`)
	says("n3", "")
	add("n4", "203.0.113.4", `, "noRules": "Forbidden"`)
	add("n5", "203.0.113.5", `, "noRules": "IPVS"`)
	add("n6", "203.0.113.6", `, "noRules": "Some"`)
	add("n7", "192.0.2.77", `, "forwards": true`)
	add("n8", "2001:db8::8", `, "forwards": true`)
	add("n9", "203.0.113.9", `, "forwards": true`)
	object[*corev1.Node](w, "n9").Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	w.ask("explain-vip-forwarding.txt", ExitOK, "explain", "vip", "203.0.113.10")

	assert.Contains(t, w.ask("", ExitFound, "explain", "node", "n4"), "it hands none over: its speaker may not write packet filter rules")
	assert.NotContains(t, w.ask("", ExitFound, "explain", "node", "n1"), "hands none over", "its session is not reported")
	w.client = nil
	w.drop("local-1")
	w.add(endpoints("local", "n2", "n3", "n4", "n9"))
	for _, name := range []string{"n3", "n4", "n5", "n6", "n7", "n8"} {
		says(name, `, "forwards": true`)
	}
	says("n2", `, "noRules": "Bond"`)
	w.ask("explain-vip-forwarding-local.txt", ExitOK, "explain", "vip", "203.0.113.11")
}
