package ipam_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

func TestReservedAddressesGoToTheirService(t *testing.T) {
	lan := onlyFor(onRequest(quota(1, pool("lan", "198.18.0.0/29", "2001:db8::/127"))), "edge")
	lan.Requesters = []string{}
	s := begin(t, lan, pool("wan", "198.18.9.0/29"))
	s.reserves(reserved("default/web", "198.18.0.5", "198.18.0.2", "2001:db8::1"))
	assert.Equal(t, []ipam.PoolStats{
		{Pool: "lan", Family: ipam.IPv4, Size: 8, Free: 6, Reserved: 2},
		{Pool: "lan", Family: ipam.IPv6, Size: 2, Free: 1, Reserved: 1},
		{Pool: "wan", Family: ipam.IPv4, Size: 8, Free: 8},
	}, s.Stats(s.now))
	s.gets("default/web", "wan/198.18.9.0", from("wan")) // it names other pools
	s.frees("default/web")
	s.gets("default/web", "lan/198.18.0.5 lan/198.18.0.2") // neither namespace nor quota matter
	s.gets("default/web", "lan/2001:db8::1 lan/198.18.0.5 lan/198.18.0.2", families(ipam.IPv6, ipam.IPv4))
	s.gets("default/web", "lan/198.18.0.2", at("198.18.0.2"))
	s.frees("default/web")
	s.passes(time.Minute)
	assert.Equal(t, 2., s.Stats(s.now)[0].Reserved)
	s.refused("edge/x", ipam.RequestNotAllowed,
		`198.18.0.2 is in pool "lan", which lets nobody ask for particular addresses, not namespace "edge"`, at("198.18.0.2"))
}

func TestReservedAddressesGoToNobodyElse(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30"))
	s.reserves(reserved("default/web", "198.18.0.0", "198.18.0.2"))
	r := s.refused("default/x", ipam.AddressReserved, "198.18.0.2 is reserved for default/web", at("198.18.0.2"))
	assert.Equal(t, "lan", r.Pool)
	s.gets("default/x", "lan/198.18.0.1")
	s.gets("default/y", "lan/198.18.0.3")
	s.refused("default/z", ipam.PoolExhausted, `pool "lan" has 0 of 4 IPv4 addresses free (2 reserved)`)
	s.gets("default/web", "lan/198.18.0.0 lan/198.18.0.2", shares("k", "80"))
	s.refused("default/z", ipam.AddressReserved, "198.18.0.0 is reserved for default/web", shares("k", "443"))
	s.reserves()
	s.gets("default/z", "lan/198.18.0.0", shares("k", "443"))
	s.gets("default/web", "lan/198.18.0.0", shares("k", "80")) // one is enough
}

func TestConflictedAddressesAreNotDrawn(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30"))
	s.gets("default/web", "lan/198.18.0.0")
	s.conflicts("198.18.0.0", "198.18.0.1", "198.18.0.2", "198.18.7.7")
	s.holds("default/web", "lan/198.18.0.0") // nobody moves unasked
	assert.Equal(t, []ipam.PoolStats{{Pool: "lan", Family: ipam.IPv4, Size: 4, Free: 1, Assigned: 1, Conflicted: 2}}, s.Stats(s.now))
	s.gets("default/x", "lan/198.18.0.3")
	s.refused("default/y", ipam.PoolExhausted, `pool "lan" has 0 of 4 IPv4 addresses free (2 in use by other hosts)`)

	s.gets("default/y", "lan/198.18.0.1", at("198.18.0.1")) // who names it has it
	s.reserves(reserved("default/z", "198.18.0.2"))
	assert.Equal(t, 1., s.Stats(s.now)[0].Conflicted)
	s.gets("default/z", "lan/198.18.0.2")

	s.frees("default/web")
	// nor comes back
	s.refused("default/web#2", ipam.PoolExhausted, `pool "lan" has 0 of 4 IPv4 addresses free (1 in quarantine, the next is free in 30s)`)
	s.passes(time.Minute)
	assert.Equal(t, 1., s.Stats(s.now)[0].Conflicted)
	s.conflicts()
	s.gets("default/web#2", "lan/198.18.0.0")
}

func TestServicesAvoidAddresses(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/31", "2001:db8::/127"), quota(1, pool("dmz", "198.18.1.0/31")))
	s.gets("default/web", "lan/198.18.0.0 lan/2001:db8::", prefer(ipam.IPv4, ipam.IPv6))
	s.gets("default/web", "lan/198.18.0.1 lan/2001:db8::", prefer(ipam.IPv4, ipam.IPv6), avoiding("198.18.0.0"))
	s.gets("default/x", "dmz/198.18.1.0") // 198.18.0.0 is in quarantine
	s.refused("default/x", ipam.PoolExhausted,
		`pool "lan" has 0 of 2 IPv4 addresses free (1 in quarantine, the next is free in 30s)`,
		avoiding("198.18.1.0"), from("lan"))
	s.gets("default/x", "dmz/198.18.1.1", avoiding("198.18.1.0")) // the quota counts what it leaves for nothing
	s.passes(time.Minute)
	s.gets("default/a", "lan/198.18.0.0", shares("k", "80"))
	s.refused("default/web", ipam.PoolExhausted, // one family is enough, but not the other one
		`pool "lan" has 0 of 2 IPv4 addresses free`, prefer(ipam.IPv4, ipam.IPv6), avoiding("198.18.0.1"), from("lan"))

	s.gets("default/x", "dmz/198.18.1.1", avoiding("198.18.1.1"), at("198.18.1.1")) // it names it
	s.reserves(reserved("default/x", "198.18.1.1"))
	s.gets("default/x", "dmz/198.18.1.1", avoiding("198.18.1.1")) // it is reserved for it
	s.gets("default/b", "lan/198.18.0.0", shares("k", "443"))
	s.gets("default/b", "lan/198.18.0.0", shares("k", "443"), avoiding("198.18.0.0")) // it shares it
}

// Its caller keeps a pool with DHCP like this: the leases are its addresses,
// each reserved for the Service that it was leased for.
func TestLeasedAddresses(t *testing.T) {
	leased := func(addresses ...string) config.Pool {
		p := pool("office", addresses...)
		p.DHCP = &config.DHCP{Interface: "eth1"}
		return p
	}
	s := begin(t, pool("lan", "198.18.9.1/32"), leased())
	s.gets("default/a", "lan/198.18.9.1")
	s.refused("default/web", ipam.PoolExhausted, `pool "lan" has 0 of 1 IPv4 addresses free; pool "office" has no lease for the Service yet`)
	s.refused("default/web", ipam.FamilyUnavailable, `pool "lan" has no IPv6 addresses; pool "office" has no IPv6 addresses`,
		families(ipam.IPv6))

	s.setup.Reservations = []config.Reservation{reserved("default/web", "198.18.0.240"), reserved("default/x", "198.18.0.241")}
	s.edit(pool("lan", "198.18.9.1/32"), leased("198.18.0.240-198.18.0.241"))
	s.gets("default/web", "office/198.18.0.240")
	s.gets("default/x", "office/198.18.0.241")
	s.refused("default/y", ipam.PoolExhausted, `pool "lan" has 0 of 1 IPv4 addresses free; pool "office" has no lease for the Service yet`)

	s.frees("default/x")
	assert.Empty(t, s.InQuarantine(s.now), "the server decides how long nobody else gets a lease")
	s.gets("default/x", "office/198.18.0.241")

	s.Revoke(netip.MustParseAddr("198.18.0.240"), s.now)
	assert.Empty(t, s.Holds("default/web"))
	s.setup.Reservations = s.setup.Reservations[1:]
	s.edit(pool("lan", "198.18.9.1/32"), leased("198.18.0.241/32"))
	s.refused("default/web", ipam.PoolExhausted, `pool "lan" has 0 of 1 IPv4 addresses free; pool "office" has no lease for the Service yet`)
	s.gets("default/x", "office/198.18.0.241")
}

func TestReservationDoesNotMoveAnybody(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/web", "lan/198.18.0.0")
	s.gets("default/x", "lan/198.18.0.1")
	s.reserves(reserved("default/web", "198.18.0.1"))
	s.gets("default/web", "lan/198.18.0.0")
	s.gets("default/x", "lan/198.18.0.1")
	s.refused("default/web", ipam.AddressInUse, "198.18.0.1 is held by default/x", renumber)
	s.frees("default/x")
	s.gets("default/web", "lan/198.18.0.0")
	s.refused("default/web", ipam.AddressQuarantined,
		"198.18.0.1 is in quarantine after its use by default/x, it is free in 30s", renumber)
	s.passes(30 * time.Second)
	s.gets("default/web", "lan/198.18.0.1", renumber)
	s.reserves(reserved("default/web", "198.18.0.1", "198.18.0.4"))
	s.gets("default/web", "lan/198.18.0.1 lan/198.18.0.4")
	s.reserves(reserved("default/web", "198.18.0.4"))
	s.gets("default/web", "lan/198.18.0.4")
}

func TestReservedAddressThatCannotBeHad(t *testing.T) {
	lan := pool("lan", "198.18.0.0/29", "!198.18.0.0/32")
	s := begin(t, lan)
	s.reserves(reserved("default/web", "198.18.0.1"))
	s.forbids(forbidden("198.18.0.1/32", "the address of node n1"))
	assert.Zero(t, s.Stats(s.now)[0].Reserved)
	s.refused("default/web", ipam.AddressForbidden, "198.18.0.1 is never handed out: it is the address of node n1")
	s.refused("default/web", ipam.AddressForbidden, "198.18.0.1 is never handed out: it is the address of node n1", from("lan"))
	s.forbids()
	s.edit(draining(lan))
	s.refused("default/web", ipam.PoolDraining, `198.18.0.1 is in pool "lan", which is draining: it gives no new addresses`)
	s.reserves(reserved("default/web", "192.0.2.1"))
	s.refused("default/web", ipam.AddressOutsidePools, "192.0.2.1 is in no pool")
	s.reserves(reserved("default/web", "198.18.0.1"), reserved("default/x", "198.18.0.1")) // the first counts
	s.edit(lan)
	s.refused("default/x", ipam.AddressReserved, "198.18.0.1 is reserved for default/web", at("198.18.0.1"))
}

func TestForbiddenAddressesAreNeverHandedOut(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29", "2001:db8::/125", "!198.18.0.7/32"), pool("pods", "10.0.0.0/30"))
	s.gets("default/web", "lan/198.18.0.2", at("198.18.0.2"))
	s.forbids(
		forbidden("198.18.0.4-198.18.0.6", "in the service CIDR 198.18.0.4/30"),
		forbidden("198.18.0.0/31", "in a range"),
		forbidden("10.0.0.0/16", "in the pod CIDR 10.0.0.0/16 of node n1"),
		forbidden("198.18.0.1-198.18.0.2", "the range of DHCP"),
		forbidden("2001:db8::-2001:db8::1", "the gateway of node n1's segment"),
		ipam.Forbidden{Why: "nothing at all"})
	assert.Equal(t, []ipam.PoolStats{
		{Pool: "lan", Family: ipam.IPv4, Size: 1, Free: 1},
		{Pool: "lan", Family: ipam.IPv6, Size: 6, Free: 6},
		{Pool: "pods", Family: ipam.IPv4},
	}, s.Stats(s.now))
	assert.Equal(t, []ipam.Held{{Addr: s.addr("198.18.0.2"), Why: "the range of DHCP", Asked: "lan"}}, s.Holds("default/web"))
	s.gets("default/web", "/198.18.0.2")
	r := s.refused("default/x", ipam.AddressForbidden, "198.18.0.5 is never handed out: it is in the service CIDR 198.18.0.4/30",
		at("198.18.0.5"))
	assert.Equal(t, "lan", r.Pool)
	s.refused("default/x", ipam.AddressForbidden, "198.18.0.0 is never handed out: it is in a range", at("198.18.0.0"))
	s.refused("default/x", ipam.PoolExhausted, `pool "pods" has 0 of 0 IPv4 addresses free (4 forbidden)`, from("pods"))
	s.gets("default/x", "lan/198.18.0.3 lan/2001:db8::2", families(ipam.IPv4, ipam.IPv6))

	s.frees("default/web") // and it does not come back
	s.refused("default/web", ipam.PoolExhausted,
		`pool "lan" has 0 of 1 IPv4 addresses free; pool "pods" has 0 of 0 IPv4 addresses free (4 forbidden)`)
	s.forbids()
	s.gets("default/web", "lan/198.18.0.2")
	s.restores("default/y", "198.18.0.7")
	s.restores("default/y", "192.0.2.1")
	assert.Equal(t, []ipam.Held{
		{Addr: s.addr("198.18.0.7"), Why: `excluded from pool "lan", or the first or last address of one of its prefixes`},
		{Addr: s.addr("192.0.2.1"), Why: "in no pool"},
	}, s.Holds("default/y"))
}

func TestQuotaOfANamespace(t *testing.T) {
	lan := quota(2, pool("lan", "198.18.0.0/28", "2001:db8::/125"))
	s := begin(t, lan)
	s.gets("a/1", "lan/198.18.0.0", shares("k", "80"), with("b"))
	s.gets("a/2", "lan/198.18.0.1 lan/2001:db8::", families(ipam.IPv4, ipam.IPv6))
	r := s.refused("a/3", ipam.QuotaExceeded, `namespace "a" holds 2 of its 2 IPv4 addresses of pool "lan"`)
	assert.Equal(t, "lan", r.Pool)
	s.refused("a/3", ipam.QuotaExceeded, `namespace "a" holds 2 of its 2 IPv4 addresses of pool "lan"`, at("198.18.0.9"))
	s.gets("a/3", "lan/198.18.0.0", shares("k", "443"), with("b")) // the address counts once
	s.gets("a/4", "lan/2001:db8::1", families(ipam.IPv6))

	s.gets("b/1", "lan/198.18.0.0", shares("k", "53"), with("a"))
	s.gets("b/2", "lan/198.18.0.2")
	s.refused("b/3", ipam.QuotaExceeded, `namespace "b" holds 2 of its 2 IPv4 addresses of pool "lan"`)
	s.gets("b/2", "lan/198.18.0.9", at("198.18.0.9")) // what it gives back does not count

	s.frees("a/1")
	s.refused("a/5", ipam.QuotaExceeded, `namespace "a" holds 2 of its 2 IPv4 addresses of pool "lan"`)
	s.frees("a/3")
	s.gets("a/5", "lan/198.18.0.3")

	s.edit(quota(1, lan)) // nothing is taken away
	s.gets("a/5", "lan/198.18.0.3")
	s.gets("a/5", "lan/198.18.0.3", renumber)
	s.refused("a/6", ipam.QuotaExceeded, `namespace "a" holds 2 of its 1 IPv4 addresses of pool "lan"`)
	s.edit(quota(1, lan), pool("wan", "198.18.9.0/31"))
	s.gets("a/6", "wan/198.18.9.0")
	s.edit(quota(3, lan))
	s.gets("a/7", "lan/198.18.0.4", from("lan"))
	s.refused("a/8", ipam.QuotaExceeded, `namespace "a" holds 3 of its 3 IPv4 addresses of pool "lan"`)
}

func TestDrainingPoolsGiveNothingNew(t *testing.T) {
	lan := pool("lan", "198.18.0.0/29")
	s := begin(t, lan)
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1", at("198.18.0.1"))
	s.frees("default/b")
	s.edit(draining(lan))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/a", "lan/198.18.0.0", at("198.18.0.0"))
	assert.Equal(t, []ipam.Held{{Addr: s.addr("198.18.0.0"), Pool: "lan", Draining: true, Asked: "lan"}}, s.Holds("default/a"))
	s.refused("default/b", ipam.PoolDraining, `pool "lan" is draining: it gives no new addresses`)
	s.refused("default/x", ipam.PoolDraining, `198.18.0.5 is in pool "lan", which is draining: it gives no new addresses`, at("198.18.0.5"))
	s.edit(draining(lan), pool("new", "198.18.1.0/29"))
	s.gets("default/b", "new/198.18.1.0")
}

func TestWhoMayAskForAnAddress(t *testing.T) {
	lan := pool("lan", "198.18.0.0/29")
	lan.Requesters = []string{"ops", "edge"}
	s := begin(t, lan)
	s.refused("default/a", ipam.RequestNotAllowed,
		`198.18.0.5 is in pool "lan", which lets only "ops", "edge" ask for particular addresses, not namespace "default"`, at("198.18.0.5"))
	s.gets("ops/a", "lan/198.18.0.5", at("198.18.0.5"))
	lan.Requesters = []string{}
	s.edit(lan)
	s.gets("ops/a", "lan/198.18.0.5", at("198.18.0.5"))
	s.gets("ops/a", "lan/198.18.0.5")
}

func TestPoolsThatLookAtLabels(t *testing.T) {
	lan := onlyFor(pool("lan", "198.18.0.0/29"), "edge")
	lan.NamespaceSelector = config.Selector{{Key: "team", Operator: config.In, Values: []string{"a", "b"}},
		{Key: "old", Operator: config.DoesNotExist}}
	lan.ServiceSelector = config.Selector{{Key: "tier", Operator: config.NotIn, Values: []string{"lab"}},
		{Key: "public", Operator: config.Exists}}
	s := begin(t, lan)
	public := labelled("public=")
	s.gets("edge/a", "lan/198.18.0.0", public)
	s.gets("default/b", "lan/198.18.0.1", public, inNamespaceLabelled("team=b"))
	s.refused("default/c", ipam.PoolNotAllowed,
		`pool "lan" is not open to namespace "default", only to "edge" and only to namespaces with the labels "team in (a,b),!old"`,
		public, from("lan"))
	s.refused("edge/c", ipam.PoolNotAllowed,
		`pool "lan" is only open to Services with the labels "tier notin (lab),public"`, labelled("public= tier=lab"), from("lan"))
	s.gets("edge/a", "lan/198.18.0.0") // relabelled: it stays
	s.gets("default/b", "lan/198.18.0.1", public)
}

func TestSeveralAddressesOfAFamily(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28", "2001:db8::/125"), pool("wan", "198.18.1.0/28"))
	both := families(ipam.IPv6, ipam.IPv4)
	s.gets("default/a", "lan/2001:db8:: wan/198.18.1.3 lan/198.18.0.5 lan/198.18.0.2", both,
		at("198.18.1.3", "198.18.0.5", "198.18.0.2", "198.18.0.5"))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.2 wan/198.18.1.3", both, at("198.18.0.2", "198.18.1.3"))
	s.refused("default/b", ipam.AddressInUse, "198.18.0.2 is held by default/a", at("198.18.0.7", "198.18.0.2"))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.2", both)
	nine := []string{"198.18.0.1", "198.18.0.2", "198.18.0.3", "198.18.0.4", "198.18.0.5", "198.18.0.6", "198.18.0.7",
		"198.18.0.8", "198.18.0.9"}
	s.refused("default/b", ipam.InvalidRequest, "9 addresses are requested, at most 8 can be", at(nine...))
}

func TestRenumber(t *testing.T) {
	lan, wan := pool("lan", "198.18.0.0/30"), pool("wan", "198.18.1.0/30")
	s := begin(t, lan, wan)
	s.gets("default/a", "wan/198.18.1.2", from("wan"), at("198.18.1.2"))
	s.gets("default/a", "wan/198.18.1.2", renumber) // nothing is wrong with it
	for name, edited := range map[string]config.Pool{
		"drains": draining(wan), "is closed": onlyFor(wan, "edge"), "is for others": onRequest(wan), "has shrunk": pool("wan", "198.18.1.0/31"),
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, lan, wan)
			s.gets("default/a", "wan/198.18.1.2", at("198.18.1.2"))
			s.gets("default/full", "lan/198.18.0.0 lan/198.18.0.1 lan/198.18.0.2 lan/198.18.0.3",
				at("198.18.0.0", "198.18.0.1", "198.18.0.2", "198.18.0.3"))
			s.edit(lan, edited)
			if name != "has shrunk" {
				_, err := s.ask("default/a", renumber, from("lan"))
				require.ErrorContains(t, err, "PoolExhausted")
				s.holds("default/a", "wan/198.18.1.2")
			}
			s.frees("default/full")
			s.passes(time.Minute)
			s.gets("default/a", text(s.Holds("default/a"))) // not asked to move
			s.gets("default/a", "lan/198.18.0.0", renumber)
			s.gets("default/a", "lan/198.18.0.0", renumber)
		})
	}
	s.reserves(reserved("default/b", "198.18.1.2"))
	s.gets("default/a", "wan/198.18.1.2")
	s.gets("default/a", "lan/198.18.0.0", renumber)
}

func TestRenumberWithoutAReplacementKeepsBothFamilies(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30", "2001:db8::/127"))
	both := prefer(ipam.IPv4, ipam.IPv6)
	s.gets("default/a", "lan/198.18.0.0 lan/2001:db8::", both)
	s.edit(pool("lan", "198.18.0.0/30"))
	s.refused("default/a", ipam.FamilyUnavailable, `pool "lan" has no IPv6 addresses`, both, renumber)
	s.gets("default/a", "lan/198.18.0.0 /2001:db8::", both)
}

func TestRenumberBringsThoseOfOneKeyTogether(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/30"))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1")
	s.gets("default/a", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/b", "lan/198.18.0.1", shares("k", "80"))
	s.refused("default/b", ipam.SharingConflict,
		"port TCP/80 of 198.18.0.0 is used by default/a: use another port or another sharing key", shares("k", "80"), renumber)
	s.gets("default/b", "lan/198.18.0.0", shares("k", "443"), renumber)
	s.gets("default/a", "lan/198.18.0.0", shares("k", "80"), renumber)
}
