package scenarios

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// Scenario 63: the speakers do not hear each other, the segment works. They
// settle on the wire who answers.
func TestGossipBlockedOneAnswers(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.oneAnswerer(vip)
	require.NoError(t, s.Lab.BlockGossip())
	t.Cleanup(func() { require.NoError(t, s.Lab.Heal()) })
	time.Sleep(2 * time.Second) // the fault has to be noticed before it can be settled
	s.oneAnswerer(vip)
	s.always(5*time.Second, "one answers", func() error { return s.OneAnswerer(s.ctx, vip) })
	require.NoError(t, s.reachUDP(vip))
	require.NoError(t, s.Lab.Heal())
	s.oneAnswerer(vip)
}

// Scenario 62: each side of a partition has an owner, and after healing there
// is one.
func TestPartitionHasAnOwnerOnEachSideAndOneAfterwards(t *testing.T) {
	s := begin(t)
	s.echo(3)
	s.service("web", port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	owner := s.owner(vip)
	others := slices.DeleteFunc(s.Lab.Nodes(), func(node string) bool { return node == owner })
	require.NoError(t, s.Lab.Partition([]string{owner}, append(others, lab.Client)))
	t.Cleanup(func() { require.NoError(t, s.Lab.Heal()) })
	s.eventually("the client's side has an owner", func() error {
		return s.OneAnswerer(s.ctx, vip)
	})
	require.NoError(t, s.Lab.Heal())
	s.oneAnswerer(vip)
	s.always(3*time.Second, "one answers", func() error { return s.OneAnswerer(s.ctx, vip) })
}

// Scenario 66: a foreign host has the address that a Service is given.
func TestAddressOfAForeignHostIsNotAnnounced(t *testing.T) {
	s := begin(t)
	const taken = "198.18.0.233"
	s.onClient("ip", "address", "add", taken+"/32", "dev", "eth0")
	s.Cleanup(func() { s.onClient("ip", "address", "delete", taken+"/32", "dev", "eth0") })
	s.config(onePool("taken", taken))
	s.echo(2)
	s.service("web")
	s.holds("web", taken)
	s.eventually("a speaker reports the conflict", func() error {
		leases, err := s.Kube.CoordinationV1().Leases(lodestone.Namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, l := range leases.Items {
			if text := l.Annotations["lodestone.io/conflicts"]; strings.Contains(text, taken) && strings.Contains(text, "withheld") {
				return nil
			}
		}
		return fmt.Errorf("no Lease tells")
	})
}
