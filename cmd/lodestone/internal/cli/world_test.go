package cli

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// world is a cluster for a test.
type world struct {
	t       *testing.T
	objects []runtime.Object
	client  *fake.Clientset
	// pods are how speakers answer; nil: nobody asks them.
	pods *fakePods
}

// ask runs a command against the cluster. The answer is compared with the file
// of the name in testdata, unless that is empty.
func (w *world) ask(golden string, want int, args ...string) string {
	w.t.Helper()
	code, text := w.run(args...)
	require.Equal(w.t, want, code, "%q: %s", args, text)
	if golden != "" {
		path := filepath.Join("testdata", golden)
		if *update {
			require.NoError(w.t, os.WriteFile(path, []byte(text), 0o644))
		}
		have, err := os.ReadFile(path)
		require.NoError(w.t, err)
		require.Equal(w.t, string(have), text, "%q; go test ./cmd/lodestone/internal/cli -update", args)
	}
	return text
}

// run runs a command against the cluster.
func (w *world) run(args ...string) (code int, text string) {
	if w.client == nil {
		w.client = testapi.New(w.objects...)
	}
	var out, errs bytes.Buffer
	code = Run(args, Streams{In: strings.NewReader(""), Out: &out, Err: &errs, Connect: func() (kubernetes.Interface, string, error) {
		return w.client, "shop", nil
	}, Ask: w.pods.ask})
	return code, out.String() + errs.String()
}

func (w *world) add(objects ...runtime.Object) { w.objects = append(w.objects, objects...) }

// drop takes an object of the fixture away.
func (w *world) drop(name string) {
	w.objects = slicesDelete(w.objects, func(o runtime.Object) bool { return o.(metav1.Object).GetName() == name })
}

// object returns the object of the fixture of that name.
func object[T runtime.Object](w *world, name string) T {
	for _, o := range w.objects {
		if t, ok := o.(T); ok && o.(metav1.Object).GetName() == name {
			return t
		}
	}
	w.t.Fatalf("no %s", name)
	panic("unreachable")
}

func slicesDelete(objects []runtime.Object, drop func(runtime.Object) bool) (kept []runtime.Object) {
	for _, o := range objects {
		if !drop(o) {
			kept = append(kept, o)
		}
	}
	return kept
}

// ago is a time that long before the command is run, with a margin that no
// rounding crosses.
func ago(d time.Duration) time.Time { return time.Now().Add(-d - d/100 - 100*time.Millisecond) }

// pod is a pod of a component on a node.
func pod(component, node, version string, ready bool) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "lodestone-" + component + "-" + node, Labels: map[string]string{
			"app.kubernetes.io/name": "lodestone", "app.kubernetes.io/component": component,
		}},
		Spec: corev1.PodSpec{NodeName: node,
			Containers: []corev1.Container{{Name: component, Image: "registry.example.com:5000/lodestone-" + component + ":" + version}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}},
	}
}

func node(name, address string, labels map[string]string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}},
	}
}

// lease is a speaker's Lease.
func lease(node string, annotations map[string]string, sessions ...report.Session) *coordinationv1.Lease {
	if len(sessions) > 0 {
		all := report.Of(annotations)
		all.Sessions = sessions
		annotations = all.Annotations()
	}
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: config.Namespace, Name: annotation.SpeakerLeasePrefix + node, Annotations: maps.Clone(annotations),
		Labels: map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker},
	}}
}

// endpoints are ready endpoints of a Service of namespace shop.
func endpoints(service string, nodes ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: service + "-1",
		Labels: map[string]string{discoveryv1.LabelServiceName: service}}}
	for i := range nodes {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &nodes[i]})
	}
	return s
}

const configured = header + `pools:
  - {name: lan, addresses: [203.0.113.10-203.0.113.19], advertise: [segment]}
  - {name: edge, addresses: [198.51.100.0/28], autoAssign: false, advertise: [tor]}
advertisements:
  - {name: segment, layer2: {}}
  - name: tor
    bgp: {peers: [tor-a, tor-b], communities: ["64512:100", no-export], localPreference: 200, med: 50, asPathPrepend: 2}
peers:
  - {name: tor-a, localASN: 64512, peerASN: 64513, address: 192.0.2.1, bfd: {transmitInterval: 100ms, receiveInterval: 100ms}}
  - {name: tor-b, localASN: 64512, peerASN: internal, address: 192.0.2.2, nodeSelector: {matchLabels: {rack: b}}}
`

// newWorld is a healthy cluster of three nodes with VIPs by layer 2 and BGP.
func newWorld(t *testing.T) *world {
	w := &world{t: t}
	w.add(
		configMap(config.ConfigMapName, config.Key, configured),
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: cluster.ElectionLease},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: new("lodestone-controller-n1_6b1c"),
				AcquireTime: &metav1.MicroTime{Time: ago(3 * time.Hour)}, RenewTime: &metav1.MicroTime{Time: ago(time.Second)}}},
		pod("controller", "n1", "v0.4.0", true), pod("controller", "n2", "v0.4.0", true),
	)
	torA := report.Session{Peer: "tor-a", Router: netip.MustParseAddr("192.0.2.1"), Established: true, Since: ago(5 * time.Hour), BFD: "Up"}
	torB := report.Session{Peer: "tor-b", Router: netip.MustParseAddr("192.0.2.2"), Established: true, Since: ago(5 * 24 * time.Hour)}
	for i, name := range []string{"n1", "n2", "n3"} {
		rack, sessions := "a", []report.Session{torA}
		if name == "n3" {
			rack, sessions = "b", []report.Session{torA, torB}
		}
		w.add(node(name, netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i)}).String(), map[string]string{"rack": rack}),
			lease(name, map[string]string{annotation.Report: fmt.Sprintf(
				`{"address": "203.0.113.%d:9744", "segments": ["203.0.113.0/24 eth0"]}`, 1+i)}, sessions...), pod("speaker", name, "v0.4.0", true))
	}
	api := service("api", "198.51.100.1")
	api.Annotations[annotation.AddressPool] = "edge"
	local := service("local", "203.0.113.11")
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	w.add(service("web", "203.0.113.10"), endpoints("web", "n1", "n2"), local, endpoints("local", "n2"), api, endpoints("api", "n1", "n3"))
	return w
}
