package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// The speakers do not hear each other, while the segment works. They
// settle on the wire which one answers.
func TestGossipBlockedOneAnswers(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.oneAnswerer(vip)
	require.NoError(t, s.Lab.BlockGossip())
	t.Cleanup(func() { require.NoError(t, s.Lab.Heal()) })
	time.Sleep(4 * time.Second) // the fault has to be noticed before it can be settled
	s.oneAnswerer(vip)
	s.mostly(5*time.Second, "one answers", func() error { return s.OneAnswerer(s.ctx, vip) })
	require.NoError(t, s.reachUDP(vip))
	require.NoError(t, s.Lab.Heal())
	s.oneAnswerer(vip)
}

// Each side of a partition has one owner: for another node on its side the owner stays, and
// for the client on the other side the third node takes over. After the partition there is one
// owner.
func TestPartitionHasAnOwnerOnEachSideAndOneAfterwards(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	owner := s.owner(vip)
	others := s.nodesBut(owner)
	beside, across := others[0], others[1]
	require.NoError(t, s.Lab.Partition([]string{owner, beside}, []string{across, lab.Client}))
	t.Cleanup(func() { require.NoError(t, s.Lab.Heal()) })
	sides := func() error {
		here, errHere := s.OwnerSeenBy(s.ctx, beside, vip)
		there, errThere := s.Owner(s.ctx, vip)
		if err := errors.Join(errHere, errThere); err != nil {
			return err
		}
		if here != owner || there != across {
			return fmt.Errorf("%s sees %s, the client sees %s", beside, here, there)
		}
		return nil
	}
	s.eventually("each side has its owner", sides)
	s.mostly(2*time.Second, "each side has its owner", sides)
	require.NoError(t, s.Lab.Heal())
	s.oneAnswerer(vip)
	s.mostly(3*time.Second, "one answers", func() error { return s.OneAnswerer(s.ctx, vip) })
}

// The addresses that the client takes are in no other scenario's pool: the
// controller hands them out to nobody for a day.

// A foreign host has the address that a Service is given. The
// Service moves on before anything was announced.
func TestServiceIsGivenAnotherAddressThanThatOfAForeignHost(t *testing.T) {
	s := begin(t)
	const taken, free = "198.18.0.251", "198.18.0.252"
	mac := s.clientTakes(taken)
	s.config(onePool("taken", taken+"-"+free))
	s.echo(2)
	s.service("web")
	s.holds("web", free)
	require.Contains(t, s.event(s.namespace, "Service", "web", "AddressConflict"), mac)
	require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_pool_addresses", lodestone.Labels{"pool": "taken", "state": "conflicted"}, 1))
	s.eventually("the Service answers", func() error { return s.reachTCP(free) })
	s.service("next")
	require.Contains(t, s.refused("next", "PoolExhausted"), "1 in use by other hosts")
}

// With a Service that wants no other address: it reports the conflict, and
// is served when the host is gone.
func TestServiceThatWaitsForTheAddressOfAForeignHost(t *testing.T) {
	s := begin(t)
	const taken = "198.18.0.199"
	mac := s.clientTakes(taken)
	s.config(onePool("taken", taken))
	s.echo(2)
	s.service("web", annotated(addrAnnotation, taken))
	s.holds("web", taken)
	require.Contains(t, s.refused("web", "AddressConflict"), mac)
	out, code, err := s.CLI(s.ctx, "", "explain", "service", s.namespace+"/web")
	require.NoError(t, err)
	require.Equal(t, 2, code, out)
	require.Contains(t, out, mac)

	s.onClient("ip", "address", "delete", taken+"/32", "dev", "eth0")
	s.eventually("the address is announced, and the Service reports it", func() error {
		if text := conditionText(s.get("web")); !strings.HasPrefix(text, "True Allocated") {
			return errors.New(text)
		}
		return s.OneAnswerer(s.ctx, taken)
	})
	require.NoError(t, s.reachTCP(taken))
}

// A foreign host takes a VIP later. No VIP moves.
func TestForeignHostTakesAVIPLater(t *testing.T) {
	s := begin(t)
	const vip = "198.18.0.198"
	s.config(onePool("later", vip))
	s.echo(2)
	s.service("web", annotated(addrAnnotation, vip))
	s.holds("web", vip)
	s.eventually("the Service answers", func() error { return s.reachTCP(vip) })
	s.clientTakes(vip)
	// Without an answer, of which there is none, arping ends with status 1.
	_ = s.Lab.Command(s.ctx, lab.Client, "arping", "-c", "3", "-i", "eth0", "-S", vip, "-P", "-U", vip).Run()
	s.eventually("the Service reports the conflict", func() error {
		if text := conditionText(s.get("web")); !strings.HasPrefix(text, "True AddressConflict") {
			return errors.New(text)
		}
		return nil
	})
	s.finds("conflict", "")
	s.always(3*time.Second, "the Service keeps its address", func() error {
		if got := addresses(s.get("web")); !slices.Equal(got, []string{vip}) {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}

// clientTakes makes the client a host with the address, and returns its
// hardware address.
func (s *story) clientTakes(address string) (mac string) {
	s.Helper()
	s.onClient("ip", "address", "add", address+"/32", "dev", "eth0")
	s.Cleanup(func() {
		// a story may have done so
		_ = s.Lab.Command(context.WithoutCancel(s.ctx), lab.Client, "ip", "address", "delete", address+"/32", "dev", "eth0").Run()
	})
	link := strings.Fields(s.onClient("ip", "-brief", "link", "show", "eth0")) // /sys is the machine's
	require.GreaterOrEqual(s, len(link), 3, "%q", link)
	return link[2]
}
