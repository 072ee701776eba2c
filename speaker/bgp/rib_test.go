package bgp

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A router that applies every batch has the wanted routes, whatever happens in
// between; and nothing that it has already is sent, unless it asks.
func TestRIBAgainstARouter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		prefixes := []netip.Prefix{vip4, more4, vip6, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}
		few, permitted := permitting(vip4, vip6, prefixes[4]), (*netipx.IPSet)(nil)
		may := func(p netip.Prefix) bool { return permitted == nil || permitted.ContainsPrefix(p) }
		deny := func(p netip.Prefix) Withholding {
			if p == prefixes[4] {
				return withheldNextHop
			}
			return ""
		}
		r := newRIB("tor")
		want := map[netip.Prefix]plan.Attributes{}
		var known map[netip.Prefix]attributes // at the router; nil: no session
		again := map[bool]bool{}              // families that it asked for
		draining := false
		take := func(t *rapid.T) {
			b := r.take(deny)
			for _, p := range b.withdraw {
				if _, ok := known[p]; !ok {
					t.Fatalf("%s is withdrawn and was not announced", p)
				}
				delete(known, p)
			}
			for a, announced := range b.announce {
				for _, p := range announced {
					if known[p] == a && !again[p.Addr().Is4()] {
						t.Fatalf("%s is sent again", p)
					}
					known[p] = a
				}
			}
			clear(again)
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				p := rapid.SampledFrom(prefixes).Draw(t, "prefix")
				if rapid.Bool().Draw(t, "announce") {
					want[p] = plan.Attributes{MED: new(rapid.Uint32Range(0, 2).Draw(t, "MED"))}
					r.set(p, plan.Route{"tor": want[p], "other": {}})
				} else {
					delete(want, p)
					r.set(p, plan.Route{"other": {}})
				}
				r.flush()
			},
			"take": func(t *rapid.T) {
				if known != nil {
					take(t)
				}
			},
			"session": func(*rapid.T) {
				r.stop()
				r.start()
				known = map[netip.Prefix]attributes{}
			},
			"no session": func(*rapid.T) { r.stop(); known = nil },
			"drain": func(t *rapid.T) {
				draining = rapid.Bool().Draw(t, "on")
				r.drain(draining)
			},
			"permit": func(t *rapid.T) {
				permitted = rapid.SampledFrom([]*netipx.IPSet{nil, few}).Draw(t, "permitted")
				r.limit(permitted)
			},
			"refresh": func(t *rapid.T) {
				if known != nil {
					is4 := rapid.Bool().Draw(t, "IPv4")
					again[is4] = true
					r.refresh(is4)
				}
			},
			"": func(t *rapid.T) {
				if known == nil || rapid.IntRange(0, 3).Draw(t, "check") > 0 {
					return
				}
				take(t)
				expected := map[netip.Prefix]attributes{}
				for p, a := range want {
					if !may(p) || deny(p) != "" {
						continue
					}
					if draining {
						a.Communities, a.LocalPreference = []config.Community{gracefulShutdown}, new(uint32(0))
					}
					expected[p] = intern(a)
				}
				if !maps.Equal(known, expected) {
					t.Fatalf("the router knows %v, not %v", known, expected)
				}
				if n, withheld := r.count(); n != len(expected) || n+withheld[withheldForbidden]+withheld[withheldNextHop] != len(want) {
					t.Fatalf("counts %d and %v of %d", n, withheld, len(want))
				}
			},
		})
	})
}

// What is not permitted is reported once, however often the router asks for all routes.
func TestForbiddenIsReportedOnce(t *testing.T) {
	t.Parallel()
	r := newRIB("tor")
	r.limit(permitting(vip4))
	r.start()
	forbidden := func() []netip.Prefix { return r.take(func(netip.Prefix) Withholding { return "" }).forbidden }
	r.set(more4, plan.Route{"tor": {}})
	require.Equal(t, []netip.Prefix{more4}, forbidden())
	r.refresh(true)
	require.Empty(t, forbidden())
	r.limit(nil)
	require.Empty(t, forbidden())
	r.limit(permitting(vip4))
	require.Equal(t, []netip.Prefix{more4}, forbidden())
}

// A prefix that replaces others is announced before they are withdrawn, and vice versa: a router has a route to each of their
// addresses at every moment.
func TestRoutesComeBeforeOthersGo(t *testing.T) {
	t.Parallel()
	all := plan.Route{"tor": {}}
	first, second := netip.MustParsePrefix("203.0.113.0/32"), netip.MustParsePrefix("203.0.113.1/32")
	both := netip.MustParsePrefix("203.0.113.0/31")
	r := newRIB("tor")
	r.start()
	sent := func() (order []string) {
		b := r.take(func(netip.Prefix) Withholding { return "" })
		require.NoError(t, b.send(
			func(prefixes []netip.Prefix) error {
				order = append(order, fmt.Sprint("withdraw ", len(prefixes)))
				return nil
			},
			func(_ attributes, prefixes []netip.Prefix) error {
				order = append(order, fmt.Sprint("announce ", len(prefixes)))
				return nil
			}))
		return slices.DeleteFunc(order, func(s string) bool { return strings.HasSuffix(s, " 0") })
	}
	r.set(both, all)
	require.Equal(t, []string{"announce 1"}, sent())
	r.set(both, nil)
	r.set(first, all)
	r.set(second, all)
	require.Equal(t, []string{"announce 2", "withdraw 1"}, sent())
	r.set(both, all)
	r.set(first, nil)
	r.set(second, nil)
	require.Equal(t, []string{"announce 1", "withdraw 2"}, sent())
}
