package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes"
	ktesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

const simpleMetalLB = `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: metallb-system}
spec: {addresses: [203.0.113.10-203.0.113.19]}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: lan, namespace: metallb-system}}
`

// offline runs the command on the standard input.
func offline(stdin string, args ...string) (code int, out, errs string) {
	var o, e bytes.Buffer
	code = Run(args, Streams{In: strings.NewReader(stdin), Out: &o, Err: &e})
	return code, o.String(), e.String()
}

func TestMigrateWritesWhatIsRead(t *testing.T) {
	t.Parallel()
	code, manifest, errs := offline(simpleMetalLB, "migrate", "metallb", "-")
	require.Zero(t, code, errs)
	require.Empty(t, errs)
	c, err := config.ParseFile("stdout", []byte(manifest))
	require.NoError(t, err, manifest)
	require.Len(t, c.Pools, 1)
	assert.Contains(t, manifest, "namespace: lodestone-system")
	code, _, errs = offline(manifest, "validate", "-")
	require.Zero(t, code, errs)

	_, document, _ := offline(simpleMetalLB, "migrate", "metallb", "-", "--as", "document")
	parsed, err := config.Parse([]byte(document))
	require.NoError(t, err)
	assert.Equal(t, c.Pools[0].Free, parsed.Pools[0].Free)

	_, values, _ := offline(simpleMetalLB, "migrate", "metallb", "-", "--as", "values")
	assert.Equal(t, "config:\n"+indented(document, "  "), values)

	_, text, _ := offline(simpleMetalLB, "migrate", "metallb", "-", "-o", "json")
	var answer struct {
		Configuration json.RawMessage
		Notes         []any
	}
	require.NoError(t, json.Unmarshal([]byte(text), &answer))
	_, err = config.Parse(answer.Configuration)
	require.NoError(t, err)
}

func TestMigrateExits(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "in.yaml")
	require.NoError(t, os.WriteFile(file, []byte(simpleMetalLB), 0o600))
	password := simpleMetalLB + "---\n{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: tor}, spec: {myASN: 1, peerASN: " +
		"2, peerAddress: 192.0.2.1, password: hunter2}}\n"
	for name, c := range map[string]struct {
		stdin string
		args  []string
		code  int
		says  string
	}{
		"a file": {"", []string{"metallb", file}, ExitOK, ""},
		"a decision": {password, []string{"metallb", "-"}, ExitFound,
			"!  BGPPeer tor: spec.password: Lodestone reads passwords from Secrets alone"},
		"not YAML": {"{", []string{"metallb", "-"}, ExitInvalid, "stdin:1: "},
		"a mistake": {strings.Replace(simpleMetalLB, "203.0.113.10-", "x-", 1), []string{"metallb", "-"}, ExitInvalid,
			"stdin:1: IPAddressPool metallb-system/lan: spec.addresses[0]: "},
		"a hostile one": {"{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: \"a\\e[2J\"}, spec: {addresses: [x]}}",
			[]string{"metallb", "-"}, ExitInvalid, "IPAddressPool a?[2J: spec.addresses[0]: "},
		"do not fit": {strings.Replace(simpleMetalLB, "203.0.113.10-203.0.113.19", "127.0.0.1-127.0.0.9", 1), []string{"metallb", "-"},
			ExitInvalid, "loopback"},
		"wrong origin":   {simpleMetalLB, []string{"kube-vip", "-"}, ExitInvalid, "there is nothing of kube-vip here"},
		"no file":        {"", []string{"metallb", file + ".gone"}, ExitFailed, "no such file"},
		"unknown form":   {"", []string{"metallb", "-", "--as", "poem"}, ExitFailed, "the forms are"},
		"unknown origin": {"", []string{"openelb"}, ExitFailed, "openelb"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, out, errs := offline(c.stdin, append([]string{"migrate"}, c.args...)...)
			assert.Equal(t, c.code, code, errs)
			assert.Contains(t, errs, c.says)
			assert.NotContains(t, out+errs, "hunter2")
		})
	}
}

// live runs the command against a cluster of these objects.
func live(t *testing.T, d dynamic.Interface, objects []runtime.Object, args ...string) (code int, out, errs string) {
	t.Helper()
	client := testapi.New(objects...)
	var o, e bytes.Buffer
	code = Run(args, Streams{
		In: strings.NewReader(""), Out: &o, Err: &e,
		Connect: func() (kubernetes.Interface, string, error) { return client, "shop", nil },
		Dynamic: func() (dynamic.Interface, error) { return d, nil },
	})
	return code, o.String(), e.String()
}

// resources is a cluster with MetalLB's resources and these objects of them.
func resources(objects ...runtime.Object) *dynamicfake.FakeDynamicClient {
	kinds := map[schema.GroupVersionResource]string{}
	for resource, kind := range map[string]string{
		"ipaddresspools": "IPAddressPool", "addresspools": "AddressPool", "l2advertisements": "L2Advertisement",
		"bgpadvertisements": "BGPAdvertisement", "bfdprofiles": "BFDProfile", "communities": "Community"} {
		kinds[schema.GroupVersionResource{Group: "metallb.io", Version: "v1beta1", Resource: resource}] = kind + "List"
	}
	kinds[schema.GroupVersionResource{Group: "metallb.io", Version: "v1beta2", Resource: "bgppeers"}] = "BGPPeerList"
	return dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds, objects...)
}

func metalLBObject(kind, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "metallb.io/v1beta1", "kind": kind, "metadata": map[string]any{"name": name, "namespace": "metallb-system"}, "spec": spec,
	}}
}

// refusing has every list of MetalLB's resources fail.
func refusing(err error) *dynamicfake.FakeDynamicClient {
	d := resources()
	d.PrependReactor("list", "*", func(ktesting.Action) (bool, runtime.Object, error) { return true, nil, err })
	return d
}

// has is a LoadBalancer Service to which MetalLB has given an address.
func has(name, ip string, annotations map[string]string) *corev1.Service {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid of " + name),
		Annotations: annotations}}
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
	return svc
}

func TestMigrateFromAClusterReportsWhoKeepsItsAddress(t *testing.T) {
	t.Parallel()
	d := resources(metalLBObject("IPAddressPool", "lan", map[string]any{"addresses": []any{"203.0.113.10-203.0.113.19"}}),
		metalLBObject("L2Advertisement", "lan", map[string]any{}))
	web := has("web", "203.0.113.10", map[string]string{"metallb.io/address-pool": "lan"})
	code, out, errs := live(t, d, []runtime.Object{web}, "migrate", "metallb")
	require.Zero(t, code, errs)
	_, err := config.ParseFile("stdout", []byte(out))
	require.NoError(t, err)
	assert.Contains(t, errs, "take-over: 1 Service that has addresses keeps them")
	assert.Contains(t, errs, "kubectl -n shop annotate service web lodestone.io/address-pool=lan\n")

	outside := has("outside", "192.0.2.7", nil)
	repaired := configMap(config.ConfigMapName, config.Key, "nonsense: true\n")
	code, _, errs = live(t, d, []runtime.Object{web, outside, repaired}, "migrate", "metallb")
	require.Equal(t, ExitFound, code, errs)
	assert.Contains(t, errs, "!  Service shop/outside: status.loadBalancer: it has [192.0.2.7], and with this configuration: "+
		"AddressOutsidePools")
	assert.Contains(t, errs, "take-over: 1 Service that has addresses keeps them")
}

func TestMigrateFromAClusterWithoutMetalLB(t *testing.T) {
	t.Parallel()
	group := schema.GroupResource{Group: "metallb.io", Resource: "ipaddresspools"}
	code, _, errs := live(t, refusing(apierrors.NewNotFound(group, "")), nil, "migrate", "metallb")
	require.Equal(t, ExitFailed, code)
	assert.Contains(t, errs, "the cluster has no MetalLB: neither resources of the group metallb.io, nor the ConfigMap metallb-system/config")

	code, _, errs = live(t, refusing(apierrors.NewForbidden(group, "", nil)), nil, "migrate", "metallb", "--from-namespace", "lb")
	require.Equal(t, ExitFailed, code)
	assert.Contains(t, errs, "you need the right to list ipaddresspools.metallb.io in namespace lb")

	code, _, errs = live(t, resources(), nil, "migrate", "metallb")
	require.Equal(t, ExitFailed, code)
	assert.Contains(t, errs, "MetalLB has no objects in namespace metallb-system")

	legacy := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "config"}, Data: map[string]string{
		"config": "address-pools:\n- {name: lan, protocol: layer2, addresses: [203.0.113.0/28]}\n",
	}}
	speaker := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}}
	speaker.Spec.Template.Spec.Containers = []corev1.Container{{Image: "quay.io/metallb/speaker:v0.16.2",
		Args: []string{"--ignore-exclude-lb"}}}
	code, out, errs := live(t, refusing(apierrors.NewNotFound(group, "")), []runtime.Object{legacy, speaker}, "migrate", "metallb")
	require.Zero(t, code, errs)
	assert.Contains(t, out, "203.0.113.0/28")
	assert.Contains(t, out, "ignoreExcludeLabel: true")

	speaker.Spec.Template.Spec.NodeSelector = map[string]string{corev1.LabelOSStable: "linux"}
	code, _, errs = live(t, refusing(apierrors.NewNotFound(group, "")), []runtime.Object{legacy, speaker}, "migrate", "metallb")
	require.Zero(t, code, errs)
	speaker.Spec.Template.Spec.NodeSelector["edge"] = "true"
	_, _, errs = live(t, refusing(apierrors.NewNotFound(group, "")), []runtime.Object{legacy, speaker}, "migrate", "metallb")
	assert.Contains(t, errs, "MetalLB runs on some nodes only: set the chart's value speaker.nodeSelector")

	pool := metalLBObject("AddressPool", "old", map[string]any{"protocol": "layer2", "addresses": []any{"203.0.113.16/28"}})
	code, out, errs = live(t, resources(pool), nil, "migrate", "metallb")
	require.Zero(t, code, errs)
	assert.Contains(t, out, "203.0.113.16/28")
}

func TestMigrateFromAClusterWithKubeVIP(t *testing.T) {
	t.Parallel()
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-vip-ds"}}
	set.Spec.Template.Spec.Containers = []corev1.Container{{Image: "ghcr.io/kube-vip/kube-vip:v1.0.1",
		Env: []corev1.EnvVar{{Name: "vip_arp", Value: "true"}, {Name: "svc_enable", Value: "true"}, {Name: "vip_interface", Value: "eth0"}}}}
	ranges := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kubevip"},
		Data: map[string]string{"range-global": "203.0.113.10-203.0.113.19"}}
	web := has("web", "203.0.113.10", map[string]string{"kube-vip.io/loadbalancerIPs": "203.0.113.10"})
	code, out, errs := live(t, nil, []runtime.Object{set, ranges, web}, "migrate", "kube-vip")
	require.Zero(t, code, errs)
	assert.Contains(t, out, "interfaces:\n            - eth0")
	assert.Contains(t, out, "ignoreExcludeLabel: true", "the nodes of the control plane announce, as now")
	assert.Contains(t, errs, "take-over: 1 Service that has addresses keeps them")

	set.Spec.Template.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{}}
	_, _, errs = live(t, nil, []runtime.Object{set, ranges, web}, "migrate", "kube-vip")
	assert.Contains(t, errs, "envFrom: its variables come from elsewhere and are not looked at")

	code, _, errs = live(t, nil, nil, "migrate", "kube-vip")
	require.Equal(t, ExitFailed, code)
	assert.Contains(t, errs, "there is no kube-vip in namespace kube-system")
}
