package provider_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	nodehelpers "k8s.io/cloud-provider/node/helpers"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

const machines = `
nodes:
  - {names: ["edge-*"], zone: z1, region: r1}
  - {names: ["*"], gone: true, systemUUID: 4c4c4544-0044-4810-8036-b4c04f4b3532}
  - {names: ["*"], region: r2}
`

func TestInstanceMetadata(t *testing.T) {
	t.Parallel()
	internal := func(ip string) corev1.NodeAddress {
		return corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip}
	}
	for _, tt := range []struct {
		name     string
		node     corev1.Node
		provided string
		want     string
	}{
		{"its own address", node("edge-1", internal("192.0.2.4")), "", "lodestone://edge-1 z1 r1 InternalIP=192.0.2.4 Hostname=edge-1"},
		{"one node IP", node("edge-1"), "192.0.2.4", "lodestone://edge-1 z1 r1 InternalIP=192.0.2.4 Hostname=edge-1"},
		{"two node IPs", node("n"), "192.0.2.4, 2001:db8::4", "lodestone://n  r2 InternalIP=192.0.2.4 InternalIP=2001:db8::4 Hostname=n"},
		{"garbage among them", node("n"), "192.0.2.4,nonsense", "lodestone://n  r2 InternalIP=192.0.2.4 Hostname=n"},
		{"its own addresses", node("n", internal("192.0.2.4"), corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n.example"}), "192.0.2.4",
			"lodestone://n  r2 InternalIP=192.0.2.4 Hostname=n.example"},
		{"a second family was added", node("n", internal("192.0.2.4")), "192.0.2.4,2001:db8::4",
			"lodestone://n  r2 InternalIP=192.0.2.4 InternalIP=2001:db8::4 Hostname=n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if tt.provided != "" {
				tt.node.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: tt.provided}
			}
			instances, _ := provider.New(provider.Options{Config: parse(t, machines)}).InstancesV2()
			m, err := instances.InstanceMetadata(t.Context(), &tt.node)
			if err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprintf("%s %s %s", m.ProviderID, m.Zone, m.Region)
			for _, a := range m.NodeAddresses {
				got += fmt.Sprintf(" %s=%s", a.Type, a.Address)
			}
			if got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			if tt.provided != "" && !strings.Contains(tt.provided, "nonsense") {
				if _, err := nodehelpers.GetNodeAddressesFromNodeIP(strings.ReplaceAll(tt.provided, " ", ""), m.NodeAddresses); err != nil {
					t.Errorf("the framework refuses the addresses: %v", err)
				}
			}
		})
	}
}

func TestProviderIDOfAnOldNodeStays(t *testing.T) {
	t.Parallel()
	n := node("n")
	n.Spec.ProviderID = "metal3://rack-4/n"
	instances, _ := provider.New(provider.Options{Config: given{state: kube.State{Read: true}}}).InstancesV2()
	if m, _ := instances.InstanceMetadata(t.Context(), &n); m.ProviderID != n.Spec.ProviderID || m.Zone+m.Region != "" {
		t.Errorf("metadata %+v", m)
	}
}

// The framework asks for a node's zone once. Before anybody knows which configuration there is, it has to ask again.
func TestNodesAreNotInitializedBeforeTheConfigurationIsRead(t *testing.T) {
	t.Parallel()
	n := node("n")
	instances, _ := provider.New(provider.Options{Config: given{}}).InstancesV2()
	m, err := instances.InstanceMetadata(t.Context(), &n)
	require.ErrorContains(t, err, "has not been read")
	require.Nil(t, m)
}

func TestNodeIsGoneOnlyByTheConfiguration(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		config given
		uuid   string
		exists bool
	}{
		{parse(t, machines), "8c4c4544-0044-4810-8036-b4c04f4b3532", true},
		{parse(t, machines), "", true},
		{parse(t, machines), "4C4C4544-0044-4810-8036-B4C04F4B3532", false},
		{parse(t, "pools: []"), "4c4c4544-0044-4810-8036-b4c04f4b3532", true},
		{given{}, "4c4c4544-0044-4810-8036-b4c04f4b3532", true},
	} {
		n := node("dead")
		n.Status.NodeInfo.SystemUUID = tt.uuid
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		instances, _ := provider.New(provider.Options{Config: tt.config}).InstancesV2()
		if exists, err := instances.InstanceExists(t.Context(), &n); exists != tt.exists || err != nil {
			t.Errorf("%s exists: %v, %v", tt.uuid, exists, err)
		}
		if down, err := instances.InstanceShutdown(t.Context(), &n); down || err != nil {
			t.Errorf("%s is shut down: %v, %v", tt.uuid, down, err)
		}
	}
}

func node(name string, addresses ...corev1.NodeAddress) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Addresses: addresses}}
}
