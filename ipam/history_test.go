package ipam_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// op is one step of a history.
type op struct {
	kind   string
	after  time.Duration // the clock moves before the step
	req    ipam.Request  // allocate; the owner of others
	addr   netip.Addr    // restore, quarantine, revoke, claim
	more   netip.Addr    // claim
	layout int           // configure
	ago    time.Duration // quarantine
}

func (o op) String() string {
	text := fmt.Sprintf("%+v %s %s", o.after, o.kind, o.req.Owner.UID)
	switch o.kind {
	case "allocate":
		return text + fmt.Sprintf(" %v all=%v count=%d pools=%v addresses=%v labels=%v sharing=%+v renumber=%v avoid=%v",
			o.req.Families, o.req.RequireAll, o.req.Count, o.req.Pools, o.req.Addresses, o.req.Subject.Labels, o.req.Sharing,
			o.req.Renumber, o.req.Avoid)
	case "restore", "abide":
		return text + fmt.Sprintf(" %s %+v", o.addr, o.req.Sharing)
	case "claim":
		return text + fmt.Sprintf(" %v %s %v pools=%v sharing=%+v", o.req.Families, o.addr, o.more, o.req.Pools, o.req.Sharing)
	case "quarantine":
		return text + fmt.Sprintf(" %s since %v", o.addr, o.ago)
	case "revoke":
		return text + " " + o.addr.String()
	case "configure":
		return text + fmt.Sprintf(" layout %d", o.layout)
	}
	return text
}

// world is the addresses that histories are about, in order. Those of both
// families are on both sides of a multiple of 16, where one page of leases ends.
var world = func() (w []netip.Addr) {
	for i := range byte(10) {
		w = append(w, netip.AddrFrom4([4]byte{198, 18, 0, 11 + i}))
	}
	for i := range byte(6) {
		w = append(w, netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 13 + i}))
	}
	return w
}()

var worldIndex = func() map[netip.Addr]int {
	index := map[netip.Addr]int{}
	for i, a := range world {
		index[a] = i
	}
	return index
}()

var services = []string{"a/x", "a/y", "a/z", "b/x", "b/y", "b/z", "c/x"}

// owners are two incarnations of each Service.
var owners = func() (o []ipam.Owner) {
	for _, name := range services {
		o = append(o, ipam.Owner{UID: name + "#0", Name: name}, ipam.Owner{UID: name + "#1", Name: name})
	}
	return o
}()

var (
	namespaceLabels = map[string]map[string]string{"a": {"l": "a"}, "b": {"l": "b"}, "c": {"l": "c"}}
	serviceLabels   = map[string]string{"l": ""}
)

// draft is a layout that can still be edited: who has each address.
type draft struct {
	pools        []config.Pool
	owner        []int // the pool of each address, -1 for none
	withheld     []bool
	forbidden    [][2]int // from, to
	reservations []config.Reservation
	conflicted   []netip.Addr
	quarantine   time.Duration
}

func randomDraft(random *rand.Rand) *draft {
	d := &draft{owner: make([]int, len(world)), withheld: make([]bool, len(world)), quarantine: 3 * time.Second}
	for _, name := range []string{"p", "q", "r", "s"}[:[]int{0, 1, 2, 3, 3, 4, 4}[random.IntN(7)]] {
		d.pools = append(d.pools, config.Pool{Name: name, AutoAssign: random.IntN(6) > 0})
	}
	random.Shuffle(len(d.pools), func(i, j int) { d.pools[i], d.pools[j] = d.pools[j], d.pools[i] })
	to := -1
	for i := range world {
		if random.IntN(3) == 0 || to < 0 {
			to = random.IntN(len(d.pools)+1) - 1
		}
		d.owner[i], d.withheld[i] = to, random.IntN(8) == 0
	}
	for range random.IntN(5) {
		d.edit(random)
	}
	return d
}

// edit changes one thing.
func (d *draft) edit(random *rand.Rand) {
	var p *config.Pool
	if len(d.pools) > 0 {
		p = &d.pools[random.IntN(len(d.pools))]
	}
	switch n := random.IntN(18); {
	case n == 0:
		d.quarantine = []time.Duration{0, 3 * time.Second, 10 * time.Second}[random.IntN(3)]
	case n <= 2:
		d.reserve(random)
	case n <= 4:
		from := random.IntN(len(world))
		to := min(from+random.IntN(4), len(world)-1)
		if d.forbidden = append(d.forbidden, [2]int{from, to}); random.IntN(2) == 0 {
			d.forbidden = d.forbidden[1:]
		}
	case n == 5:
		i := random.IntN(len(world))
		d.withheld[i] = !d.withheld[i]
	case n <= 7:
		d.owner[random.IntN(len(world))] = random.IntN(len(d.pools)+1) - 1
	case n >= 16:
		if d.conflicted = append(slices.Clone(d.conflicted), world[random.IntN(len(world))]); random.IntN(2) == 0 {
			d.conflicted = d.conflicted[1:]
		}
	case p == nil:
	case n == 8:
		p.Namespaces = [][]string{nil, nil, nil, {"a"}, {"b", "c"}}[random.IntN(5)]
	case n == 9:
		p.ServiceSelector = []config.Selector{nil, {{Key: "l", Operator: config.Exists}}}[random.IntN(2)]
	case n == 10:
		p.NamespaceSelector = []config.Selector{nil, {{Key: "l", Operator: config.In, Values: []string{"a"}}}}[random.IntN(2)]
	case n == 11:
		p.NamespaceQuota = random.IntN(4)
	case n == 12:
		p.Requesters = [][]string{nil, nil, {}, {"a", "b"}}[random.IntN(4)]
	case n == 13:
		p.KeepFor = []time.Duration{0, 5 * time.Second, time.Minute}[random.IntN(3)]
	case n == 14:
		p.Draining = !p.Draining && random.IntN(2) == 0
	default:
		p.Priority, p.Name = random.IntN(3)-1, d.newName(p.Name, random)
	}
}

// newName is a name that no pool has, or the present one.
func (d *draft) newName(name string, random *rand.Rand) string {
	other := []string{"p", "q", "r", "s"}[random.IntN(4)]
	if slices.ContainsFunc(d.pools, func(p config.Pool) bool { return p.Name == other }) {
		return name
	}
	return other
}

// reserve adds a reservation or drops the oldest.
func (d *draft) reserve(random *rand.Rand) {
	if len(d.reservations) > 2 || len(d.reservations) > 0 && random.IntN(2) == 0 {
		d.reservations = d.reservations[1:]
		return
	}
	r := config.Reservation{Service: services[random.IntN(len(services))]}
	for range 1 + random.IntN(2) {
		a := world[random.IntN(len(world))]
		taken := slices.Contains(r.Addresses, a) ||
			slices.ContainsFunc(d.reservations, func(r config.Reservation) bool { return slices.Contains(r.Addresses, a) })
		if !taken {
			r.Addresses = append(r.Addresses, a)
		}
	}
	d.reservations = append(slices.Clone(d.reservations), r)
}

// layout spells a draft out.
func (d *draft) layout() *layout {
	l := &layout{Setup: ipam.Setup{Quarantine: d.quarantine, Reservations: slices.Clone(d.reservations), Conflicted: d.conflicted},
		at: make([]spot, len(world)), families: map[string][]ipam.Family{}}
	free, withheld := make([]netipx.IPSetBuilder, len(d.pools)), make([]netipx.IPSetBuilder, len(d.pools))
	for i, a := range world {
		l.at[i].pool, l.at[i].withheld = d.owner[i], d.withheld[i]
		switch owner := d.owner[i]; {
		case owner < 0:
		case d.withheld[i]:
			withheld[owner].Add(a)
		default:
			free[owner].Add(a)
			if name := d.pools[owner].Name; !slices.Contains(l.families[name], family(a)) {
				l.families[name] = append(l.families[name], family(a))
			}
		}
	}
	for i, p := range d.pools {
		p.Free, _ = free[i].IPSet()
		p.Withheld, _ = withheld[i].IPSet()
		l.Pools = append(l.Pools, p)
	}
	for n, f := range d.forbidden {
		if world[f[0]].Is4() != world[f[1]].Is4() {
			continue
		}
		why := fmt.Sprintf("forbidden by %d", n)
		l.Forbidden = append(l.Forbidden, ipam.Forbidden{Range: netipx.IPRangeFrom(world[f[0]], world[f[1]]), Why: why})
		for i := f[0]; i <= f[1]; i++ {
			l.at[i].bans = append(l.at[i].bans, ban{f[1] - f[0], f[0], why})
		}
	}
	for _, a := range d.conflicted {
		l.at[worldIndex[a]].conflict = true
	}
	for _, r := range d.reservations {
		for _, a := range r.Addresses {
			l.at[worldIndex[a]].reserved = r.Service
		}
	}
	return l
}

// randomLayouts are edits of edits, with a fresh start now and then.
func randomLayouts(random *rand.Rand) (layouts []*layout) {
	var d *draft
	for i := range 40 {
		if i%8 == 0 {
			d = randomDraft(random)
		} else {
			d.edit(random)
		}
		layouts = append(layouts, d.layout())
	}
	return layouts
}

func randomSharing(random *rand.Rand) *ipam.Sharing {
	if random.IntN(10) < 3 {
		return nil
	}
	s := &ipam.Sharing{Key: "k"}
	if random.IntN(5) == 0 {
		s.Key = []string{"m", ""}[random.IntN(2)]
	}
	if random.IntN(12) == 0 {
		s.Backends = "web"
	}
	for range random.IntN(3) {
		s.Ports = append(s.Ports, ipam.Port{Protocol: []string{"TCP", "UDP"}[random.IntN(2)], Number: uint16(random.IntN(8))})
	}
	s.Namespaces = [][]string{nil, {"a"}, {"c", "b"}, {"a", "b", "c"}, {"c", "b", "a", "b"}}[random.IntN(5)]
	return s
}

func randomRequest(random *rand.Rand) ipam.Request {
	owner := owners[random.IntN(len(owners))]
	req := ipam.Request{
		Owner:      owner,
		Subject:    config.Subject{Namespace: namespace(owner.Name), NamespaceLabels: namespaceLabels[namespace(owner.Name)]},
		RequireAll: random.IntN(2) == 0,
		Count:      max(0, random.IntN(12)-8),
		Renumber:   random.IntN(8) == 0,
		Sharing:    randomSharing(random),
		Families:   [][]ipam.Family{{ipam.IPv4}, {ipam.IPv6}, {ipam.IPv4, ipam.IPv6}, {ipam.IPv6, ipam.IPv4}}[random.IntN(4)],
	}
	if random.IntN(2) == 0 {
		req.Subject.Labels = serviceLabels
	}
	for range max(0, random.IntN(6)-3) {
		req.Pools = append(req.Pools, []string{"p", "q", "r", "s"}[random.IntN(4)])
	}
	if random.IntN(6) == 0 {
		for range 1 + random.IntN(8) {
			req.Avoid = append(req.Avoid, world[random.IntN(len(world))])
		}
	}
	for range max(0, random.IntN(6)-3) {
		a := world[random.IntN(len(world))]
		if slices.Contains(req.Families, family(a)) || random.IntN(10) == 0 {
			req.Addresses = append(req.Addresses, a)
		}
	}
	return req
}

func randomOp(random *rand.Rand, layouts int) op {
	o := op{req: randomRequest(random), addr: world[random.IntN(len(world))], more: world[random.IntN(len(world))]}
	switch random.IntN(12) {
	case 0:
		o.after = -time.Duration(random.IntN(20)) * time.Second
	case 1:
		o.after = time.Minute
	case 2, 3, 4, 5:
		o.after = time.Duration(random.IntN(3000)) * time.Millisecond
	}
	switch n := random.IntN(100); {
	case n < 58:
		o.kind = "allocate"
	case n < 61:
		o.kind = "claim"
	case n < 62:
		o.kind = "abide"
	case n < 86:
		o.kind = "release"
	case n < 90:
		o.kind = "restore"
	case n < 91:
		o.kind = "revoke"
	case n < 94:
		o.kind, o.ago = "quarantine", time.Duration(random.IntN(15000)-2000)*time.Millisecond
	case n < 99:
		o.kind, o.layout = "configure", random.IntN(layouts)
	default:
		o.kind = "restart"
	}
	return o
}

// play is a history that goes on: the model, and an allocator that must never
// differ from it, or two that must not differ in their words either.
type play struct {
	layouts []*layout
	setup   ipam.Setup
	now     time.Time
	model   *model
	// all are the allocators. The model has one answer, and so have those who
	// agree with it; the second one is there for what the model does not
	// have: messages, the order in which a restart restores things, and that to
	// consider a request changes nothing, which only the first one does.
	all   []*ipam.Allocator
	asked int
}

// run plays a history. It returns the first step after which something is
// wrong, and what.
func run(ops []op, layouts []*layout, twins bool) (failed int, how string) {
	p := &play{layouts: layouts, now: start, model: newModel(), all: []*ipam.Allocator{ipam.New()}}
	if twins {
		p.all = append(p.all, ipam.New())
	}
	for _, a := range p.all {
		a.Configure(p.setup)
	}
	for i := range ops {
		p.now = p.now.Add(ops[i].after)
		if how := p.step(&ops[i]); how != "" {
			return i, how
		}
		if i%64 == 0 || i == len(ops)-1 {
			if how := p.compare(); how != "" {
				return i, how
			}
		}
	}
	return -1, ""
}

// step plays one step. It returns what is wrong, if anything is.
func (p *play) step(o *op) string {
	switch o.kind {
	case "allocate":
		if how := p.allocate(&o.req); how != "" {
			return how
		}
	case "claim":
		if how := p.claim(o); how != "" {
			return how
		}
	case "configure":
		l := p.layouts[o.layout]
		p.setup = l.Setup
		p.model.configure(l)
		for _, a := range p.all {
			a.Configure(p.setup)
		}
	case "restart":
		p.restart()
	default:
		if how := p.happen(o); how != "" {
			return how
		}
	}
	uid := o.req.Owner.UID
	want := p.model.held(uid)
	for _, a := range p.all {
		if got := a.Holds(uid); !slices.Equal(got, want) {
			return fmt.Sprintf("%s holds %v, want %v", uid, got, want)
		}
	}
	return ""
}

// happen plays a step that nobody can refuse.
func (p *play) happen(o *op) string {
	owner, since := o.req.Owner, p.now.Add(-o.ago)
	var freed []netip.Addr
	var holder ipam.Owner
	var restored bool
	switch o.kind {
	case "release":
		freed = p.model.release(owner, p.now)
	case "restore":
		holder, restored = p.model.restore(owner, o.addr, o.req.Sharing, p.now)
	case "quarantine":
		p.model.restFrom(owner.Name, o.addr, since, p.now)
	case "revoke":
		p.model.revoke(o.addr, p.now)
	case "abide":
		p.model.tick(p.now)
		p.model.abide(&o.req)
	}
	for _, a := range p.all {
		switch o.kind {
		case "release":
			if got := a.Release(owner.UID, p.now); !slices.Equal(got, freed) {
				return fmt.Sprintf("released %v, want %v", got, freed)
			}
		case "restore":
			if got, ok := a.Restore(ipam.Holding{Owner: owner, Addr: o.addr, Sharing: o.req.Sharing, Since: p.now}); got != holder ||
				ok != restored {
				return fmt.Sprintf("got %v %v, want %v %v", got, ok, holder, restored)
			}
		case "quarantine":
			a.Quarantine(owner.Name, o.addr, since, p.now)
		case "revoke":
			a.Revoke(o.addr, p.now)
		case "abide":
			a.Abide(owner, o.req.Sharing, p.now)
		}
	}
	return ""
}

// claim plays a Service that claims addresses as its own from before. One that
// holds nothing gets the answer that it would get if it requested them.
func (p *play) claim(o *op) string {
	addrs := []netip.Addr{o.addr}
	if o.more.Is4() == o.addr.Is4() {
		addrs = append(addrs, o.more)
	}
	if len(p.model.holds[o.req.Owner.UID]) == 0 && slices.Contains(o.req.Families, family(o.addr)) {
		p.model.tick(p.now)
		asks := o.req
		asks.Addresses, asks.Families, asks.Renumber, asks.Count = addrs, []ipam.Family{family(o.addr)}, false, 0
		would := p.model.decide(&asks, choice{})
		if reason := p.model.claimAll(&o.req, addrs, p.now, p.now); reason != would {
			return fmt.Sprintf("a claim of %v is answered %q, a request %q", addrs, reason, would)
		}
		return p.claimed(o, addrs, would)
	}
	return p.claimed(o, addrs, p.model.claimAll(&o.req, addrs, p.now, p.now))
}

func (p *play) claimed(o *op, addrs []netip.Addr, want ipam.Reason) string {
	for _, a := range p.all {
		r := a.Claim(o.req, addrs, p.now, p.now)
		if r == nil && want != "" || r != nil && r.Reason != want {
			return fmt.Sprintf("a claim of %v is answered %v, want %q", addrs, r, want)
		}
	}
	return ""
}

func (p *play) allocate(req *ipam.Request) string {
	before := p.all[0].Holds(req.Owner.UID)
	judged := len(before) == 0 && len(req.Addresses) == 0 && len(req.Families) == 1 && req.Count <= 1
	var considered []ipam.Consideration
	if p.asked++; judged || p.asked%8 == 0 {
		considered = p.all[0].Consider(*req, p.now)
	}
	want, reason := p.model.allocate(req, p.now)
	got, err := p.all[0].Allocate(*req, p.now)
	r, _ := err.(*ipam.Refusal)
	for _, a := range p.all[1:] {
		again, errAgain := a.Allocate(*req, p.now)
		s, _ := errAgain.(*ipam.Refusal)
		if !slices.Equal(got, again) || !r.Same(s) || r != nil && r.Message != s.Message {
			return fmt.Sprintf("the same history gave %v %v and %v %v", got, err, again, errAgain)
		}
	}
	switch {
	case err == nil && reason != "", err != nil && (r.Reason != reason || r.Message == ""), !slices.Equal(got, want):
		return fmt.Sprintf("got %v %v, want %v %q", got, err, want, reason)
	case err != nil && !p.mayLeave(req, before):
		return fmt.Sprintf("a refusal changed %v to %v", before, p.all[0].Holds(req.Owner.UID))
	case judged:
		return explains(considered, got, err)
	}
	return ""
}

// mayLeave: what a refusal took from the Service is held by others with whom
// it clashes.
func (p *play) mayLeave(req *ipam.Request, before []ipam.Held) bool {
	after := p.all[0].Holds(req.Owner.UID)
	if slices.Equal(after, before) {
		return true
	}
	for _, h := range before {
		_, c := clashAt(req.Owner, req.Sharing, p.model.at(h.Addr))
		if slices.Contains(after, h) == (c != "") {
			return false
		}
	}
	return true
}

// explains returns how a decision and its explanation differ.
func explains(considered []ipam.Consideration, got []ipam.Held, err error) string {
	would := slices.ContainsFunc(considered, func(c ipam.Consideration) bool { return c.Reason == "" })
	where := slices.IndexFunc(considered, func(c ipam.Consideration) bool { return len(got) > 0 && c.Pool == got[0].Pool })
	switch {
	case would != (err == nil):
		return fmt.Sprintf("the answer is %v %v, but considered was %+v", got, err, considered)
	case err == nil && (where < 0 || considered[where].Reason != ""):
		return fmt.Sprintf("the answer is %v, but considered was %+v", got, considered)
	case slices.ContainsFunc(considered, func(c ipam.Consideration) bool { return c.Message == "" }):
		return fmt.Sprintf("no message: %+v", considered)
	}
	return ""
}

// restart builds the allocators anew from the state of the first one. The second
// one has the setup at once, and gets what is in quarantine in another order.
func (p *play) restart() {
	old := p.all[0]
	all := old.InQuarantine(p.now)
	for i := range p.all {
		a := ipam.New()
		if i > 0 {
			a.Configure(p.setup)
			slices.Reverse(all)
		}
		for _, uid := range slices.Sorted(maps.Keys(p.model.holds)) {
			for _, h := range old.Holds(uid) {
				s := p.model.at(h.Addr).stay(uid)
				a.Restore(ipam.Holding{Owner: s.owner, Addr: h.Addr, Sharing: s.terms, Since: s.since, Asked: h.Asked})
			}
		}
		for _, r := range all {
			a.Quarantine(r.Name, r.Addr, r.Since, p.now)
		}
		a.Configure(p.setup)
		p.all[i] = a
	}
	p.model.tick(p.now)
	p.model.restart()
}

// compare compares everything that can be seen, and looks for addresses that
// are lost, doubled, or shared by those who clash.
func (p *play) compare() string {
	stats, quarantined := p.model.stats(p.now), p.model.inQuarantine(p.now)
	for _, a := range p.all {
		if got := a.Stats(p.now); !slices.Equal(got, stats) {
			return fmt.Sprintf("stats are %v, want %v", got, stats)
		}
		if got := a.InQuarantine(p.now); !slices.Equal(got, quarantined) {
			return fmt.Sprintf("in quarantine are %v, want %v", got, quarantined)
		}
		next, any := a.NextFree(p.now)
		if any != (len(quarantined) > 0) || any &&
			next != slices.MinFunc(quarantined, func(r, s ipam.Quarantined) int { return r.Until.Compare(s.Until) }).Until {
			return fmt.Sprintf("next free %v %v of %v", next, any, quarantined)
		}
		for uid := range p.model.holds {
			if got, want := a.Holds(uid), p.model.held(uid); !slices.Equal(got, want) {
				return fmt.Sprintf("%s holds %v, want %v", uid, got, want)
			}
		}
	}
	for _, s := range stats {
		if s.Size != s.Free+s.Assigned+s.Quarantined+s.Conflicted+s.Reserved {
			return fmt.Sprintf("addresses lost or doubled: %v", s)
		}
	}
	for _, at := range p.model.places {
		if how := p.comparePlace(at); how != "" {
			return how
		}
	}
	return ""
}

func (p *play) comparePlace(at *place) string {
	var owners []ipam.Owner
	for i, s := range at.stays {
		owners = append(owners, s.owner)
		for _, t := range at.stays[:i] {
			if clash(s.owner, s.terms, t.owner, t.terms) != "" {
				return fmt.Sprintf("%v and %v clash on %s", s.owner, t.owner, at.addr)
			}
		}
	}
	for _, a := range p.all {
		if got := a.HoldersOf(at.addr); !slices.Equal(got, owners) {
			return fmt.Sprintf("%s is held by %v, want %v", at.addr, got, owners)
		}
	}
	return ""
}

// shrink leaves steps out of a failing history as long as it still fails.
func shrink(ops []op, layouts []*layout, twins bool) []op {
	for size := len(ops); size >= 1; size /= 2 {
		for from := 0; from < len(ops); {
			fewer := slices.Delete(slices.Clone(ops), from, min(from+size, len(ops)))
			if at, _ := run(fewer, layouts, twins); at >= 0 {
				ops = fewer[:at+1]
			} else {
				from += size
			}
		}
	}
	return ops
}

// TestRandomHistoriesAgainstModel plays 120,000 random steps. TestManyRandomHistoriesAgainstModel, which
// is long, plays others.
func TestRandomHistoriesAgainstModel(t *testing.T) {
	playSeeds(t, 0, fewSeeds)
}

const fewSeeds, manySeeds = 24, 200

func playSeeds(t *testing.T, from, to int) {
	const steps, parts = 5000, 4
	for part := range parts {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := from + part; seed < to; seed += parts {
				playSeed(t, uint64(seed), steps)
			}
		})
	}
}

func playSeed(t *testing.T, seed uint64, steps int) {
	random := rand.New(rand.NewPCG(seed, 0))
	layouts := randomLayouts(random)
	ops := append(make([]op, 0, steps+1), op{kind: "configure"})
	for range steps {
		ops = append(ops, randomOp(random, len(layouts)))
	}
	twins := seed/4%4 == 0
	at, _ := run(ops, layouts, twins)
	if at < 0 {
		return
	}
	ops = shrink(ops[:at+1], layouts, twins)
	_, how := run(ops, layouts, twins)
	var story strings.Builder
	for _, o := range ops {
		fmt.Fprintln(&story, o)
		if o.kind == "configure" {
			describe(&story, layouts[o.layout])
		}
	}
	t.Fatalf("seed %d: %s\na short history that fails:\n%s", seed, how, story.String())
}

func describe(w *strings.Builder, l *layout) {
	for _, p := range l.Pools {
		fmt.Fprintf(w, "    %+v\n", p)
	}
	fmt.Fprintf(w, "    quarantine %v, reserved %v, forbidden %v, conflicted %v\n", l.Quarantine, l.Reservations, l.Forbidden, l.Conflicted)
}

// FuzzAllocate sends requests of any shape to an allocator in use.
func FuzzAllocate(f *testing.F) {
	f.Add("IPv4", true, "", "", "", "", "", false)
	f.Add("IPv6,IPv4", false, "lan,dmz", "::ffff:198.18.0.3,2001:db8::1", "k", "80,443/UDP", "", true)
	f.Add("IPX,IPv4", true, "\x00", "fe80::1%eth0,198.18.1.0,0.0.0.0", "k", "80", "web", true)
	f.Add("IPv4", true, "dmz", "198.18.1.0,198.18.1.1,198.18.1.0", "shared", "80,80", "\x00", false)
	f.Add("IPv4", true, "", "198.18.1.2", "shared", "53/UDP", "", false)
	f.Fuzz(func(t *testing.T, fs string, all bool, pools, addresses, key, ports, backends string, again bool) {
		s := begin(t, pool("lan", "198.18.0.0/30", "!198.18.0.0/32"), onRequest(pool("dmz", "198.18.1.0/30", "2001:db8::/126")))
		s.reserves(reserved("default/other", "198.18.1.3"))
		s.forbids(forbidden("198.18.1.1/32", "the address of node n1"))
		s.gets("default/web", "dmz/198.18.1.0 dmz/2001:db8::", families(ipam.IPv4, ipam.IPv6), from("dmz"))
		s.gets("other/shared", "dmz/198.18.1.2", from("dmz"), shares("shared", "80"), with("default", "elsewhere"))
		s.gets("default/a", "lan/198.18.0.1")
		req := ipam.Request{Owner: owner("default/a"), Subject: config.Subject{Namespace: "default"}, RequireAll: all, Renumber: again}
		for _, w := range strings.Split(fs, ",") {
			req.Families = append(req.Families, ipam.Family(w))
		}
		if pools != "" {
			req.Pools = strings.Split(pools, ",")
		}
		if addresses != "" {
			for _, w := range strings.Split(addresses, ",") {
				a, _ := netip.ParseAddr(w)
				req.Addresses = append(req.Addresses, a)
			}
		}
		if key != "" {
			req.Sharing = &ipam.Sharing{Key: key, Backends: backends, Namespaces: []string{"other", backends, ""}}
			for _, w := range strings.Split(ports, ",") {
				req.Sharing.Ports = append(req.Sharing.Ports, portsOf(w)...)
			}
		}
		s.survives(req)
		s.holds("default/web", "dmz/198.18.1.0 dmz/2001:db8::")
		s.holds("other/shared", "dmz/198.18.1.2")
		for _, p := range s.Stats(s.now) {
			require.Equal(t, p.Size, p.Free+p.Assigned+p.Quarantined+p.Conflicted+p.Reserved)
		}
	})
}

// survives sends a request of any shape: it is met, and then again with the
// same answer, or refused with words.
func (s *story) survives(req ipam.Request) {
	s.Helper()
	s.Consider(req, s.now)
	got, err := s.Allocate(req, s.now)
	if err != nil {
		var r *ipam.Refusal
		require.ErrorAs(s, err, &r)
		require.NotEmpty(s, r.Reason)
		require.NotEmpty(s, r.Message)
		s.holds("default/a", "lan/198.18.0.1")
		return
	}
	require.NotEmpty(s, got)
	again, err := s.Allocate(req, s.now)
	require.NoError(s, err)
	require.Equal(s, got, again)
}
