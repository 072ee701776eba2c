package ipam_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

func TestLowestFreeAddressOfTheFirstPoolByPriority(t *testing.T) {
	s := begin(t,
		pool("second", "198.18.2.1-198.18.2.2"),
		priority(-1, pool("first", "198.18.1.0/31")),
		priority(-2, onRequest(pool("special", "198.18.9.0/31"))),
		pool("third", "198.18.3.0/31"))
	s.gets("default/a", "first/198.18.1.0")
	s.gets("default/b", "first/198.18.1.1")
	s.gets("default/c", "second/198.18.2.1")
	s.gets("default/d", "third/198.18.3.0", from("third", "first"))
	s.gets("default/e", "second/198.18.2.2")
	s.gets("default/f", "third/198.18.3.1")
	s.refused("default/g", ipam.PoolExhausted, `pool "first" has 0 of 2 IPv4 addresses free; `+
		`pool "second" has 0 of 2 IPv4 addresses free; pool "third" has 0 of 2 IPv4 addresses free`)
	s.gets("default/g", "special/198.18.9.0", from("special"))
}

func TestAllocateAgainChangesNothing(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29", "2001:db8::/125"))
	s.gets("default/a", "lan/198.18.0.0")
	for range 3 {
		s.gets("default/b", "lan/198.18.0.1 lan/2001:db8::", families(ipam.IPv4, ipam.IPv6))
	}
	_, quarantined := s.NextFree(s.now)
	assert.False(t, quarantined)
	assert.Equal(t, []ipam.PoolStats{
		{Pool: "lan", Family: ipam.IPv4, Size: 8, Free: 6, Assigned: 2},
		{Pool: "lan", Family: ipam.IPv6, Size: 8, Free: 7, Assigned: 1},
	}, s.Stats(s.now))
}

func TestFreedAddressGoesToTheOneThatWaits(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.1-198.18.0.3"))
	s.gets("default/a", "lan/198.18.0.1")
	s.gets("default/b", "lan/198.18.0.2")
	s.gets("default/c", "lan/198.18.0.3")
	s.refused("default/waiting", ipam.PoolExhausted, `pool "lan" has 0 of 3 IPv4 addresses free`)

	s.frees("default/b")
	s.passes(17500 * time.Millisecond)
	r := s.refused("default/waiting", ipam.PoolExhausted,
		`pool "lan" has 0 of 3 IPv4 addresses free (1 in quarantine, the next is free in 13s)`)
	assert.Equal(t, "lan", r.Pool)
	s.frees("default/a")
	s.refused("default/waiting", ipam.PoolExhausted,
		`pool "lan" has 0 of 3 IPv4 addresses free (2 in quarantine, the next is free in 13s)`)
	next, quarantined := s.NextFree(s.now)
	assert.True(t, quarantined)
	assert.Equal(t, start.Add(30*time.Second), next)

	s.now = next
	s.gets("default/waiting", "lan/198.18.0.2")
	s.passes(time.Minute)
	s.gets("default/next", "lan/198.18.0.1")
}

func TestReleaseReturnsWhatItFreed(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/31", "2001:db8::/127"))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.0", families(ipam.IPv6, ipam.IPv4))
	assert.Equal(t, []netip.Addr{netip.MustParseAddr("2001:db8::"), netip.MustParseAddr("198.18.0.0")},
		s.Release("default/a", s.now))
	assert.Nil(t, s.Release("default/a", s.now))
	assert.Nil(t, s.Release("default/nobody", s.now))
	assert.Empty(t, s.HoldersOf(netip.MustParseAddr("198.18.0.0")))
}

func TestRequestedAddress(t *testing.T) {
	s := begin(t,
		pool("lan", "198.18.0.0/28", "!198.18.0.0/32", "!2001:db8::/128", "2001:db8::/120"),
		onRequest(pool("dmz", "198.18.1.0/28")),
		onlyFor(pool("edge", "198.18.2.0/28"), "edge"))
	s.gets("default/web", "lan/198.18.0.5", at("198.18.0.5"))
	s.gets("default/named", "dmz/198.18.1.3", at("198.18.1.3"))
	s.gets("default/mapped", "lan/198.18.0.6", at("::ffff:198.18.0.6"))
	s.gets("default/dual", "lan/198.18.0.1 lan/2001:db8::7", at("2001:db8::7"), families(ipam.IPv4, ipam.IPv6))

	s.refused("default/x", ipam.AddressInUse, "198.18.0.5 is held by default/web", at("198.18.0.5"))
	s.refused("default/x", ipam.AddressOutsidePools, "192.0.2.1 is in no pool", at("192.0.2.1"))
	r := s.refused("default/x", ipam.AddressOutsidePools, `198.18.0.9 is in pool "lan", not in the requested "dmz"`,
		at("198.18.0.9"), from("dmz"))
	assert.Equal(t, "lan", r.Pool)
	s.refused("default/x", ipam.AddressWithheld,
		`198.18.0.0 is never handed out: it is excluded from pool "lan", or the first or last address of one of its prefixes`, at("198.18.0.0"))
	s.refused("default/x", ipam.AddressWithheld,
		`2001:db8:: is never handed out: it is excluded from pool "lan"`, at("2001:db8::"), families(ipam.IPv6))
	s.refused("default/x", ipam.WrongFamily,
		"2001:db8::9 is an IPv6 address, the Service has only IPv4", at("2001:db8::9"))
	s.refused("default/x", ipam.PoolNotAllowed,
		`198.18.2.1 is in pool "edge", which is not open to namespace "default", only to "edge"`, at("198.18.2.1"))
	s.refused("default/x", ipam.PoolNotFound, `there is no pool "lab"`, at("198.18.0.9"), from("lab"))
	s.refused("default/x", ipam.InvalidRequest,
		`"2001:db8::9%eth0" is not an address without a zone`, at("2001:db8::9%eth0"), families(ipam.IPv6))
}

func TestRequestedAddressIsAnOrderAlsoForPreferDualStack(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28", "2001:db8::/127"))
	s.gets("default/web", "lan/2001:db8::1", at("2001:db8::1"), families(ipam.IPv6))
	s.refused("default/x", ipam.AddressInUse, "2001:db8::1 is held by default/web",
		at("2001:db8::1"), prefer(ipam.IPv4, ipam.IPv6))
}

func TestServiceMovesToTheAddressItAsksFor(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28"))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1")
	s.refused("default/a", ipam.AddressInUse, "198.18.0.1 is held by default/b", at("198.18.0.1"))
	s.gets("default/a", "lan/198.18.0.7", at("198.18.0.7"))
	s.gets("default/a", "lan/198.18.0.7")
	s.gets("default/c", "lan/198.18.0.2")
	s.passes(time.Minute)
	s.gets("default/d", "lan/198.18.0.0")
}

func TestServiceMovesToThePoolItAsksFor(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28"), onRequest(pool("dmz", "198.18.1.0/32")))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1")
	s.gets("default/a", "dmz/198.18.1.0", from("dmz"))
	s.refused("default/b", ipam.PoolExhausted, `pool "dmz" has 0 of 1 IPv4 addresses free`, from("dmz"))
	s.gets("default/a", "dmz/198.18.1.0", from("lan", "dmz"))
	s.gets("default/a", "dmz/198.18.1.0")
}

func TestPoolsThatAreNotOpen(t *testing.T) {
	s := begin(t)
	s.refused("default/a", ipam.NoPool, "there are no pools")
	s.refused("default/a", ipam.PoolNotFound, `there is no pool "lan"`, from("lan"))

	edge := onlyFor(pool("edge", "198.18.2.0/28", "2001:db8::/127"), "edge", "core")
	s.edit(edge, onRequest(pool("dmz", "198.18.1.0/32")), onRequest(pool("lab", "198.18.3.0/32")))
	s.refused("default/a", ipam.NoPool,
		`none of 3 pools is open to the Service in namespace "default": 2 with autoAssign off, 1 for other namespaces or labels`)
	r := s.refused("default/a", ipam.PoolNotAllowed,
		`pool "edge" is not open to namespace "default", only to "edge", "core"`, from("edge"))
	assert.Equal(t, "edge", r.Pool)
	r = s.refused("default/a", ipam.PoolNotAllowed,
		`there is no pool "wan"; pool "edge" is not open to namespace "default", only to "edge", "core"`, from("wan", "edge"))
	assert.Empty(t, r.Pool)
	s.gets("default/a", "dmz/198.18.1.0", from("wan", "edge", "dmz"))
	s.gets("edge/b", "edge/198.18.2.0")
	s.refused("edge/c", ipam.FamilyUnavailable, `pool "dmz" has no IPv6 addresses`, from("dmz"), families(ipam.IPv6))

	s.edit(onlyFor(edge, "core"))
	s.gets("edge/b", "edge/198.18.2.0", from("edge"))
}

func TestRefusalNamesAFewPoolsOfMany(t *testing.T) {
	var pools []config.Pool
	for _, n := range strings.Split("abcdef", "") {
		pools = append(pools, pool(n, "2001:db8::"+n+"/128"))
	}
	s := begin(t, pools...)
	r := s.refused("default/x", ipam.FamilyUnavailable, `pool "a" has no IPv4 addresses; pool "b" has no IPv4 addresses; `+
		`pool "c" has no IPv4 addresses; pool "d" has no IPv4 addresses; pool "e" has no IPv4 addresses; and 1 more`)
	assert.Empty(t, r.Pool)
	s.refused("default/x", ipam.PoolNotFound, `there is no pool "1", "2", "3", "4", "5" and 2 more`,
		at("2001:db8::a"), families(ipam.IPv6), from("1", "2", "3", "4", "5", "6", "7"))
}

func TestRequestsThatCannotBeRead(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28"))
	s.refused("", ipam.InvalidRequest, "the request has no owner")
	s.refused("default/x", ipam.InvalidRequest, `the request has families [], not one or two different ones`, families())
	s.refused("default/x", ipam.InvalidRequest, `the request has families ["IPv4" "IPv4"], not one or two different ones`,
		families(ipam.IPv4, ipam.IPv4))
	s.refused("default/x", ipam.InvalidRequest, `the request has family "IPX", neither IPv4 nor IPv6`, families("IPX"))
	s.refused("default/x", ipam.InvalidRequest, `"invalid IP" is not an address without a zone`,
		func(r *ipam.Request) { r.Addresses = make([]netip.Addr, 1) })
}

func TestDualStackTransitions(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29", "2001:db8::/125"))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/a", "lan/198.18.0.0 lan/2001:db8::", families(ipam.IPv4, ipam.IPv6))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.0", families(ipam.IPv6, ipam.IPv4))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.7", families(ipam.IPv6, ipam.IPv4), at("198.18.0.7"))
	s.gets("default/a", "lan/2001:db8::", families(ipam.IPv6))
	s.refused("default/b", ipam.AddressQuarantined,
		"198.18.0.7 is in quarantine after its use by default/a, it is free in 30s", at("198.18.0.7"))
	s.gets("default/a", "lan/198.18.0.0", families(ipam.IPv4)) // both are in quarantine equally long
}

func TestPreferDualStackTakesWhatThereIs(t *testing.T) {
	v4, v6 := pool("lan", "198.18.0.0/32"), pool("lan", "2001:db8::/128")
	both := prefer(ipam.IPv6, ipam.IPv4)
	s := begin(t, v4)
	s.gets("default/a", "lan/198.18.0.0", both)
	s.refused("default/b", ipam.PoolExhausted, `pool "lan" has 0 of 1 IPv4 addresses free`, both)
	s.refused("default/b", ipam.FamilyUnavailable, `pool "lan" has no IPv6 addresses`, families(ipam.IPv6, ipam.IPv4))

	s.edit(pool("lan", "198.18.0.0/32", "2001:db8::/128"))
	s.gets("default/a", "lan/2001:db8:: lan/198.18.0.0", both)
	s.edit(v6)
	s.gets("default/a", "lan/2001:db8:: /198.18.0.0", both)
}

func TestBothFamiliesFromOnePool(t *testing.T) {
	s := begin(t,
		pool("four", "198.18.1.0/31"),
		pool("both", "198.18.2.0/32", "2001:db8:2::/126"),
		pool("six", "2001:db8:3::/128"))
	dual := families(ipam.IPv4, ipam.IPv6)
	s.gets("default/a", "both/198.18.2.0 both/2001:db8:2::", dual)
	s.gets("default/b", "four/198.18.1.0 both/2001:db8:2::1", dual) // no pool has both: split
	s.gets("default/c", "six/2001:db8:3::", families(ipam.IPv6), from("six"))
	s.gets("default/c", "six/2001:db8:3:: four/198.18.1.1", families(ipam.IPv6, ipam.IPv4))
	s.refused("default/d", ipam.PoolExhausted, `pool "four" has 0 of 2 IPv4 addresses free; `+
		`pool "both" has 0 of 1 IPv4 addresses free; pool "six" has no IPv4 addresses`, dual)
	s.gets("default/d", "both/2001:db8:2::2", prefer(ipam.IPv4, ipam.IPv6))
}

func TestSecondFamilyComesFromThePoolOfTheFirst(t *testing.T) {
	s := begin(t, pool("first", "198.18.1.0/31", "2001:db8:1::/126"), pool("second", "198.18.2.0/31", "2001:db8:2::/126"))
	s.gets("default/a", "second/198.18.2.0", from("second"))
	s.gets("default/a", "second/198.18.2.0 second/2001:db8:2::", families(ipam.IPv4, ipam.IPv6))
	s.gets("default/b", "second/198.18.2.1 second/2001:db8:2::1", at("198.18.2.1"), prefer(ipam.IPv4, ipam.IPv6))
}

func TestPoolEditsNeverMoveAnAddress(t *testing.T) {
	lan := pool("lan", "198.18.0.0/29")
	s := begin(t, lan)
	s.gets("default/named", "lan/198.18.0.0", from("lan"))
	s.gets("default/auto", "lan/198.18.0.1")

	s.edit(pool("dmz", "198.18.1.0/29")) // the pool is gone
	s.gets("default/named", "/198.18.0.0", from("lan"))
	s.gets("default/auto", "/198.18.0.1")
	assert.Zero(t, s.Stats(s.now)[0].Assigned)
	s.refused("default/x", ipam.AddressOutsidePools, "198.18.0.0 is in no pool", at("198.18.0.0"))

	s.edit(pool("lan", "198.18.0.4/30"), pool("new", "198.18.0.0/30")) // the address lies in another pool now
	s.gets("default/named", "new/198.18.0.0", from("lan"))
	s.gets("default/auto", "new/198.18.0.1")
	s.gets("default/x", "new/198.18.0.2", from("new"))

	s.edit(lan) // back again
	s.gets("default/named", "lan/198.18.0.0", from("lan"))
	s.gets("default/y", "lan/198.18.0.3")
}

func TestStrandedServiceMovesWhenItAsks(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/a", "lan/198.18.0.0", from("lan"))
	s.gets("default/b", "lan/198.18.0.1")
	s.restores("default/c", "192.0.2.1") // from outside every pool, its wish is not known
	s.restores("default/d", "192.0.2.2")
	s.edit(pool("dmz", "198.18.1.0/29"))
	s.refused("default/a", ipam.PoolNotFound, `there is no pool "wan"`, from("wan"))
	s.gets("default/a", "dmz/198.18.1.0", from("dmz"))
	s.gets("default/b", "dmz/198.18.1.6", at("198.18.1.6"))

	s.gets("default/c", "/192.0.2.1", from("lan"))
	s.gets("default/c", "/192.0.2.1", from("lan"))
	s.gets("default/c", "dmz/198.18.1.1", from("dmz"))
	s.gets("default/d", "/192.0.2.2")
	s.gets("default/d", "dmz/198.18.1.2", from("dmz"))
}

func TestRestoreRecordsWhatIsTrue(t *testing.T) {
	s := begin(t)
	s.restores("default/a", "198.18.0.0")
	s.restores("default/a", "198.18.0.0")
	s.restores("default/a", "2001:db8::5%eth0")
	s.restores("default/withheld", "198.18.0.7")
	s.restores("default/outside", "::ffff:192.0.2.1")
	s.holds("default/a", "/198.18.0.0 /2001:db8::5")
	s.edit(pool("lan", "198.18.0.0/29", "!198.18.0.7/32"))
	s.holds("default/a", "lan/198.18.0.0 /2001:db8::5")
	s.holds("default/withheld", "/198.18.0.7")
	s.holds("default/outside", "/192.0.2.1")

	holder, ok := s.Restore(ipam.Holding{Owner: owner("default/thief"), Addr: netip.MustParseAddr("198.18.0.0"), Since: s.now})
	assert.False(t, ok)
	assert.Equal(t, owner("default/a"), holder)
	assert.Nil(t, s.Holds("default/thief"))
	_, ok = s.Restore(ipam.Holding{Owner: owner("default/a"), Addr: netip.Addr{}, Since: s.now})
	assert.False(t, ok)

	s.gets("default/b", "lan/198.18.0.1")
	s.gets("default/a", "lan/198.18.0.0") // drops the second family
	s.frees("default/b")
	s.restores("default/c", "198.18.0.1") // out of quarantine
	s.restores("default/c", "2001:db8::5")
	_, quarantined := s.NextFree(s.now)
	assert.False(t, quarantined)
	assert.Equal(t, []ipam.PoolStats{{Pool: "lan", Family: ipam.IPv4, Size: 7, Free: 5, Assigned: 2}}, s.Stats(s.now))
}

func TestRecreatedServiceComesBackToItsAddress(t *testing.T) {
	first := priority(-1, pool("first", "198.18.1.0/31"))
	s := begin(t, first, pool("lan", "198.18.0.0/29", "2001:db8::/125"))
	s.gets("default/x", "first/198.18.1.0")
	s.gets("default/web", "lan/198.18.0.0 lan/2001:db8::", from("lan"), families(ipam.IPv4, ipam.IPv6))
	s.frees("default/web")
	s.passes(20 * time.Second)
	s.refused("default/other", ipam.AddressQuarantined,
		"198.18.0.0 is in quarantine after its use by default/web, it is free in 10s", at("198.18.0.0"))
	s.gets("default/other", "lan/198.18.0.1", from("lan"))
	s.gets("default/web#2", "lan/198.18.0.0") // the first pool has a free one
	s.gets("default/web#2", "lan/198.18.0.0 lan/2001:db8::", families(ipam.IPv4, ipam.IPv6))
	s.passes(10 * time.Second)
	s.refused("default/other", ipam.AddressInUse,
		"198.18.0.0 is held by default/web", at("198.18.0.0"))
}

func TestComingBackTheLastAddressCounts(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"))
	s.gets("default/web", "lan/198.18.0.2", at("198.18.0.2"))
	s.passes(time.Second)
	s.gets("default/web", "lan/198.18.0.4", at("198.18.0.4"))
	s.passes(time.Second)
	s.gets("default/web", "lan/198.18.0.3", at("198.18.0.3"))
	s.passes(time.Second)
	s.gets("default/web", "lan/198.18.0.2", at("198.18.0.2"))
	s.passes(time.Second)
	s.frees("default/web")
	s.gets("default/web#2", "lan/198.18.0.2")
	s.gets("default/web#3", "lan/198.18.0.3")
	s.gets("default/web#4", "lan/198.18.0.4")
	s.gets("default/web#5", "lan/198.18.0.0")
}

func TestClockSetBack(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/31"))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1")
	s.frees("default/a")
	s.passes(-24 * time.Hour)
	s.refused("default/c", ipam.PoolExhausted,
		`pool "lan" has 0 of 2 IPv4 addresses free (1 in quarantine, the next is free in 30s)`)
	s.frees("default/b")
	s.passes(29 * time.Second)
	s.refused("default/c", ipam.PoolExhausted,
		`pool "lan" has 0 of 2 IPv4 addresses free (2 in quarantine, the next is free in 1s)`)
	s.passes(time.Second)
	s.gets("default/c", "lan/198.18.0.0")
	s.passes(-time.Hour)
	s.gets("default/d", "lan/198.18.0.1")
}

func TestQuarantineOutlivesPoolEdits(t *testing.T) {
	lan := pool("lan", "198.18.0.0/32")
	s := begin(t, lan)
	s.gets("default/a", "lan/198.18.0.0")
	s.frees("default/a")
	s.edit()
	s.edit(pool("new", "198.18.0.0/31"))
	assert.Equal(t, []ipam.PoolStats{{Pool: "new", Family: ipam.IPv4, Size: 2, Free: 1, Quarantined: 1}}, s.Stats(s.now))
	s.gets("default/b", "new/198.18.0.1")
	s.passes(time.Second)
	s.edit(lan)
	s.quarantines(10 * time.Second) // a shorter quarantine counts from the release
	s.refused("default/c", ipam.PoolExhausted,
		`pool "lan" has 0 of 1 IPv4 addresses free (1 in quarantine, the next is free in 9s)`)
	s.quarantines(0)
	s.gets("default/c", "lan/198.18.0.0")
	s.frees("default/c")
	s.gets("default/d", "lan/198.18.0.0")
}

func TestHugePoolsCostNothing(t *testing.T) {
	s := begin(t, pool("v4", "10.0.0.0/8"), pool("v6", "2001:db8::/48"))
	s.gets("default/a", "v6/2001:db8:0:ffff:ffff:ffff:ffff:ffff", families(ipam.IPv6), at("2001:db8:0:ffff:ffff:ffff:ffff:ffff"))
	s.gets("default/b", "v6/2001:db8:0:1::", families(ipam.IPv6), at("2001:db8:0:1::"))
	s.gets("default/c", "v6/2001:db8::", families(ipam.IPv6))
	s.gets("default/d", "v4/10.255.255.255", at("10.255.255.255"))
	stats := s.Stats(s.now)
	assert.Equal(t, 1<<24-1., stats[0].Free)
	assert.Equal(t, float64(1<<40)*(1<<40), stats[1].Size)
	assert.Equal(t, 3., stats[1].Assigned)
	s.frees("default/b")
	s.passes(time.Minute)
	s.gets("default/e", "v6/2001:db8:0:1::", families(ipam.IPv6), at("2001:db8:0:1::"))
}

func several(n int) wish { return func(r *ipam.Request) { r.Count = n } }

// A Service gets as many addresses of a family as it asks for or keeps what it has, from one pool or from
// several. Of fewer it keeps the first ones, and gets those that it gave back again before others.
func TestSeveralAddressesByTheirNumber(t *testing.T) {
	both := families(ipam.IPv4, ipam.IPv6)
	s := begin(t, pool("lan", "198.18.0.1-198.18.0.3", "2001:db8::1-2001:db8::2"), pool("more", "198.18.1.1-198.18.1.2"))
	s.gets("default/a", "lan/198.18.0.1 lan/198.18.0.2", several(2))
	s.gets("default/a", "lan/198.18.0.1 lan/198.18.0.2 lan/198.18.0.3 more/198.18.1.1", several(4))
	s.refused("default/a", ipam.PoolExhausted, `6 IPv4 addresses are requested: pool "lan" has 0 of 3 IPv4 addresses free; `+
		`pool "more" has 1 of 2 IPv4 addresses free`, several(6))
	s.gets("default/a", "lan/198.18.0.1")
	s.refused("default/b", ipam.PoolExhausted, `2 IPv4 addresses are requested: pool "lan" has 0 of 3 IPv4 addresses free `+
		`(2 in quarantine, the next is free in 30s); pool "more" has 1 of 2 IPv4 addresses free`, several(2))
	s.gets("default/a", "lan/198.18.0.1 lan/198.18.0.2 lan/198.18.0.3", several(3))

	s.refused("default/a", ipam.PoolExhausted, `3 IPv6 addresses are requested: pool "lan" has 2 of 2 IPv6 addresses free; `+
		`pool "more" has no IPv6 addresses`, several(3), both)
	s.gets("default/a", "lan/198.18.0.1 lan/198.18.0.2 lan/198.18.0.3", several(3), prefer(ipam.IPv4, ipam.IPv6))
	s.gets("default/a", "lan/198.18.0.1 lan/198.18.0.2 lan/2001:db8::1 lan/2001:db8::2", several(2), both)
	s.gets("default/a", "lan/198.18.0.2 lan/2001:db8::1 lan/2001:db8::2", several(2), both, at("198.18.0.2"))
}

func TestAsManyAddressesAsMayBe(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/28", "2001:db8::/120"), quota(2, pool("small", "198.18.1.0/28")))
	both := families(ipam.IPv4, ipam.IPv6)
	s.refused("default/a", ipam.InvalidRequest, "9 addresses are requested or reserved, at most 8 can be", several(9))
	s.refused("default/a", ipam.InvalidRequest, "10 addresses are requested or reserved, at most 8 can be", several(5), both)
	s.refused("default/a", ipam.InvalidRequest, "2 addresses of a family are requested, and a Service with a sharing key has one",
		several(2), shares("k", "80"))
	s.refused("default/a", ipam.QuotaExceeded, `3 IPv4 addresses are requested: namespace "default" holds 2 of its 2 IPv4 addresses `+
		`of pool "small"`, several(3), from("small"))
	s.gets("default/b", "lan/198.18.0.0", several(1), shares("k", "80"))
	s.reserves(reserved("default/c", "198.18.0.5"))
	s.gets("default/c", "lan/198.18.0.5 lan/198.18.0.1", several(2))
	s.gets("default/c", "lan/198.18.0.5 lan/198.18.0.1", several(2))
	s.gets("default/c", "lan/198.18.0.5")
}
