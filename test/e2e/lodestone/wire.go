package lodestone

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// answer matches one reply in arping's output.
var answer = regexp.MustCompile(`bytes from ([0-9a-f:]{17}) `)

// Arping asks for an address on a host's segment as often as count and returns the
// hardware address of each answer, in the order of arrival. The host is its namespace.
// arping is a program of others: it sees what any host on the segment sees.
func Arping(ctx context.Context, host, address string, count int) ([]string, error) {
	// Without an answer arping ends with status 1: that is a result.
	out, err := netns.Command(ctx, host, "arping", "-c", strconv.Itoa(count), "-w", "1", "-W", "0.05", "-i", "eth0", address).CombinedOutput()
	var macs []string
	for _, match := range answer.FindAllStringSubmatch(string(out), -1) {
		macs = append(macs, match[1])
	}
	if len(macs) == 0 && !regexp.MustCompile(`Timeout|unanswered`).Match(out) {
		return nil, fmt.Errorf("arping %s: %w: %s", address, err, out)
	}
	return macs, nil
}

// advertised matches one advertisement in ndisc6's output.
var advertised = regexp.MustCompile(`Target link-layer address: ([0-9A-F:]{17})`)

// Ndisc6 solicits an IPv6 address on a host's segment as often as count and returns
// the hardware address of each answer. It waits for answers of several hosts to each
// solicitation. The host is its namespace.
func Ndisc6(ctx context.Context, host, address string, count int) ([]string, error) {
	var macs []string
	for range count {
		// Without an answer ndisc6 ends with status 2: that is a result.
		out, err := netns.Command(ctx, host, "ndisc6", "-m", "-r", "1", "-w", "50", address, "eth0").CombinedOutput()
		matches := advertised.FindAllStringSubmatch(string(out), -1)
		for _, match := range matches {
			macs = append(macs, strings.ToLower(match[1]))
		}
		if len(matches) == 0 && !regexp.MustCompile(`Timed out|No response`).Match(out) {
			return nil, fmt.Errorf("ndisc6 %s: %w: %s", address, err, out)
		}
	}
	return macs, nil
}

// Ask asks the client's segment for an address of either family.
func (i *Installation) Ask(ctx context.Context, address string, count int) ([]string, error) {
	return askFrom(ctx, i.Lab.Namespace(lab.Client), address, count)
}

func askFrom(ctx context.Context, host, address string, count int) ([]string, error) {
	if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
		return Ndisc6(ctx, host, address, count)
	}
	return Arping(ctx, host, address, count)
}

// Owner returns the node that answers the client for the address on the wire.
func (i *Installation) Owner(ctx context.Context, address string) (string, error) {
	return i.ownerFrom(ctx, lab.Client, address)
}

// OwnerSeenBy returns the node that answers another node for the address.
func (i *Installation) OwnerSeenBy(ctx context.Context, node, address string) (string, error) {
	return i.ownerFrom(ctx, node, address)
}

// asking is how long an owner is asked for until somebody answers: a speaker that has to wait for a busy
// machine answers too late for the first request. Linux asks for as long.
const asking = 3 * time.Second

func (i *Installation) ownerFrom(ctx context.Context, host, address string) (string, error) {
	var macs []string
	for end := time.Now().Add(asking); len(macs) == 0 && time.Now().Before(end); {
		var err error
		if macs, err = askFrom(ctx, i.Lab.Namespace(host), address, 1); err != nil {
			return "", err
		}
	}
	slices.Sort(macs)
	if macs = slices.Compact(macs); len(macs) != 1 {
		return "", fmt.Errorf("%d hosts answer for %s: %q", len(macs), address, macs)
	}
	return i.nodeOf(macs[0])
}

func (i *Installation) nodeOf(mac string) (string, error) {
	for _, node := range i.Lab.Nodes() {
		host := lan.Host{Addresses: []netip.Prefix{netip.PrefixFrom(i.Lab.Addresses(node)[0], 24)}}
		if host.MAC().String() == mac {
			return node, nil
		}
	}
	return "", fmt.Errorf("no node has hardware address %s", mac)
}

// OneAnswerer checks that several requests get an answer each, all from one node. An answer may come late,
// and to the next request then.
func (i *Installation) OneAnswerer(ctx context.Context, address string) error {
	const requests = 10
	var macs []string
	for end := time.Now().Add(asking); len(macs) < requests && time.Now().Before(end); {
		more, err := i.Ask(ctx, address, requests-len(macs))
		if err != nil {
			return err
		}
		macs = append(macs, more...)
	}
	if len(macs) < requests || len(macs) > requests*3/2 {
		return fmt.Errorf("%d requests for %s got %d answers: %q", requests, address, len(macs), macs)
	}
	if macs = slices.Compact(macs); len(macs) != 1 {
		return fmt.Errorf("several nodes answer for %s: %q", address, macs)
	}
	return nil
}

// DeleteForwarding deletes the rules of direct forwarding on a node, as somebody may by hand.
func (i *Installation) DeleteForwarding(ctx context.Context, node string) error {
	var commands []string
	for _, table := range []string{"ip lodestone-direct", "ip6 lodestone-direct", "netdev lodestone-direct-ip",
		"netdev lodestone-direct-ip6"} {
		commands = append(commands, "add table "+table, "delete table "+table)
	}
	if output, err := i.Lab.Command(ctx, node, "nft", strings.Join(commands, "; ")).CombinedOutput(); err != nil {
		return fmt.Errorf("delete the rules of %s: %w: %s", node, err, output)
	}
	return nil
}

// ForgetConnections removes the connections to VIPs from the nodes' conntrack. It remembers a connection that
// was not closed for a day, and clients use ports again.
func (i *Installation) ForgetConnections() (errs error) {
	hosts := toVIPs{}
	for _, host := range i.Lab.HostNames() {
		for _, address := range i.Lab.Addresses(host) {
			hosts[address] = true
		}
	}
	for _, node := range i.Lab.Nodes() {
		errs = errors.Join(errs, i.Lab.InNamespace(node, func() (errs error) {
			for _, family := range []netlink.InetFamily{netlink.FAMILY_V4, netlink.FAMILY_V6} {
				_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, hosts)
				errs = errors.Join(errs, err)
			}
			return errs
		}))
	}
	return errs
}

// toVIPs matches connections to addresses of the lab's segments that no host has.
type toVIPs map[netip.Addr]bool

func (hosts toVIPs) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	to = to.Unmap()
	return !hosts[to] && (netip.MustParsePrefix("198.18.0.0/15").Contains(to) || netip.MustParsePrefix("2001:db8::/32").Contains(to))
}
