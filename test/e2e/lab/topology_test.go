package lab

import (
	"slices"
	"testing"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
)

func TestTopologyOfASingleStackCluster(t *testing.T) {
	top := newTopology(Options{Nodes: 3})
	for got, want := range map[string]string{
		join(top.addresses(ControlPlane)): "198.18.0.1/24",
		join(top.addresses("n1")):         "198.18.0.11/24",
		join(top.addresses(Client)):       "198.18.0.100/24",
		join(top.podCIDRs("n3")):          "10.244.3.0/24",
		join(top.serviceCIDRs()):          "10.96.0.0/16",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestTopologyOfADualStackCluster(t *testing.T) {
	top := newTopology(Options{Nodes: 2, DualStack: true})
	for got, want := range map[string]string{
		join(top.addresses("n2")):   "198.18.0.12/24,2001:db8:0:1::12/64",
		join(top.podCIDRs("n2")):    "10.244.2.0/24,2001:db8:10:2::/64",
		join(top.addresses(Client)): "198.18.0.100/24,2001:db8:0:1::100/64",
		join(top.clusterCIDRs()):    "10.244.0.0/16,2001:db8:10::/48",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestNodesReachPodsAndEverythingElse(t *testing.T) {
	hosts := newTopology(Options{Nodes: 3}).hosts()
	var routes []string
	for _, route := range hosts[slices.IndexFunc(hosts, isHost("n2"))].Routes {
		routes = append(routes, route.To.String()+" via "+route.Via.String())
	}
	want := []string{"10.244.1.0/24 via 198.18.0.11", "10.244.3.0/24 via 198.18.0.13", "0.0.0.0/0 via 198.18.0.1"}
	if !slices.Equal(routes, want) {
		t.Errorf("routes of n2 = %v, want %v", routes, want)
	}
	if client := hosts[slices.IndexFunc(hosts, isHost(Client))]; len(client.Routes) > 0 {
		t.Errorf("the client has routes: %v", client.Routes)
	}
}

func isHost(name string) func(lan.Host) bool {
	return func(h lan.Host) bool { return h.Name == name }
}
