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

// A host whose namespace is not removed is in the way of the next lab.
func TestEveryHostIsRemoved(t *testing.T) {
	wire := place(2).lan()
	for _, host := range newTopology(Options{Nodes: 12, APIServers: 3, Router: RouterBoth}).hosts() {
		if !wire.Owns(wire.Namespace(host.Name)) {
			t.Errorf("the namespace of %s stays when the lab goes", host.Name)
		}
	}
}

func TestNodesWithoutRoutesToPods(t *testing.T) {
	hosts := newTopology(Options{Nodes: 3, OwnPodRoutes: true}).hosts()
	routes := hosts[slices.IndexFunc(hosts, isHost("n2"))].Routes
	if len(routes) != 1 || routes[0].To.String() != "0.0.0.0/0" {
		t.Errorf("routes of n2 = %v, want the default route alone", routes)
	}
}

func TestClientsBehindRouters(t *testing.T) {
	top := newTopology(Options{Nodes: 1, DualStack: true, Router: RouterBoth})
	for got, want := range map[string]string{
		join(top.addresses(Router)):  "198.18.0.254/24,2001:db8:0:1::254/64",
		join(top.addresses(Remote)):  "198.18.8.2/24,2001:db8:0:8::2/64",
		join(top.addresses(Remote2)): "198.18.9.2/24,2001:db8:0:9::2/64",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	hosts := top.hosts()
	node, remote := hosts[slices.IndexFunc(hosts, isHost("n1"))], hosts[slices.IndexFunc(hosts, isHost(Remote2))]
	var routes []string
	for _, route := range append(node.Routes, remote.Routes...) {
		routes = append(routes, route.To.String()+" via "+route.Via.String())
	}
	want := []string{
		"0.0.0.0/0 via 198.18.0.1", "::/0 via 2001:db8:0:1::1",
		"198.18.8.0/24 via 198.18.0.254", "2001:db8:0:8::/64 via 2001:db8:0:1::254",
		"198.18.9.0/24 via 198.18.0.253", "2001:db8:0:9::/64 via 2001:db8:0:1::253",
		"0.0.0.0/0 via 198.18.9.1", "::/0 via 2001:db8:0:9::1",
	}
	if !slices.Equal(routes, want) {
		t.Errorf("routes = %v, want %v", routes, want)
	}
}

func isHost(name string) func(lan.Host) bool {
	return func(h lan.Host) bool { return h.Name == name }
}
