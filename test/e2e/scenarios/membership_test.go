package scenarios

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// Another membership key is written into the Secret. One kubelet delivers it late. Meanwhile
// the speaker that owns the VIP is replaced by one that has only the new key, which must not
// act alone. No datagram is lost, and one node answers at every moment.
func TestMembershipKeyIsReplaced(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.steady(vip)
	owner := s.owner(vip)
	others := s.nodesBut(owner)
	first, late := others[0], others[1]
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, 3, late)) // Kubernetes may miss it meanwhile, and its pods
	s.steady(vip)
	before := s.keysOf(owner)
	kubelet, err := s.Lab.Process("kubelet-" + late)
	require.NoError(s, err)
	s.afterwards(func() { require.NoError(s, kubelet.Thaw()) })

	s.losesNothing([]string{vip}, func() {
		require.NoError(s, kubelet.Freeze())
		s.rotateKey()
		s.hurry(first)
		s.eventually("the first speaker understands both keys", func() error {
			if !strings.HasPrefix(s.keysOf(first), before+",") {
				return fmt.Errorf("it has %s", s.keysOf(first))
			}
			return nil
		})
		next := strings.TrimPrefix(s.keysOf(first), before+",")
		replaced := s.speakerOf(owner)
		require.NoError(s, s.Terminate(s.ctx, &replaced))
		s.eventually("another speaker has the new key alone", func() error { return s.has(owner, next) })
		s.mostly(6*time.Second, "it does not go on alone", func() error {
			if err := s.owned(vip, owner, false); err != nil {
				return err
			}
			return s.OneAnswerer(s.ctx, vip)
		})
		require.Equal(s, before, s.keysOf(late))
		require.Equal(s, before+","+next, s.keysOf(first))

		require.NoError(s, kubelet.Thaw())
		s.hurry(late)
		for _, node := range s.Lab.Nodes() {
			s.eventually("the speaker of "+node+" has the new key alone", func() error { return s.has(node, next) })
		}
		s.eventually("the VIP is back", func() error { return s.owned(vip, owner, true) })
		out, _, err := s.CLI(s.ctx, "", "status")
		require.NoError(s, err)
		require.Contains(s, out, "membership key "+next)
		require.NoError(s, s.Upgrade(s.ctx, s.Lab.Chart()))
		s.always(3*time.Second, "an upgrade keeps the key", func() error { return s.has(first, next) })
	})
	s.oneAnswerer(vip)
}

// rotateKey runs the command of the guide.
func (s *story) rotateKey() {
	s.Helper()
	text, err := os.ReadFile(filepath.Join(s.Lab.Root, "docs/guides/maintenance.md"))
	require.NoError(s, err)
	_, section, _ := strings.Cut(string(text), "\n## Rotate the membership key\n")
	_, section, _ = strings.Cut(section, "\n```sh\n")
	command, _, found := strings.Cut(section, "\n```\n")
	require.True(s, found)
	out, err := s.Lab.Command(s.ctx, lab.ControlPlane, "bash", "-euo", "pipefail", "-c", command).CombinedOutput()
	require.NoError(s, err, "%s", out)
}

// hurry makes the kubelet look at the node's speaker at once.
func (s *story) hurry(node string) {
	s.Helper()
	_, err := s.Kube.CoreV1().Pods(lodestone.Namespace).Patch(s.ctx, s.speakerOf(node).Name, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata": {"annotations": {"example.com/hurry": %q}}}`, time.Now()), metav1.PatchOptions{})
	require.NoError(s, err)
}

// keysOf returns the membership keys that the node's speaker reports.
func (s *story) keysOf(node string) string {
	s.Helper()
	lease, err := s.Kube.CoordinationV1().Leases(lodestone.Namespace).Get(s.ctx, "lodestone-speaker-"+node, metav1.GetOptions{})
	require.NoError(s, err)
	var report struct{ MembershipKeys []string }
	require.NoError(s, json.Unmarshal([]byte(lease.Annotations["lodestone.io/report"]), &report))
	return strings.Join(report.MembershipKeys, ",")
}

func (s *story) has(node, keys string) error {
	if got := s.keysOf(node); got != keys {
		return fmt.Errorf("it has %s", got)
	}
	return nil
}

// A firewall around one node lets all packets out, and of the membership's only answers to the
// node's own connections in. The node and the others take each other for lost, and nothing else
// happens: no VIP flaps, and none has two owners.
func TestFirewallAroundOneNodeMovesNoVIPTwice(t *testing.T) {
	s := begin(t)
	s.echo(3)
	var vips []string
	for i := range 6 {
		name := fmt.Sprint("web-", i)
		s.service(name)
		vips = append(vips, s.assigned(name))
	}
	for _, vip := range vips {
		s.oneAnswerer(vip)
	}
	node := s.Lab.Nodes()[1]
	rule := fmt.Sprintf("add table ip walled; add chain ip walled input { type filter hook input priority -10; }; "+
		"add rule ip walled input tcp dport %[1]d ct state new drop; add rule ip walled input udp dport %[1]d drop", lab.GossipPort)
	s.afterwards(func() { s.on(s.ctx, node, "nft", "add table ip walled; delete table ip walled") })
	s.on(s.ctx, node, "nft", rule)
	s.finds("membership-port", node, "--active")
	for _, vip := range vips {
		s.oneAnswerer(vip)
	}
	moves := func() (all float64) {
		for _, n := range s.Lab.Nodes() {
			pod := s.speakerOf(n)
			for _, transition := range []string{"gained", "lost"} {
				count, err := s.Metric(s.ctx, &pod, "lodestone_speaker_ownership_transitions_total", lodestone.Labels{"transition": transition})
				require.NoError(s, err)
				all += count
			}
		}
		return all
	}
	before := moves()
	s.mostly(5*time.Second, "each VIP has one owner", func() error {
		for _, vip := range vips {
			if err := s.OneAnswerer(s.ctx, vip); err != nil {
				return err
			}
		}
		return nil
	})
	require.Less(t, moves(), before+float64(2*len(vips)), "VIPs came and went") // in five seconds a flapping one does so often
	s.on(s.ctx, node, "nft", "delete table ip walled")
	s.eventually("all is well again", func() error {
		if found := s.faults("--active"); len(found) > 0 {
			return fmt.Errorf("%+v", found)
		}
		return nil
	})
}

// The owner's link carries what it sends, and nothing to it, as a broken fibre may. The owner
// takes all others for lost and announces their VIPs; but clients soon use the nodes that they
// can reach.
func TestLinkThatCarriesOneWayOnly(t *testing.T) {
	s := begin(t)
	s.echo(3)
	var vips []string
	for _, name := range []string{"a", "b", "c"} {
		s.service(name, port("tcp", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
		vips = append(vips, s.assigned(name))
	}
	deaf := s.owner(vips[0])
	s.echoAway(3, vips[0])
	others := func() error {
		var all error
		for _, vip := range vips {
			all = errors.Join(all, s.reachTCP(vip), s.owned(vip, deaf, false))
		}
		return all
	}
	s.afterwards(func() { require.NoError(t, s.Lab.Heal()) })
	require.NoError(t, s.Lab.Deafen(deaf))
	s.eventually("the others serve all VIPs", others)
	time.Sleep(5 * time.Second) // what the others contradict comes once more
	s.mostly(5*time.Second, "clients are left to them", others)
	require.NoError(t, s.Lab.Heal())
	s.ownedBy(vips[0], deaf)
	for _, vip := range vips {
		s.oneAnswerer(vip)
	}
}

// One node is cut off from the API server, while it serves as before. It does not know of new
// Services: others own all VIPs, old ones and new ones, and no client notices.
func TestNodeCutOffFromTheAPIServer(t *testing.T) {
	s := begin(t)
	old := s.serveUDP("old")
	s.echoAway(3, old) // Kubernetes misses the node, and its pods
	node := s.owner(old)
	server := s.Lab.Addresses(lab.ControlPlane)[0]
	s.afterwards(func() { // a new speaker sees at once
		s.on(s.ctx, node, "nft", "add table ip cut; delete table ip cut")
		pod := s.speakerOf(node)
		require.NoError(s, s.Terminate(s.ctx, &pod))
		s.ownedBy(old, node)
	})
	s.losesNothing([]string{old}, func() {
		s.on(s.ctx, node, "nft", fmt.Sprintf("add table ip cut; add chain ip cut output { type filter hook output priority 0; }; "+
			"add rule ip cut output ip daddr %s tcp dport 6443 drop", server))
		s.eventually("another node owns the VIP", func() error { return s.owned(old, node, false) })
	})
	pod := s.speakerOf(node)
	s.eventually("its speaker is not ready", func() error {
		if got := s.status(lodestone.URL(&pod, "readyz"), ""); got != http.StatusServiceUnavailable {
			return fmt.Errorf("it answers %d", got)
		}
		return s.owned(old, node, false)
	})
	for i := range 6 { // not all on the others
		name := fmt.Sprint("new-", i)
		s.service(name)
		vip := s.assigned(name)
		s.eventually("a client reaches "+name, func() error { return s.reachTCP(vip) })
		s.oneAnswerer(vip)
		s.eventually("another node owns it", func() error { return s.owned(vip, node, false) })
	}
	s.isSilent("old", node, "SpeakerNotReady") // as the operator sees
}
