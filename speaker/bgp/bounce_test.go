package bgp

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// Node and router forward packets for a port that nobody serves to each other. The guide's
// lines end that, and leave the served ports to all clients: those behind the router, and
// the node itself.
func TestPacketsThatNobodyServes(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	node, tor, client := s.Hosts[0], s.Hosts[1], s.Hosts[2]
	for _, h := range []*testnet.Host{node, tor} {
		h.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.eth0.send_redirects=0")
	}
	client.Run("ip", "route", "add", "203.0.113.0/26", "via", tor4.String())
	tor.Run("ip", "route", "add", "203.0.113.0/26", "via", node4.String())
	node.Run("ip", "route", "add", "default", "via", tor4.String())
	// As kube-proxy: a port of a VIP has another destination before it is routed.
	for hook, priority := range map[string]string{"prerouting": "-100", "output": "-100"} {
		node.Run("nft", "add", "table", "ip", "proxy")
		node.Run("nft", "add", "chain", "ip", "proxy", hook, fmt.Sprintf("{ type nat hook %s priority %s ; }", hook, priority))
		node.Run("nft", "add", "rule", "ip", "proxy", hook, "ip", "daddr", "203.0.113.7", "tcp", "dport", "80", "dnat", "to",
			node4.String()+":8080")
	}
	var pod net.Listener
	require.NoError(t, node.Do(func() (err error) {
		pod, err = net.Listen("tcp", node4.String()+":8080")
		return err
	}))
	served := make(chan struct{})
	t.Cleanup(func() { pod.Close(); <-served })
	go func() {
		defer close(served)
		for {
			conn, err := pod.Accept()
			if err != nil {
				return
			}
			io.WriteString(conn, "pod") //nolint:errcheck // the client notices
			conn.Close()
		}
	}()
	reach := func(from *testnet.Host, port string) (answer string, err error) {
		err = from.Do(func() error {
			conn, err := net.DialTimeout("tcp", "203.0.113.7:"+port, 5*time.Second)
			if err != nil {
				return err
			}
			defer conn.Close()
			b, err := io.ReadAll(conn)
			answer = string(b)
			return err
		})
		return answer, err
	}
	everybody := func() {
		t.Helper()
		for _, from := range []*testnet.Host{client, node} {
			answer, err := reach(from, "80")
			require.NoError(t, err)
			require.Equal(t, "pod", answer)
		}
	}
	everybody()
	before := forwarded(t, node)
	_, err := reach(client, "81")
	require.Error(t, err)
	require.Greater(t, forwarded(t, node)-before, 20, "a packet that goes to and fro")

	found := false
	for _, text := range examples(t, guides+"/bgp.md", "sh") {
		for line := range strings.Lines(text) {
			found = true
			node.Run("sh", "-c", line)
		}
	}
	require.True(t, found, "the guide has lines for the host")
	before = forwarded(t, node)
	_, err = reach(client, "81")
	require.ErrorContains(t, err, "no route to host", "the client gets an ICMP error")
	require.Equal(t, before, forwarded(t, node))
	everybody()
}

// The guide has the same lines for IPv6, but for the program's flag.
func TestIPv6PacketsThatNobodyServes(t *testing.T) {
	t.Parallel()
	s := testnet.NewSegment(t, 3)
	node, tor, client := s.Hosts[0], s.Hosts[1], s.Hosts[2]
	for i, h := range s.Hosts {
		h.Run("ip", "addr", "add", fmt.Sprintf("2001:db8:77::%d/64", i+1), "dev", "eth0", "nodad")
		h.Run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
	}
	client.Run("ip", "route", "add", "2001:db8:203::/64", "via", "2001:db8:77::2")
	tor.Run("ip", "route", "add", "2001:db8:203::/64", "via", "2001:db8:77::1")
	node.Run("ip", "route", "add", "default", "via", "2001:db8:77::2")
	bounced := func() (hops int, err error) {
		before := forwarded6(t, node)
		err = client.Do(func() error {
			conn, err := net.DialTimeout("tcp", "[2001:db8:203::7]:81", 5*time.Second)
			if err == nil {
				conn.Close()
			}
			return err
		})
		return forwarded6(t, node) - before, err
	}
	hops, err := bounced()
	require.Error(t, err)
	require.Greater(t, hops, 20, "a packet that goes to and fro")
	lines := strings.NewReplacer("ip r", "ip -6 r", "203.0.113.0/26", "2001:db8:203::/64")
	for _, text := range examples(t, guides+"/bgp.md", "sh") {
		for line := range strings.Lines(text) {
			node.Run("sh", "-c", lines.Replace(line))
		}
	}
	hops, err = bounced()
	require.ErrorContains(t, err, "network is unreachable", "the client gets an ICMPv6 error: no route")
	require.Zero(t, hops)
}

// forwarded6 returns how many IPv6 packets a host has forwarded.
func forwarded6(t *testing.T, h *testnet.Host) int {
	t.Helper()
	fields := strings.Fields(h.Run("cat", "/proc/net/snmp6"))
	at := slices.Index(fields, "Ip6OutForwDatagrams")
	require.GreaterOrEqual(t, at, 0)
	n, err := strconv.Atoi(fields[at+1])
	require.NoError(t, err)
	return n
}

// forwarded returns how many IPv4 packets a host has forwarded.
func forwarded(t *testing.T, h *testnet.Host) int {
	t.Helper()
	var names []string
	for line := range strings.Lines(h.Run("cat", "/proc/net/snmp")) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Ip:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if name == "ForwDatagrams" {
				n, err := strconv.Atoi(fields[i])
				require.NoError(t, err)
				return n
			}
		}
	}
	t.Fatal("no ForwDatagrams")
	return 0
}
