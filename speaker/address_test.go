package speaker

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// nodeAddresses are what a Node has, one after the other.
type nodeAddresses struct {
	addrs   []netip.Addr
	changed notify.Signal
}

func (n *nodeAddresses) Addresses() []netip.Addr  { return n.addrs }
func (n *nodeAddresses) Changed() <-chan struct{} { return n.changed.Next() }

// A speaker whose Node has got another address ends and says so. One whose Node is not
// known, or never had the address, goes on.
func TestNodeLeavesItsAddress(t *testing.T) {
	t.Parallel()
	old, next := netip.MustParseAddr("198.18.0.11"), netip.MustParseAddr("198.18.0.99")
	for name, test := range map[string]struct {
		has  [][]netip.Addr
		ends bool
	}{
		"changed":            {[][]netip.Addr{{old}, {next}}, true},
		"changed at once":    {[][]netip.Addr{nil, {next, old}, {next}}, true},
		"one more":           {[][]netip.Addr{{old}, {next, old}}, false},
		"not known any more": {[][]netip.Addr{{old}, nil}, false},
		"chosen by a person": {[][]netip.Addr{{next}, nil, {next}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				node, ended := &nodeAddresses{}, make(chan error, 1)
				go func() { ended <- AddressWatch{Address: old, Node: node}.Run(t.Context()) }()
				synctest.Wait()
				for _, addrs := range test.has {
					node.addrs = addrs
					node.changed.Notify()
					synctest.Wait()
				}
				select {
				case err := <-ended:
					assert.True(t, test.ends)
					require.ErrorContains(t, err, "left the address 198.18.0.11")
				default:
					assert.False(t, test.ends)
				}
			})
		})
	}
}
