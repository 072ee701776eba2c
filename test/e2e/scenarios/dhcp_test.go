package scenarios

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// officePool is a configuration whose only pool has the addresses that the
// DHCP server on the nodes' segment leases.
const officePool = "\npools:\n  - {name: office, dhcp: {interface: eth0}}\n"

// leases checks what the DHCP server has leased: to which host names.
func leases(server *lodestone.DHCPServer, want map[string]string) error {
	got, err := server.Leases()
	if err == nil && !maps.Equal(got, want) {
		err = fmt.Errorf("it has leased %v, want %v", got, want)
	}
	return err
}

// A pool's addresses are those of a DHCP server: a Service gets one and is
// reached by it, keeps it over the end of the controllers, and gives it back
// when it goes. A Service that gets none reports the server's answer.
func poolLeasesItsAddressesFromADHCPServer(t *testing.T) {
	s := begin(t)
	server, err := s.RunDHCPServer(s.ctx, "198.18.0.240", "198.18.0.243")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	s.config(officePool)
	s.echo(2)

	allLeased := func() {
		t.Helper()
		require.NoError(t, s.LeaderMetricBecomes(s.ctx, "lodestone_leases", lodestone.Labels{"pool": "office", "state": "leased"}, 4))
	}

	leased := map[string]string{}
	for _, name := range []string{"a", "b", "c", "d"} {
		s.service(name)
		vip := s.assigned(name)
		require.NotContains(t, leased, vip)
		leased[vip] = name
		s.eventually("VIP "+vip+" answers by TCP", func() error { return s.reachTCP(vip) })
		s.oneAnswerer(vip)
	}
	require.NoError(t, leases(server, leased))

	s.service("e")
	require.Contains(t, s.refused("e", "LeasePending"),
		`pool "office" has no lease for the Service yet: no DHCP server on interface "eth0" has offered an address since`)
	allLeased()

	s.restartController()
	allLeased()
	s.killController()
	allLeased()
	s.always(2*time.Second, "everybody keeps the address and answers", func() error {
		for vip, name := range leased {
			svc := s.get(name)
			if got := addresses(svc); len(got) != 1 || got[0] != vip || !strings.Contains(conditionText(svc), "True Allocated") {
				return fmt.Errorf("Service %s has %q, had %s: %s", name, got, vip, conditionText(svc))
			}
			if err := s.reachTCP(vip); err != nil {
				return err
			}
		}
		return leases(server, leased)
	})

	vip := s.assigned("a")
	s.delete("a")
	s.deleted("a")
	s.holds("e", vip)
	leased[vip] = "e"
	require.NoError(t, leases(server, leased))
	for _, name := range leased {
		s.delete(name)
	}
	s.eventually("the server has all addresses back", func() error { return leases(server, nil) })
}
