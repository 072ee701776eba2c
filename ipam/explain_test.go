package ipam_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/ipam"
)

func TestConsider(t *testing.T) {
	s := begin(t,
		onRequest(pool("special", "198.18.1.0/31")),
		priority(1, pool("last", "198.18.2.0/31", "2001:db8::/127")),
		draining(pool("old", "198.18.3.0/31")),
		onlyFor(pool("edge", "198.18.4.0/31"), "edge"),
		quota(1, pool("small", "198.18.5.0/30")),
		pool("full", "198.18.6.0/32"))
	s.gets("default/a", "small/198.18.5.0", from("small"))
	s.gets("default/b", "full/198.18.6.0", from("full"))
	v4 := func(pool string, free float64, reason ipam.Reason, message string) ipam.Consideration {
		return ipam.Consideration{Family: ipam.IPv4, Pool: pool, Free: free, Reason: reason, Message: message}
	}
	special := v4("special", 2, ipam.NotAutoAssigned, `pool "special" is only for Services that name it (autoAssign is off)`)
	edge := v4("edge", 2, ipam.PoolNotAllowed, `pool "edge" is not open to namespace "default", only to "edge"`)
	assert.Equal(t, []ipam.Consideration{
		v4("old", 2, ipam.PoolDraining, `pool "old" is draining: it gives no new addresses`),
		edge,
		v4("small", 3, ipam.QuotaExceeded, `namespace "default" holds 1 of its 1 IPv4 addresses of pool "small"`),
		v4("full", 0, ipam.PoolExhausted, `pool "full" has 0 of 1 IPv4 addresses free`),
		v4("last", 2, "", `pool "last" has 2 of 2 IPv4 addresses free`),
		special,
	}, s.Consider(request("default/x"), s.now))
	s.gets("default/x", "last/198.18.2.0")
	s.gets("default/x", "last/198.18.2.0", renumber)

	named := s.Consider(request("default/x", from("edge", "lab", "special", "edge"), families(ipam.IPv6)), s.now)
	assert.Len(t, named, 6)
	assert.Equal(t, []string{"edge", "special"}, []string{named[0].Pool, named[1].Pool})
	assert.Equal(t, ipam.FamilyUnavailable, named[1].Reason)
	assert.Equal(t, ipam.Consideration{
		Family: ipam.IPv6, Pool: "last", Free: 2, Reason: ipam.PoolNotNamed,
		Message: `pool "last" is not among the requested "edge", "lab", "special", "edge"`,
	}, named[2])
	assert.Nil(t, s.Consider(request("default/x", families("IPX")), s.now))
}

func TestConsiderExactAddresses(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/29"), pool("wan", "198.18.1.0/29"))
	s.gets("default/a", "lan/198.18.0.3", at("198.18.0.3"))
	ask := func(wishes ...wish) (answers []string) {
		for _, c := range s.Consider(request("default/x", wishes...), s.now) {
			answers = append(answers, string(c.Reason)+" "+c.Message)
		}
		return answers
	}
	assert.Equal(t, []string{" pool \"lan\" gives [198.18.0.5]", " pool \"wan\" gives [198.18.1.5]"}, ask(at("198.18.0.5", "198.18.1.5")))
	assert.Equal(t, []string{" pool \"lan\" gives [198.18.0.5]", "AddressOutsidePools pool \"wan\" does not contain [198.18.0.5]"},
		ask(at("198.18.0.5")))
	held := "AddressInUse 198.18.0.3 is held by default/a"
	assert.Equal(t, []string{held, held}, ask(at("198.18.0.5", "198.18.0.3")))
	s.reserves(reserved("default/x", "198.18.1.7"))
	assert.Equal(t, []string{"AddressOutsidePools pool \"lan\" does not contain [198.18.1.7]", " pool \"wan\" gives [198.18.1.7]"}, ask())
}

func TestConsiderAddressesThatAreNotFree(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/32"), pool("wan", "198.18.1.0/32"))
	s.gets("default/a", "lan/198.18.0.0", shares("k", "80"))
	s.gets("default/b", "wan/198.18.1.0")
	s.frees("default/b")
	got := s.Consider(request("default/x", shares("k", "443")), s.now)
	assert.Equal(t, ipam.Consideration{
		Family: ipam.IPv4, Pool: "lan", Message: "198.18.0.0 is shared with default/a",
	}, got[0])
	assert.Equal(t, ipam.PoolExhausted, got[1].Reason)
	got = s.Consider(request("default/x", shares("k", "80")), s.now)
	assert.Equal(t, []ipam.Reason{ipam.SharingConflict, ipam.SharingConflict}, []ipam.Reason{got[0].Reason, got[1].Reason})
	got = s.Consider(request("default/b#2"), s.now)
	assert.Equal(t, ipam.PoolExhausted, got[0].Reason)
	assert.Equal(t, ipam.Consideration{Family: ipam.IPv4, Pool: "wan", Message: "198.18.1.0 waits for the Service to come back"}, got[1])
}

func TestSameRefusal(t *testing.T) {
	s := begin(t, pool("lan", "198.18.0.0/31"))
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "lan/198.18.0.1")
	s.frees("default/a")
	refusal := func(wishes ...wish) *ipam.Refusal {
		_, err := s.ask("default/x", wishes...)
		return err.(*ipam.Refusal)
	}
	full, quarantined := refusal(), refusal(at("198.18.0.0"))
	s.passes(time.Second)
	assert.NotEqual(t, full.Message, refusal().Message)
	assert.True(t, full.Same(refusal()))
	assert.NotEqual(t, quarantined.Message, refusal(at("198.18.0.0")).Message)
	assert.True(t, quarantined.Same(refusal(at("198.18.0.0"))))
	assert.False(t, quarantined.Same(full))
	s.frees("default/b")
	assert.True(t, full.Same(refusal()), "two are in quarantine now")
	assert.False(t, full.Same(nil))
	elsewhere := *full
	elsewhere.Pool = "dmz"
	assert.False(t, full.Same(&elsewhere))
	assert.True(t, (*ipam.Refusal)(nil).Same(nil))
	assert.True(t, (&ipam.Refusal{Reason: "Other", Message: "a"}).Same(&ipam.Refusal{Reason: "Other", Message: "a"}))
	assert.False(t, (&ipam.Refusal{Reason: "Other", Message: "a"}).Same(&ipam.Refusal{Reason: "Other", Message: "b"}))
}
