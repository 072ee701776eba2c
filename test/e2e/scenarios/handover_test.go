package scenarios

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

const excludeLabel = "node.kubernetes.io/exclude-from-external-load-balancers"

// Moves that an operator causes, there and back.
func TestPlannedMovesLoseNothing(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.steady(vip)
	owner := s.owner(vip)
	for name, m := range map[string]struct{ away, back func(s *story, node string) }{
		"label": {
			func(s *story, node string) { s.label(node, excludeLabel, "true") },
			func(s *story, node string) { s.label(node, excludeLabel, "") },
		},
		"taint": {
			func(s *story, node string) { s.taint(node, corev1.TaintNodeOutOfService, corev1.TaintEffectNoSchedule) },
			func(s *story, node string) { s.taint(node, corev1.TaintNodeOutOfService, "") },
		},
		"cordon": {
			func(s *story, node string) {
				s.config(usualPools + "\nexcludeTaints: [node.kubernetes.io/unschedulable]\n")
				_, err := s.Lab.Kubectl(s.ctx, "cordon", node)
				require.NoError(s, err)
			},
			func(s *story, node string) { s.uncordon(node) },
		},
		"configuration": {
			func(s *story, node string) {
				s.config(usualPools + fmt.Sprintf("\nadvertisements:\n  - name: elsewhere\n    layer2:\n      nodeSelector: {matchExpressions: "+
					"[{key: %s, operator: NotIn, values: [%s]}]}\n",
					corev1.LabelHostname, node))
			},
			func(s *story, _ string) { s.config(usualPools) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := s.part(t)
			s.afterwards(func() { m.back(s, owner) })
			s.losesNothing([]string{vip}, func() {
				m.away(s, owner)
				s.eventually("another node owns the VIP", func() error { return s.owned(vip, owner, false) })
				require.NoError(t, s.reachTCP(vip))
				s.oneAnswerer(vip)
				m.back(s, owner)
				s.eventually("the VIP is back", func() error { return s.owned(vip, owner, true) })
			})
			require.NoError(t, s.reachTCP(vip))
			s.oneAnswerer(vip)
		})
	}
}

// A node is drained whose pods serve while they terminate. A VIP that
// only nodes with endpoints may own moves away; others stay. All datagrams get to a pod.
func TestDrainLosesNothing(t *testing.T) {
	s := begin(t)
	s.echo(3)
	for _, args := range [][]string{
		{"patch", "deployment/" + lodestone.EchoName, "--patch", `{"spec": {"template": {"spec": {
			"terminationGracePeriodSeconds": 20, "containers": [{"name": "echo", "args": ["-on-term=drain", "-grace=12s"]}]}}}}`},
		{"rollout", "status", "deployment/" + lodestone.EchoName},
	} {
		_, err := s.Lab.Kubectl(s.ctx, append([]string{"--namespace", s.namespace}, args...)...)
		require.NoError(t, err)
	}
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	s.service("local", port("udp", corev1.ProtocolUDP, 80), localPolicy)
	web, here := s.assigned("web"), s.assigned("local")
	s.steady(web)
	s.steady(here)
	drained, other := s.owner(here), s.owner(web)
	s.afterwards(func() {
		_, err := s.Lab.Kubectl(s.ctx, "uncordon", drained)
		require.NoError(s, err)
	})
	client := s.FromClient()
	client.Straight = true
	s.losesNothingFrom(client, []string{web, here}, func() {
		_, err := s.Lab.Kubectl(s.ctx, "drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=1m")
		require.NoError(t, err)
	})
	s.eventually("one VIP has moved, and the other one has not", func() error {
		return errors.Join(s.owned(here, drained, false), s.owned(web, other, true))
	})
}

// Maintenance of other nodes does not affect a connection. Maintenance of the
// owner ends it, as no other node knows it: the client gets a reset at once, and
// the next connection works.
func TestLongLivedConnectionThroughMaintenance(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.steady(vip)
	owner := s.owner(vip)
	flow := s.openStream(vip)
	for _, node := range s.Lab.Nodes() {
		if node == owner {
			continue
		}
		s.afterwards(func() { s.label(node, excludeLabel, "") })
		s.label(node, excludeLabel, "true")
		require.NoError(t, flow.lines(100))
		s.label(node, excludeLabel, "")
		require.NoError(t, flow.lines(100))
	}
	s.afterwards(func() { s.label(owner, excludeLabel, "") })
	s.label(owner, excludeLabel, "true")
	s.eventually("another node owns the VIP", func() error { return s.owned(vip, owner, false) })
	err := flow.lines(1000) // ten seconds of them: none of them comes late, whether the flow ends or not
	require.True(t, err == nil || ended(err), "the client was left waiting: %v", err)
	t.Logf("the connection through the old owner ended by: %v", err)
	require.NoError(t, s.openStream(vip).lines(100))
}

// afterwards calls undo when the test ends.
func (s *story) afterwards(undo func()) {
	s.Cleanup(func() {
		s.ctx = context.WithoutCancel(s.ctx)
		undo()
	})
}

// A node whose link is back waits until it has met the others: it takes its VIP
// back from its deputy by a planned move.
func TestNodeWhoseLinkIsBackIsNoSecondOwner(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.echoAway(3, vip)
	owner := s.owner(vip)
	s.afterwards(func() { require.NoError(s, s.Lab.HealNode(owner)) })
	require.NoError(t, s.Lab.NodeLoss(owner))
	s.eventually("another node owns the VIP", func() error { return s.owned(vip, owner, false) })
	s.always(5*time.Second, "its deputy serves", func() error { return s.reachUDP(vip) })
	require.NoError(t, s.Lab.HealNode(owner))
	var first, last time.Time // of the requests with two answers in a row
	s.eventually("the VIP is back", func() error {
		asked := time.Now()
		answers, err := s.Ask(s.ctx, vip, 1)
		slices.Sort(answers)
		if err == nil && len(slices.Compact(answers)) > 1 {
			if last = asked; first.IsZero() {
				first = asked
			}
		} else if last.Sub(first) < 3*time.Second {
			first, last = time.Time{}, time.Time{}
		}
		return errors.Join(err, s.owned(vip, owner, true))
	})
	// The deputy answers until it hears the owner, and that for 6 s at most.
	require.Less(t, last.Sub(first), 3*time.Second, "two nodes answered from %s to %s", first, last)
	s.oneAnswerer(vip)
}

// losesNothing checks that of the datagrams to each VIP, one every 5 ms, none
// is lost while move happens.
func (s *story) losesNothing(vips []string, move func()) {
	s.Helper()
	s.losesNothingFrom(s.FromClient(), vips, move)
}

func (s *story) losesNothingFrom(where probe.Options, vips []string, move func()) {
	s.Helper()
	where.Timeout = 5 * time.Second // a pod that gets no processor time is late, and loses nothing
	var targets []netip.AddrPort
	for _, vip := range vips {
		targets = append(targets, target(vip))
	}
	records, err := lodestone.During(s.ctx, where, targets, func() error { move(); return nil })
	require.NoError(s, err)
	for at, record := range records {
		assert.Zero(s, record.Lost(), "datagrams to %s: %s; %s", at, record.Losses(), record.Outage())
	}
}

// owned checks that the node owns the VIP, or that another one does.
func (s *story) owned(vip, node string, want bool) error {
	owner, err := s.Owner(s.ctx, vip)
	if err == nil && (owner == node) != want {
		err = fmt.Errorf("%s owns %s", owner, vip)
	}
	return err
}

// taint gives the node the taint; without effect, it takes it away.
func (s *story) taint(node, key string, effect corev1.TaintEffect) {
	s.Helper()
	s.eventually("the node takes a taint", func() error {
		nodes := s.Kube.CoreV1().Nodes()
		n, err := nodes.Get(s.ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var taints []corev1.Taint
		for _, t := range n.Spec.Taints {
			if t.Key != key {
				taints = append(taints, t)
			}
		}
		if effect != "" {
			taints = append(taints, corev1.Taint{Key: key, Effect: effect})
		}
		n.Spec.Taints = taints
		_, err = nodes.Update(s.ctx, n, metav1.UpdateOptions{})
		return err
	})
}

// stream is a connection on which a pod writes a line every 10 ms.
type stream struct {
	conn   net.Conn
	reader *bufio.Reader
}

// openStream connects the client to the VIP's port 80.
func (s *story) openStream(vip string) *stream {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, 30*time.Second)
	defer cancel()
	conn, err := netns.Dialer(s.Lab.Namespace(lab.Client))(ctx, "tcp", target(vip).String())
	require.NoError(s, err)
	s.Cleanup(func() { conn.Close() })
	_, err = fmt.Fprintf(conn, "GET /stream HTTP/1.1\r\nHost: %s\r\n\r\n", vip)
	require.NoError(s, err)
	return &stream{conn, bufio.NewReader(conn)}
}

// ended reports whether the error is that the other side ended the connection.
func ended(err error) bool {
	return errors.Is(err, unix.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
}

// lines reads that many lines. A pod that gets no processor time is late, but not for half a minute.
func (f *stream) lines(count int) error {
	for range count {
		if err := f.conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			return err
		}
		if _, err := f.reader.ReadString('\n'); err != nil {
			return err
		}
	}
	return nil
}
