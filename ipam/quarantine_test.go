package ipam_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

func TestPoolsThatKeepAddresses(t *testing.T) {
	lan, short := keeping(time.Hour, pool("lan", "198.18.0.0/29")), keeping(time.Second, pool("short", "198.18.1.0/29"))
	s := begin(t, lan, short)
	s.gets("default/a", "lan/198.18.0.0")
	s.gets("default/b", "short/198.18.1.0", from("short"))
	s.frees("default/a")
	s.frees("default/b")
	assert.Equal(t, []ipam.Quarantined{
		{Addr: s.addr("198.18.0.0"), Pool: "lan", Name: "default/a", Since: start, Until: start.Add(time.Hour)},
		{Addr: s.addr("198.18.1.0"), Pool: "short", Name: "default/b", Since: start, Until: start.Add(30 * time.Second)},
	}, s.InQuarantine(s.now))
	next, _ := s.NextFree(s.now)
	assert.Equal(t, start.Add(30*time.Second), next)

	s.passes(59 * time.Minute)
	s.gets("default/x", "lan/198.18.0.1")
	s.gets("default/a#2", "lan/198.18.0.0")
	s.frees("default/a#2")
	s.edit(short) // stranded ones are not kept
	next, _ = s.NextFree(s.now)
	assert.Equal(t, s.now.Add(30*time.Second), next)
	s.edit(lan)
	next, _ = s.NextFree(s.now)
	assert.Equal(t, s.now.Add(time.Hour), next)
	s.passes(time.Hour)
	_, quarantined := s.NextFree(s.now)
	assert.False(t, quarantined)
}

func TestKeptAddressesAndAClockSetBack(t *testing.T) {
	s := begin(t, keeping(time.Hour, pool("lan", "198.18.0.0/29")))
	s.gets("default/a", "lan/198.18.0.0")
	s.frees("default/a")
	for _, d := range []time.Duration{30 * time.Minute, -time.Hour, 29 * time.Minute} { // 59 minutes pass
		s.passes(d)
		_, quarantined := s.NextFree(s.now)
		assert.True(t, quarantined)
	}
	s.gets("default/x", "lan/198.18.0.1")
	s.gets("default/a#2", "lan/198.18.0.0")
	s.frees("default/a#2")
	s.passes(-time.Hour)
	next, _ := s.NextFree(s.now)
	assert.Equal(t, s.now.Add(time.Hour), next)
	s.passes(time.Hour)
	s.gets("default/y", "lan/198.18.0.0")
}

func TestQuarantineFromBeforeTheStart(t *testing.T) {
	s := begin(t, keeping(time.Minute, pool("lan", "198.18.0.0/29")))
	s.restores("default/held", "198.18.0.4")
	for addr, ago := range map[string]time.Duration{
		"198.18.0.0": 40 * time.Second, "198.18.0.1": -time.Hour, "198.18.0.2": time.Minute, "198.18.0.4": 0, "192.0.2.1": 20 * time.Second,
	} {
		s.Quarantine("default/a", s.addr(addr), s.now.Add(-ago), s.now)
	}
	s.Quarantine("default/b", s.addr("198.18.0.1"), s.now, s.now) // in quarantine already
	s.Quarantine("default/b", ipam.Quarantined{}.Addr, s.now, s.now)
	want := []ipam.Quarantined{
		{Addr: s.addr("198.18.0.0"), Pool: "lan", Name: "default/a", Since: start.Add(-40 * time.Second), Until: start.Add(20 * time.Second)},
		{Addr: s.addr("192.0.2.1"), Name: "default/a", Since: start.Add(-20 * time.Second), Until: start.Add(10 * time.Second)},
		{Addr: s.addr("198.18.0.1"), Pool: "lan", Name: "default/a", Since: start, Until: start.Add(time.Minute)},
	}
	require.Equal(t, want, s.InQuarantine(s.now))
	s.holds("default/held", "lan/198.18.0.4")

	s.passes(-time.Hour) // the clock was set back: it stays in quarantine as long as before
	for i := range want {
		want[i].Since, want[i].Until = want[i].Since.Add(-time.Hour), want[i].Until.Add(-time.Hour)
	}
	require.Equal(t, want, s.InQuarantine(s.now))
	s.passes(10 * time.Second)
	require.Len(t, s.InQuarantine(s.now), 2)
	s.passes(10 * time.Second)
	require.Len(t, s.InQuarantine(s.now), 1)
}

// The end of a quarantine costs the same, however many other pools have addresses in quarantine.
func TestTheEndOfAQuarantineIsFoundAmongManyPools(t *testing.T) {
	keepers := func(n int) func() {
		pools := []config.Pool{pool("short", "198.18.0.0/32")}
		for i := range n {
			pools = append(pools, keeping(100_000*time.Hour, pool(fmt.Sprint(i), fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))))
		}
		s := begin(t, pools...)
		for i := range n {
			name := fmt.Sprintf("default/%d", i)
			s.gets(name, fmt.Sprintf("%d/10.%d.%d.0", i, i/256, i%256), from(fmt.Sprint(i)))
			s.frees(name)
		}
		return func() {
			for range n {
				s.gets("default/web", "short/198.18.0.0", from("short"))
				s.frees("default/web")
				next, _ := s.NextFree(s.now)
				require.Equal(t, s.now.Add(30*time.Second), next)
				s.passes(30 * time.Second)
			}
		}
	}
	testcost.Grows(t, "quarantines that end", keepers(1000), keepers(testcost.Growth*1000), func(end func()) { end() })
}

// The end of a quarantine costs the same, however many other addresses the Service has released.
func TestManyQuarantinesOfOneServiceEnd(t *testing.T) {
	released := func(n int) func() {
		s := begin(t, pool("lan", "2001:db8::/64"))
		addrs := make([]netip.Addr, n)
		for i := range addrs {
			addrs[i] = s.addr(fmt.Sprintf("2001:db8::%x", i))
		}
		return func() {
			for _, addr := range addrs {
				s.Quarantine("default/web", addr, s.now, s.now)
			}
			require.True(t, s.Expects("default/web"))
			s.passes(30 * time.Second)
			require.Empty(t, s.InQuarantine(s.now))
			require.False(t, s.Expects("default/web"))
		}
	}
	testcost.Grows(t, "quarantines of one Service that end", released(4000), released(testcost.Growth*4000), func(end func()) { end() })
}

func TestNothingIsFreeBeforeTheFirstSetup(t *testing.T) {
	s := &story{t, ipam.New(), start, ipam.Setup{Quarantine: 30 * time.Second}}
	s.restores("default/a", "198.18.0.0")
	s.frees("default/a")
	s.Quarantine("default/b", s.addr("198.18.0.1"), s.now.Add(-20*time.Second), s.now)
	s.passes(5 * time.Second)
	require.Len(t, s.InQuarantine(s.now), 2)
	s.passes(10 * time.Second)
	s.edit(pool("lan", "198.18.0.0/31"))
	require.Equal(t, []ipam.Quarantined{{Addr: s.addr("198.18.0.0"), Pool: "lan", Name: "default/a", Since: start,
		Until: start.Add(30 * time.Second)}},
		s.InQuarantine(s.now))
	s.gets("default/x", "lan/198.18.0.1")
}

// A namespace without a quota can give back one address of a large pool after the other.
func TestWhatANamespaceReleasesHasABound(t *testing.T) {
	s := begin(t, pool("lan", "2001:db8::/64"))
	six := families(ipam.IPv6)
	s.gets("team/web", "lan/2001:db8::", six)
	s.frees("team/web")
	s.gets("crowd/first", "lan/2001:db8::1", six)
	s.frees("crowd/first")
	for i := range ipam.MaxQuarantined {
		name := fmt.Sprintf("crowd/%d", i)
		_, err := s.ask(name, six)
		require.NoError(t, err)
		s.frees(name)
	}
	in := s.InQuarantine(s.now)
	assert.LessOrEqual(t, len(in), ipam.MaxQuarantined)
	assert.Greater(t, len(in), ipam.MaxQuarantined*3/4)
	assert.Equal(t, "team/web", in[0].Name, "what others have released is not free")
	assert.Equal(t, fmt.Sprintf("crowd/%d", ipam.MaxQuarantined-1), in[len(in)-1].Name)
	s.gets("team/api", "lan/2001:db8::1", six)
	s.gets("team/web", "lan/2001:db8::", six)
	s.passes(time.Hour)
	assert.Empty(t, s.InQuarantine(s.now))
}
