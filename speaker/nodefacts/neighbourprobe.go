package nodefacts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

const (
	// window is how long answers to one round of requests are awaited. If there is no answer, the request
	// is repeated. A second machine with the address also has to answer within that time.
	window = 300 * time.Millisecond
	// rounds is the number of rounds. Together they last longer than a second, after which a host repeats
	// a lost question for our own hardware address (retrans_time_ms of Linux).
	rounds = 4
	// pace is the time between two requests, which everybody on the segment
	// hears.
	pace = 2 * time.Millisecond
)

// link is an interface by which addresses of one family are asked for.
type link struct {
	netstate.Interface
	v4 bool
	// neighbours are the addresses of nodes, trials VIPs.
	neighbours []diagnose.Neighbour
	trials     []diagnose.Trial
}

type links []*link

// links returns the node's links, each interface once for each family.
func (g *Gatherer) links() (all links) {
	for _, i := range g.options.Interfaces.Interfaces() {
		if i.Up && i.Ethernet && !i.Loopback && !i.NoARP && len(i.HardwareAddr) == 6 {
			all = append(all, &link{Interface: i, v4: true}, &link{Interface: i})
		}
	}
	return all
}

// to returns the link on whose subnet the address is.
func (all links) to(a netip.Addr) *link {
	for _, l := range all {
		if l.v4 == a.Is4() && l.source(a).IsValid() {
			return l
		}
	}
	return nil
}

// source returns the node's own address on the subnet of the other one.
func (l *link) source(to netip.Addr) netip.Addr {
	for _, p := range l.Addrs {
		if p.Contains(to) && !p.IsSingleIP() && p.Addr() != to && !slices.Contains(l.Tentative, p) {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

func (l *link) of(node string, a netip.Addr) diagnose.Neighbour {
	return diagnose.Neighbour{Node: node, Address: a, Interface: l.Name}
}

// ask has the address of a node asked for.
func (l *link) ask(node string, a netip.Addr) {
	l.neighbours = append(l.neighbours, l.of(node, a))
}

// try has a VIP asked for, and its port tried if it has one. It returns why that is not possible.
func (all links) try(owner string, vip netip.AddrPort) (why string) {
	l := all.to(vip.Addr())
	switch {
	case owner == "":
		return "the speaker that was to try it does not know another node that owns it; it may have moved: diagnose again"
	case l == nil:
		return "the node that was to try it has no interface that is up on its segment"
	}
	l.trials = append(l.trials, diagnose.Trial{Neighbour: l.of(owner, vip.Addr()), Port: vip.Port()})
	return ""
}

// run asks, and returns the results.
func (l *link) run(ctx context.Context) ([]diagnose.Neighbour, []diagnose.Trial) {
	all := map[netip.Addr][]string{}
	for _, n := range l.neighbours {
		all[n.Address] = nil
	}
	for _, t := range l.trials {
		all[t.Address] = nil
	}
	if len(all) == 0 {
		return nil, nil
	}
	err := l.resolve(ctx, all)
	for i := range l.neighbours {
		n := &l.neighbours[i]
		n.Answers, n.Error = all[n.Address], text(err)
	}
	for i := range l.trials {
		t := &l.trials[i]
		t.Answers, t.Error = all[t.Address], text(err)
	}
	if err == nil {
		l.probePorts(ctx)
	}
	return l.neighbours, l.trials
}

// resolve adds to each address the hardware addresses that answer for it.
func (l *link) resolve(ctx context.Context, all map[netip.Addr][]string) error {
	if l.v4 {
		return l.resolveARP(ctx, all)
	}
	return l.resolveNDP(ctx, all)
}

func (l *link) device() *net.Interface {
	return &net.Interface{Index: l.Index, Name: l.Name, HardwareAddr: l.HardwareAddr, MTU: l.MTU}
}

func (l *link) resolveARP(ctx context.Context, all map[netip.Addr][]string) error {
	client, err := arp.Dial(l.device())
	if err != nil {
		return fmt.Errorf("open a socket for ARP on %s: %w", l.Name, err)
	}
	defer client.Close()
	return exchange(ctx, client, conversation{
		due: unanswered(all),
		send: func(a netip.Addr) error {
			p, err := arp.NewPacket(arp.OperationRequest, l.HardwareAddr, l.source(a), make(net.HardwareAddr, 6), a)
			if err != nil {
				return err //nolint:wrapcheck // exchange does
			}
			return client.WriteTo(p, ethernet.Broadcast) //nolint:wrapcheck // exchange does
		},
		receive: func() error {
			p, _, err := client.Read()
			if err == nil && p.Operation == arp.OperationReply {
				note(all, p.SenderIP, p.SenderHardwareAddr)
			}
			return err //nolint:wrapcheck // exchange does
		},
	})
}

func (l *link) resolveNDP(ctx context.Context, all map[netip.Addr][]string) error {
	conn, _, err := ndp.Listen(l.device(), ndp.LinkLocal)
	if err != nil {
		return fmt.Errorf("open a socket for NDP on %s: %w", l.Name, err)
	}
	defer conn.Close()
	var filter ipv6.ICMPFilter
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeNeighborAdvertisement)
	if err := conn.SetICMPFilter(&filter); err != nil {
		return fmt.Errorf("filter NDP on %s: %w", l.Name, err)
	}
	return exchange(ctx, conn, conversation{
		due: unanswered(all),
		send: func(a netip.Addr) error {
			group, err := ndp.SolicitedNodeMulticast(a)
			if err != nil {
				return err //nolint:wrapcheck // exchange does
			}
			own := &ndp.LinkLayerAddress{Direction: ndp.Source, Addr: l.HardwareAddr}
			return conn.WriteTo(&ndp.NeighborSolicitation{TargetAddress: a, Options: []ndp.Option{own}}, nil,
				group) //nolint:wrapcheck // exchange does
		},
		receive: func() error {
			m, _, _, err := conn.ReadFrom()
			if answer, ok := m.(*ndp.NeighborAdvertisement); ok && err == nil {
				for _, o := range answer.Options {
					if mac, ok := o.(*ndp.LinkLayerAddress); ok && mac.Direction == ndp.Target {
						note(all, answer.TargetAddress, mac.Addr)
					}
				}
			}
			return err //nolint:wrapcheck // exchange does
		},
	})
}

// maxAnswers is how many hardware addresses are noted of an address. Two are one too many already.
const maxAnswers = 8

// note adds an answer for an address that was asked for.
func note(all map[netip.Addr][]string, a netip.Addr, mac net.HardwareAddr) {
	if known, asked := all[a]; asked && len(known) < maxAnswers && !slices.Contains(known, mac.String()) {
		all[a] = append(known, mac.String())
	}
}

func unanswered(all map[netip.Addr][]string) func() []netip.Addr {
	return func() (due []netip.Addr) {
		for a, answers := range all {
			if len(answers) == 0 {
				due = append(due, a)
			}
		}
		return due
	}
}

// conversation is a question put to many.
type conversation struct {
	// due are those that have not answered.
	due     func() []netip.Addr
	send    func(netip.Addr) error
	receive func() error
}

// deadliner is a socket.
type deadliner interface{ SetReadDeadline(time.Time) error }

// exchange asks all that have not answered and waits for answers, for at most rounds rounds. It ignores
// packets that it cannot read.
func exchange(ctx context.Context, socket deadliner, c conversation) error {
	for range rounds {
		due := c.due()
		if len(due) == 0 || ctx.Err() != nil {
			return ctx.Err() //nolint:wrapcheck // it explains enough
		}
		for _, a := range due {
			if err := c.send(a); err != nil {
				return fmt.Errorf("ask for %s: %w", a, err)
			}
			time.Sleep(pace)
		}
		end := time.Now().Add(window)
		if err := socket.SetReadDeadline(end); err != nil {
			return fmt.Errorf("limit the wait for answers: %w", err)
		}
		for time.Now().Before(end) {
			var failed *net.OpError // the deadline has passed, or the interface is gone
			if err := c.receive(); errors.As(err, &failed) {
				break
			}
		}
	}
	return nil
}
