package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// heldPeers closes down once a session is held down.
type heldPeers struct {
	*bgp.Announcer
	down chan struct{}
	once sync.Once
}

func (h *heldPeers) SetDown(ctx context.Context, peer string, down bool, why string) error {
	err := h.Announcer.SetDown(ctx, peer, down, why)
	if down && err == nil {
		h.once.Do(func() { close(h.down) })
	}
	return err
}

// The router of an unnumbered peer is found before there may be a session: with
// strict BFD comes first. And BFD goes on while the session begins anew.
func TestStrictBFDWithUnnumberedPeer(t *testing.T) {
	t.Parallel()
	segment := testnet.NewSegment(t, 2)
	node, tor := segment.Hosts[0], segment.Hosts[1]
	var local []string
	require.Eventually(t, func() bool {
		local = strings.Fields(node.Run("ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link"))
		return len(local) > 3
	}, 30*time.Second, 10*time.Millisecond, "a link-local address")
	f := router.NewFRR(t, tor, fmt.Sprintf(`
interface eth0
 ipv6 nd ra-interval 1
 no ipv6 nd suppress-ra
bfd
 peer %s interface eth0
  transmit-interval 100
  receive-interval 100
  detect-multiplier 30
router bgp 64513
 bgp router-id 198.18.0.2
 no bgp ebgp-requires-policy
 neighbor eth0 interface remote-as external
 neighbor eth0 timers connect 1
`, netip.MustParsePrefix(local[3]).Addr()), "zebra", "bfdd", "bgpd")
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b := bfd.New(bfd.Options{Log: log, Registry: prometheus.NewRegistry()})
	a := bgp.New(bgp.Options{Log: log, Registry: prometheus.NewRegistry(), NextHops: netstate.NextHops, Inside: node.Do})
	held := &heldPeers{Announcer: a, down: make(chan struct{})}
	d := NewDetector(b, held, upToDate, log)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 3)
	go func() { ended <- node.Do(func() error { return b.Run(ctx) }) }()
	go func() { ended <- a.Run(ctx) }()
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		for range cap(ended) {
			require.NoError(t, <-ended)
		}
	})
	timers := &config.BFD{TransmitInterval: 100 * time.Millisecond, ReceiveInterval: 100 * time.Millisecond,
		DetectMultiplier: 30, Strict: true}
	want := plan.BGP{Sessions: map[string]plan.Session{"tor": {
		Peer: &config.Peer{Name: "tor", Interface: "eth0", Port: 179, PeerASN: config.ASN{External: true}, HoldTime: 90 * time.Second,
			ConnectRetry: time.Second, BFD: timers},
		LocalASN: 64512, RouterID: netip.MustParseAddr("198.18.0.1"),
	}}}
	d.Set(t.Context(), want)
	await := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.After(30 * time.Second); ; {
			bgpChanged, bfdChanged := a.Changed(), b.Changed()
			if ok() {
				return
			}
			select {
			case <-bgpChanged:
			case <-bfdChanged:
			case <-deadline:
				t.Fatalf("%s: %+v %+v", what, a.Peers(), b.States())
			}
		}
	}
	<-held.down // before it is tried
	require.NoError(t, a.Set(t.Context(), want))
	await("session", func() bool { p := a.Peers(); return len(p) == 1 && p[0].State == bgp.Established })
	before, session := b.States()["tor"], a.Peers()[0]
	require.True(t, before.Up())

	f.Ask("clear bgp *")
	await("new session", func() bool {
		p := a.Peers()[0]
		return p.State == bgp.Established && p.Since.After(session.Since)
	})
	require.Equal(t, before.Discriminator, b.States()["tor"].Discriminator, "BFD has not begun anew")
}
