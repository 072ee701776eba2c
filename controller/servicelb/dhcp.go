package servicelb

import (
	"context"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

// Leases keep addresses leased from DHCP servers; pools.Keeper is one.
type Leases interface {
	// Set replaces, for each interface, the clients that want a lease there. It releases the
	// leases of clients that are gone.
	Set(want map[string][]ledger.LeaseClient)
	// Current returns the states of the leases, by interface and ID.
	Current() map[string]map[string]ledger.LeaseState
	// Changed returns a channel that is closed when Current has something
	// new. Ask for it before Current and nothing is missed.
	Changed() <-chan struct{}
}

// keepLeases keeps the leases and the ledger in step.
func (c *Controller) keepLeases(ctx context.Context) {
	for {
		leases, config := c.Leases.Changed(), c.Config.Changed()
		c.stepLeases()
		select {
		case <-ctx.Done():
			return
		case <-leases:
		case <-config:
		case <-c.ledger.leases:
		}
	}
}

func (c *Controller) stepLeases() {
	current := c.Leases.Current()
	l, now := c.ledger.open()
	want, due, lost := l.FollowLeases(current, now)
	c.ledger.close()
	if want != nil {
		c.Leases.Set(want)
	}
	for _, loss := range lost {
		svc, _ := c.get(loss.Service) // nil: it is gone
		c.emit.lost(svc, loss)
	}
	for _, name := range due {
		c.queue.Add(name)
	}
}
