package lodestone

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// NextHops returns the nodes to which a router's kernel forwards the VIP's
// traffic, sorted: the result of BGP and BFD.
func (i *Installation) NextHops(router, vip string) ([]string, error) {
	handle, err := netns.Netlink(i.Lab.Namespace(router))
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	address := netip.MustParseAddr(vip)
	family := netlink.FAMILY_V4
	if address.Is6() {
		family = netlink.FAMILY_V6
	}
	routes, err := handle.RouteList(nil, family)
	if err != nil {
		return nil, fmt.Errorf("list routes of %s: %w", router, err)
	}
	var nodes []string
	for _, r := range routes {
		if r.Dst == nil || r.Dst.String() != netip.PrefixFrom(address, address.BitLen()).String() {
			continue
		}
		hops := []netip.Addr{asAddr(r.Gw)}
		for _, hop := range r.MultiPath {
			hops = append(hops, asAddr(hop.Gw))
		}
		for _, hop := range hops {
			if hop.IsValid() {
				nodes = append(nodes, i.hostOf(hop))
			}
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}

func asAddr(ip []byte) netip.Addr {
	address, _ := netip.AddrFromSlice(ip)
	return address.Unmap()
}

// hostOf names the host that has the address, or returns the address itself.
func (i *Installation) hostOf(address netip.Addr) string {
	for _, node := range i.Lab.Nodes() {
		if slices.Contains(i.Lab.Addresses(node), address) {
			return node
		}
	}
	return address.String()
}

// Path is one way to a prefix that a router with FRR has heard of.
type Path struct {
	ASPath struct {
		String string `json:"string"`
	} `json:"aspath"`
	Community struct {
		String string `json:"string"`
	} `json:"community"`
	LargeCommunity struct {
		String string `json:"string"`
	} `json:"largeCommunity"`
	MED             int  `json:"metric"`
	LocalPreference int  `json:"locPrf"`
	Stale           bool `json:"stale"`
	Peer            struct {
		ID string `json:"peerId"`
	} `json:"peer"`
}

// Paths returns what a router with FRR has heard of the prefix.
func (i *Installation) Paths(ctx context.Context, router string, prefix netip.Prefix) ([]Path, error) {
	var table struct {
		Paths []Path `json:"paths"`
	}
	family := "ipv4"
	if prefix.Addr().Is6() {
		family = "ipv6"
	}
	err := i.askFRR(ctx, router, fmt.Sprintf("show bgp %s unicast %s json", family, prefix), &table)
	return table.Paths, err
}

// Session is a BGP session as a router with FRR sees it.
type Session struct {
	State       string `json:"bgpState"`
	RemoteAS    uint32 `json:"remoteAs"`
	Established int    `json:"connectionsEstablished"`
	ResetReason string `json:"lastResetDueTo"`
}

// Sessions returns the sessions of a router with FRR by the node's address.
func (i *Installation) Sessions(ctx context.Context, router string) (map[string]Session, error) {
	sessions := map[string]Session{}
	return sessions, i.askFRR(ctx, router, "show bgp neighbors json", &sessions)
}

func (i *Installation) askFRR(ctx context.Context, router, question string, answer any) error {
	text, err := i.Lab.AskRouter(ctx, router, question)
	if err != nil {
		return err
	}
	if strings.TrimSpace(text) == "" {
		text = "{}"
	}
	if err := json.Unmarshal([]byte(text), answer); err != nil {
		return fmt.Errorf("read the answer of %s to %q: %w: %s", router, question, err, text)
	}
	return nil
}
