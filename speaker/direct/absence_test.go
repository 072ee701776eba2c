package direct

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Others hear a speaker a moment before it has written its rules.
func TestAbsences(t *testing.T) {
	t.Parallel()
	key := plan.LimitKey{VIP: vip4, Service: "web"}
	for name, test := range map[string]struct {
		came, lost, back, asked time.Duration // back: 0 is never
		joined                  time.Duration // 0: n2 has been there from the beginning
		began                   time.Duration // the Director
		none                    bool          // n1 is not there
		with                    []string      // who else is lost
		missed                  string
	}{
		"it came while the speaker was lost":                  {came: 20, lost: 10, asked: 30, missed: "n2 "},
		"it came before":                                      {came: 9, lost: 10, asked: 30},
		"the speaker is heard since a moment":                 {came: 20, lost: 10, back: 30, asked: 30, missed: "n2 "},
		"the speaker is heard for less long than it was lost": {came: 31, lost: 10, back: 30, asked: 47, missed: "n2 "},
		"the speaker is heard for longer":                     {came: 31, lost: 10, back: 30, asked: 50},
		"the speaker was lost for a moment":                   {came: 20, lost: 20, back: 21, asked: 23},
		"the speaker was lost for long":                       {came: 20, lost: 10, back: 110, asked: 170},
		"it comes while all others are lost, or this one":     {came: 20, lost: 10, asked: 30, with: []string{"n3", "n4"}},
		"endpoints came while it was lost":                    {came: 1, joined: 20, lost: 10, asked: 30, missed: "n2 "},
		"the first endpoints came while it was lost":          {came: 1, joined: 20, none: true, lost: 10, asked: 30, missed: "n2 "},
		"endpoints came before":                               {came: 1, joined: 6, lost: 10, asked: 30},
		"the Director has begun and learns of them":           {came: 1, joined: 21, began: 18, lost: 20, asked: 30},
		"one of three others is lost with this one":           {came: 20, lost: 10, asked: 30, with: []string{"n3"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := New(Options{}).absences
			start, last := time.Now(), map[plan.LimitKey]plan.Direct(nil)
			a.began = start.Add(test.began * time.Second)
			if test.began == 0 {
				a.began = start.Add(-learnTime)
			}
			for at := time.Duration(0); at <= test.asked; at++ {
				want := plan.Forwarding{Nodes: map[string][]netip.Addr{"n1": nil, "n2": nil, "n3": nil, "n4": nil}, Lost: map[string]bool{}}
				for _, node := range append(test.with, "n2") {
					want.Lost[node] = at >= test.lost && (test.back == 0 || at < test.back)
				}
				if at >= test.came {
					of := plan.Direct{}
					if !test.none {
						of.Backends = append(of.Backends, plan.Backend{Node: "n1", Open: 1})
					}
					if at >= test.joined {
						of.Backends = append(of.Backends, plan.Backend{Node: "n2", Open: 1})
					}
					want.Services = map[plan.LimitKey]plan.Direct{key: of}
				}
				a.follow(start.Add(at*time.Second), want, func(plan.LimitKey) (plan.Direct, bool) {
					of, known := last[key]
					return of, known
				})
				last = want.Services
			}
			require.Equal(t, test.missed, a.missedBy(key))
			a.see(start.Add(time.Hour), nil)
			require.Empty(t, a.came, "nobody needs to know any more")
		})
	}
}
