package direct

import (
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// A node that has missed a Service, or its first endpoint of it, is not asked until its speaker has been heard for long
// enough to have written its rules.
func TestAbsences(t *testing.T) {
	t.Parallel()
	key := plan.LimitKey{VIP: vip4, Service: "web"}
	for name, test := range map[string]struct {
		came, lost, back, asked time.Duration // back: 0 is never
		port                    time.Duration // 0: it has been there as long as the Service
		anew                    time.Duration // the Service is deleted and made again; 0: never
		joined                  time.Duration // 0: n2 has been there from the beginning
		reports                 time.Duration // n2, that it has rules; 0: from the beginning
		none                    bool          // n1 is not there
		with                    []string      // who else is lost
		heard                   []string      // of those that are lost
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
		"endpoints came when it was heard since a moment":     {came: 1, joined: 30, lost: 10, back: 30, asked: 30, missed: "n2 "},
		"endpoints came when it was heard for longer":         {came: 1, joined: 32, lost: 10, back: 30, asked: 32},
		"a port came while it was lost":                       {came: 1, port: 20, lost: 10, asked: 30, missed: "n2 "},
		"a port came before":                                  {came: 1, port: 6, lost: 10, asked: 30},
		"it was made anew while the speaker was lost":         {came: 1, anew: 20, lost: 10, asked: 30, missed: "n2 "},
		"endpoints came before":                               {came: 1, joined: 6, lost: 10, asked: 30},
		"it came before the node reported its rules":          {came: 20, lost: 10, back: 30, reports: 31, asked: 31},
		"the node joined as it reported its rules":            {came: 1, joined: 31, lost: 10, back: 30, reports: 31, asked: 31},
		"it came after the node had reported its rules":       {came: 32, lost: 10, reports: 31, asked: 33, missed: "n2 "},
		"one of three others is lost with this one":           {came: 20, lost: 10, asked: 30, with: []string{"n3"}},
		"another one starts meanwhile": {came: 20, lost: 10, asked: 30, with: []string{"n3"}, heard: []string{"n3"},
			missed: "n2 n3 "},
		"most others start": {came: 20, lost: 10, back: 21, asked: 22, with: []string{"n3"}, heard: []string{"n2", "n3"},
			missed: "n2 n3 "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := New(Options{}).absences
			start, last := time.Now(), map[plan.LimitKey]plan.Direct(nil)
			for at := time.Duration(0); at <= test.asked; at++ {
				want := plan.Forwarding{Nodes: map[string][]netip.Addr{"n1": nil, "n2": nil, "n3": nil, "n4": nil}, Lost: map[string]bool{}}
				if at < test.reports {
					delete(want.Nodes, "n2")
				}
				want.Heard = map[string]bool{}
				for _, node := range test.heard {
					want.Heard[node] = true
				}
				for _, node := range append(test.with, "n2") {
					want.Lost[node] = at >= test.lost && (test.back == 0 || at < test.back)
				}
				if at >= test.came {
					of := plan.Direct{Ports: []plan.Port{{Number: 81}}}
					if at >= test.port {
						of.Ports = web
					}
					if test.anew > 0 && at >= test.anew {
						of.Seed++
					}
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
			require.Equal(t, test.missed, a.missedBy(key, web))
			a.see(start.Add(time.Hour), nil, nil)
			require.Empty(t, a.came, "nobody needs to know any more")
		})
	}
}

// A node that starts without rules asks nodes whose speakers are lost: it does not know which Services are new, and most are
// not. With the rules of an earlier Director, Services that are not in them are new.
func TestAbsencesOfOneThatStartsAnew(t *testing.T) {
	t.Parallel()
	now := time.Now()
	key := func(name string) plan.LimitKey { return plan.LimitKey{VIP: vip4, Service: name} }
	want := func(names ...string) plan.Forwarding {
		f := plan.Forwarding{Services: map[plan.LimitKey]plan.Direct{}, Lost: map[string]bool{"n2": true},
			Nodes: map[string][]netip.Addr{"n1": nil, "n2": nil, "n3": nil, "n4": nil}}
		for i, name := range names {
			ports := []plan.Port{{Protocol: unix.IPPROTO_TCP, Number: uint16(80 + i)}}
			f.Services[key(name)] = plan.Direct{Ports: ports, Backends: some("n1", "n2")}
		}
		return f
	}
	o := Options{Log: slog.New(slog.DiscardHandler), Node: "n1"}
	first := NewSimulated(o, Tables{})
	first.Begin(want("default/web"), nil, now)
	first.Reconcile(Seen{}, now)
	require.Empty(t, first.absences.missedBy(key("default/web"), web))
	second := NewSimulated(o, Tables{})
	second.Begin(want("default/web", "default/new"), first, now.Add(time.Minute))
	require.Empty(t, second.absences.missedBy(key("default/web"), web))
	require.Equal(t, "n2 ", second.absences.missedBy(key("default/new"), want("", "default/new").Services[key("default/new")].Ports))
}

// A node that has not answered since this Director began may have restarted, and have no rules. It is not asked until its
// speaker is heard.
func TestNodeThatWasNeverHeard(t *testing.T) {
	t.Parallel()
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 0, byte(i)}) }
	want := plan.Forwarding{Nodes: map[string][]netip.Addr{"n1": {addr(1)}, "n2": {addr(2)}, "n3": {addr(3)}},
		Lost:     map[string]bool{"n3": true},
		Services: map[plan.LimitKey]plan.Direct{{VIP: vip4, Service: "default/web"}: {Ports: web, Backends: some("n1", "n2", "n3")}}}
	now := time.Now()
	for name, test := range map[string]struct {
		others bool          // n2 answers
		silent time.Duration // n3 does not answer for so long
		asked  bool          // n3, before its speaker is heard
	}{
		"it answers after a while":         {true, 5 * time.Second, false},
		"it answers at once":               {true, time.Second, true},
		"nobody answers, and then all do":  {false, 5 * time.Second, true},
		"it answers after it was given up": {true, 20 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewSimulated(Options{Log: slog.New(slog.DiscardHandler), Node: "n1", Hold: defaultHold}, Tables{})
			s.Begin(want, nil, now)
			look := func(at time.Duration, answer ...int) {
				seen := Seen{Subnets: map[netip.Prefix]int{netip.MustParsePrefix("198.18.0.0/24"): 2}}
				for _, i := range answer {
					seen.Neighbours = append(seen.Neighbours, SeenNeighbour{addr(i), 2, net.HardwareAddr{2, 0, 0, 0, 0, byte(i)}, false})
				}
				s.Reconcile(seen, now.Add(at))
			}
			for at := time.Duration(0); at < test.silent; at += interval {
				if test.others {
					look(at, 2)
				} else {
					look(at)
				}
			}
			look(test.silent, 2, 3)
			_, asked := s.peers(families[0])["n3"]
			require.Equal(t, test.asked, asked)
			heard := want
			heard.Lost = nil
			s.Set(heard, now.Add(test.silent))
			look(test.silent+interval, 2, 3)
			require.Contains(t, s.peers(families[0]), "n3")
		})
	}
}
