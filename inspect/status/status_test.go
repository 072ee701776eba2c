package status

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

const lan = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.11]}]\n"

// keyA and keyB are marks of membership keys.
const keyA, keyB = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"

// healthy is a cluster of two nodes in which nothing is wrong.
func healthy(t *testing.T) *cluster.Objects {
	o, err := cluster.All(t.Context(), testapi.New(), cluster.Place{
		Namespace: config.Namespace, ConfigName: config.ConfigMapName, Scope: kube.Scope{Classless: true}})
	require.NoError(t, err)
	o.Config, err = config.Parse([]byte(lan))
	require.NoError(t, err)
	o.Controllers = []*corev1.Pod{pod("n1", true)}
	o.Controllers[0].Spec.Containers[0].Name = "controller"
	o.Election = &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: new("lodestone-controller-n1_6b1c"),
		RenewTime: new(metav1.NewMicroTime(o.Now))}}
	for _, name := range []string{"n1", "n2"} {
		o.Nodes = append(o.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		o.Speakers = append(o.Speakers, pod(name, true))
		o.Leases = append(o.Leases, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: annotation.SpeakerLeasePrefix + name,
				Annotations: report.Report{Keys: []string{keyA}}.Annotations()},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &name}})
	}
	return o
}

func pod(node string, ready bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "pod-" + node},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: "speaker", Image: "registry.example.com:5000/lodestone:v1.0.0"}}}}
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return p
}

// lacks makes a pod wait for the reason.
func lacks(p *corev1.Pod, reason string) {
	p.Status.Conditions = nil
	waiting := &corev1.ContainerStateWaiting{Reason: reason}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: waiting}}}
}

// Each problem that an operator has to look at gives a warning, the worst first, and nothing else does.
func TestWarnings(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(o *cluster.Objects)
		want   []string
	}{
		"nothing is wrong": {func(*cluster.Objects) {}, nil},
		"no controller": {func(o *cluster.Objects) { o.Controllers = nil },
			[]string{"controller: no pod of the controller: Services get no addresses"}},
		"nobody leads": {func(o *cluster.Objects) { o.Election = nil }, []string{"controller: no replica leads: Services get no addresses"}},
		"the leader hangs": {func(o *cluster.Objects) {
			o.Election.Spec.RenewTime = new(metav1.NewMicroTime(o.Now.Add(-3 * time.Minute)))
		}, []string{"controller: the leader lodestone-controller-n1 has not renewed its Lease for 3m, by the clock of this machine: " +
			"Services get no addresses"}},
		"the clock of the leader is not that of this machine": {func(o *cluster.Objects) {
			o.Election.Spec.RenewTime = new(metav1.NewMicroTime(o.Now.Add(-stale)))
		}, nil},
		"a replica is not ready": {func(o *cluster.Objects) { o.Controllers = append(o.Controllers, pod("n2", false)) },
			[]string{"controller: 1 of 2 replicas are ready"}},
		"a node has no speaker": {func(o *cluster.Objects) { o.Speakers = o.Speakers[1:] }, []string{"speaker: node n1: no speaker pod"}},
		"a node that the DaemonSet does not select needs none": {func(o *cluster.Objects) {
			o.Speakers = o.Speakers[1:]
			o.Nodes[1].Labels = map[string]string{"edge": "yes"}
			o.Speakers[0].Spec.NodeSelector = map[string]string{"edge": "yes"}
		}, nil},
		"a node whose taints keep the DaemonSet away needs none": {func(o *cluster.Objects) {
			o.Speakers = o.Speakers[1:]
			o.Nodes[0].Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
			o.Speakers[0].Spec.Tolerations = []corev1.Toleration{{Key: "node.kubernetes.io/not-ready", Operator: corev1.TolerationOpExists}}
		}, nil},
		"a node whose taints it tolerates needs one": {func(o *cluster.Objects) {
			o.Speakers = o.Speakers[1:]
			o.Nodes[0].Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectPreferNoSchedule}, {Key: "storage", Effect: "NoExecute"}}
			o.Speakers[0].Spec.Tolerations = []corev1.Toleration{{Key: "storage", Operator: corev1.TolerationOpExists}}
		}, []string{"speaker: node n1: no speaker pod"}},
		"a speaker cannot start": {func(o *cluster.Objects) { lacks(o.Speakers[1], "ImagePullBackOff") },
			[]string{"speaker: node n2: pod pod-n2 is not ready: ImagePullBackOff"}},
		"the old pod of a node goes, and the new one is ready": {func(o *cluster.Objects) {
			old := pod("n1", true)
			old.DeletionTimestamp = &metav1.Time{Time: o.Now}
			o.Speakers = append([]*corev1.Pod{old}, o.Speakers...)
		}, nil},
		"an upgrade has stopped half way": {func(o *cluster.Objects) { o.Speakers[1].Spec.Containers[0].Image = "lodestone:v1.1.0" },
			[]string{"version: controller v1.0.0, speakers v1.0.0, v1.1.0: an upgrade is under way, or has stopped half way"}},
		"images by digest cannot be compared": {func(o *cluster.Objects) {
			o.Controllers[0].Spec.Containers[0].Image = "registry.example.com:5000/lodestone-controller@sha256:0123"
		}, nil},
		"a container of others is none of ours": {func(o *cluster.Objects) {
			o.Speakers[0].Spec.Containers = append(o.Speakers[0].Spec.Containers, corev1.Container{Name: "proxy", Image: "mesh@sha256:0123"})
		}, nil},
		"the membership key is replaced": {func(o *cluster.Objects) {
			o.Leases[1].Annotations = report.Report{Keys: []string{keyA, keyB}}.Annotations()
		}, []string{"speaker: the membership key is being replaced: speakers use the new one when all have both, within two minutes; " +
			"a speaker that is gone delays that until its Lease is deleted: " +
			keyA + " on n1; " + keyA + ", " + keyB + " on n2"}},
		"a Lease that nobody holds any more does not count": {func(o *cluster.Objects) {
			o.Leases[1].Annotations, o.Leases[1].Spec.HolderIdentity = report.Report{Keys: []string{keyB}}.Annotations(), nil
		}, nil},
		"an advertisement matches no interface": {func(o *cluster.Objects) {
			o.Leases[0].Annotations = report.Report{Keys: []string{keyA}, Unmatched: []string{"segment"}}.Annotations()
		}, []string{"speaker: node n1: advertisement segment matches no interface of it: compare its interfaces with ip link there"}},
		"direct forwarding does not work": {func(o *cluster.Objects) {
			for _, l := range o.Leases {
				l.Annotations = report.Report{Keys: []string{keyA}, Network: report.Network{NoRules: "Forbidden"}}.Annotations()
			}
		}, []string{"speaker: n1, n2: connections are not forwarded directly (Forbidden), and may end when a VIP moves: lodestone explain " +
			"node has why"}},
		"the worst comes first": {func(o *cluster.Objects) {
			o.Speakers = o.Speakers[1:]
			vip := netip.MustParseAddr("203.0.113.10")
			o.Leases[1].Annotations = report.Report{Network: report.Network{Conflicts: []report.Conflict{{VIP: vip, HardwareAddr: [6]byte{2}}}},
				Keys: []string{keyA}}.Annotations()
		}, []string{"conflict: another machine, 02:00:00:00:00:00, has 203.0.113.10, as heard on node n2; it is not announced",
			"speaker: node n1: no speaker pod"}},
		"there is no configuration": {func(o *cluster.Objects) { o.Config, o.Speakers, o.Nodes = nil, nil, nil },
			[]string{"configuration: there is no ConfigMap lodestone-system/lodestone-config: no Service gets an address, and " +
				"nothing is announced"}},
		"speakers have one that is not there any more": {func(o *cluster.Objects) { o.Config = nil },
			[]string{"configuration: there is no ConfigMap lodestone-system/lodestone-config, create it: controllers and speakers that run go by " +
				"the last valid one, those that start by its copy in ConfigMap lodestone-config-last-valid, if there is one"}},
		"who leads was not read": {func(o *cluster.Objects) {
			o.Omit(cluster.Election, errors.New("you may not read it"))
			o.Election = nil
		}, nil},
		"what was not read is not taken for missing": {func(o *cluster.Objects) {
			o.Omit(cluster.Pods, errors.New("you may not read pods"))
			o.Controllers, o.Speakers = nil, nil
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := healthy(t)
			c.change(o)
			var got []string
			for _, w := range Of(o).Warnings {
				got = append(got, w.About+": "+w.Message)
			}
			assert.Equal(t, c.want, got)
		})
	}
}

// What is shown of one Service is not what another one waits for, and what the controller has answered counts.
func TestWhyEachServiceWaits(t *testing.T) {
	t.Parallel()
	o := healthy(t)
	for name, address := range map[string]string{"one": "192.0.2.1", "two": "192.0.2.2", "new": "", "refused": ""} {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name)},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}}}
		if address != "" {
			svc.Annotations = map[string]string{annotation.Addresses: address}
		}
		if name == "refused" {
			svc.Status.Conditions = []metav1.Condition{{Type: annotation.ConditionAllocated, Status: "False", Reason: "PoolExhausted",
				Message: "4 addresses are in use by other hosts"}}
		}
		o.Services = append(o.Services, svc)
	}
	s := Of(o).Services
	for _, name := range []string{"one", "two"} {
		assert.Contains(t, s.Messages["shop/"+name], map[string]string{"one": "192.0.2.1", "two": "192.0.2.2"}[name])
	}
	assert.Contains(t, s.Messages["shop/new"], "the controller is to write")
	assert.Equal(t, "4 addresses are in use by other hosts", s.Messages["shop/refused"])
	assert.Len(t, s.Waiting, 3)
}

// What could not be read is null, and not empty.
func TestUnknownIsNotEmpty(t *testing.T) {
	t.Parallel()
	o := healthy(t)
	assert.NotNil(t, Of(o).Pools)
	for _, kind := range []string{cluster.ConfigMaps, cluster.Leases, cluster.Pods, cluster.Services} {
		o.Omit(kind, errors.New("no right to "+kind))
	}
	s := Of(o)
	assert.Len(t, s.Unread, 4)
	assert.Nil(t, s.Configuration)
	assert.Nil(t, s.Controller)
	assert.Nil(t, s.Speakers)
	assert.Nil(t, s.Pools)
	assert.Nil(t, s.Services)
	assert.Nil(t, s.VIPs)
	assert.Nil(t, s.Peers)
	assert.Nil(t, s.Conflicts)
}

func TestVersionOfAnImage(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"lodestone:v1.0.0": "v1.0.0", "registry.example.com:5000/lodestone": "latest", "registry.example.com:5000/lodestone:v1": "v1",
		"lodestone@sha256:0123": "sha256:0123", "lodestone:v1@sha256:0123": "v1",
	} {
		assert.Equal(t, want, version(image), image)
	}
}
