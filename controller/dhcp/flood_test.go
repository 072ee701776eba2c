package dhcp

import (
	"context"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/mdlayher/packet"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// A machine on the segment sends answers to nobody's question as fast as it can, to the hardware
// address that asks: they get past the kernel's filter. The bound is the socket's queue. Leases are
// acquired all the same, those that there were stay, and nothing of the answers is kept.
func TestFloodOfAnswers(t *testing.T) {
	seg := testnet.NewSegment(t, 3)
	asking, flooder, server := seg.Hosts[0], seg.Hosts[1], seg.Hosts[2]
	dnsmasq(t, server, filepath.Join(t.TempDir(), "leases"), "198.18.0.100,198.18.0.109,255.255.255.0,2m", "--no-ping", "--quiet-dhcp")
	all := clients(2)
	s, _ := start(t, asking)
	s.Set(all[:1])
	had := await(t, s, "a lease", allLeased)

	us, err := inside{asking}.Interface("eth0")
	require.NoError(t, err)
	them, err := inside{flooder}.Interface("eth0")
	require.NoError(t, err)
	socket, err := inside{flooder}.Listen(&them.Interface, unix.ETH_P_ALL, nil)
	require.NoError(t, err)
	defer socket.Close()
	request, err := dhcpv4.New(dhcpv4.WithHwAddr(us.HardwareAddr))
	require.NoError(t, err)
	var frames [][]byte
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeOffer, dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak} {
		f := answerFrame(reply(request, kind, serverA, addrA))
		copy(f, us.HardwareAddr)
		frames = append(frames, f)
	}
	ctx, stop := context.WithCancel(t.Context())
	var flooding sync.WaitGroup
	var sent atomic.Int64
	flooding.Go(func() {
		for ctx.Err() == nil {
			f := frames[sent.Add(1)%int64(len(frames))]
			if _, err := socket.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil && ctx.Err() == nil {
				continue // its own queue is full
			}
		}
	})
	defer flooding.Wait()
	defer stop()
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	require.Eventually(t, func() bool { return sent.Load() > 10_000 }, 2*time.Minute, time.Millisecond)
	s.Set(all)
	has := await(t, s, "two leases", allLeased)
	require.Equal(t, had[all[0].ID].Lease.Addr, has[all[0].ID].Lease.Addr)
	stop()
	flooding.Wait()
	require.Eventually(t, func() bool { // what is still read at the end is free a moment later
		runtime.GC()
		runtime.ReadMemStats(&now)
		return now.HeapAlloc < before.HeapAlloc+4<<20
	}, 20*time.Second, 10*time.Millisecond)
	t.Logf("%d answers sent, %d KiB kept", sent.Load(), (int64(now.HeapAlloc)-int64(before.HeapAlloc))>>10)
}
