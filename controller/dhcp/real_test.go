package dhcp

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/mdlayher/packet"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// inside is the network of a test's host.
type inside struct{ h *testnet.Host }

func (n inside) Interface(name string) (i Interface, err error) {
	err = n.h.Do(func() error { i, err = host{}.Interface(name); return err })
	return i, err
}

func (n inside) Listen(i *net.Interface, etherType int, filter []bpf.RawInstruction) (c net.PacketConn, err error) {
	err = n.h.Do(func() error { c, err = host{}.Listen(i, etherType, filter); return err })
	return c, err
}

// start runs a Source for eth0 of a host until stop, or the end of the test.
func start(t *testing.T, h *testnet.Host) (s *Source, stop func()) {
	t.Helper()
	s = New(Options{Interface: "eth0", Network: inside{h}, Log: slog.New(slog.NewTextHandler(t.Output(), nil)).With("host", h.Name)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	stop = func() {
		if cancel(); !stopped {
			stopped = true
			require.NoError(t, <-done)
		}
	}
	t.Cleanup(stop)
	return s, stop
}

// await waits until the states are as wanted, and returns them. A busy machine takes long for hundreds of leases.
func await(t *testing.T, s *Source, what string, ok func(map[string]State) bool) map[string]State {
	t.Helper()
	for deadline := time.After(4 * time.Minute); ; {
		changed := s.Changed()
		current := s.Current()
		if ok(current) {
			return current
		}
		select {
		case <-changed:
		case <-time.After(100 * time.Millisecond): // what changes without notice, as renewals do
		case <-deadline:
			t.Fatalf("never: %s\n%s", what, show(current))
		}
	}
}

func show(states map[string]State) string {
	var b strings.Builder
	for id, s := range states {
		fmt.Fprintf(&b, "%s: %+v, lost %v, %v\n", id, s.Lease, s.Lost, s.Err)
	}
	return b.String()
}

// leased is how many clients have a lease, each another address.
func leased(states map[string]State) int {
	addrs := map[netip.Addr]bool{}
	for _, s := range states {
		if s.Lease != nil {
			addrs[s.Lease.Addr] = true
		}
	}
	return len(addrs)
}

func allLeased(states map[string]State) bool { return leased(states) == len(states) }

func clients(n int) []Client {
	var c []Client
	for i := range n {
		c = append(c, Client{ID: fmt.Sprintf("lab/default/web-%d/0", i), Hostname: fmt.Sprintf("web-%d", i)})
	}
	return c
}

// knowing adds what the clients had.
func knowing(c []Client, states map[string]State) []Client {
	known := append([]Client(nil), c...)
	for i := range known {
		known[i].Last = states[known[i].ID].Lease.Addr
	}
	return known
}

// serve runs a server on a host until stop, or the end of the test. It
// returns when the server has written the line that reports it as ready.
func serve(t *testing.T, h *testnet.Host, ready string, env []string, program string, args ...string) (stop func()) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		path = "/usr/sbin/" + program // not on everybody's PATH
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := h.Command(ctx, path, args...) // nsenter execs it: killing kills the server
	cmd.Env = append(os.Environ(), env...)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdout, cmd.Stderr = w, w
	require.NoError(t, cmd.Start(), "hack/deps.sh installs %s", program)
	w.Close()
	started, ended := make(chan bool), make(chan struct{})
	go func() {
		defer close(ended)
		waiting := true
		for lines := bufio.NewScanner(r); lines.Scan(); {
			fmt.Fprintln(t.Output(), program+": "+lines.Text())
			if waiting && strings.Contains(lines.Text(), ready) {
				waiting = false
				started <- true
			}
		}
		close(started)
	}()
	stopped := false
	stop = func() {
		if cancel(); !stopped {
			stopped = true
			_ = cmd.Wait() // killed
			<-ended
			r.Close()
		}
	}
	t.Cleanup(stop)
	require.True(t, <-started, "%s never said %q", program, ready)
	return stop
}

// dnsmasq runs Debian's dnsmasq with one range. If it is not to be quiet, it waits until its log is read.
func dnsmasq(t *testing.T, h *testnet.Host, leases, ipRange string, args ...string) (stop func()) {
	t.Helper()
	if !slices.Contains(args, "--quiet-dhcp") {
		args = append(args, "--log-dhcp")
	}
	return serve(t, h, "sockets bound exclusively", nil, "dnsmasq", append([]string{
		"--keep-in-foreground", "--log-facility=-", "--conf-file=/dev/null", "--pid-file", "--user=root", "--group=root",
		"--port=0", "--interface=eth0", "--bind-interfaces",
		"--dhcp-leasefile=" + leases, "--dhcp-range=" + ipRange}, args...)...)
}

// kea runs Debian's Kea with one range. The times are in seconds.
type kea struct {
	leases, pool          string
	renew, rebind, expire int
	more                  string // members of Dhcp4
}

func (k kea) serve(t *testing.T, h *testnet.Host) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "kea.json")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `{"Dhcp4": {%s
		"interfaces-config": {"interfaces": ["eth0"]},
		"lease-database": {"type": "memfile", "name": %q, "lfc-interval": 0},
		"authoritative": true,
		"renew-timer": %d, "rebind-timer": %d, "valid-lifetime": %d, "expired-leases-processing": {"reclaim-timer-wait-time": 1},
		"subnet4": [{"id": 1, "subnet": "198.18.0.0/24", "pools": [{"pool": %q}]}],
		"loggers": [{"name": "kea-dhcp4", "severity": "INFO", "output_options": [{"output": "stdout"}]}]
	}}`, k.more, k.leases, k.renew, k.rebind, k.expire, k.pool), 0o644))
	// Where AppArmor confines Debian's program by its path, it may read no file of a test.
	path, err := exec.LookPath("kea-dhcp4")
	require.NoError(t, err)
	program := filepath.Join(dir, "kea-dhcp4")
	require.NoError(t, os.WriteFile(program, []byte(file(t, path)), 0o755))
	return serve(t, h, "DHCP4_STARTED", []string{"KEA_PIDFILE_DIR=" + dir, "KEA_LOCKFILE_DIR=" + dir}, program, "-c", config)
}

func file(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(content)
}

// The life of a few leases, as dnsmasq sees it.
func TestDnsmasq(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 3)
	first, second, server := seg.Hosts[0], seg.Hosts[1], seg.Hosts[2]
	leases := filepath.Join(t.TempDir(), "leases")
	dnsmasq(t, server, leases, "198.18.0.100,198.18.0.109,255.255.255.0,2m")
	all := clients(4)

	a, stop := start(t, first)
	a.Set(all[:3])
	had := await(t, a, "three leases", func(s map[string]State) bool { return leased(s) == 3 })
	for id, s := range had {
		require.NoError(t, s.Err)
		l := s.Lease
		require.True(t, netip.MustParsePrefix("198.18.0.96/28").Contains(l.Addr), id)
		require.Equal(t, netip.MustParsePrefix("198.18.0.0/24"), l.Subnet)
		require.Equal(t, netip.MustParseAddr("198.18.0.3"), l.Server)
		require.Equal(t, 2*time.Minute, l.Expires.Sub(l.Acquired))
		require.Equal(t, 105*time.Second, l.Rebind.Sub(l.Acquired))
		require.InDelta(t, 57, l.Renew.Sub(l.Acquired).Seconds(), 3.1)
		known := fmt.Sprintf("%s web-%c 00:", l.Addr, id[len("lab/default/web-")])
		require.Contains(t, file(t, leases), known, "hostname and client identifier of type 0")
	}

	// The leader changes, and its successor knows the addresses from the
	// Services: nothing is released, nothing moves.
	stop()
	b, stop := start(t, second)
	begin := time.Now()
	b.Set(knowing(all[:3], had))
	has := await(t, b, "taken over", func(s map[string]State) bool { return leased(s) == 3 })
	t.Logf("three leases taken over in %v", time.Since(begin))
	for id, s := range has {
		require.Equal(t, had[id].Lease.Addr, s.Lease.Addr)
		require.False(t, s.Lost.IsValid())
	}

	// The next one knows nothing; the server still does.
	stop()
	c, _ := start(t, first)
	c.Set(all[:3])
	for id, s := range await(t, c, "leased again", func(s map[string]State) bool { return leased(s) == 3 }) {
		require.Equal(t, had[id].Lease.Addr, s.Lease.Addr)
	}

	// A Service goes, another comes.
	gone := had[all[0].ID].Lease.Addr
	c.Set(all[1:])
	await(t, c, "a lease for the new one", func(s map[string]State) bool { return leased(s) == 3 && s[all[3].ID].Lease != nil })
	require.NotContains(t, file(t, leases), gone.String()+" web-0 ", "released")
}

// The server came back without its memory, and with other addresses.
func TestDnsmasqRefuses(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 2)
	stop := dnsmasq(t, seg.Hosts[1], filepath.Join(t.TempDir(), "leases"), "198.18.0.100,198.18.0.109,255.255.255.0,2m",
		"--dhcp-authoritative", "--no-ping")
	s, end := start(t, seg.Hosts[0])
	s.Set(clients(2))
	had := await(t, s, "two leases", allLeased)
	end()
	stop()

	// Authoritative, it learns from the client what it forgot.
	leases := filepath.Join(t.TempDir(), "leases")
	stop = dnsmasq(t, seg.Hosts[1], leases, "198.18.0.100,198.18.0.109,255.255.255.0,2m", "--dhcp-authoritative", "--no-ping")
	s, end = start(t, seg.Hosts[0])
	s.Set(knowing(clients(2), had))
	for id, st := range await(t, s, "leased again", allLeased) {
		require.Equal(t, had[id].Lease.Addr, st.Lease.Addr)
	}
	end()
	stop()

	dnsmasq(t, seg.Hosts[1], leases, "198.18.0.200,198.18.0.209,255.255.255.0,2m", "--dhcp-authoritative", "--no-ping")
	s, _ = start(t, seg.Hosts[0])
	s.Set(knowing(clients(2), had))
	for id, st := range await(t, s, "two other leases", allLeased) {
		require.Equal(t, had[id].Lease.Addr, st.Lost)
		require.Equal(t, 200, int(st.Lease.Addr.As4()[3])/10*10)
		require.NoError(t, st.Err)
	}
}

func TestDnsmasqExhausted(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 2)
	dnsmasq(t, seg.Hosts[1], filepath.Join(t.TempDir(), "leases"), "198.18.0.100,198.18.0.102,255.255.255.0,2m", "--no-ping")
	s, _ := start(t, seg.Hosts[0])
	all := clients(5)
	s.Set(all)
	states := await(t, s, "three leases, two errors", func(s map[string]State) bool {
		errs := 0
		for _, st := range s {
			if st.Err != nil && strings.Contains(st.Err.Error(), "used up") {
				errs++
			}
		}
		return leased(s) == 3 && errs == 2
	})
	var kept []Client
	dropped := false
	for _, c := range all {
		switch st := states[c.ID]; {
		case st.Lease == nil:
			require.ErrorContains(t, st.Err, `no DHCP server on interface "eth0" has offered an address since `)
			require.ErrorContains(t, st.Err, " (VIPs waiting: 2); a server answers others, so its range may be used up")
			kept = append(kept, c)
		case dropped:
			kept = append(kept, c)
		default:
			dropped = true
		}
	}
	s.Set(kept)
	await(t, s, "the address that was given back is leased", func(s map[string]State) bool { return leased(s) == 3 })
}

// A server that dies is waited for as long as the lease lasts.
func TestKeaDies(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 3)
	k := kea{leases: filepath.Join(t.TempDir(), "leases"), pool: "198.18.0.100-198.18.0.109", renew: 2, rebind: 4, expire: 7}
	stop := k.serve(t, seg.Hosts[1])
	s, _ := start(t, seg.Hosts[0])
	s.Set(clients(2))
	had := await(t, s, "two leases", allLeased)
	id := clients(1)[0].ID
	first := had[id].Lease

	// A leader that does not know yet that it leads no more does no harm.
	other, end := start(t, seg.Hosts[2])
	other.Set(knowing(clients(2), had))
	await(t, other, "two leases of the other leader", allLeased)
	renewed := await(t, s, "renewed twice, past the end of the first lease", func(s map[string]State) bool {
		return s[id].Lease != nil && s[id].Lease.Expires.Sub(first.Expires) > 3*time.Second
	})
	require.Equal(t, first.Addr, renewed[id].Lease.Addr)
	require.Equal(t, first.Acquired, renewed[id].Lease.Acquired)
	for id, st := range other.Current() {
		require.NoError(t, st.Err)
		require.Equal(t, had[id].Lease.Addr, st.Lease.Addr)
	}
	end()

	stop()
	failing := await(t, s, "renewing fails", func(s map[string]State) bool { return s[id].Err != nil })
	require.NotNil(t, failing[id].Lease)
	require.ErrorContains(t, failing[id].Err, `no DHCP server on interface "eth0" has extended the lease of `+first.Addr.String())
	lost := await(t, s, "lost", func(s map[string]State) bool { return s[id].Lease == nil })
	require.Equal(t, first.Addr, lost[id].Lost)
	require.False(t, time.Now().Before(failing[id].Lease.Expires))
	require.ErrorContains(t, lost[id].Err, "the lease of "+first.Addr.String()+" ended at "+clock(failing[id].Lease.Expires))

	k.serve(t, seg.Hosts[1])
	back := await(t, s, "leased again", allLeased)
	require.Equal(t, first.Addr, back[id].Lease.Addr, "asked for the address that it had")
	require.False(t, back[id].Lost.IsValid())
}

// A server refuses to extend a lease: its range was moved.
func TestKeaRefuses(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 2)
	leases := filepath.Join(t.TempDir(), "leases")
	k := kea{leases: leases, pool: "198.18.0.100-198.18.0.109", renew: 3, rebind: 10, expire: 20}
	stop := k.serve(t, seg.Hosts[1])
	s, _ := start(t, seg.Hosts[0])
	s.Set(clients(3))
	had := await(t, s, "three leases", allLeased)
	stop()
	require.NoError(t, os.Remove(leases))
	k.pool = "198.18.0.200-198.18.0.209"
	k.serve(t, seg.Hosts[1])
	moved := await(t, s, "other addresses", func(s map[string]State) bool {
		for _, st := range s {
			if !st.Lost.IsValid() {
				return false
			}
		}
		return allLeased(s)
	})
	for id, st := range moved {
		require.Equal(t, had[id].Lease.Addr, st.Lost)
		require.Equal(t, 200, int(st.Lease.Addr.As4()[3])/10*10)
	}
}

// A server that goes by the hardware address cannot serve several VIPs.
func TestKeaByHardwareAddress(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 2)
	kea{leases: filepath.Join(t.TempDir(), "leases"), pool: "198.18.0.100-198.18.0.109", renew: 100, rebind: 200, expire: 300,
		more: `"match-client-id": false,`}.serve(t, seg.Hosts[1])
	s, _ := start(t, seg.Hosts[0])
	s.Set(clients(2))
	states := await(t, s, "one lease, one error", func(s map[string]State) bool {
		return leased(s) == 1 && s["lab/default/web-1/0"].Err != nil
	})
	require.ErrorContains(t, states["lab/default/web-1/0"].Err,
		`is leased to "lab/default/web-0/0" already: a server that distinguishes clients by hardware address`)
}

// Every fault of the interface is reported, and the client recovers when it ends.
func TestInterfaceFails(t *testing.T) {
	t.Parallel()
	seg := testnet.NewSegment(t, 2)
	kea{leases: filepath.Join(t.TempDir(), "leases"), pool: "198.18.0.100-198.18.0.199", renew: 1, rebind: 20,
		expire: 30}.serve(t, seg.Hosts[1])
	h := seg.Hosts[0]
	s, _ := start(t, h)
	s.Set(clients(1))
	id := clients(1)[0].ID
	addr := await(t, s, "leased", allLeased)[id].Lease.Addr

	failing := func(want string) {
		t.Helper()
		await(t, s, want, func(s map[string]State) bool {
			return s[id].Lease != nil && s[id].Err != nil && strings.Contains(s[id].Err.Error(), want)
		})
	}
	works := func(what string) {
		t.Helper()
		now := time.Now()
		states := await(t, s, what, func(s map[string]State) bool {
			l := s[id].Lease
			return s[id].Err == nil && l != nil && l.Expires.Sub(now) > 30*time.Second
		})
		require.Equal(t, addr, states[id].Lease.Addr)
	}
	h.Run("ip", "link", "set", "eth0", "down")
	failing(`interface "eth0" is down`)
	h.Run("ip", "link", "set", "eth0", "up")
	works("up again")

	seg.Switch.Run("ip", "link", "set", "p1", "down")
	failing(`interface "eth0" has no carrier`)
	seg.Switch.Run("ip", "link", "set", "p1", "up")
	works("carrier again")

	h.Run("ip", "link", "set", "eth0", "address", "02:00:00:00:00:99")
	works("another hardware address")
	h.Run("ip", "addr", "flush", "dev", "eth0")
	works("no address of its own")

	h.Run("ip", "link", "del", "eth0")
	failing("no such network interface")
	seg.Plug(h, "eth0")
	works("a new interface")
}

// Five hundred VIPs, as the server and the wire see them.
func TestManyLeases(t *testing.T) {
	t.Parallel()
	const n = 500
	seg := testnet.NewSegment(t, 3)
	server := seg.Hosts[2]
	server.Run("ip", "addr", "add", "198.18.4.1/22", "dev", "eth0")
	dnsmasq(t, server, filepath.Join(t.TempDir(), "leases"), "198.18.4.2,198.18.6.200,255.255.252.0,1h", "--dhcp-lease-max=1000", "--no-ping",
		"--quiet-dhcp")
	s, stop := start(t, seg.Hosts[0])
	begin := time.Now()
	s.Set(clients(n))
	had := await(t, s, "all leased", allLeased)
	t.Logf("%d leases acquired in %v", n, time.Since(begin))
	stop()

	s, _ = start(t, seg.Hosts[1])
	begin = time.Now()
	s.Set(knowing(clients(n), had))
	has := await(t, s, "all taken over", allLeased)
	t.Logf("%d leases taken over in %v", n, time.Since(begin))
	for id := range has {
		require.Equal(t, had[id].Lease.Addr, has[id].Lease.Addr)
	}

}

// The kernel's filter passes answers to us, and nothing else.
func TestFilter(t *testing.T) {
	t.Parallel()
	// No switch: a bridge may look into packets itself.
	a, b := testnet.NewHost(t, "a"), testnet.NewHost(t, "b")
	testnet.Connect(a, "eth0", b, "eth0")
	a.Run("ip", "link", "set", "eth0", "promisc", "on")
	i, err := inside{a}.Interface("eth0")
	require.NoError(t, err)
	raw, err := bpf.Assemble(filter(i.HardwareAddr))
	require.NoError(t, err)
	listen := func(h *testnet.Host, filter []bpf.RawInstruction) net.PacketConn {
		i, err := inside{h}.Interface("eth0")
		require.NoError(t, err)
		c, err := inside{h}.Listen(&i.Interface, unix.ETH_P_ALL, filter)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	here, there := listen(a, raw), listen(b, nil)

	answer := func(to net.HardwareAddr) []byte {
		request, err := dhcpv4.New(dhcpv4.WithHwAddr(to))
		require.NoError(t, err)
		return answerFrame(reply(request, dhcpv4.MessageTypeAck, serverA, addrA))
	}
	with := func(at int, b ...byte) []byte {
		f := answer(i.HardwareAddr)
		copy(f[at:], b)
		return f
	}
	options := with(offIP, 0x46)
	options = slices.Concat(options[:offIP+20], []byte{1, 1, 1, 0}, options[offIP+20:])
	other := slices.Clone(i.HardwareAddr)
	for n := range other {
		other[n] ^= 4
	}
	end := with(60, 0xee) // ends the wait for a frame that does not pass
	for _, tt := range []struct {
		name  string
		frame []byte
		from  net.PacketConn
		want  bool
	}{
		{"broadcast", answer(i.HardwareAddr), there, true},
		{"unicast", with(0, i.HardwareAddr...), there, true},
		{"IP options", options, there, true},
		{"sent by this host", answer(i.HardwareAddr), here, false},
		{"to another host", with(0, 2, 0, 0, 0, 0, 0x77), there, false},
		{"for another client", answer(other), there, false},
		{"for another client, first byte", answer(append(net.HardwareAddr{i.HardwareAddr[0] ^ 4}, i.HardwareAddr[1:]...)), there, false},
		{"for another client, last byte", answer(append(slices.Clone(i.HardwareAddr[:5]), i.HardwareAddr[5]^1)), there, false},
		{"IPv6", with(12, 0x86, 0xdd), there, false},
		{"TCP", with(offIP+9, 6), there, false},
		{"first fragment", with(offIP+6, 0x20), there, false},
		{"later fragment", with(offIP+7, 1), there, false},
		{"another port", with(37, 67), there, false},
		{"a request", with(42, 1), there, false},
		{"a VLAN", slices.Concat(answer(i.HardwareAddr)[:12], []byte{0x81, 0, 0, 7}, answer(i.HardwareAddr)[12:]), there, false},
		{"cut", answer(i.HardwareAddr)[:70], there, false},
	} {
		for _, f := range [][]byte{tt.frame, end} {
			from := there
			if len(f) == len(tt.frame) && &f[0] == &tt.frame[0] {
				from = tt.from
			}
			_, err := from.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]})
			require.NoError(t, err)
		}
		passed := 0
		for buf := make([]byte, 1500); ; passed++ {
			n, _, err := here.ReadFrom(buf)
			require.NoError(t, err)
			if bytes.Equal(buf[:n], end) {
				break
			}
		}
		require.Equal(t, map[bool]int{true: 1}[tt.want], passed, tt.name)
	}
}
