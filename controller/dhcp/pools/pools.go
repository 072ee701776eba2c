// Package pools keeps leases from DHCP servers for the service controller: it
// runs a client (controller/dhcp) on the interface of each pool that leases its
// addresses, as long as there is such a pool.
package pools

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/lodestone-lb/lodestone/controller/dhcp"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// source is the part of *dhcp.Source that is used.
type source interface {
	Set(want []dhcp.Client)
	Current() map[string]dhcp.State
	Changed() <-chan struct{}
	ExtendOnly()
	Run(ctx context.Context) error
}

// Keeper is a task, and the servicelb.Leases that it keeps.
type Keeper struct {
	open func(on string) source
	wake chan struct{}

	mu      sync.Mutex
	clients map[string]*client // by interface
	// opened wait for Run to start them.
	opened []*client
	// ended is closed at the end of the interface's last client.
	ended   map[string]chan struct{}
	changed notify.Signal
}

// client is the source on one interface, until stop is closed.
type client struct {
	source
	stop chan struct{}
	// before is the end of the client that the interface had before, nil if it
	// had none; ended is the end of this one.
	before, ended chan struct{}
}

// New returns a keeper that asks for nothing until it runs.
func New(log *slog.Logger) *Keeper {
	return &Keeper{
		open: func(on string) source { return dhcp.New(dhcp.Options{Interface: on, Log: log}) },
		wake: make(chan struct{}, 1), clients: map[string]*client{}, ended: map[string]chan struct{}{},
	}
}

// Set implements servicelb.Leases. It does not wait.
func (k *Keeper) Set(want map[string][]ledger.LeaseClient) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for on, c := range k.clients {
		if _, wanted := want[on]; !wanted {
			c.Set(nil)
			close(c.stop)
			delete(k.clients, on)
			k.changed.Notify()
		}
	}
	for on, list := range want {
		c := k.clients[on]
		if c == nil {
			c = &client{source: k.open(on), stop: make(chan struct{}), before: k.ended[on], ended: make(chan struct{})}
			k.clients[on], k.ended[on] = c, c.ended
			k.opened = append(k.opened, c)
		}
		clients := make([]dhcp.Client, len(list))
		for i, l := range list {
			clients[i] = dhcp.Client(l)
		}
		c.Set(clients)
	}
	notify.Wake(k.wake)
}

// ExtendOnly has the clients extend the leases that there are, and ask for no others. It is for a process that leads no more, and does
// not know which Services there are.
func (k *Keeper) ExtendOnly() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.clients {
		c.ExtendOnly()
	}
}

// Current implements servicelb.Leases.
func (k *Keeper) Current() map[string]map[string]ledger.LeaseState {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]map[string]ledger.LeaseState{}
	for on, c := range k.clients {
		states := map[string]ledger.LeaseState{}
		for id, s := range c.Current() {
			states[id] = ledger.LeaseState{Addr: addrOf(s.Lease), Err: s.Err, Lost: s.Lost}
		}
		all[on] = states
	}
	return all
}

func addrOf(l *dhcp.Lease) netip.Addr {
	if l == nil {
		return netip.Addr{}
	}
	return l.Addr
}

// Changed implements servicelb.Leases.
func (k *Keeper) Changed() <-chan struct{} { return k.changed.Next() }

// Run runs the clients until ctx ends. Leases that Set gave up are released by then. Those
// that are wanted are left to the next process that runs.
func (k *Keeper) Run(ctx context.Context) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	for {
		k.mu.Lock()
		opened := k.opened
		k.opened = nil
		k.mu.Unlock()
		for _, c := range opened {
			tasks.Go(func() { k.run(ctx, c) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		}
	}
}

// run runs a client until it is stopped or ctx ends. It first waits until the client before
// has released its leases, because they may be asked for again.
func (k *Keeper) run(ctx context.Context, c *client) {
	defer close(c.ended)
	if c.before != nil {
		<-c.before
	}
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	tasks.Go(func() { _ = c.Run(ctx) }) // it never fails
	for {
		changed := c.Changed()
		k.changed.Notify()
		select {
		case <-changed:
		case <-c.stop:
			return
		case <-ctx.Done():
			return
		}
	}
}
