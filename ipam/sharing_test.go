package ipam_test

import (
	"fmt"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

func TestServicesOfOneKeyShareAnAddress(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29", "2001:db8::/125"))
	dual := families(ipam.IPv4, ipam.IPv6)
	s.gets("default/other", "lan/198.18.0.0")
	s.gets("default/web", "lan/198.18.0.1", shares("k", "80"))
	s.gets("default/api", "lan/198.18.0.1 lan/2001:db8::", shares("k", "443"), dual)
	s.gets("default/web", "lan/198.18.0.1 lan/2001:db8::", shares("k", "80"), dual) // joins family by family
	s.gets("default/dns", "lan/198.18.0.1", shares("k", "80/UDP"))
	s.gets("default/elsewhere", "lan/198.18.0.2", shares("m", "80"))
	assert.Equal(t, []ipam.Owner{owner("default/web"), owner("default/api"), owner("default/dns")},
		s.HoldersOf(netip.MustParseAddr("198.18.0.1")))

	s.frees("default/web")
	s.frees("default/dns")
	_, quarantined := s.NextFree(s.now)
	assert.False(t, quarantined, "somebody is left")
	s.frees("default/api")
	s.refused("default/x", ipam.AddressQuarantined,
		"198.18.0.1 is in quarantine after its use by default/api, it is free in 30s", at("198.18.0.1"))
	s.gets("default/web", "lan/198.18.0.3", shares("k", "80"))
}

// An address passes from one owner to another of the same Service, with its terms.
func TestTransfer(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	addr := netip.MustParseAddr("198.18.0.0")
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/api", "lan/198.18.0.0", shares("k", "443"))
	since := s.HeldSince(owner("default/web").UID, addr)
	heir := ipam.Owner{UID: "heir", Name: "default/web"}
	s.now = s.now.Add(time.Minute)
	for range 2 { // the second time it holds nothing
		s.Transfer(addr, owner("default/web").UID, heir)
		assert.Empty(t, s.Holds(owner("default/web").UID))
		assert.Equal(t, []ipam.Owner{heir, owner("default/api")}, s.HoldersOf(addr))
		assert.Equal(t, since, s.HeldSince(heir.UID, addr))
	}
	s.refused("default/x", ipam.SharingConflict,
		"port TCP/80 of 198.18.0.0 is used by default/web: use another port or another sharing key", shares("k", "80"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80")) // both are one Service
	s.Transfer(addr, owner("default/web").UID, heir)
	assert.Equal(t, []ipam.Owner{heir, owner("default/api")}, s.HoldersOf(addr))

	assert.False(t, s.Leave(owner("default/web").UID, addr, s.now))
	assert.True(t, s.Leave(heir.UID, addr, s.now))
	assert.False(t, s.Leave(heir.UID, addr, s.now))
	assert.Equal(t, []ipam.Owner{owner("default/api")}, s.HoldersOf(addr))
	s.gets("default/x", "lan/198.18.0.0", shares("k", "80")) // its port is free
	s.frees("default/x")
	assert.True(t, s.Leave(owner("default/api").UID, addr, s.now))
	s.refused("default/y", ipam.AddressQuarantined,
		"198.18.0.0 is in quarantine after its use by default/api, it is free in 30s", at("198.18.0.0"))
}

func TestTheSameKeyMeansTheSameAddress(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80 443", "app=web"))
	r := s.refused("default/x", ipam.SharingConflict,
		"port TCP/443 of 198.18.0.0 is used by default/web: use another port or another sharing key", shares("k", "443 8080", "app=web"))
	assert.Equal(t, "lan", r.Pool)
	s.refused("default/x", ipam.SharingConflict,
		`198.18.0.0 is held by default/web, which has externalTrafficPolicy Local with selector "app=web", `+
			`this Service externalTrafficPolicy Cluster: let both have externalTrafficPolicy Cluster, or the same selector, or use another sharing key`,
		shares("k", "8080"))
	s.gets("default/x", "lan/198.18.0.1", shares("", "443"))
	s.gets("default/y", "lan/198.18.0.2", shares("", "8080")) // no key is not a key
}

func TestSharingBetweenNamespacesTakesBoth(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("a/web", "lan/198.18.0.0", shares("k", "80"), with("b", "c"))
	s.gets("d/web", "lan/198.18.0.1", shares("k", "80"), with("a")) // a does not name d
	s.gets("c/web", "lan/198.18.0.2", shares("k", "443"))           // c does not name a
	s.gets("b/web", "lan/198.18.0.0", shares("k", "443"), with("a"))
	s.refused("c/x", ipam.SharingConflict, `198.18.0.0, held by b/web, cannot be shared between namespaces "b" and "c": `+
		`each Service has to name the other's namespace`, shares("k", "8080"), with("a"), at("198.18.0.0"))
}

func TestAskingForAnAddressThatIsShared(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/web", "lan/198.18.0.5", shares("k", "80"), at("198.18.0.5"))
	s.gets("default/api", "lan/198.18.0.5", shares("k", "443"), at("198.18.0.5"))
	s.refused("default/x", ipam.SharingConflict,
		"port TCP/80 of 198.18.0.5 is used by default/web: use another port or another sharing key", shares("k", "80"), at("198.18.0.5"))
	s.refused("default/x", ipam.AddressInUse,
		"198.18.0.5 is held by default/web, default/api",
		shares("m", "8080"), at("198.18.0.5"))
	s.refused("default/x", ipam.AddressInUse,
		"198.18.0.5 is held by default/web, default/api", at("198.18.0.5"))
	s.gets("default/x", "lan/198.18.0.6", shares("k", "80"), at("198.18.0.6"))
	s.gets("default/y", "lan/198.18.0.5", shares("k", "8080")) // of two under the key, the lowest on which it fits
	s.gets("default/z", "lan/198.18.0.6", shares("k", "443"))
}

func TestOnlyPoolsThatTheServiceCouldDrawFromCount(t *testing.T) {
	lan, dmz := pool("lan", "198.18.0.0/29"), onRequest(pool("dmz", "198.18.1.0/31"))
	s := begin(t, lan, dmz)
	s.gets("default/web", "dmz/198.18.1.0", shares("k", "80"), from("dmz"))
	s.gets("default/api", "lan/198.18.0.0", shares("k", "443"))
	s.gets("default/x", "dmz/198.18.1.0", shares("k", "8080"), from("dmz", "lan"))
	s.edit(lan, draining(dmz))
	s.gets("default/x", "dmz/198.18.1.0", shares("k", "8080"), from("dmz", "lan"))
	s.gets("default/y", "lan/198.18.0.0", shares("k", "9090"), from("dmz", "lan"))
	s.refused("default/z", ipam.PoolDraining, `198.18.1.0 is in pool "dmz", which is draining: it gives no new addresses`,
		shares("k", "9090"), at("198.18.1.0"))
}

func TestWhoeverChangesItsTermsLeaves(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80 443")) // alone it may use what it likes
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/api", "lan/198.18.0.0", shares("k", "443"))
	s.gets("default/api", "lan/198.18.0.1", shares("m", "443")) // another key, another address
	s.gets("default/api", "lan/198.18.0.1")
	s.gets("default/dns", "lan/198.18.0.0", shares("k", "53/UDP"))
	s.gets("default/dns", "lan/198.18.0.2") // no key, an address for itself
	s.holds("default/web", "lan/198.18.0.0")
}

func TestWhoeverClashesHoldsNothing(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/31", "2001:db8::/128"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/api", "lan/198.18.0.0 lan/2001:db8::", shares("k", "443"), families(ipam.IPv4, ipam.IPv6))
	s.gets("default/x", "lan/198.18.0.1")

	// The port is the neighbour's: what it holds alone stays.
	_, err := s.ask("default/api", shares("k", "80"), families(ipam.IPv4, ipam.IPv6))
	assert.ErrorContains(t, err, "SharingConflict: port TCP/80 of 198.18.0.0 is used by default/web")
	s.holds("default/api", "lan/2001:db8::")
	s.holds("default/web", "lan/198.18.0.0")
	s.gets("default/api", "lan/198.18.0.0 lan/2001:db8::", shares("k", "443"), families(ipam.IPv4, ipam.IPv6))

	// No key any more, and nothing else is free.
	_, err = s.ask("default/api")
	assert.ErrorContains(t, err, "PoolExhausted")
	s.holds("default/api", "lan/2001:db8::")
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80 443"))
}

func TestRefusedServiceIsKnownByItsNewTerms(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30"))
	s.gets("default/x", "lan/198.18.0.0")
	s.gets("default/web", "lan/198.18.0.1", shares("k", "80"))
	s.refused("default/web", ipam.AddressInUse, "198.18.0.0 is held by default/x", shares("k", "443"),
		at("198.18.0.0"))
	s.refused("default/api", ipam.SharingConflict,
		"port TCP/443 of 198.18.0.1 is used by default/web: use another port or another sharing key", shares("k", "443"))
	s.gets("default/api", "lan/198.18.0.1", shares("k", "80"))
}

// Anybody with a key may make Services that share an address, and a look at one of them is a
// look at all.
func TestSharersHaveABound(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	for i := range ipam.MaxSharers {
		s.gets(fmt.Sprintf("default/%d", i), "lan/198.18.0.0", shares("k", strconv.Itoa(i)))
	}
	const full = "198.18.0.0 is shared by 1000 Services, and more cannot: use another sharing key"
	s.refused("default/x", ipam.SharingConflict, full, shares("k", "8080"))
	s.refused("default/x", ipam.SharingConflict, full, shares("k", "8080"), at("198.18.0.0"))
	s.gets("default/7", "lan/198.18.0.0", shares("k", "7 8080"))
	s.gets("default/7#again", "lan/198.18.0.0", shares("k", "7")) // to people the same Service
	_, ok := s.Restore(ipam.Holding{Owner: owner("default/before"), Addr: netip.MustParseAddr("198.18.0.0"), Since: start,
		Sharing: &ipam.Sharing{Key: "k", Ports: portsOf("9090")}})
	assert.True(t, ok, "what was is true")
	s.gets("default/before", "lan/198.18.0.0", shares("k", "9090"))
	s.gets("default/x", "lan/198.18.0.1", shares("m", "8080"))
	for _, gone := range []string{"default/7", "default/7#again", "default/before"} {
		_, err := s.ask("default/y", shares("k", "9999"))
		assert.ErrorContains(t, err, "and more cannot", gone)
		s.frees(gone)
	}
	s.gets("default/y", "lan/198.18.0.0", shares("k", "9999"))
}

// What a look at a Service that waits for a shared address costs grows with those who share it, and not with their
// ports times its own: others wait meanwhile.
func TestWaitingForPortsOfManySharers(t *testing.T) {
	const looks = 200
	ports := func(from, n int) []ipam.Port {
		ports := make([]ipam.Port, n)
		for i := range ports {
			ports[i] = ipam.Port{Protocol: "TCP", Number: uint16(from + 1000*i)} // no two Services have theirs one after the other
		}
		return ports
	}
	crowd := func(sharers, n int) func() {
		s := begin(t, pool("lan", "198.18.0.0/29"))
		for i := range sharers {
			s.gets(fmt.Sprintf("default/%d", i), "lan/198.18.0.0", func(r *ipam.Request) { r.Sharing = &ipam.Sharing{Key: "k", Ports: ports(i, n)} })
		}
		last := ports(sharers-1, n)
		return func() {
			for range looks {
				s.refused("default/x", ipam.SharingConflict,
					fmt.Sprintf("port %s of 198.18.0.0 is used by default/%d: use another port or another sharing key", last[0], sharers-1),
					func(r *ipam.Request) { r.Sharing = &ipam.Sharing{Key: "k", Ports: last} })
			}
		}
	}
	testcost.Grows(t, "to wait", crowd(240, 15), crowd(testcost.Growth*240, testcost.Growth*15), func(look func()) { look() })
}

func TestJoinableAddressesHaveABound(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/24"))
	addr := func(i int) string { return fmt.Sprintf("198.18.0.%d", i) }
	for i := range ipam.MaxJoinable {
		s.gets(fmt.Sprintf("default/%d", i), "lan/"+addr(100+i), shares("k", "80"), at(addr(100+i)))
	}
	s.gets("default/last", "lan/198.18.0.5", shares("k", "443"), at("198.18.0.5"))
	const clash = "port TCP/80 of 198.18.0.100 is used by default/0: use another port or another sharing key"
	s.refused("default/x", ipam.SharingConflict, clash, shares("k", "80"))
	s.gets("default/x", "lan/198.18.0.5", shares("k", "80"), at("198.18.0.5"))
	s.gets("default/x", "lan/198.18.0.5", shares("k", "80"))
	s.frees("default/x")
	s.gets("default/y", "lan/198.18.0.100", shares("k", "8080"))
	s.frees("default/7")
	s.gets("default/x", "lan/198.18.0.5", shares("k", "80"))
}

// A Service that moves is known under two UIDs for a while: what it gives back
// is still shown.
func TestOneServiceUnderTwoUIDs(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/web", "lan/198.18.0.5", at("198.18.0.5"))
	s.gets("default/web", "lan/198.18.0.4", at("198.18.0.4"))
	s.restores("default/web#leaving", "198.18.0.5")
	s.refused("default/x", ipam.AddressInUse, "198.18.0.5 is held by default/web", at("198.18.0.5"))
	s.gets("default/web", "lan/198.18.0.5", at("198.18.0.5"))
	s.frees("default/web#leaving")
	s.holds("default/web", "lan/198.18.0.5")
}

func TestRestoreKeepsTheTermsOfSharing(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	addr, since := netip.MustParseAddr("198.18.0.3"), start.Add(-time.Hour)
	port := func(n uint16) *ipam.Sharing {
		return &ipam.Sharing{Key: "k", Ports: []ipam.Port{{Protocol: "TCP", Number: n}}}
	}
	for n, service := range []string{"default/web", "default/api"} {
		_, ok := s.Restore(ipam.Holding{Owner: owner(service), Addr: addr, Sharing: port(uint16(n)), Since: since})
		assert.True(t, ok)
	}
	holder, ok := s.Restore(ipam.Holding{Owner: owner("default/x"), Addr: addr, Sharing: port(1), Since: since})
	assert.False(t, ok)
	assert.Equal(t, owner("default/api"), holder)
	holder, ok = s.Restore(ipam.Holding{Owner: owner("default/x"), Addr: addr, Since: since})
	assert.False(t, ok)
	assert.Equal(t, owner("default/web"), holder)
	assert.Nil(t, s.Holds("default/x"))
	_, ok = s.Restore(ipam.Holding{Owner: ipam.Owner{UID: "default/web", Name: "default/renamed"}, Addr: addr, Sharing: port(7), Since: since})
	assert.False(t, ok)

	s.gets("default/x", "lan/198.18.0.3", shares("k", "8080"))
	s.refused("default/y", ipam.AddressInUse, "198.18.0.3 is held by default/web, "+
		"default/api, default/x", at("198.18.0.3"))
}
