package speaker

import (
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// nodeAddresses are what a Node has, one after the other.
type nodeAddresses struct {
	addrs   []netip.Addr
	changed notify.Signal
}

func (n *nodeAddresses) Addresses() []netip.Addr  { return n.addrs }
func (n *nodeAddresses) Changed() <-chan struct{} { return n.changed.Next() }

// A speaker whose Node has another address now ends with an error about it. One whose Node is not
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

// looked calls once when somebody asks for the addresses.
type looked struct {
	*Speaker
	once func()
}

func (l looked) Addresses() []netip.Addr {
	defer l.once()
	return l.Speaker.Addresses()
}

// The addresses are those of the speaker's own Node in the API.
func TestASpeakerEndsWhenItsNodeLeavesTheAddress(t *testing.T) {
	old := netip.MustParseAddr("198.18.0.11")
	at := func(address string) *corev1.Node {
		n := nodeObject("n1")
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}, {Type: corev1.NodeHostName, Address: "n1"}}
		return n
	}
	s := newStory(t)
	s.apply(at(old.String()))
	s.start()
	require.Eventually(t, func() bool { return slices.Equal(s.speaker.Addresses(), []netip.Addr{old}) }, testTimeout, time.Millisecond)
	asked, ended := make(chan struct{}), make(chan error, 1)
	watch := AddressWatch{Address: old, Node: looked{s.speaker, sync.OnceFunc(func() { close(asked) })}}
	go func() { ended <- watch.Run(t.Context()) }()
	<-asked
	s.apply(at("198.18.0.99"))
	select {
	case err := <-ended:
		require.ErrorContains(t, err, "left the address 198.18.0.11")
		require.ErrorContains(t, err, "198.18.0.99")
	case <-time.After(testTimeout):
		t.Fatal("it goes on")
	}
}
