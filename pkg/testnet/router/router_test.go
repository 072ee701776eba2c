package router

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

func TestFRR(t *testing.T) {
	t.Parallel()
	f := NewFRR(t, testnet.NewHost(t, "frr"), "router bgp 64513\n bgp router-id 198.18.0.1\n", "zebra", "bfdd", "bgpd")
	var global struct{ RouterID string }
	f.Show("show bgp vrf default json", &global)
	require.Equal(t, "198.18.0.1", global.RouterID)

	f.Configure("router bgp 64513", "bgp router-id 198.18.0.9")
	f.Show("show bgp vrf default json", &global)
	require.Equal(t, "198.18.0.9", global.RouterID)

	_, err := f.ask("bgpd", "configure terminal", "router bgp nonsense", "bgp router-id 198.18.0.7")
	require.ErrorContains(t, err, `"router bgp nonsense"`)

	f.Kill()
	f.Start()
	f.Show("show bgp vrf default json", &global)
	require.Equal(t, "198.18.0.1", global.RouterID, "the configuration of before is in force again")
	require.Contains(t, f.AskDaemon("bfdd", "show bfd peers json"), "[")
}

func TestBIRD(t *testing.T) {
	t.Parallel()
	b := NewBIRD(t, testnet.NewHost(t, "bird"), "router id 198.18.0.1;\nprotocol device {}\n")
	require.Contains(t, b.Ask("show status"), "Router ID is 198.18.0.1")
	b.Kill()
	b.Start()
	require.Contains(t, b.Ask("show protocols"), "device1")
}
