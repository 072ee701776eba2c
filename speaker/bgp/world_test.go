package bgp

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
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	timeout = 2 * time.Minute
	nodeASN = 64512
	peerASN = 64513
)

var (
	node4, node6 = netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("2001:db8::1")
	tor4, tor6   = netip.MustParseAddr("198.18.0.2"), netip.MustParseAddr("2001:db8::2")
	other4       = netip.MustParseAddr("198.18.0.3")
	vip4, vip6   = netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("2001:db8:203::1/128")
	more4        = netip.MustParsePrefix("203.0.113.2/32")
)

// world is a segment with a node (host 0) and routers (hosts 1 and 2), with the
// wanted sessions and routes of the node.
type world struct {
	t         testing.TB
	segment   *testnet.Segment
	node      *testnet.Host
	tor       *testnet.Host
	want      plan.BGP
	passwords passwords
	registry  *prometheus.Registry
	options   Options
	announcer *Announcer
	log       *testnet.Log
	cancel    context.CancelFunc
}

// passwords are Secrets that may change.
type passwords struct {
	mu     sync.Mutex
	of     map[config.SecretKey]string
	faults map[config.SecretKey]error
}

func (p *passwords) fail(key config.SecretKey, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = map[config.SecretKey]error{key: err}
}

func (p *passwords) set(key config.SecretKey, password string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = map[config.SecretKey]string{}
	}
	p.of[key] = password
}

func (p *passwords) get(key config.SecretKey) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if password, ok := p.of[key]; ok {
		return password, nil
	}
	if err := p.faults[key]; err != nil {
		return "", fmt.Errorf("Secret %q: %w", key.Name, err)
	}
	return "", fmt.Errorf("Secret %q does not exist", key.Name)
}

func newWorld(t testing.TB, routers int) *world {
	t.Helper()
	w := &world{t: t, segment: testnet.NewSegment(t, 1+routers)}
	w.node, w.tor = w.segment.Hosts[0], w.segment.Hosts[1]
	w.want = plan.BGP{Sessions: map[string]plan.Session{}, Routes: map[netip.Prefix]plan.Route{}}
	return w
}

// peer returns an external peer at tor4, and adds its session.
func (w *world) peer(name string, change func(*config.Peer)) *config.Peer {
	p := &config.Peer{Name: name, Address: tor4, Port: 179, PeerASN: config.ASN{Number: peerASN}, HoldTime: 90 * time.Second,
		ConnectRetry: time.Second}
	if change != nil {
		change(p)
	}
	w.want.Sessions[name] = plan.Session{Peer: p, LocalASN: nodeASN, RouterID: netip.MustParseAddr("198.18.0.1")}
	return p
}

// route wants a prefix at a peer, with attributes.
func (w *world) route(prefix netip.Prefix, peer string, a plan.Attributes) {
	route := plan.Route{peer: a}
	for name, other := range w.want.Routes[prefix] {
		if name != peer {
			route[name] = other
		}
	}
	w.want.Routes[prefix] = route
}

// start starts the announcer on the node and sets what is wanted.
func (w *world) start() {
	w.t.Helper()
	w.log, w.registry = &testnet.Log{}, prometheus.NewPedanticRegistry()
	w.options.Log = slog.New(slog.NewTextHandler(w.log, nil))
	w.options.Registry, w.options.Passwords, w.options.NextHops, w.options.Inside = w.registry, w.passwords.get, netstate.NextHops, w.node.Do
	w.announcer = New(w.options)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.announcer.Run(ctx) }()
	w.cancel = cancel
	w.t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			require.NoError(w.t, err)
		case <-time.After(timeout):
			w.t.Error("the announcer does not end")
		}
		if w.t.Failed() {
			w.t.Log(w.log.String())
		}
	})
	w.set()
}

// stop stops the announcer as the speaker does.
func (w *world) stop(restarting bool) {
	w.t.Helper()
	w.announcer.Stop(restarting)
	require.ErrorIs(w.t, w.announcer.Set(context.Background(), w.want), ErrStopped)
}

func (w *world) set() {
	w.t.Helper()
	require.NoError(w.t, w.announcer.Set(context.Background(), w.want))
}

func (w *world) setDown(peer string, down bool, why string) {
	w.t.Helper()
	require.NoError(w.t, w.announcer.SetDown(context.Background(), peer, down, why))
}

// status returns what the announcer knows of a peer.
func (w *world) status(name string) Peer {
	for _, p := range w.announcer.Peers() {
		if p.Name == name {
			return p
		}
	}
	return Peer{}
}

// up waits until the session is established.
func (w *world) up(name string) Peer {
	w.t.Helper()
	w.until("session with "+name, func() bool { return w.status(name).State == Established }, func() any { return w.status(name) })
	return w.status(name)
}

// unbroken checks that no session with the peer has ended. Attempts before the first one may have failed, on a busy machine.
func (w *world) unbroken(name string) {
	w.t.Helper()
	require.Equal(w.t, Established, w.status(name).State)
	require.NotContains(w.t, w.log.String(), `msg="BGP session ended" peer=`+name+" ")
}

// down waits until there is no session because of an error with these words.
func (w *world) down(name string, words ...string) Peer {
	w.t.Helper()
	w.until(fmt.Sprintf("error %q", words), func() bool {
		p := w.status(name)
		for _, word := range words {
			if !strings.Contains(p.LastError, word) {
				return false
			}
		}
		return p.State != Established
	}, func() any { return w.status(name) })
	return w.status(name)
}

func (w *world) until(what string, ok func() bool, got func() any) {
	w.t.Helper()
	for end := time.Now().Add(timeout); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("no %s within %s: %+v", what, timeout, got())
		}
	}
}

// frr is an FRR with bgpd in AS peerASN, the node being its neighbour at
// address.
func (w *world) frr(host *testnet.Host, address, more string, daemons ...string) *router.FRR {
	w.t.Helper()
	return router.NewFRR(w.t, host, fmt.Sprintf(`
frr defaults traditional
router bgp %[1]d
 bgp router-id 198.18.0.2
 no bgp ebgp-requires-policy
 neighbor %[2]s remote-as %[3]d
 neighbor %[2]s timers connect 1
 %[4]s
`, peerASN, address, nodeASN, more), daemons...)
}

// frrPath is a path as bgpd shows it.
type frrPath struct {
	Valid     bool
	Stale     bool
	Metric    *uint32
	LocPrf    *uint32
	Origin    string
	AsPath    struct{ String string } `json:"aspath"`
	Community struct{ String string }
	Large     struct{ String string } `json:"largeCommunity"`
	Nexthops  []struct{ IP, Afi string }
}

func (p frrPath) nextHop(afi string) (all []string) {
	for _, n := range p.Nexthops {
		if n.Afi == afi {
			all = append(all, n.IP)
		}
	}
	return all
}

// path returns the path to a prefix at the router; nil: none.
func path(f *router.FRR, prefix netip.Prefix) *frrPath {
	family := "ipv6"
	if prefix.Addr().Is4() {
		family = "ipv4"
	}
	var answer struct{ Paths []frrPath }
	f.Show(fmt.Sprintf("show bgp %s unicast %s json", family, prefix), &answer)
	if len(answer.Paths) == 0 {
		return nil
	}
	return &answer.Paths[0]
}

// has waits until the router has a prefix, and returns its path.
func (w *world) has(f *router.FRR, prefix netip.Prefix) *frrPath {
	w.t.Helper()
	w.until(prefix.String()+" at the router", func() bool { return path(f, prefix) != nil }, func() any {
		return fmt.Sprint(f.Ask("show bgp summary"), w.announcer.Peers())
	})
	return path(f, prefix)
}

// lacks waits until the router does not have the prefix.
func (w *world) lacks(f *router.FRR, prefix netip.Prefix) {
	w.t.Helper()
	w.until("withdrawal of "+prefix.String(), func() bool { return path(f, prefix) == nil }, func() any { return path(f, prefix) })
}

// frrNeighbor is a neighbour as bgpd shows it.
type frrNeighbor struct {
	BgpState           string
	ConnectionsDropped int
	MessageStats       struct{ UpdatesRecv, NotificationsRecv int }
}

func neighbor(f *router.FRR, address string) frrNeighbor {
	answer := map[string]frrNeighbor{}
	f.Show("show bgp neighbors "+address+" json", &answer)
	return answer[address]
}

// twoRouters is a world in which the node has announced vip4 to two routers.
func twoRouters(t *testing.T) (w *world, tor, other *router.FRR) {
	w = newWorld(t, 2)
	tor = w.frr(w.tor, "198.18.0.1", "")
	other = w.frr(w.segment.Hosts[2], "198.18.0.1", "bgp router-id 198.18.0.3")
	w.peer("tor", nil)
	w.peer("other", func(p *config.Peer) { p.Address = other4 })
	w.route(vip4, "tor", plan.Attributes{})
	w.route(vip4, "other", plan.Attributes{})
	w.start()
	w.has(tor, vip4)
	w.has(other, vip4)
	return w, tor, other
}
