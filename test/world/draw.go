package world

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// The times of a scenario: the fleet starts, faults come, and then everything has time to recover.
const (
	beginning = 15 * time.Second
	// settled follows the end of the last fault. It has room for the longest of the promised times: a neighbour that
	// checks an entry (45 s), a defence (10 s), a search for lost speakers (4 s), a hand-over (6 s).
	settled = 60 * time.Second
	// settledDirect is that with direct forwarding: a speaker that is heard again, within 10 s, catches up.
	settledDirect = longestCatchUp + 10*time.Second
)

// Scenario is what a seed decides beforehand. Everything else that is random follows from the seed, too.
type Scenario struct {
	Seed     uint64
	Nodes    int
	Services int
	// Separate is set if the membership has another network than the segment.
	Separate bool
	// Keep, Prefer and Refresh are the settings of the advertisement that the world begins with.
	Keep, Prefer, Refresh bool
	// Direct is set if connections are forwarded directly.
	Direct bool
	// Detector is set if the real failure detector finds out who is lost.
	Detector bool
	// Dual is set if the segment has IPv6, and Services have addresses of either family or of both.
	Dual bool
	// Segments is how many there are, one or two. Home is that by which speakers hear each other, unless Separate. API is that by
	// which nodes reach the API server, from 1 on; 0: another network. Both are the nodes on both segments, as bits.
	Segments, Home, API int
	Both                uint64
	// Quarantine is how long an address that a Service has left is given to no other one.
	Quarantine time.Duration
	// DHCP is set if there is a pool that leases its addresses from a DHCP server.
	DHCP bool
	// Routers is how many routers nodes announce to.
	Routers int
	// Faults are in the order in which they begin.
	Faults []Fault
}

// Fault is something that happens to the world, begins At and takes For.
type Fault struct {
	At, For time.Duration
	Kind    Kind
	// Node is whose fault it is, Other the other node or the Service, if there is one.
	Node, Other int
}

// Kind is a kind of fault.
type Kind int

// The kinds. Those from Exclude on are edits by people that no client may notice.
const (
	Kill     Kind = iota // the speaker, or its node, is gone
	Pause                // the speaker does not run
	Stop                 // the speaker ends in order, and another one is started
	Cable                // the node has no link to a segment
	Backbone             // the node has no link to the network of the membership, if that is another one
	Switch               // no node has a link to that network
	Split                // the nodes up to Node and those after it do not hear each other, nor the hosts of the other side
	Deaf                 // the node receives nothing on a segment
	Mute                 // nothing that the node sends there arrives
	Noise                // frames on a segment are lost, repeated and late
	Flap                 // the others take the speaker for dead for a moment
	Away                 // the API server does not answer the node
	AllAway              // the API server answers nobody
	Slow                 // the node's processor is busy
	Sick                 // kube-proxy on the node is not healthy
	Foreign              // a host that is no speaker takes the address of a Service
	Replay               // a host repeats announcements of speakers
	Leader               // the controller that leads is stopped, and started again
	Crash                // the controller that leads is killed
	Suspend              // it does not run
	Cutoff               // the API server does not answer it
	SetClock             // the clock of one is set wrongly
	Ill                  // the API server refuses requests, or answers them late or not
	Stale                // one of several API servers lags behind
	Server               // one of several API servers is away, until its clients go to another one
	Clock                // the clock of the node is set wrongly
	Forger               // an attacker with the key claims all VIPs with the node's address
	Delete               // the Service is deleted, and created again
	Ask                  // the Service asks for something else
	Exclude              // the node is labelled
	Plugin               // the node's network plugin restarts
	Prefer               // an advertisement prefers the node
	Pods                 // the Service's pods are on another set of nodes
	Local                // the Service has another externalTrafficPolicy
	Create               // there is another Service
	Pools                // the pools are changed
	Tenant               // a Service gets hostile annotations
	Liar                 // an attacker with the node's token and the key reports falsely about the node
	Rekey                // the Secret that speakers share is another one
	kinds
)

var names = [kinds]string{"kill", "pause", "stop", "cable", "backbone", "switch", "split", "deaf", "mute", "noise", "flap", "away",
	"all-away",
	"slow", "sick", "foreign", "replay", "leader", "crash", "suspend", "cutoff", "set-clock",
	"ill", "stale", "server", "clock", "forger", "delete", "ask", "exclude", "plugin", "prefer", "pods", "local", "create", "pools", "tenant",
	"liar", "rekey"}

func (k Kind) String() string {
	switch {
	case k >= Unserved:
		return leaseNames[k-Unserved]
	case k >= Reboot:
		return routerNames[k-Reboot]
	case k >= Power:
		return dataNames[k]
	}
	return names[k]
}

// planned reports whether no VIP may be unanswered because of it: an edit, a stop in order, or a clock that is set.
func (k Kind) planned() bool { return k == Stop || k == Clock || k >= Exclude && k != Power }

// longest returns how long such a fault lasts at most.
func (k Kind) longest() time.Duration {
	switch k {
	case Flap: // a speaker that hears of its death contradicts at once
		return time.Second
	case Away, AllAway:
		return 100 * time.Second
	case Server: // see package apiclient
		return 5 * time.Second
	}
	return 40 * time.Second
}

func (f Fault) String() string {
	return fmt.Sprintf("%s n%d %d for %.3fs", f.Kind, f.Node, f.Other, f.For.Seconds())
}

// Faults follow each other at one of these paces, and take one of these lengths, on the average.
var (
	paces   = [...]time.Duration{200 * time.Millisecond, 2 * time.Second, 10 * time.Second}
	lengths = [...]time.Duration{100 * time.Millisecond, time.Second, 15 * time.Second}
)

// themes are groups of related kinds. The first one has all kinds.
var themes = func() [][]Kind {
	all := make([]Kind, kinds)
	for k := range all {
		all[k] = Kind(k)
	}
	return [][]Kind{all,
		{Leader, Ask, Delete, Create, Pools, AllAway},
		{Crash, Suspend, Cutoff, Ill, SetClock, Ask, Delete, Create},
		{Leader, Stale, Server, Ill, Cutoff, Ask, Delete, Create, Pods},
		{Tenant, Leader, Crash, Create, Delete, Ask},
		{Liar, Forger, Tenant, Create, Exclude, Prefer, Pods},
		{Rekey, Kill, Pause, Away, Split, Stop, Prefer},
		{Clock, Kill, Slow, Pods, Replay, Foreign, Split, Delete},
		{Split, Deaf, Mute, Noise, Replay, Foreign, Cable, Flap, Kill, Delete},
		{Stop, Exclude, Plugin, Prefer, Pods, Local, Create},
		{Kill, Pause, Slow, Sick, Away, Backbone, Switch, Cable, Pods},
		{Replay, Kill, Exclude, Cable},
	}
}()

// Draw returns the scenario of a seed.
func Draw(seed uint64) Scenario {
	r := rand.New(rand.NewPCG(seed, 0))
	percent := func(p int) bool { return r.IntN(100) < p }
	s := Scenario{Seed: seed, Segments: 1, Nodes: 2 + r.IntN(4), Services: 1 + r.IntN(8), Separate: percent(40), Keep: percent(30),
		Prefer: percent(30), Refresh: percent(20)}
	if percent(3) {
		s.Nodes = 6 + r.IntN(45)
	}
	// A scenario has some kinds only, mostly of one theme: ten faults of three kinds meet more often than ten of twenty.
	all := themes[r.IntN(len(themes))]
	some := r.Perm(len(all))[:1+r.IntN(min(6, len(all)))]
	for at, n := beginning, 1+r.IntN(12); n > 0; n-- {
		at += time.Duration(r.ExpFloat64() * float64(paces[r.IntN(3)]))
		kind := all[some[r.IntN(len(some))]]
		length := time.Duration(float64(lengths[r.IntN(3)]) * (0.2 + r.ExpFloat64()))
		s.Faults = append(s.Faults, Fault{At: at, For: min(length, kind.longest()), Kind: kind, Node: r.IntN(s.Nodes),
			Other: r.IntN(1 << 16)})
	}
	s.drawData()
	s.drawRouters()
	s.drawSegments()
	s.drawLeases()
	s.drawQuarantine()
	s.drawEndpoints()
	return s
}

// firstQuarantines is the first seed whose fleet may have no quarantine.
const firstQuarantines = 40_000_000

// drawQuarantine takes the quarantine out of half of the scenarios: it hides addresses that are free too early. They have more
// Services that leave addresses and want some, and writes that take long.
func (s *Scenario) drawQuarantine() {
	s.Quarantine = 30 * time.Second
	if r := rand.New(rand.NewPCG(s.Seed, 9)); s.Seed >= firstQuarantines && r.IntN(2) == 0 {
		s.Quarantine = 0
		s.add(r, []Kind{Ill, Ask, Delete, Create})
	}
}

// firstEndpoints is the first seed whose fleet may have more changes of which nodes can serve a Service.
const firstEndpoints = 50_000_000

// drawEndpoints adds such changes to half of the scenarios.
func (s *Scenario) drawEndpoints() {
	if r := rand.New(rand.NewPCG(s.Seed, 10)); s.Seed >= firstEndpoints && r.IntN(2) == 0 {
		s.add(r, []Kind{Pods, Local, Prefer, Stop, Sick})
	}
}

// firstSegments is the first seed whose fleet may have two segments, so that the fleets of lower seeds stay the same.
const firstSegments = 10_000_000

// drawSegments adds a second segment to the scenario of a seed, and faults that concern it.
func (s *Scenario) drawSegments() {
	r := rand.New(rand.NewPCG(s.Seed, 7))
	if s.Seed < firstSegments || s.Direct || s.Routers > 0 || r.IntN(100) < 50 {
		return
	}
	s.Segments, s.Home, s.API, s.Both = 2, r.IntN(2), r.IntN(3), r.Uint64()|1
	s.add(r, []Kind{Cable, Split, Deaf, Mute, Noise, Kill, Stop, Exclude, Delete, Pods, Foreign})
}

// isOn reports whether a node is on a segment.
func (s *Scenario) isOn(node, segment int) bool {
	home := s.Home
	if s.Separate {
		home = node % s.Segments
	}
	return segment == home || s.Both>>node&1 > 0
}

// add adds faults of some of these kinds.
func (s *Scenario) add(r *rand.Rand, all []Kind) {
	some := r.Perm(len(all))[:1+r.IntN(3)]
	for at, n := beginning, r.IntN(6); n > 0; n-- {
		at += time.Duration(r.ExpFloat64() * float64(paces[r.IntN(3)]))
		f := Fault{At: at, Kind: all[some[r.IntN(len(some))]], Node: r.IntN(s.Nodes), Other: r.IntN(1 << 16)}
		length := time.Duration(float64(lengths[r.IntN(3)]) * (0.2 + r.ExpFloat64()))
		if f.For = min(length, 40*time.Second); f.Kind == Power {
			f.For = 20*time.Second + min(2*length, 40*time.Second) // no node starts sooner
		}
		s.Faults = append(s.Faults, f)
	}
	slices.SortStableFunc(s.Faults, func(a, b Fault) int { return int(a.At - b.At) })
}

// quiet is when the last fault ends.
func (s Scenario) quiet() time.Duration {
	last := beginning
	for _, f := range s.Faults {
		last = max(last, f.At+f.For)
	}
	return last
}

// End is when the world ends.
func (s Scenario) End() time.Duration {
	switch {
	case s.Routers > 0:
		return s.quiet() + settledRouters
	case s.Direct:
		return s.quiet() + settledDirect
	}
	return s.quiet() + settled
}

// String returns the scenario as the first lines of its story.
func (s Scenario) String() string {
	text := fmt.Sprintf("seed %d: %d nodes, %d services, %d routers, separate=%t keep=%t prefer=%t refresh=%t direct=%t dual=%t detector=%t\n",
		s.Seed, s.Nodes, s.Services, s.Routers, s.Separate, s.Keep, s.Prefer, s.Refresh, s.Direct, s.Dual, s.Detector)
	if s.Segments > 1 {
		text += fmt.Sprintf("  two segments: home=%d api=%d both=%b\n", s.Home, s.API, s.Both&(1<<s.Nodes-1))
	}
	if s.DHCP {
		text += "  a DHCP server\n"
	}
	if s.Quarantine == 0 {
		text += "  no quarantine\n"
	}
	for _, f := range s.Faults {
		text += fmt.Sprintf("  at %.3fs %s\n", f.At.Seconds(), f)
	}
	return text
}

// Has reports whether the scenario has a fault of the kind with that name.
func (s Scenario) Has(kind string) bool {
	return slices.ContainsFunc(s.Faults, func(f Fault) bool { return f.Kind.String() == kind })
}

// WithNodes returns the scenario with another number of nodes.
func (s Scenario) WithNodes(n int) Scenario {
	s.Nodes, s.Faults = n, slices.Clone(s.Faults)
	for i := range s.Faults {
		s.Faults[i].Node %= n
	}
	return s
}

// without returns the scenario without some of its faults.
func (s Scenario) without(from, to int) Scenario {
	s.Faults = slices.Delete(slices.Clone(s.Faults), from, to)
	return s
}
