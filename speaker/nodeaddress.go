package speaker

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
)

// Addresses knows the addresses of this speaker's Node; Speaker is one.
type Addresses interface {
	// Addresses returns the internal addresses, none if they are not known.
	Addresses() []netip.Addr
	Changed() <-chan struct{}
}

// AddressWatch is the task that fails when the Node has left the address that the speaker
// was started with. Other speakers look for this one there, and a pod learns the address of its
// node only when it starts: when the task fails, the kubelet starts the pod again.
type AddressWatch struct {
	Address netip.Addr
	Node    Addresses
}

// String names the task.
func (w AddressWatch) String() string { return "address" }

// Run returns an error when the Node had the address and has others now, and nil when
// ctx ends. An address that the Node never had is no error: a person has chosen it.
func (w AddressWatch) Run(ctx context.Context) error {
	had := false
	for {
		changed, addrs := w.Node.Changed(), w.Node.Addresses()
		has := slices.Contains(addrs, w.Address)
		if had && !has && len(addrs) > 0 {
			return fmt.Errorf("the Node has left the address %s (--node-ip, NODE_IP) and has %v now: the speaker has to be started with one "+
				"of these", w.Address, addrs)
		}
		had = had || has
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}
