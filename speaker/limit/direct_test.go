package limit

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Three nodes keep the connections to a VIP, which one of them owns. Together they keep to the
// limit: what the owner hands to the others before it comes to its own limit, they count.
func TestLimitIsShared(t *testing.T) {
	t.Parallel()
	const rate, attempts = 90, 600
	segment := testnet.NewSegment(t, 4)
	client, hosts := segment.Hosts[3], segment.Hosts[:3]
	w := &world{t: t, client: client}
	snapshot := plan.Snapshot{
		Config: &config.Config{Advertisements: []config.Advertisement{{Name: "all", Layer2: &config.Layer2{Direct: true}}}},
		Nodes:  map[string]plan.Node{}, Speakers: map[string]bool{},
		Services: []plan.Service{{Name: "default/web", VIPs: []netip.Addr{vip4}, Serving: true, Ports: web,
			Limit: plan.Limit{PerSecond: rate, Ports: web}}},
	}
	for i := range hosts {
		name := fmt.Sprint("n", i+1)
		snapshot.Speakers[name] = true
		snapshot.Nodes[name] = plan.Node{Network: report.Network{Forwards: true},
			Addresses: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("198.18.0.%d", i+1))}}
	}
	owner := plan.Owners(snapshot)[vip4]
	client.Run("ip", "route", "add", vip4.String(), "dev", "eth0")
	for i, host := range hosts {
		name := fmt.Sprint("n", i+1)
		// The node itself serves the VIP, and does not answer for it.
		host.Run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
		host.Run("ip", "addr", "add", vip4.String(), "dev", "lo")
		require.NoError(t, host.Do(func() error {
			l, err := net.Listen("tcp", ":80")
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			if link, err := net.InterfaceByName("eth0"); err == nil && name == owner {
				client.Run("ip", "neigh", "replace", vip4.String(), "lladdr", link.HardwareAddr.String(), "dev", "eth0")
			}
			return err
		}))
		made, log := plan.Make(name, snapshot), slog.New(slog.DiscardHandler)
		limiter := New(Options{Log: log, Registry: prometheus.NewRegistry()})
		director := direct.New(direct.Options{Log: log, Node: name, Gateways: func() []netip.Addr { return nil }})
		limiter.Set(made.Limits)
		director.Set(*made.Forwarding)
		w.run(func(ctx context.Context) error { return host.Do(func() error { return limiter.Run(ctx) }) })
		w.run(func(ctx context.Context) error { return host.Do(func() error { return director.Run(ctx) }) })
		w.until(func() bool { return director.InForce() && director.Status().Peers == 2 }, func() any { return director.Status() })
		w.until(func() bool { return limiter.published.Load().want != nil }, func() any { return limiter.Status() })
	}

	s := w.connect(client, vip4, 80, attempts)
	w.until(func() bool { return s.connected() >= rate }, func() any { return s.connected() })
	time.Sleep(500 * time.Millisecond) // those that all admit are there
	connected := s.connected()         // before the time is taken by which there may be so many
	most := float64(rate) * (1 + time.Since(s.began).Seconds())
	require.LessOrEqual(t, float64(connected), most+3, "of %d", attempts)
}
