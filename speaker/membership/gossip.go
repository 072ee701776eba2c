package membership

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/membership/guard"
)

const (
	// retransmitMult times the logarithm of the number of speakers is how often a message is passed
	// on. With memberlist's default of 4, where a tenth of the packets is lost, about every ten minutes
	// a suspected speaker did not hear of the suspicion, or its objection was not heard.
	retransmitMult = 10
	// gossipNodes is how many others are sent to each interval. With 8, a change reaches 1,000 speakers in four intervals. An
	// interval without changes costs a wake-up and no packet.
	gossipNodes = 8

	// tcpTimeout bounds a connection to another speaker, each way.
	tcpTimeout = time.Second
	// leaveTimeout and updateTimeout bound the wait until the message has reached another speaker.
	leaveTimeout  = 500 * time.Millisecond
	updateTimeout = 500 * time.Millisecond
	// repeatAfter is when our metadata is sent once more. By then memberlist has sent all messages
	// that waited beside it.
	repeatAfter = 500 * time.Millisecond
)

// gossip connects memberlist with the table: it is memberlist's Delegate, AliveDelegate and
// EventDelegate.
type gossip struct {
	*base
	table  *table
	leases *leases
	guard  *guard.Transport // set by config
	mu     sync.Mutex
	sent   []byte // our metadata, as memberlist has it
}

// listen opens the sockets. From now on anybody may send to this speaker.
func (g *gossip) listen() error {
	sockets, err := guard.Listen(g.options.Address, g.leases.known, g.metrics.refused.Inc)
	if err != nil {
		return fmt.Errorf("listen for other speakers on %s: %w", g.options.Address, err)
	}
	// The kernel chose the port if none was given.
	g.options.Address = netip.AddrPortFrom(g.options.Address.Addr(), sockets.Address().Port())
	config := g.config(sockets)
	list, err := memberlist.Create(config)
	if err != nil {
		_ = config.Transport.Shutdown()
		return fmt.Errorf("take part in the membership: %w", err)
	}
	g.list.Store(list)
	return nil
}

// config returns memberlist's settings. The guard seals and opens what memberlist sends and receives.
func (g *gossip) config(transport memberlist.Transport) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = g.options.Node
	c.BindAddr, c.BindPort = g.options.Address.Addr().String(), int(g.options.Address.Port())
	c.AdvertiseAddr, c.AdvertisePort = c.BindAddr, c.BindPort
	g.guard = guard.New(transport, g.ring.gossipKeys, g.metrics.refused.Inc)
	c.Transport = g.guard
	c.UDPBufferSize -= guard.Overhead
	c.EnableCompression = false // a few bytes must not become many
	c.ProbeInterval, c.ProbeTimeout = g.settings.ProbeInterval, g.settings.ProbeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = g.settings.SuspicionMultiplier, 2
	c.AwarenessMaxMultiplier = 2
	c.GossipInterval, c.GossipNodes = g.settings.GossipInterval, gossipNodes
	c.RetransmitMult = retransmitMult
	c.DisableTcpPings = true
	c.TCPTimeout = g.options.tcpTimeout
	c.DeadNodeReclaimTime = time.Second // a node may come back with another address
	c.Logger = bridge(g.log)
	c.Delegate, c.Alive, c.Events = g, g, g
	return c
}

// sendMetadata sends our metadata by update when it changes, until memberlist has it. If memberlist
// objects to a suspicion at the same moment, it drops the metadata and repeats the one before. After
// that the metadata is sent once more: of two waiting messages of the same length memberlist 0.7 may
// forget the older one, because it numbers messages anew whenever its queue is empty.
func (g *gossip) sendMetadata(ctx context.Context, update func(time.Duration) error) {
	var again <-chan time.Time
	for {
		repeat := true
		select {
		case <-ctx.Done():
			return
		case <-g.send:
		case <-again:
			repeat = false
		}
		again = nil
		if err := update(updateTimeout); err != nil {
			g.log.Debug("metadata not yet sent", "err", err)
		}
		switch {
		case !g.isSent():
			notify.Wake(g.send)
		case repeat:
			again = time.After(repeatAfter)
		}
	}
}

// isOwn reports whether the event is about this speaker. It records the metadata that memberlist has of
// this speaker.
func (g *gossip) isOwn(n *memberlist.Node) bool {
	if n.Name != g.options.Node {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sent = n.Meta
	return true
}

// isSent reports whether memberlist has the metadata that we publish.
func (g *gossip) isSent() bool {
	now := g.NodeMeta(memberlist.MetaMaxSize)
	g.mu.Lock()
	defer g.mu.Unlock()
	return bytes.Equal(g.sent, now)
}

// NodeMeta returns our metadata.
func (g *gossip) NodeMeta(limit int) []byte { return published{g.table}.current().encode(limit) }

// NotifyAlive returns an error if the speaker is refused.
func (g *gossip) NotifyAlive(n *memberlist.Node) error { return g.table.accept(n, g.leases.listed) }

// NotifyJoin is called when a speaker is met. Like the next two methods, it is called while memberlist
// holds its locks. memberlist itself refutes what others claim about this speaker.
func (g *gossip) NotifyJoin(n *memberlist.Node) {
	if !g.isOwn(n) {
		g.metrics.changes.WithLabelValues("join").Inc()
		g.table.arrive(n)
	}
}

// NotifyUpdate is called when the metadata of a speaker has changed.
func (g *gossip) NotifyUpdate(n *memberlist.Node) {
	if !g.isOwn(n) {
		g.table.update(n)
	}
}

// NotifyLeave is called when a speaker has left or counts as dead for memberlist.
func (g *gossip) NotifyLeave(n *memberlist.Node) {
	if n.Name != g.options.Node {
		g.table.suspect(n.Name)
	}
}

// The rest of memberlist.Delegate is not used.
func (*gossip) NotifyMsg([]byte)                {}
func (*gossip) GetBroadcasts(int, int) [][]byte { return nil }
func (*gossip) LocalState(bool) []byte          { return nil }
func (*gossip) MergeRemoteState([]byte, bool)   {}

// bridge returns a logger for memberlist. All its lines are debug lines: this package logs what matters
// to people.
func bridge(l *slog.Logger) *log.Logger { return log.New(writer{l}, "", 0) }

type writer struct{ log *slog.Logger }

func (w writer) Write(line []byte) (int, error) {
	if w.log.Enabled(context.Background(), slog.LevelDebug) {
		w.log.Debug(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}
