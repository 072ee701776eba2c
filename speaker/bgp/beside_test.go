package bgp

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// pluginBIRD is how Calico has BIRD announce a node's pods to the router at the top of the rack.
const pluginBIRD = `
router id 198.18.0.1;
protocol device {}
protocol static pods { ipv4; route 10.244.7.0/26 blackhole; }
protocol bgp tor {
	local 198.18.0.1 as 64512;
	neighbor 198.18.0.2 as 64513;
	connect retry time 1;
	ipv4 { import none; export all; next hop self; };
}
`

// The network plugin has a session with the router from the node's address, and listens on port 179. The
// router takes no second session from that address, and the plugin's stays. From an address of its own the
// speaker has one.
func TestBesideTheBGPOfTheNetworkPlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	pods, own := netip.MustParsePrefix("10.244.7.0/26"), netip.MustParseAddr("198.18.0.101")
	f := w.frr(w.tor, "198.18.0.1", "neighbor 198.18.0.101 remote-as 64512\n neighbor 198.18.0.101 timers connect 1")
	router.NewBIRD(t, w.node, pluginBIRD)
	w.has(f, pods)
	w.peer("tor", nil)
	w.route(vip4, "tor", plan.Attributes{})
	w.start()
	w.until("a refusal", func() bool { return w.status("tor").LastError != "" }, func() any { return w.status("tor") })
	time.Sleep(3 * time.Second) // it tries again each second
	require.Nil(t, path(f, vip4))

	w.node.Run("ip", "addr", "add", own.String()+"/24", "dev", "eth0")
	s := w.want.Sessions["tor"]
	s.Source = own
	w.want.Sessions["tor"] = s
	w.set()
	w.up("tor")
	require.Equal(t, []string{"198.18.0.101"}, w.has(f, vip4).nextHop("ipv4"))
	require.Equal(t, []string{"198.18.0.1"}, path(f, pods).nextHop("ipv4"))
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped, "the plugin's session")

	w.peer("tor", func(p *config.Peer) { p.Passive = true })
	s.Peer = w.want.Sessions["tor"].Peer
	w.want.Sessions["tor"] = s
	w.set()
	w.down("tor", "listen on 198.18.0.101:179: address already in use")
	require.Zero(t, neighbor(f, "198.18.0.1").ConnectionsDropped, "the plugin's session")
}
