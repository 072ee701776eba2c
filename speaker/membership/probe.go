package membership

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// probeAtOnce is how many speakers Probe asks at a time. pings is how often it asks a speaker that
	// does not answer by UDP: a busy node may answer later than the failover settings allow.
	probeAtOnce = 16
	pings       = 10
)

// Reach is how another speaker answers on the membership port.
type Reach struct {
	Node    string
	Address netip.AddrPort
	// UDP and TCP are why the speaker does not answer by them. A speaker that answers by UDP also has
	// our key.
	UDP, TCP error
}

// Probe asks all other speakers that have a Lease, alive or not, for an answer on the membership port. It
// returns the answers, sorted by node, and how many speakers were not asked before ctx ended.
func (t *Task) Probe(ctx context.Context) (answers []Reach, unasked int) {
	store := t.leases.current()
	if store == nil || t.list.Load() == nil {
		return nil, 0
	}
	others := t.leases.others(store.List())
	all := make([]Reach, len(others))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i, node := range slices.Sorted(maps.Keys(others)) {
		group.Go(func() error {
			if ctx.Err() != nil {
				return nil
			}
			r := Reach{Node: node, Address: others[node], UDP: t.ping(node, others[node]), TCP: connect(ctx, others[node])}
			if ctx.Err() == nil || r.TCP == nil && r.UDP == nil {
				all[i] = r
			}
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	answers = slices.DeleteFunc(all, func(r Reach) bool { return r.Node == "" })
	return answers, len(others) - len(answers)
}

func (t *Task) ping(node string, at netip.AddrPort) (err error) {
	for range pings {
		if _, err = t.list.Load().Ping(node, net.UDPAddrFromAddrPort(at)); err == nil {
			return nil
		}
	}
	return err //nolint:wrapcheck // it names the node
}

// connect opens a connection and closes it without sending anything.
func connect(ctx context.Context, at netip.AddrPort) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", at.String())
	if err != nil {
		return err //nolint:wrapcheck // it names the address
	}
	return conn.Close() //nolint:wrapcheck // it names the address
}
