// Package change describes what an edit of the configuration changes, in sentences for people.
package change

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Kind is what an edit does to a pool.
type Kind string

// The kinds of changes, in the order in which Diff returns them for one pool.
const (
	Added    Kind = "Added"
	Removed  Kind = "Removed"
	Renamed  Kind = "Renamed"  // the same addresses under another name
	Widened  Kind = "Widened"  // hands out addresses that it did not
	Shrunk   Kind = "Shrunk"   // no longer hands out addresses that it did
	Moved    Kind = "Moved"    // another priority or place among the pools with autoAssign
	Drained  Kind = "Drained"  // gives no new addresses any more
	Reopened Kind = "Reopened" // gives addresses again
	Edited   Kind = "Edited"   // another setting has changed
)

// Change is one thing that an edit of the document changes about a pool.
type Change struct {
	Kind Kind
	// Pool is the pool's name: the new one, unless the pool is removed.
	Pool string
	// Was is the old name of a renamed pool.
	Was string
	// Addresses are those that the pool hands out from now on (Added,
	// Widened) or no longer (Removed, Shrunk). Nil otherwise.
	Addresses *netipx.IPSet
	// Message is a sentence for people, without a full stop.
	Message string
}

// Diff returns what an edit changes about the pools: those of the new document in its order,
// then the removed ones in the order of the old. A nil Config has no pools. Only the meaning
// of the pools counts, not how it is written.
func Diff(old, edited *config.Config) []Change {
	before, after := poolsOf(old), poolsOf(edited)
	var d differ
	pairs := match(before, after)
	places := movedTo(before, after, pairs)
	kept := make([]bool, len(before))
	for i := range after {
		p := &after[i]
		if pairs[i] < 0 {
			d.add(Change{Kind: Added, Pool: p.Name, Addresses: p.Free}, "is added with %s", contents(p))
			continue
		}
		kept[pairs[i]] = true
		d.compare(&before[pairs[i]], p, places[i])
	}
	for i := range before {
		if p := &before[i]; !kept[i] {
			d.add(Change{Kind: Removed, Pool: p.Name, Addresses: p.Free}, "is removed with %s: %s", contents(p), afterwards(p))
		}
	}
	return d.changes
}

func poolsOf(c *config.Config) []config.Pool {
	if c == nil {
		return nil
	}
	return c.Pools
}

// match returns for each new pool the old one that it was: the one of its name, or else one
// whose name is gone and whose addresses or leases it has. -1 is none.
func match(before, after []config.Pool) []int {
	names := map[string]bool{}
	for i := range after {
		names[after[i].Name] = true
	}
	byName := map[string]int{}
	nameless := map[string]int{} // by what no other pool has
	for i := range before {
		byName[before[i].Name] = i
		if !names[before[i].Name] {
			nameless[own(&before[i])] = i
		}
	}
	pairs := make([]int, len(after))
	for i := range after {
		j, ok := byName[after[i].Name]
		if !ok {
			j, ok = nameless[own(&after[i])]
			ok = ok && after[i].Free.Equal(before[j].Free)
		}
		if pairs[i] = -1; ok {
			pairs[i] = j
		}
	}
	return pairs
}

// own is something that no other pool of the document has: the first address,
// or the interface.
func own(p *config.Pool) string {
	if p.DHCP != nil {
		return lessor(p)
	}
	return p.Free.Ranges()[0].From().String()
}

// movedTo returns for each new pool its place in the order in which pools are tried, if that
// has changed. Of pools whose priority stays, as few as possible count as moved.
func movedTo(before, after []config.Pool, pairs []int) []string {
	was := make([]int, len(before)) // old pools' places
	for place, i := range order(before) {
		was[i] = place
	}
	var stayed, seen []int // new pools and their old places, in the new order
	places, previous := make([]string, len(after)), "first"
	for _, i := range order(after) {
		places[i] = previous
		previous = fmt.Sprintf("after pool %q", after[i].Name)
		if j := pairs[i]; j >= 0 && before[j].AutoAssign && before[j].Priority == after[i].Priority {
			stayed, seen = append(stayed, i), append(seen, was[j])
		}
	}
	for _, k := range longestIncreasing(seen) {
		places[stayed[k]] = ""
	}
	return places
}

// order returns the pools with autoAssign in the order in which they are tried.
func order(pools []config.Pool) []int {
	var order []int
	for i := range pools {
		if pools[i].AutoAssign {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(pools[i].Priority, pools[j].Priority) })
	return order
}

// longestIncreasing returns the indices of a longest increasing subsequence of
// different numbers, last first (patience sorting).
func longestIncreasing(s []int) []int {
	var tails []int // tails[n] is the lowest end of n+1 increasing numbers
	before := make([]int, len(s))
	for i, x := range s {
		n, _ := slices.BinarySearchFunc(tails, x, func(tail, x int) int { return cmp.Compare(s[tail], x) })
		if before[i] = -1; n > 0 {
			before[i] = tails[n-1]
		}
		if n == len(tails) {
			tails = append(tails, i)
		}
		tails[n] = i
	}
	var longest []int
	if len(tails) > 0 {
		for i := tails[len(tails)-1]; i >= 0; i = before[i] {
			longest = append(longest, i)
		}
	}
	return longest
}

// differ collects changes.
type differ struct{ changes []Change }

// add adds a change whose sentence begins with the pool.
func (d *differ) add(c Change, format string, args ...any) {
	c.Message = fmt.Sprintf("pool %q ", cmp.Or(c.Was, c.Pool)) + fmt.Sprintf(format, args...)
	d.changes = append(d.changes, c)
}

// compare adds what is different about a pool that is in both documents; place
// is where it is tried now, if that has changed.
func (d *differ) compare(old, p *config.Pool, place string) {
	if old.Name != p.Name {
		d.add(Change{Kind: Renamed, Pool: p.Name, Was: old.Name},
			"is called %q now: Services keep their addresses, annotations that name %q find no pool", p.Name, old.Name)
	}
	if !p.Free.Equal(old.Free) {
		d.resize(old, p)
	}
	d.move(old, p, place)
	switch {
	case p.Draining && !old.Draining:
		d.add(Change{Kind: Drained, Pool: p.Name}, "is draining: it gives no new addresses, Services keep those that they hold")
	case old.Draining && !p.Draining:
		d.add(Change{Kind: Reopened, Pool: p.Name}, "is active again: it gives new addresses")
	}
	for _, s := range settings(old, p) {
		if s.change != "" {
			d.changes = append(d.changes, Change{
				Kind: Edited, Pool: p.Name, Message: fmt.Sprintf("pool %q: %s %s", p.Name, s.key, s.change),
			})
		}
	}
}

// resize adds what a pool gains and loses.
func (d *differ) resize(old, p *config.Pool) {
	if gained := minus(p.Free, old.Free); len(gained.Ranges()) > 0 {
		d.add(Change{Kind: Widened, Pool: p.Name, Addresses: gained}, "gains %s", amount(gained))
	}
	if lost := minus(old.Free, p.Free); len(lost.Ranges()) > 0 {
		d.add(Change{Kind: Shrunk, Pool: p.Name, Addresses: lost},
			"loses %s: Services keep those that they hold", amount(lost))
	}
}

func minus(a, b *netipx.IPSet) *netipx.IPSet {
	var s netipx.IPSetBuilder
	s.AddSet(a)
	s.RemoveSet(b)
	left, _ := s.IPSet() // only valid ranges went in
	return left
}

// move adds a change of the order; place is where the pool is now tried, if
// that has changed.
func (d *differ) move(old, p *config.Pool, place string) {
	c := Change{Kind: Moved, Pool: p.Name}
	switch {
	case p.Priority != old.Priority && !p.AutoAssign:
		d.add(c, "has priority %d, was %d: without autoAssign it has no effect", p.Priority, old.Priority)
	case p.Priority != old.Priority:
		d.add(c, "has priority %d, was %d: it is tried %s", p.Priority, old.Priority, place)
	case place != "" && old.AutoAssign:
		d.add(c, "is tried %s now", place)
	}
}

// setting is a key of a pool and how its value has changed, if it has.
type setting struct{ key, change string }

func settings(old, p *config.Pool) []setting {
	return []setting{
		{"dhcp", leased(old, p)},
		{"autoAssign", became(strconv.FormatBool(old.AutoAssign), strconv.FormatBool(p.AutoAssign))},
		{"namespaces", gainedAndLost(old.Namespaces, p.Namespaces)},
		{"namespaceSelector", became(selectorText(old.NamespaceSelector), selectorText(p.NamespaceSelector))},
		{"serviceSelector", became(selectorText(old.ServiceSelector), selectorText(p.ServiceSelector))},
		{"namespaceQuota", became(quotaText(old.NamespaceQuota), quotaText(p.NamespaceQuota))},
		{"requesters", gainedAndLost(old.Requesters, p.Requesters)},
		{"keepFor", became(old.KeepFor.String(), p.KeepFor.String())},
		{"advertise", gainedAndLost(old.Advertise, p.Advertise)},
	}
}

// leased describes where addresses are leased now, if that has changed.
func leased(old, p *config.Pool) string {
	text := became(lessor(old), lessor(p))
	if text != "" && old.DHCP != nil {
		text += ": " + afterwards(old)
	}
	return text
}

func lessor(p *config.Pool) string {
	if p.DHCP == nil {
		return notSet
	}
	return "interface " + strconv.Quote(p.DHCP.Interface)
}

// afterwards describes what becomes of a pool's Services without it.
func afterwards(p *config.Pool) string {
	if p.DHCP != nil {
		return "its leases are released, and Services lose those that they hold"
	}
	return "Services keep those that they hold"
}

const notSet = "not set"

func became(old, now string) string {
	if now == old {
		return ""
	}
	return fmt.Sprintf("is %s, was %s", clip(now), clip(old))
}

// maxShown is how much of a value, in characters, a change repeats.
const maxShown = 200

func clip(s string) string {
	if utf8.RuneCountInString(s) <= maxShown {
		return s
	}
	return string([]rune(s)[:maxShown]) + "..."
}

// selectorText has one text for {} and for nothing, because both leave the pool equally open.
func selectorText(s config.Selector) string { return cmp.Or(s.String(), notSet) }

func quotaText(n int) string {
	if n == 0 {
		return notSet
	}
	return strconv.Itoa(n)
}

// gainedAndLost describes how a list has changed whose order does not matter.
func gainedAndLost(old, now []string) string {
	switch {
	case old == nil && now == nil:
		return ""
	case old == nil:
		return fmt.Sprintf("is [%s], was %s", enumerate(now), notSet)
	case now == nil:
		return fmt.Sprintf("is %s, was [%s]", notSet, enumerate(old))
	}
	var parts []string
	if gained := without(now, old); len(gained) > 0 {
		parts = append(parts, "gains "+enumerate(gained))
	}
	if lost := without(old, now); len(lost) > 0 {
		parts = append(parts, "loses "+enumerate(lost))
	}
	return strings.Join(parts, " and ")
}

// without returns the elements of a that are not in b.
func without(a, b []string) []string {
	in := map[string]bool{}
	for _, s := range b {
		in[s] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return in[s] })
}

// contents describes what a pool has to give.
func contents(p *config.Pool) string {
	if p.DHCP != nil {
		return "leases on " + lessor(p)
	}
	return amount(p.Free)
}

// amount describes how many addresses a set has, and which.
func amount(s *netipx.IPSet) string {
	p := config.Pool{Free: s}
	var ranges []string
	for _, r := range s.Ranges() {
		ranges = append(ranges, config.RangeText(r))
	}
	return fmt.Sprintf("%s (%s)", sizeText(p.Size()), enumerate(ranges))
}

// sizeText is exact for numbers that people would count.
func sizeText(n float64) string {
	switch {
	case n == 1:
		return "1 address"
	case n < 1e9:
		return fmt.Sprintf("%.0f addresses", n)
	default:
		return fmt.Sprintf("about %.2g addresses", n)
	}
}

// maxListed is how many things a sentence lists before "N more".
const maxListed = 5

func enumerate(list []string) string {
	text := strings.Join(list[:min(len(list), maxListed)], ", ")
	if more := len(list) - maxListed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
