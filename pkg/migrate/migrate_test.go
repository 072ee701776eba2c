package migrate_test

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/migrate"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

var update = flag.Bool("update", false, "write what comes out")

// origins are what a file's name begins with.
var origins = map[string]func([]migrate.Object) (*migrate.Result, error){"metallb": migrate.MetalLB, "kubevip": migrate.KubeVIP}

func read(t *testing.T, text string) []migrate.Object {
	t.Helper()
	objects, err := migrate.Read("in.yaml", strings.NewReader(text))
	require.NoError(t, err)
	return objects
}

// Golden files: the objects of others, the document, and the notes.
func TestMigrations(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			objects, err := migrate.Read(filepath.Base(file), strings.NewReader(string(text)))
			require.NoError(t, err)
			from, _, _ := strings.Cut(filepath.Base(file), "-")
			r, err := origins[from](objects)
			require.NoError(t, err)

			parsed, err := config.Parse([]byte(r.Document))
			require.NoError(t, err)
			assert.Equal(t, parsed, r.Config)
			output := printed(r)
			assert.NotContains(t, output, "hunter2", "a password")
			assert.NotContains(t, output, "yourPassword", "a password")

			golden := strings.TrimSuffix(file, ".yaml") + ".golden"
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(output), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			assert.Equal(t, string(want), output, "go test ./pkg/migrate -update")
		})
	}
}

func printed(r *migrate.Result) string {
	var b strings.Builder
	b.WriteString(r.Document)
	for _, n := range r.Notes {
		mark := "-"
		if n.Decision {
			mark = "!"
		}
		fmt.Fprintf(&b, "%s %s\n", mark, n)
	}
	for _, s := range r.Services {
		fmt.Fprintln(&b, s.Command())
	}
	return b.String()
}

// The order in which objects come does not matter.
func TestOrderOfObjectsDoesNotMatter(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/metallb-full.yaml")
	require.NoError(t, err)
	objects := read(t, string(text))
	forth, err := migrate.MetalLB(objects)
	require.NoError(t, err)
	for i, j := 0, len(objects)-1; i < j; i, j = i+1, j-1 {
		objects[i], objects[j] = objects[j], objects[i]
	}
	back, err := migrate.MetalLB(objects)
	require.NoError(t, err)
	assert.Equal(t, forth.Document, back.Document)
}

const (
	l2All = "\n---\n{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: all}}"
	peer  = "\n---\n{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: tor}, spec: {myASN: 64512, peerASN: 64513, " +
		"peerAddress: 198.18.0.1}}"
)

func poolOf(spec string) string {
	return "{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: lan, namespace: m}, spec: {" + spec + "}}" + l2All
}

// A list that somebody wrote over several lines is one line, which a command can have.
func TestAnAnnotationOverSeveralLines(t *testing.T) {
	t.Parallel()
	r, err := migrate.MetalLB(read(t, poolOf("addresses: [192.0.2.0/24]")+`
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {metallb.io/loadBalancerIPs: "192.0.2.1,\n2001:db8::1\n"}}
spec: {type: LoadBalancer}
`))
	require.NoError(t, err)
	require.Equal(t, "192.0.2.1, 2001:db8::1", r.Services[0].Annotations[annotation.Addresses])
}

// Which addresses a pool of MetalLB gives, its counterpart gives.
func TestAddressesAreTheSame(t *testing.T) {
	t.Parallel()
	for spec, c := range map[string]struct{ gives, keeps []string }{
		"addresses: [192.0.2.0/28]": {[]string{"192.0.2.0", "192.0.2.15"}, nil},
		"addresses: [192.0.2.0/24], avoidBuggyIPs: true": {[]string{"192.0.2.1", "192.0.2.254"},
			[]string{"192.0.2.0", "192.0.2.255"}},
		"addresses: [192.0.2.0/25], avoidBuggyIPs: true": {[]string{"192.0.2.1", "192.0.2.127"}, []string{"192.0.2.0"}},
		"addresses: [10.1.0.0/16], avoidBuggyIPs: true": {[]string{"10.1.0.1", "10.1.7.1", "10.1.255.254"},
			[]string{"10.1.0.0", "10.1.7.0", "10.1.7.255", "10.1.8.0", "10.1.255.255"}},
		"addresses: [192.0.2.200-192.0.3.10], avoidBuggyIPs: true": {[]string{"192.0.2.254", "192.0.3.1"},
			[]string{"192.0.2.255", "192.0.3.0"}},
		"addresses: [\"2001:db8::/120\"], avoidBuggyIPs: true": {[]string{"2001:db8::", "2001:db8::ff"}, nil},
		"addresses: [192.0.2.7/32, 192.0.2.8 - " +
			"192.0.2.9, 192.0.2.64/31]": {[]string{"192.0.2.7", "192.0.2.8", "192.0.2.9", "192.0.2.64", "192.0.2.65"}, nil},
	} {
		r, err := migrate.MetalLB(read(t, poolOf(spec)))
		require.NoError(t, err, spec)
		for _, a := range c.gives {
			assert.True(t, r.Config.Pools[0].Free.Contains(netip.MustParseAddr(a)), "%s gives %s\n%s", spec, a, r.Document)
		}
		for _, a := range c.keeps {
			assert.False(t, r.Config.Pools[0].Free.Contains(netip.MustParseAddr(a)), "%s keeps %s\n%s", spec, a, r.Document)
		}
	}
}

// Every mistake is reported with its place: file, object, field.
func TestMistakesHaveTheirPlace(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"wrong type": {poolOf("addresses: 192.0.2.0/24"),
			[]string{"in.yaml:1: IPAddressPool m/lan: spec.addresses: must be a list, not string"}},
		"wrong scalar": {poolOf("addresses: [192.0.2.0/24], autoAssign: 'yes'"),
			[]string{"spec.autoAssign: must be true or false, not string"}},
		"wrong address": {poolOf("addresses: [192.0.2.0/24, 300.1.1.1/24]"),
			[]string{`in.yaml:1: IPAddressPool m/lan: spec.addresses[1]: "300.1.1.1/24" is neither a prefix nor a range`}},
		"more than IPv4": {poolOf("addresses: ['::ffff:203.0.113.0/95']"),
			[]string{`"::ffff:203.0.113.0/95" is neither a prefix nor a range`}},
		"nobody is taken": {strings.Replace(poolOf("addresses: [192.0.2.0/24]"), "name: all}",
			"name: nobody}, spec: {ipAddressPools: [none]}", 1), []string{`the name "nobody" is taken`}},
		"backwards":      {poolOf("addresses: [192.0.2.9-192.0.2.1]"), []string{`"192.0.2.9-192.0.2.1" is not a range`}},
		"mixed families": {poolOf("addresses: ['192.0.2.9-2001:db8::1']"), []string{"is not a range"}},
		"no addresses":   {poolOf(""), []string{"spec.addresses: is empty"}},
		"all at once":    {poolOf("addresses: [a, b]"), []string{"spec.addresses[0]", "spec.addresses[1]"}},
		"twice": {poolOf("addresses: [192.0.2.0/24]") + "\n---\n" + poolOf("addresses: [192.0.3.0/24]"),
			[]string{"is there twice, also at in.yaml:1"}},
		"a key twice": {"apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nkind: IPAddressPool",
			[]string{"in.yaml:1", "already set"}},
		"nameless": {"{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, spec: {addresses: [192.0.2.0/24]}}",
			[]string{"metadata.name: is missing"}},
		"no profile": {poolOf("addresses: [192.0.2.0/24]") + strings.Replace(peer, "198.18.0.1", "198.18.0.1, bfdProfile: fast",
			1), []string{`in.yaml:5: BGPPeer tor: spec.bfdProfile: there is no BFDProfile "fast"`}},
		"no ASN": {poolOf("addresses: [192.0.2.0/24]") + strings.Replace(peer, "myASN: 64512,", "", 1),
			[]string{"spec.myASN: is missing"}},
		"a number too big": {poolOf("addresses: [192.0.2.0/24]") + strings.Replace(peer, "64512", "99999999999", 1),
			[]string{"BGPPeer tor: spec.myASN: must be a whole number from 0 to 4294967295"}},
		"a bad duration": {poolOf("addresses: [192.0.2.0/24]") + strings.Replace(peer, "198.18.0.1", "198.18.0.1, holdTime: soon",
			1), []string{`spec.holdTime: "soon" is not a duration`}},
		"no community": {poolOf("addresses: [192.0.2.0/24]") + peer + "\n---\n{apiVersion: metallb.io/v1beta1, kind: " +
			"BGPAdvertisement, metadata: {name: a}, spec: {communities: [vip]}}", []string{`spec.communities[0]: "vip" is no community`}},
		"legacy": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: config}\ndata: {config: 'address-pools: [{name: a, " +
			"protocol: arp, addresses: [x]}]'}",
			[]string{"data.config.address-pools[0]", `protocol: "arp" is neither layer2 nor bgp`, `spec.addresses[0]`}},
		"legacy type": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: config}\ndata: {config: 'peers: [{my-asn: x}]'}",
			[]string{"ConfigMap config: data.config.peers.my-asn: must be a whole number"}},
		"legacy YAML": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: config}\ndata: {config: '[['}",
			[]string{"ConfigMap config: data.config: is not YAML"}},
		"nothing": {"{apiVersion: v1, kind: Secret, metadata: {name: s}}", []string{"there is nothing of MetalLB here"}},
		"they do not fit": {poolOf("addresses: [192.0.2.0/24, 192.0.2.0/25]"),
			[]string{"the objects do not fit together", `pools[0] "lan": 192.0.2.0/25 overlaps 192.0.2.0/24`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects, err := migrate.Read("in.yaml", strings.NewReader(c.text))
			if err == nil {
				_, err = migrate.MetalLB(objects)
			}
			require.Error(t, err)
			for _, words := range c.want {
				assert.Contains(t, err.Error(), words)
			}
		})
	}
}

// How addresses are announced does not follow from the addresses alone.
func TestKubeVIPWithoutItsPodsIsADecision(t *testing.T) {
	t.Parallel()
	r, err := migrate.KubeVIP(read(t, "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {range-global: "+
		"192.0.2.1-192.0.2.9, interface-global: eth0}}"))
	require.NoError(t, err)
	require.True(t, r.Decisions())
	require.Contains(t, r.Notes[0].String(), "DaemonSet kube-vip: is not among the objects")
}

// Where nothing says that Services are served, none are: kube-vip serves them only if it is asked to.
func TestKubeVIPOfTheControlPlaneIsNoneOfServices(t *testing.T) {
	t.Parallel()
	const ranges = "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {range-global: 192.0.2.1-192.0.2.9}}\n---\n"
	of := func(container string) *migrate.Result {
		r, err := migrate.KubeVIP(read(t, ranges+"{apiVersion: v1, kind: Pod, metadata: {name: cp}, spec: {nodeName: n1, containers: "+
			"[{image: kube-vip, "+container+"}]}}"))
		require.NoError(t, err)
		return r
	}
	for _, container := range []string{"env: [{name: cp_enable, value: 'true'}]", "env: [{name: svc_enable, value: ''}]",
		"args: [manager, --controlplane]", "args: [manager, --services=false]"} {
		r := of(container)
		assert.NotContains(t, r.Document, "advertisements", container)
		require.Len(t, r.Notes, 2, container)
		assert.Contains(t, r.Notes[0].Message, "does not serve Services")
		assert.Contains(t, r.Notes[1].String(), "DaemonSet kube-vip: is not among the objects with svc_enable=true")
	}
	for _, container := range []string{"args: [manager, --services]", "env: [{name: svc_enable, value: '1'}]",
		"envFrom: [{configMapRef: {name: c}}]", "args: [manager, --config-file=/etc/kube-vip.yaml]",
		"env: [{name: svc_enable, valueFrom: {configMapKeyRef: {name: c, key: k}}}]"} {
		assert.Contains(t, of(container).Document, "kubernetes.io/hostname: n1", container)
	}
}

func TestMistakesOfKubeVIPHaveTheirPlace(t *testing.T) {
	t.Parallel()
	pod := func(env string) string {
		return "apiVersion: v1\nkind: Pod\nmetadata: {name: kube-vip, namespace: s}\nspec: {containers: [{image: " +
			"kube-vip, env: [{name: svc_enable, value: 'true'}, " + env + "]}]}"
	}
	for name, c := range map[string]struct{ text, want string }{
		"address": {"{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip, namespace: s}, data: {cidr-global: " +
			"'192.0.2.0/24,x'}}", `in.yaml:1: ConfigMap s/kubevip: data.cidr-global[1]: "x" is neither a prefix nor a range of addresses`},
		"second": {"{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {cidr-global: 192.0.2.0/24}}\n---\n{apiVersion: " +
			"v1, kind: ConfigMap, metadata: {name: b}, data: {cidr-global: 192.0.2.0/24}}",
			"in.yaml:3: ConfigMap b: is a second ConfigMap with addresses, the first is ConfigMap a at in.yaml:1"},
		"wrong type": {"{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {cidr-global: [a]}}",
			"ConfigMap kubevip: data: must be text, not array"},
		"number": {pod("{name: bgp_enable, value: 'true'}, {name: bgp_as, value: many}"),
			`Pod s/kube-vip: spec.containers[0].env[bgp_as]: "many" is not a whole number`},
		"peer": {pod("{name: bgp_enable, value: 'true'}, {name: bgp_peers, value: 'router:65000:hunter2'}"),
			"env[bgp_peers[0]]: does not begin with an address"},
		"peer's AS": {pod("{name: bgp_enable, value: 'true'}, {name: bgp_peers, value: '192.0.2.1:hunter2'}"),
			"env[bgp_peers[0]]: has no AS number after the address"},
		"bracket": {pod("{name: bgp_enable, value: 'true'}, {name: bgp_peers, value: '[2001:db8::1:65000'}"),
			"the bracket before the address is not closed"},
		"nothing": {"{apiVersion: v1, kind: ConfigMap, metadata: {name: other}, data: {a: b}}", "there is nothing of kube-vip here"},
		"containers": {"{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d}, spec: {template: {spec: {containers: {}}}}}",
			"DaemonSet d: spec.template.spec.containers: must be a list, not object"},
		"no such pod": {"{apiVersion: v1, kind: Pod, metadata: {name: d}, spec: {containers: [{image: kube-vip-cloud-provider}]}}",
			"there is nothing of kube-vip here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := migrate.KubeVIP(read(t, c.text))
			require.ErrorContains(t, err, c.want)
			assert.NotContains(t, err.Error(), "hunter2")
		})
	}
}

func TestHostileInput(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, want string }{
		"no YAML":   {"{", "in.yaml:1: the document that begins here is not YAML"},
		"second":    {"apiVersion: v1\nkind: Secret\n---\n[", "in.yaml:4: the document that begins here is not YAML"},
		"no object": {"- 1", "in.yaml:1: is not a Kubernetes object"},
		"no kind":   {"a: b", "has no kind or no apiVersion"},
		"list in list": {"{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: List, items: []}]}",
			"in.yaml:1: items[0]: List: is a list in a list"},
		"item":  {"{apiVersion: v1, kind: List, items: [1]}", "in.yaml:1: items[0]: is not a Kubernetes object"},
		"cycle": {"a: &a [*a]", "in.yaml:1: the document that begins here is not YAML"},
		"bomb": {"a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c " +
			"[*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f " +
			"[*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: [*f,*f,*f,*f,*f,*f,*f,*f,*f,*f]",
			"in.yaml:1: the document that begins here is not YAML"},
		"huge": {"a: " + strings.Repeat("x", migrate.MaxSize), "is larger than 16777216 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := migrate.Read("in.yaml", strings.NewReader(c.text))
			require.ErrorContains(t, err, c.want)
			assert.Less(t, len(err.Error()), 1000)
		})
	}
}

// Text may follow the dashes.
func TestDocumentsBeginAfterDashes(t *testing.T) {
	t.Parallel()
	objects, err := migrate.Read("in.yaml", strings.NewReader("--- {apiVersion: v1, kind: A, metadata: {name: a}}\r\n--- # a "+
		"comment\napiVersion: v1\nkind: B\nmetadata: {name: b, namespace: ns}\n---"))
	require.NoError(t, err)
	require.Len(t, objects, 2)
	assert.Equal(t, []string{"in.yaml:1", "A a", "in.yaml:2", "B ns/b"},
		[]string{objects[0].From, objects[0].String(), objects[1].From, objects[1].String()})
}

func TestNothingAndCommentsAreNoObjects(t *testing.T) {
	t.Parallel()
	objects, err := migrate.Read("in.yaml", strings.NewReader("# nothing\n---\n---\n# here\n"))
	require.NoError(t, err)
	require.Empty(t, objects)
}

// Every input gives either a valid configuration, or an error that fits on a screen.
func FuzzMigrate(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(poolOf("addresses: [0.0.0.0/0], avoidBuggyIPs: true")))
	f.Add([]byte(poolOf("addresses: [255.255.255.255], avoidBuggyIPs: true")))
	f.Fuzz(func(t *testing.T, text []byte) {
		testcost.Within(t, "a migration", len(text), func() { both(string(text)) })
		objects, err := migrate.Read("in.yaml", strings.NewReader(string(text)))
		if err != nil {
			return
		}
		for _, name := range []string{"metallb", "kubevip"} {
			r, err := origins[name](objects)
			switch {
			case err != nil && len(err.Error()) > 100_000:
				t.Fatalf("%s: an error of %d bytes", name, len(err.Error()))
			case err == nil:
				if _, err := config.Parse([]byte(r.Document)); err != nil {
					t.Fatalf("%s: %v\n%s", name, err, r.Document)
				}
			}
		}
	})
}
