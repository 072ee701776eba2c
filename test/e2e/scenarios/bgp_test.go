package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// routed is a pool that no segment has, announced to the lab's two routers: FRR
// over IPv4, BIRD over IPv4, too. All VIPs of both families are in it. Each story
// gets addresses of its own: kernels remember the flows of the one before, to pods
// that are gone.
const routed = `
quarantine: 60s
pools:
  - name: routed
    addresses: [198.18.16.0/24, "2001:db8:16::/112"]
advertisements:
  - name: routers
    bgp: {}
`

// tor and spine are the lab's routers, as peers; more keys can follow. A story that is not about BFD has slow BFD: on a busy
// machine a router may send nothing for 0.3 s.
const (
	torWithoutBFD = "\n  - {name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513"

	slowBFD  = ", bfd: {transmitInterval: 1s, receiveInterval: 1s}"
	quickBFD = ", bfd: {transmitInterval: 100ms, receiveInterval: 100ms}"

	tor   = torWithoutBFD + slowBFD
	spine = "\n  - {name: spine, address: 198.18.0.253, localASN: 64512, peerASN: external" + slowBFD
	peers = "\npeers:" + tor + "}" + spine + "}\n"
)

var quickPeers = strings.ReplaceAll(peers, slowBFD, quickBFD)

// dualStack asks for an address of each family.
func dualStack(svc *corev1.Service) {
	svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
}

func localPolicy(svc *corev1.Service) {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// steadyFrom waits until every node's kube-proxy serves what the host asks for.
func (s *story) steadyFrom(host, vip string) {
	s.Helper()
	require.NoError(s, s.SteadyFrom(s.ctx, host, target(vip)))
}

// learnt waits until the router forwards the VIP's traffic to these nodes and
// no others.
func (s *story) learnt(router, vip string, nodes ...string) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s sends traffic for %s to %q", router, vip, nodes), func() error {
		got, err := s.NextHops(router, vip)
		if err == nil && !slices.Equal(got, nodes) {
			err = fmt.Errorf("it sends it to %q", got)
		}
		return err
	})
}

// onRouter configures a router with FRR, and undoes that when the test ends.
func (s *story) onRouter(do, undo []string) {
	s.Helper()
	ask := func(ctx context.Context, commands []string) {
		_, err := s.Lab.AskRouter(ctx, lab.Router,
			append([]string{"configure terminal", fmt.Sprintf("router bgp %d", lab.RouterASN)}, commands...)...)
		require.NoError(s, err)
	}
	s.afterwards(func() { ask(s.ctx, undo) })
	ask(s.ctx, do)
}

// losesNothingBehind checks that of the datagrams from behind the router to the
// VIP none is lost while move happens.
func (s *story) losesNothingBehind(vip string, move func()) {
	s.Helper()
	s.steadyFrom(lab.Remote, vip)
	s.losesNothingFrom(s.FromRemote(), []string{vip}, move)
}

// Every node announces a VIP, to routers of two makes and
// in both families, and they spread connections over the nodes.
func TestRoutersSpreadConnectionsOverTheNodes(t *testing.T) {
	s := begin(t)
	s.config(routed + peers)
	s.echo(3)
	s.service("web", dualStack, localPolicy, port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vips := s.allAddresses("web", 2)
	for router, remote := range map[string]string{lab.Router: lab.Remote, lab.Router2: lab.Remote2} {
		for _, vip := range vips {
			s.learnt(router, vip, s.Lab.Nodes()...)
			s.steadyFrom(remote, vip)
			p := probe.TCP(s.ctx, probe.Options{Namespace: s.Lab.Namespace(remote), Target: target(vip)})
			require.NoError(s, p.WaitAnswers(s.ctx, 60))
			record, err := p.Finish()
			require.NoError(s, err)
			assert.Zero(s, record.Lost(), "of %d connections from %s to %s", record.Sent, remote, vip)
			assert.Len(s, record.Nodes(), 3, "nodes that took connections from %s to %s: %v", remote, vip, record.Nodes())
		}
	}
	s.delete("web")
	for _, vip := range vips {
		s.learnt(lab.Router, vip)
		s.learnt(lab.Router2, vip)
	}
}

// allAddresses waits until the Service has that many addresses.
func (s *story) allAddresses(name string, count int) []string {
	s.Helper()
	var got []string
	s.eventually(fmt.Sprintf("Service %s has %d addresses", name, count), func() error {
		svc := s.get(name)
		if got = addresses(svc); len(got) != count {
			return fmt.Errorf("it has %q: %s", got, conditionText(svc))
		}
		return nil
	})
	return got
}

// With policy Local the routers know the nodes with endpoints, and
// a node's last endpoint that ends costs clients nothing.
func TestRoutersKnowTheNodesWithEndpoints(t *testing.T) {
	s := begin(t)
	s.config(routed + peers)
	nodes := s.Lab.Nodes()
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, 2, nodes[2]))
	s.service("web", localPolicy, port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.learnt(lab.Router, vip, nodes[0], nodes[1])
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, 1, nodes[0], nodes[2]))
	s.learnt(lab.Router, vip, nodes[1])
	s.learnt(lab.Router2, vip, nodes[1])
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, 0))
	s.learnt(lab.Router, vip)
}

// A node that loses its power costs the clients behind a router less than a
// second, by BFD.
func TestPowerLossBehindARouter(t *testing.T) {
	s := begin(t)
	s.config(routed + quickPeers)
	nodes := s.Lab.Nodes()
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, 2, nodes[0])) // no pods on the node that is lost
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.learnt(lab.Router, vip, nodes...)
	s.bfdUp(nodes...)
	s.steadyFrom(lab.Remote, vip)
	p := probe.UDP(s.ctx, probe.Options{Namespace: s.Lab.Namespace(lab.Remote), Target: target(vip), NewFlows: true})
	require.NoError(s, p.WaitAnswers(s.ctx, 200))
	s.afterwards(func() { require.NoError(s, s.Lab.HealNode(nodes[0])) })
	cut := time.Now()
	require.NoError(s, s.Lab.NodeLoss(nodes[0]))
	s.learnt(lab.Router, vip, nodes[1:]...)
	gone := time.Since(cut)
	require.NoError(s, p.WaitAnswers(s.ctx, 200))
	record, err := p.Finish()
	require.NoError(s, err)
	t.Logf("the router forgot the node after %s; %d of %d datagrams were lost", gone.Round(time.Millisecond), record.Lost(), record.Sent)
	assert.Less(s, gone, 50*time.Second, "without BFD it takes the hold time, 90 s, since the last keepalive, which are 30 s apart")
	require.NoError(s, s.Lab.HealNode(nodes[0]))
	s.learnt(lab.Router, vip, nodes...)
}

// bfdUp waits until the router's BFD sessions with the nodes are up.
func (s *story) bfdUp(nodes ...string) {
	s.Helper()
	s.eventually("BFD is up", func() error {
		text, err := s.Lab.AskRouter(s.ctx, lab.Router, "show bfd peers brief")
		if up := strings.Count(text, " up"); err == nil && up < len(nodes) {
			err = fmt.Errorf("%d of %d sessions: %s", up, len(nodes), text)
		}
		return err
	})
}

// While the speakers are replaced one by one no client notices. That
// it is so with graceful restart, too, is the fleet's TestFailurePolicies.
func TestRollingUpdateBehindARouterLosesNothing(t *testing.T) {
	s := begin(t)
	s.config(routed + "\npeers:" + tor + "}\n")
	vip := s.serveUDP("web")
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
	s.losesNothingBehind(vip, func() { require.NoError(s, s.RollSpeakers(s.ctx)) })
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
}

// A router that takes no connections for a while does not lose one node after the other: a rolling update goes no
// further before it has the first one again.
func TestRollingUpdateWaitsForTheRouter(t *testing.T) {
	s := begin(t)
	s.config(routed + "\npeers:" + tor + "}\n")
	vip := s.serveUDP("web")
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
	const end = "add table inet away; delete table inet away"
	s.afterwards(func() { s.on(s.ctx, lab.Router, "nft", end) })
	s.losesNothingBehind(vip, func() {
		s.on(s.ctx, lab.Router, "nft", "add table inet away; "+
			"add chain inet away in { type filter hook input priority 0; }; add chain inet away out { type filter hook output priority 0; }; "+
			"add rule inet away in tcp dport 179 tcp flags syn drop; add rule inet away out tcp dport 179 tcp flags syn drop")
		rolled := make(chan error, 1)
		go func() { rolled <- s.RollSpeakers(s.ctx) }()
		time.Sleep(20 * time.Second) // in which all three would be replaced
		s.on(s.ctx, lab.Router, "nft", end)
		require.NoError(s, <-rolled)
	})
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
}

// With graceful restart, a speaker that is killed costs nothing: the router
// keeps its routes until it is back. BFD would contradict that.
func TestKilledSpeakerWithGracefulRestart(t *testing.T) {
	s := begin(t)
	s.config(routed + "\npeers: [{name: tor, address: 198.18.0.254, localASN: 64512, peerASN: 64513, gracefulRestart: {restartTime: 60s}}]\n")
	vip := s.serveUDP("web")
	nodes := s.Lab.Nodes()
	s.learnt(lab.Router, vip, nodes...)
	s.losesNothingBehind(vip, func() {
		s.killSpeaker(nodes[0])
		s.always(time.Second, "the router keeps the routes", func() error {
			got, err := s.NextHops(lab.Router, vip)
			if err == nil && !slices.Equal(got, nodes) {
				err = fmt.Errorf("it has %q", got)
			}
			return err
		})
		s.eventually("the speaker's session is back", func() error { return s.session(nodes[0], "Established") })
		s.learnt(lab.Router, vip, nodes...)
	})
}

// session checks the state of the node's session with FRR.
func (s *story) session(node, state string) error {
	sessions, err := s.Sessions(s.ctx, lab.Router)
	if got := sessions[s.Lab.Addresses(node)[0].String()]; err == nil && got.State != state {
		err = fmt.Errorf("the session of %s is %+v", node, got)
	}
	return err
}

// Routers are asked to prefer other nodes before a node is taken out, and no client
// notices.
func TestNodeTakenOutBehindARouterLosesNothing(t *testing.T) {
	s := begin(t)
	s.config(routed + peers)
	vip := s.serveUDP("web")
	nodes := s.Lab.Nodes()
	s.learnt(lab.Router, vip, nodes...)
	s.afterwards(func() { s.label(nodes[0], excludeLabel, "") })
	const asked = "draining: routers are asked to prefer other nodes"
	before := strings.Count(s.logs(s.ctx, "speaker"), asked)
	s.losesNothingBehind(vip, func() {
		s.label(nodes[0], excludeLabel, "true")
		s.eventually("the router is asked to prefer others", func() error { // for two seconds, which vtysh may miss
			if strings.Count(s.logs(s.ctx, "speaker"), asked) > before {
				return nil
			}
			paths, err := s.Paths(s.ctx, lab.Router, netip.PrefixFrom(netip.MustParseAddr(vip), 32))
			for _, p := range paths {
				if strings.Contains(p.Community.String, "graceful-shutdown") {
					return err
				}
			}
			return errors.Join(err, fmt.Errorf("no path has the community: %+v", paths))
		})
		s.learnt(lab.Router, vip, nodes[1:]...)
		s.label(nodes[0], excludeLabel, "")
		s.learnt(lab.Router, vip, nodes...)
	})
	s.eventually("the session is there", func() error { return s.session(nodes[0], "Established") })
}

// The attributes of advertisements reach the router, and change
// without ending a session.
func TestAdvertisementsChangeWhileSessionsStay(t *testing.T) {
	s := begin(t)
	const tor = torWithoutBFD // a node without processor time for a moment is not what this is about
	const peers = "\npeers:" + tor + "}" + spine + "}\n"
	s.config(routed + peers)
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
	before := s.established()
	for _, step := range []struct {
		keys  string
		check func(lodestone.Path) bool
	}{
		{`communities: ["64512:100", no-advertise, "64512:1:2"]`, func(p lodestone.Path) bool {
			return p.Community.String == "64512:100 no-advertise" && p.LargeCommunity.String == "64512:1:2"
		}},
		{"med: 50", func(p lodestone.Path) bool { return p.MED == 50 && p.Community.String == "" }},
		{"asPathPrepend: 2", func(p lodestone.Path) bool { return p.ASPath.String == "64512 64512 64512" && p.MED == 0 }},
		{"", func(p lodestone.Path) bool { return p.ASPath.String == "64512" }},
	} {
		s.config(strings.Replace(routed, "bgp: {}", "bgp: {"+step.keys+"}", 1) + peers)
		s.eventually("the router has paths with "+step.keys, func() error {
			paths, err := s.Paths(s.ctx, lab.Router, netip.PrefixFrom(netip.MustParseAddr(vip), 32))
			if err == nil && (len(paths) != 3 || slices.ContainsFunc(paths, func(p lodestone.Path) bool { return !step.check(p) })) {
				err = fmt.Errorf("it has %+v", paths)
			}
			return err
		})
	}
	s.config(routed + "\npeers:" + tor + "}\n") // without the other router
	s.learnt(lab.Router2, vip)
	s.config(routed + peers)
	s.learnt(lab.Router2, vip, s.Lab.Nodes()...)
	require.Equal(s, before, s.established(), "how often FRR saw each session come up")
}

// established returns how often FRR saw each session come up.
func (s *story) established() map[string]int {
	s.Helper()
	sessions, err := s.Sessions(s.ctx, lab.Router)
	require.NoError(s, err)
	times := map[string]int{}
	for address, session := range sessions {
		times[address] = session.Established
	}
	return times
}

// A node gains and loses a session by its labels.
func TestRelabelledNodeGainsAndLosesItsSession(t *testing.T) {
	s := begin(t)
	nodes := s.Lab.Nodes()
	s.config(routed + "\npeers:" + tor + ", nodeSelector: {matchLabels: {rack: a}}}\n")
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.afterwards(func() { s.label(nodes[0], "rack", ""); s.label(nodes[1], "rack", "") })
	s.label(nodes[0], "rack", "a")
	s.learnt(lab.Router, vip, nodes[0])
	s.label(nodes[1], "rack", "a")
	s.learnt(lab.Router, vip, nodes[0], nodes[1])
	s.label(nodes[0], "rack", "b")
	s.learnt(lab.Router, vip, nodes[1])
	s.eventually("the session has gone", func() error {
		sessions, err := s.Sessions(s.ctx, lab.Router)
		if _, there := sessions[s.Lab.Addresses(nodes[0])[0].String()]; err == nil && there {
			err = errors.New("it is there")
		}
		return err
	})
}

// A session needs its password, and a change of one peer's password
// affects no other peer.
func TestPasswordFromASecret(t *testing.T) {
	s := begin(t)
	nodes := s.Lab.Nodes()
	s.onRouter([]string{"neighbor nodes password right"}, []string{"no neighbor nodes password"})
	secrets := s.Kube.CoreV1().Secrets(lodestone.Namespace)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "tor"}, StringData: map[string]string{"password": "wrong"}}
	s.config(routed + "\npeers:" + tor + ", passwordSecretRef: {name: tor}}" + spine + "}\n")
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.learnt(lab.Router2, vip, nodes...)
	s.eventually("an Event names what is missing", func() error {
		text := fmt.Sprint(s.events("default", "Node", nodes[0], "BGPSessionDown"))
		if !strings.Contains(text, "there is no Secret lodestone-system/tor") {
			return errors.New(text)
		}
		return nil
	})
	_, err := secrets.Create(s.ctx, secret, metav1.CreateOptions{})
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, secrets.Delete(s.ctx, "tor", metav1.DeleteOptions{})) })
	s.always(3*time.Second, "a wrong password opens no session", func() error {
		got, err := s.NextHops(lab.Router, vip)
		if err == nil && len(got) > 0 {
			err = fmt.Errorf("the router has %q", got)
		}
		return err
	})
	secret.StringData["password"] = "right"
	_, err = secrets.Update(s.ctx, secret, metav1.UpdateOptions{})
	require.NoError(s, err)
	s.learnt(lab.Router, vip, nodes...)
	s.learnt(lab.Router2, vip, nodes...)
}

// What routers announce is not installed.
func TestRoutesOfRoutersAreNotInstalled(t *testing.T) {
	s := begin(t)
	s.onRouter([]string{"no bgp network import-check", "address-family ipv4 unicast", "network 198.18.99.0/24",
		"neighbor nodes default-originate"},
		[]string{"bgp network import-check", "address-family ipv4 unicast", "no network 198.18.99.0/24", "no neighbor nodes default-originate"})
	s.config(routed + peers)
	s.echo(3)
	s.service("web")
	s.learnt(lab.Router, s.assigned("web"), s.Lab.Nodes()...)
	for _, node := range s.Lab.Nodes() {
		var text []byte
		s.eventually("the speaker has counted the router's routes", func() error { return s.refusedRoutes(node) })
		text, err := s.Lab.Command(s.ctx, node, "ip", "route").Output()
		require.NoError(s, err)
		assert.NotContains(s, string(text), "198.18.99.0")
		assert.NotContains(s, string(text), "proto bgp")
	}
}

// refusedRoutes checks that the node's speaker has refused routes of tor.
func (s *story) refusedRoutes(node string) error {
	pod := s.speakerOf(node)
	count, err := s.Metric(s.ctx, &pod, "lodestone_bgp_dropped_prefixes_total", lodestone.Labels{"peer": "tor"})
	if err == nil && count < 2 {
		err = fmt.Errorf("it refused %v", count)
	}
	return err
}

// A Service can be announced on the segment and to routers.
func TestLayer2AndBGPForOneService(t *testing.T) {
	s := begin(t)
	s.config(usualPools + "advertisements:\n  - name: both\n    layer2: {}\n    bgp: {}\n" + peers)
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.eventually("the client on the segment reaches it", func() error { return s.reachTCP(vip) })
	s.oneAnswerer(vip)
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
	s.afterwards(func() { s.label(s.Lab.Nodes()[0], excludeLabel, "") })
	s.label(s.Lab.Nodes()[0], excludeLabel, "true")
	s.learnt(lab.Router, vip, s.Lab.Nodes()[1:]...)
	s.eventually("the client on the segment reaches it", func() error { return s.reachTCP(vip) })
}

// The API server's absence takes nothing from the routers, and a node that is
// lost meanwhile is forgotten.
func TestRoutersForgetANodeWithoutTheAPIServer(t *testing.T) {
	s := begin(t)
	s.config(routed + quickPeers)
	nodes := s.Lab.Nodes()
	s.echo(3)
	s.service("web")
	vip := s.assigned("web")
	s.learnt(lab.Router, vip, nodes...)
	s.bfdUp(nodes...)
	thaw := s.frozenAPIServer()
	s.afterwards(func() { require.NoError(s, s.Lab.HealNode(nodes[0])) })
	require.NoError(s, s.Lab.NodeLoss(nodes[0]))
	s.learnt(lab.Router, vip, nodes[1:]...)
	require.NoError(s, s.Lab.HealNode(nodes[0]))
	s.learnt(lab.Router, vip, nodes...)
	thaw()
}

// The operator sees every session and route by asking the API server
// alone.
func TestOperatorSeesSessionsAndRoutes(t *testing.T) {
	s := begin(t)
	s.config(routed + quickPeers)
	s.echo(3)
	s.service("web")
	vip, nodes := s.assigned("web"), s.Lab.Nodes()
	s.learnt(lab.Router, vip, nodes...)
	s.bfdUp(nodes...)
	s.eventually("every session is established, and BFD is up", func() error {
		out, code, err := s.CLI(s.ctx, "", "bgp", "peers")
		if err == nil && (code != 0 || strings.Count(out, "established") != 2*len(nodes) || strings.Count(out, "Up") != 2*len(nodes)) {
			err = fmt.Errorf("exit code %d: %s", code, out)
		}
		return err
	})
	s.prints(0, []string{"bgp", "routes", vip}, vip+"/32", "tor", "spine", nodes[2])
	s.prints(0, []string{"explain", "vip", vip}, s.namespace+"/web", nodes[0], "announces it to spine, tor")
	s.prints(0, []string{"explain", "peer", "tor"}, "198.18.0.254", nodes[1])
	s.prints(0, []string{"simulate", "lose", nodes[0]}, vip+"/32", "by BFD after about 300ms")
	s.prints(0, []string{"status"}, "2 BGP peers", "3 of 3 up", "routed")

	_, err := s.Lab.AskRouter(s.ctx, lab.Router, "configure terminal", fmt.Sprintf("router bgp %d", lab.RouterASN),
		"neighbor nodes shutdown message maintenance of the rack")
	require.NoError(s, err)
	s.afterwards(func() {
		_, err := s.Lab.AskRouter(s.ctx, lab.Router, "configure terminal", fmt.Sprintf("router bgp %d", lab.RouterASN),
			"no neighbor nodes shutdown")
		require.NoError(s, err)
	})
	s.eventually("the operator reads why the sessions are gone", func() error {
		out, code, err := s.CLI(s.ctx, "", "status")
		if err == nil && (code != 2 || !strings.Contains(out, "maintenance of the rack")) {
			err = fmt.Errorf("exit code %d: %s", code, out)
		}
		return err
	})
}

// prints waits until a command of the CLI prints that, and exits so: what speakers report comes a moment later.
func (s *story) prints(code int, args []string, want ...string) {
	s.Helper()
	s.eventually(fmt.Sprintf("%q prints %q", args, want), func() error {
		out, got, err := s.CLI(s.ctx, "", args...)
		if err == nil && (got != code || slices.ContainsFunc(want, func(text string) bool { return !strings.Contains(out, text) })) {
			err = fmt.Errorf("exit code %d: %s", got, out)
		}
		return err
	})
}
