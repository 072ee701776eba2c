package diagnose

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

var update = flag.Bool("update", false, "write the reference of the checks")

func addr(text string) netip.Addr     { return netip.MustParseAddr(text) }
func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }

var noon = time.Date(2026, 11, 26, 12, 3, 0, 0, time.UTC)

func mac(n int) string { return fmt.Sprintf("02:00:00:00:00:%02x", n) }

// healthy is a cluster of three nodes with VIPs of both families and a passive
// peer at n1, of which everything has been asked.
func healthy() *Cluster {
	c := &Cluster{
		Namespace: "lodestone-system", Active: true, Facts: map[string]Facts{}, Mute: map[string]string{},
		Segments: map[string][]report.Segment{}, Clocks: map[string]Clock{}, APIServer: &Clock{Offset: time.Minute, Uncertainty: time.Second},
		Passive:  map[string][]string{"n1": {"tor-a"}},
		Sessions: []Session{{Node: "n1", Peer: "tor-a", Up: true, BFD: "Up"}, {Node: "n2", Peer: "tor-b", Up: true}},
		VIPs: []VIP{
			{Addr: addr("203.0.113.10"), Owner: "n1", Port: 80}, {Addr: addr("2001:db8::10"), Owner: "n2"}, {Addr: addr("198.51.100.1")},
		},
	}
	for i, name := range []string{"n1", "n2", "n3"} {
		c.Segments[name] = []report.Segment{{Subnet: prefix("203.0.113.0/24"), Interface: "eth0"},
			{Subnet: prefix("2001:db8::/64"), Interface: "eth0"}, {Subnet: prefix("192.0.2.0/24"), Interface: "mgmt"}}
		c.Clocks[name] = Clock{Offset: time.Minute + time.Second, Uncertainty: 5 * time.Millisecond}
		c.Facts[name] = Facts{
			Node: name, Active: true, Unread: map[string]string{},
			Conditions: []Condition{{Name: "caches", OK: true, Message: "synced"}}, Alive: []string{"n1", "n2", "n3"},
			Interfaces: []Interface{
				{Name: "lo", MTU: 65536, Up: true, Addrs: []netip.Prefix{prefix("127.0.0.1/8")}},
				{Name: "eth0", HardwareAddr: mac(i + 1), MTU: 1500, Up: true, Addrs: []netip.Prefix{prefix(fmt.Sprintf("203.0.113.%d/24", i+1))}},
				{Name: "mgmt", HardwareAddr: mac(i + 17), MTU: 1500, Up: true, Addrs: []netip.Prefix{prefix(fmt.Sprintf("192.0.2.%d/24", i+1))}},
			},
			Sysctls: map[string]int{
				SysctlForward4: 1, SysctlForward6: 1,
				Sysctl("all", "arp_ignore"): 0, Sysctl("all", "arp_announce"): 0, Sysctl("all", "rp_filter"): 0, Sysctl("all", "forwarding"): 1,
				Sysctl("eth0", "arp_ignore"): 0, Sysctl("eth0", "arp_announce"): 0, Sysctl("eth0", "rp_filter"): 2, Sysctl("eth0", "forwarding"): 1,
			},
			DefaultRoutes: []string{"eth0"}, ProxyMode: "iptables", Capabilities: 1<<capNetRaw | 1<<capNetBindService,
			BGPListeners: []Listener{{Address: netip.MustParseAddrPort("0.0.0.0:179"), Ours: true}},
			Received:     noon,
			Detection: &Detection{Heartbeat: 25, Silence: 85, Watchers: []string{"n1", "n2"},
				Late: report.Late{Milliseconds: 30, At: noon, Times: 2}},
		}
	}
	change(c, "n2", func(f *Facts) {
		f.Members = []Member{{Node: "n1", Address: netip.MustParseAddrPort("203.0.113.1:9744")}}
		f.Neighbours = []Neighbour{{Node: "n1", Address: addr("203.0.113.1"), Interface: "eth0", Answers: []string{mac(1)}}}
		f.VIPs = []Trial{{Neighbour{Node: "n1", Address: addr("203.0.113.10"), Interface: "eth0", Answers: []string{mac(1)}}, 80, Accepted}}
	})
	return c
}

// change changes the facts of a node.
func change(c *Cluster, node string, f func(*Facts)) {
	facts := c.Facts[node]
	f(&facts)
	c.Facts[node] = facts
}

func on(node string, f func(*Facts)) func(*Cluster) {
	return func(c *Cluster) { change(c, node, f) }
}

func sysctl(node, name string, value int) func(*Cluster) {
	return on(node, func(f *Facts) { f.Sysctls[name] = value })
}

// ipvs puts the VIP where kube-proxy in mode IPVS puts it.
func ipvs(f *Facts) {
	f.ProxyMode = "ipvs"
	f.Interfaces = append(f.Interfaces, Interface{Name: ipvsInterface, Addrs: []netip.Prefix{prefix("203.0.113.10/32")}})
}

func TestHealthyClusterIsSilent(t *testing.T) {
	t.Parallel()
	r := Check(healthy())
	assert.Equal(t, OK, r.Findings[0].Severity, "%+v", r.Findings)
	assert.Len(t, r.Findings, len(catalogue))
	assert.Empty(t, r.NotRun)
}

// Each fault is found by its check, with the numbers, and by no other.
func TestFaultsAreFoundByTheirChecks(t *testing.T) {
	t.Parallel()
	trial := func(f func(*Trial)) func(*Cluster) {
		return on("n2", func(facts *Facts) { f(&facts.VIPs[0]) })
	}
	for name, fault := range map[string]struct {
		plant    func(*Cluster)
		check    ID
		severity Severity
		nodes    string
		text     string
	}{
		"invalid configuration": {func(c *Cluster) {
			c.Notices = []Notice{{Configuration, Warning, "ConfigMap is invalid", "validate"}}
		}, Configuration, Warning, "", "ConfigMap is invalid"},
		"condition": {on("n3", func(f *Facts) { f.Conditions[0] = Condition{Name: "caches", Message: "waiting for the API server"} }),
			Speakers, Error, "n3", "the speaker is not ready: caches: waiting for the API server"},
		"mute": {func(c *Cluster) { c.Mute["n4"] = "no speaker pod" }, Complete, Unknown, "n4",
			"nothing is known of the node itself: no speaker pod"},
		"unread": {func(c *Cluster) { c.Unread = []string{"you may not read Nodes"} }, Complete, Unknown, "", "you may not read Nodes"},
		"passive": {on("n3", func(f *Facts) { f.Active = false }), Complete, Unknown, "n3",
			"has not probed the network: it is of another version"},
		"other that handles": {func(c *Cluster) { c.Others = []Other{{"MetalLB", "shop/web", true}} },
			Implementations, Error, "", "MetalLB handles Services that Lodestone serves: shop/web"},
		"other that may": {func(c *Cluster) { c.Others = []Other{{"MetalLB", "DaemonSet a/b", false}} },
			Implementations, Warning, "", "MetalLB is installed, and may handle"},
		"ipvs without strictARP": {on("n2", func(f *Facts) {
			ipvs(f)
			f.Sysctls[Sysctl("all", "arp_announce")] = 2
		}), KubeProxy, Error, "n2", "arp_ignore is 0 on eth0, so that the kernel answers ARP for all VIPs on kube-ipvs0, 1 at the moment"},
		"ipvs by its interface": {on("n2", func(f *Facts) {
			ipvs(f)
			f.ProxyMode, f.Sysctls[Sysctl("all", "arp_announce")] = "", 2
		}), KubeProxy, Error, "n2", "mode IPVS without strictARP"},
		"ipvs, setting unknown": {on("n2", func(f *Facts) {
			ipvs(f)
			f.Sysctls[Sysctl("all", "arp_announce")] = 2
			delete(f.Sysctls, Sysctl("eth0", "arp_ignore"))
			f.Unread[Sysctl("eth0", "arp_ignore")] = "permission denied"
		}), KubeProxy, Unknown, "n2", "net/ipv4/conf/eth0/arp_ignore is not known: permission denied"},
		"arp_announce with ipvs": {on("n2", func(f *Facts) {
			ipvs(f)
			f.Sysctls[Sysctl("all", "arp_ignore")] = 1
		}), ARP, Warning, "n2", "arp_announce is 0 on eth0, and 1 VIPs are on kube-ipvs0"},
		"VIP configured": {on("n3", func(f *Facts) { f.Interfaces[1].Addrs = append(f.Interfaces[1].Addrs, prefix("203.0.113.10/32")) }),
			ARP, Error, "n3", "VIP 203.0.113.10 is configured on eth0"},
		"no ARP":              {sysctl("n1", Sysctl("all", "arp_ignore"), 8), ARP, Error, "n1", "arp_ignore is 8 on eth0"},
		"no forwarding":       {sysctl("n1", SysctlForward4, 0), IPForward, Error, "n1", "net/ipv4/ip_forward is 0"},
		"no forwarding there": {sysctl("n1", Sysctl("eth0", "forwarding"), 0), IPForward, Error, "n1", "net/ipv4/conf/eth0/forwarding is 0"},
		"no IPv6 forwarding":  {sysctl("n1", SysctlForward6, 0), IPForward, Error, "n1", "net/ipv6/conf/all/forwarding is 0"},
		"forwarding not known": {on("n1", func(f *Facts) { delete(f.Sysctls, SysctlForward4) }), IPForward, Unknown, "n1",
			"net/ipv4/ip_forward is not known: the speaker does not report it"},
		"strict and another way back": {on("n1", func(f *Facts) {
			f.Sysctls[Sysctl("all", "rp_filter")], f.Sysctls[Sysctl("eth0", "rp_filter")] = 1, 0
			f.DefaultRoutes = []string{"mgmt"}
		}), RPFilter, Warning, "n1", "rp_filter is 1 (strict) on eth0, and the default route leads through mgmt"},
		"strict, routes unknown": {on("n1", func(f *Facts) {
			f.Sysctls[Sysctl("eth0", "rp_filter")], f.Unread["default routes"] = 1, "open: no such file"
		}), RPFilter, Unknown, "n1", "default routes is not known"},
		"off the segment": {func(c *Cluster) { c.VIPs[0].Owner, c.VIPs[0].OffSegment = "", "NotOnSegment: none" },
			OnSegment, Error, "", "nobody announces 203.0.113.10: NotOnSegment: none"},
		"alone on the segment": {func(c *Cluster) {
			c.Segments["n2"], c.Segments["n3"] = c.Segments["n2"][1:], c.Segments["n3"][1:]
		}, OnSegment, Warning, "n1", "no other node is on the segment of 203.0.113.10"},
		"no NET_RAW": {on("n1", func(f *Facts) { f.Capabilities = 1 << capNetBindService }), Capabilities, Error, "n1", "lacks NET_RAW"},
		"no NET_ADMIN": {func(c *Cluster) { c.NetAdmin = "routes to pods" }, Capabilities, Error, "n1 n2 n3",
			"lacks NET_ADMIN, as is needed for routes to pods"},
		"no port 179": {on("n1", func(f *Facts) { f.Capabilities = 1 << capNetRaw }), Capabilities, Error, "n1",
			"lacks NET_BIND_SERVICE: it cannot listen on port 179 for passive peers (tor-a)"},
		"no rules": {on("n1", func(f *Facts) { f.Forwarding = &Forwarding{Error: "operation not permitted"} }), Forwards, Warning, "n1",
			"VIPs work without: operation not permitted"},
		"no table": {on("n1", func(f *Facts) { f.Forwarding = &Forwarding{WithoutTable: 3} }), Forwards, Warning, "n1", "3 Services at VIPs"},
		"conntrack full": {on("n1", func(f *Facts) { f.Forwarding = &Forwarding{ConntrackFull: true} }), Forwards, Warning, "n1",
			"conntrack is nearly full"},
		"nobody to hand to": {on("n1", func(f *Facts) {
			f.Forwarding = &Forwarding{Unreachable: []Unreachable{{"n2", addr("192.0.2.2"), "silent"}}}
		}), Forwards, Warning, "n1", "do not answer, and their connections wait: n2 (192.0.2.2)"},
		"a node elsewhere": {on("n1", func(f *Facts) {
			f.Forwarding = &Forwarding{Unreachable: []Unreachable{{"n2", addr("192.0.2.2"), "elsewhere"}}}
		}), Forwards, Warning, "n1", "or this node has no address with the segment's prefix length (only a /32 or /128)"},
		"not alive": {on("n1", func(f *Facts) { f.Alive = []string{"n1", "n2"} }), Alive, Error, "n1",
			"does not see that of node n3, which is alive"},
		"port closed": {on("n2", func(f *Facts) { f.Members[0].UDP = "no response" }), MembershipPort, Error, "n2",
			"the speaker of node n1 does not answer at 203.0.113.1:9744 by UDP (no response)"},
		"members not asked": {on("n2", func(f *Facts) { f.Unread["members"] = "3 of 9 speakers were not asked" }), MembershipPort, Unknown,
			"n2", "3 of 9"},
		"session down": {func(c *Cluster) { c.Sessions[1].Up, c.Sessions[1].Message = false, "hold timer expired" }, BGP, Error, "n2",
			"no session with peer tor-b: hold timer expired"},
		"session troubled": {func(c *Cluster) { c.Sessions[1].Message = "router ID shared" }, BGP, Warning, "n2",
			"session with peer tor-b: router ID shared"},
		"session left over": {func(c *Cluster) { c.Sessions[1].Leftover = true }, BGP, Warning, "n2", "should be none"},
		"BFD down":          {func(c *Cluster) { c.Sessions[0].BFD = "Down" }, BFD, Error, "n1", "the BFD session with peer tor-a is Down"},
		"another daemon": {on("n1", func(f *Facts) { f.BGPListeners[0].Ours = false }), BGPPort, Error, "n1",
			"another BGP daemon listens on 0.0.0.0:179, and passive peers (tor-a) connect there in vain"},
		"two daemons": {on("n1", func(f *Facts) {
			f.BGPListeners = append(f.BGPListeners, Listener{Address: netip.MustParseAddrPort("203.0.113.1:179")})
		}), BGPPort, Warning, "n1", "another BGP daemon listens on 203.0.113.1:179 beside the speaker"},
		"no daemon": {on("n1", func(f *Facts) { f.BGPListeners = nil }), BGPPort, Error, "n1", "nobody listens on port 179"},
		"no ARP answer": {on("n2", func(f *Facts) { f.Neighbours[0].Answers = nil }), Neighbours, Error, "n2",
			"address 203.0.113.1 of node n1: nobody answers ARP for it on eth0"},
		"no NDP answer": {on("n2", func(f *Facts) { f.Neighbours[0].Answers, f.Neighbours[0].Address = nil, addr("2001:db8::1") }),
			Neighbours, Error, "n2", "nobody answers NDP"},
		"not asked": {on("n2", func(f *Facts) { f.Neighbours[0].Error = "operation not permitted" }), Neighbours, Unknown, "n2",
			"was not asked for: operation not permitted"},
		"VIP of a stranger": {trial(func(t *Trial) { t.Answers = []string{mac(99)} }), Reach, Error, "n2",
			"VIP 203.0.113.10 of node n1: 02:00:00:00:00:63 (no known node) answers ARP"},
		"VIP of another node": {trial(func(t *Trial) { t.Answers = []string{mac(3)} }), Reach, Error, "n2", "02:00:00:00:00:03 (n3) answers ARP"},
		"VIP of two": {trial(func(t *Trial) { t.Answers = []string{mac(1), mac(3)} }), Reach, Error, "n2",
			"2 hardware addresses answer ARP for it on eth0: 02:00:00:00:00:01 (n1), 02:00:00:00:00:03 (n3)"},
		"VIP of nobody": {trial(func(t *Trial) { t.Answers, t.Reply = nil, "" }), Reach, Error, "n2", "nobody answers ARP"},
		"VIP that is silent": {trial(func(t *Trial) { t.Reply = Silence }), Reach, Error, "n2",
			"VIP 203.0.113.10 of node n1: TCP port 80 does not answer"},
		"VIP that refuses": {trial(func(t *Trial) { t.Reply = Refused }), Reach, Warning, "n2", "TCP port 80 refuses connections"},
		"VIP not tried": {trial(func(t *Trial) { t.Error = "it may have moved" }), Reach, Unknown, "n2",
			"VIP 203.0.113.10 was not tried: it may have moved"},
		"late": {on("n3", func(f *Facts) { f.Detection.Late.Milliseconds, f.Detection.AccusedAt = 400, noon }), Heartbeats, Warning, "n3",
			"others took the speaker for lost at 12:03:00 UTC, and its VIPs moved: its loop was 400 ms late at 12:03:00 UTC, and 2 times " +
				"in the last hour later than a heartbeat (25 ms)"},
		"heartbeats lost": {func(c *Cluster) {
			c.Facts["n3"].Detection.AccusedAt = noon.Add(-59 * time.Minute)
			c.Facts["n1"].Detection.Lost = []Loss{{"n3", noon, 87}}
		}, Heartbeats, Warning, "n3", "others took the speaker for lost at 11:04:00 UTC (n1 heard nothing from it), and its VIPs moved: " +
			"its heartbeats did not arrive, since its loop was never later than 30 ms"},
		"MTU": {on("n3", func(f *Facts) { f.Interfaces[1].MTU = 9000 }), MTU, Warning, "",
			"interfaces on 203.0.113.0/24 have different MTUs, 1500 on n1 (eth0), n2 (eth0), 9000 on n3 (eth0)"},
		"clock": {func(c *Cluster) { c.Clocks["n2"] = Clock{Offset: 50 * time.Second} }, ClockSkew, Warning, "n2",
			"the clock is 10s behind that of the API server, give or take 1s"},
		"clock far off":    {func(c *Cluster) { c.Clocks["n2"] = Clock{Offset: 2 * time.Minute} }, ClockSkew, Error, "n2", "1m0s ahead of"},
		"no clock":         {func(c *Cluster) { c.APIServer = nil }, ClockSkew, Unknown, "", "the clock of the API server is not known"},
		"nothing to check": {func(c *Cluster) { c.Undecided = []ID{BGP} }, BGP, Unknown, "", "undecided: what it takes could not be read"},
		"nobody announces": {func(c *Cluster) { c.Notices = []Notice{{Announced, Error, "nobody announces it", ""}} }, Announced, Error, "",
			"nobody announces it"},
		"versions differ": {func(c *Cluster) { c.Notices = []Notice{{Versions, Warning, "v1 and v2", ""}} }, Versions, Warning,
			"", "v1 and v2"},
		"address conflict": {func(c *Cluster) { c.Notices = []Notice{{Conflict, Error, "another machine", ""}} }, Conflict, Error, "",
			"another machine"},
		"controller absent": {func(c *Cluster) { c.Notices = []Notice{{Controller, Error, "no replica leads", ""}} }, Controller, Error, "",
			"no replica leads"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := healthy()
			fault.plant(c)
			var found []Finding
			for _, f := range Check(c).Findings {
				if f.Severity != OK {
					found = append(found, f)
				}
			}
			require.NotEmpty(t, found)
			for _, f := range found {
				assert.Equal(t, fault.check, f.Check, "%+v", f)
			}
			f := found[0]
			assert.Equal(t, fault.severity, f.Severity)
			assert.Equal(t, fault.nodes, strings.Join(f.Nodes, " "))
			assert.Contains(t, f.Message, fault.text)
		})
	}
}

// Strict filtering is no finding where it does no harm: the route back leads through the interface, or there is
// none at all.
func TestStrictFilteringAloneIsNoFault(t *testing.T) {
	t.Parallel()
	for _, routes := range [][]string{{"eth0"}, {"mgmt", "eth0"}, nil} {
		c := healthy()
		change(c, "n1", func(f *Facts) { f.Sysctls[Sysctl("eth0", "rp_filter")], f.DefaultRoutes = 1, routes })
		assert.Equal(t, OK, Check(c).Findings[0].Severity, "%v", routes)
	}
}

// An address that the kernel does not answer for on its segment hurts nobody, and
// a node may answer by any of its interfaces.
func TestWhatNobodyNoticesIsNoFault(t *testing.T) {
	t.Parallel()
	c := healthy()
	change(c, "n3", func(f *Facts) {
		f.Interfaces[0].Addrs = append(f.Interfaces[0].Addrs, prefix("203.0.113.10/32"), prefix("198.51.100.1/32"))
		f.Sysctls[Sysctl("all", "arp_ignore")] = 1
	})
	change(c, "n2", func(f *Facts) { f.VIPs[0].Answers = []string{mac(1), mac(17)} })
	assert.Equal(t, OK, Check(c).Findings[0].Severity, "%+v", Check(c).Findings)

	change(c, "n3", func(f *Facts) { f.Sysctls[Sysctl("all", "arp_ignore")] = 0 })
	assert.Contains(t, Check(c).Findings[0].Message, "VIP 203.0.113.10 is configured on lo")
}

// Nodes of IPv6 alone need not forward IPv4.
func TestNodesWithoutIPv4NeedNotForwardIt(t *testing.T) {
	t.Parallel()
	c := healthy()
	change(c, "n1", func(f *Facts) {
		f.Sysctls[SysctlForward4] = 0
		f.Interfaces = []Interface{{Name: "lo", Addrs: []netip.Prefix{prefix("127.0.0.1/8")}},
			{Name: "eth0", MTU: 1500, HardwareAddr: mac(1), Addrs: []netip.Prefix{prefix("2001:db8::1/64")}}}
	})
	assert.Equal(t, OK, Check(c).Findings[0].Severity)
}

// A speaker that is late although it has real-time priority is on a node that stood still. What is over, and what an
// older speaker does not report, is no fault.
func TestLateSpeakers(t *testing.T) {
	t.Parallel()
	c := healthy()
	change(c, "n1", func(f *Facts) { f.Detection.Late.Milliseconds = 400 })
	assert.Equal(t, OK, Check(c).Findings[0].Severity, "nobody noticed")
	change(c, "n1", func(f *Facts) { f.Detection.AccusedAt = noon })
	assert.Contains(t, Check(c).Findings[0].Hint, "speaker.bgp.realTimeBFD=true")
	change(c, "n1", func(f *Facts) { f.Detection.RealTime = true })
	assert.Contains(t, Check(c).Findings[0].Hint, "was the virtual machine paused")
	change(c, "n1", func(f *Facts) { f.Detection.AccusedAt = noon.Add(-time.Hour) })
	change(c, "n2", func(f *Facts) { f.Detection = nil })
	assert.Equal(t, OK, Check(c).Findings[0].Severity, "%+v", Check(c).Findings)
}

// The worst comes first, and the same finding on many nodes is one.
func TestReportIsOrderedAndShort(t *testing.T) {
	t.Parallel()
	c := healthy()
	sysctl("n3", SysctlForward4, 0)(c)
	sysctl("n1", SysctlForward4, 0)(c)
	c.Mute["n4"] = "gone"
	c.Sessions[1].Message = "odd"
	r := Check(c)
	var order []Severity
	for _, f := range r.Findings {
		order = append(order, f.Severity)
	}
	assert.Equal(t, []Severity{Error, Warning, Unknown, OK}, slices.Compact(order))
	assert.Equal(t, []string{"n1", "n3"}, r.Findings[0].Nodes)
	assert.True(t, r.Has(Warning))
	for _, f := range r.Findings {
		if f.Check == MTU {
			assert.Equal(t, "interfaces on a segment have one MTU, by the reports of 3 of 4 nodes", f.Message)
		}
	}
}

// Without any facts, nothing is reported as well.
func TestWithoutAnswersNothingIsWell(t *testing.T) {
	t.Parallel()
	r := Check(&Cluster{Mute: map[string]string{"n1": "no answer"}})
	for _, f := range r.Findings {
		entry := catalogue[slices.IndexFunc(catalogue, func(e Entry) bool { return e.ID == f.Check })]
		if entry.OfNodes {
			assert.Equal(t, Unknown, f.Severity, "%+v", f)
		}
	}
	assert.Equal(t, []ID{MembershipPort, Neighbours, Reach}, r.NotRun)
}

func TestEveryVIPIsTriedByOneOtherNode(t *testing.T) {
	t.Parallel()
	c := healthy()
	assert.Equal(t, map[string][]netip.AddrPort{
		"n2": {netip.MustParseAddrPort("203.0.113.10:80")}, "n3": {netip.MustParseAddrPort("[2001:db8::10]:0")},
	}, c.Plan(), "198.51.100.1 is on no segment")

	// The next one is away: the one after it.
	c.Mute["n2"] = "gone"
	assert.Equal(t, map[string][]netip.AddrPort{"n3": {netip.MustParseAddrPort("203.0.113.10:80"),
		netip.MustParseAddrPort("[2001:db8::10]:0")}}, c.Plan())

	// No node is asked for more than it can do.
	c.VIPs = nil
	for i := range 2 * MaxVIPs {
		c.VIPs = append(c.VIPs, VIP{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(100 + i)}), Owner: "n1"})
	}
	assert.Len(t, c.Plan()["n3"], MaxVIPs)
}

// The two ends of a wire that is closed in one direction are distinguished from a
// node that is away.
func TestUnknownOwnersAreNotStrangers(t *testing.T) {
	t.Parallel()
	c := healthy()
	delete(c.Facts, "n1")
	c.Mute["n1"] = "no answer"
	for _, f := range Check(c).Findings {
		if f.Check == Neighbours || f.Check == Reach {
			assert.Equal(t, OK, f.Severity, "whose hardware address it is, only n1 could know: %+v", f)
		}
	}
}

const referenceHead = `# Checks of lodestone diagnose

<!-- generated by go test ./pkg/diagnose -update -->

What [lodestone diagnose](cli.md#lodestone-diagnose) checks, by the names that its
answers have. A finding is an *error* (Services do not work, or will not when
something moves), a *warning* (some clients, or some day, will notice) or *unknown*
(it could not be found out, and the message has the reason). Checks marked with * send
packets, and are made with ` + "`--active`" + ` only.

| check | what a finding means | what helps |
|---|---|---|
`

// TestReference checks that the reference is what the catalogue has.
func TestReference(t *testing.T) {
	t.Parallel()
	text := referenceHead
	for _, e := range Catalogue() {
		mark := ""
		if e.Active {
			mark = " *"
		}
		text += fmt.Sprintf("| `%s`%s | %s | %s |\n", e.ID, mark, e.Meaning, e.Cure)
	}
	page := filepath.Join("..", "..", "docs", "reference", "checks.md")
	if *update {
		require.NoError(t, os.WriteFile(page, []byte(text), 0o644))
	}
	have, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Equal(t, text, string(have), "go test ./pkg/diagnose -update")
}
