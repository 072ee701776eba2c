package config

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go4.org/netipx"
)

// The largest entry of a pool: an IPv4 /8, an IPv6 /32. More is a typo.
const (
	minPrefix4 = 8
	minPrefix6 = 32
)

// block is one entry of addresses or exclude.
type block struct {
	netipx.IPRange
	prefix netip.Prefix // zero unless the entry is a prefix
	text   string       // as written
	at     value
	pool   int  // which one of the document
	subnet bool // its first and last address are the network's
}

// parseBlock reads a prefix, a range or an address.
func parseBlock(s string) (block, error) {
	switch {
	case strings.Contains(s, "/"):
		prefix, err := parsePrefix(s)
		return block{IPRange: netipx.RangeOfPrefix(prefix), prefix: prefix, text: s}, err
	case strings.Contains(s, "-"):
		r, err := parseRange(s)
		return block{IPRange: r, text: s}, err
	default:
		a, err := parseAddr(s)
		return block{IPRange: netipx.IPRangeFrom(a, a), text: s}, err
	}
}

func parseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return a, fmt.Errorf("%s is not an IP address: %s", Quote(s), why(err))
	case a.Zone() != "":
		return a, fmt.Errorf("%s has a zone: remove %%%s, a VIP belongs to no one interface", s, a.Zone())
	case a.Is4In6():
		return a, fmt.Errorf("%s is an IPv4 address in IPv6 form: write %s", s, a.Unmap())
	}
	return a, nil
}

// why returns netip's reason, without the parts that repeat the input.
func why(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, "): "); i >= 0 {
		text = text[i+3:]
	}
	if text == "unable to parse IP" || strings.HasPrefix(text, "unexpected character") {
		return "write an address (203.0.113.10), a prefix (203.0.113.0/24) or a range (203.0.113.10-203.0.113.20)"
	}
	reason, _, _ := strings.Cut(text, " (at ")
	return reason
}

func parsePrefix(s string) (netip.Prefix, error) {
	addr, length, _ := strings.Cut(s, "/")
	if i := strings.IndexByte(length, '-'); i >= 0 {
		return netip.Prefix{}, fmt.Errorf("%s mixes a prefix and a range: write one of them", Quote(s))
	}
	if a, err := netip.ParseAddr(addr); err == nil && a.Is4In6() && a.Zone() == "" {
		return netip.Prefix{}, fmt.Errorf("%s is an IPv4 prefix in IPv6 form: write %s", Quote(s), unmapped(a, length))
	}
	a, err := parseAddr(addr)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits, err := strconv.ParseUint(length, 10, 8)
	if err != nil || int(bits) > a.BitLen() || length != strconv.FormatUint(bits, 10) {
		return netip.Prefix{}, fmt.Errorf("%s has no valid prefix length: an %s prefix ends in /0 to /%d", Quote(s), family(a), a.BitLen())
	}
	prefix := netip.PrefixFrom(a, int(bits))
	if whole := prefix.Masked(); whole != prefix {
		return prefix, fmt.Errorf("%s has bits set after its first %d: did you mean the prefix %s, or the one address %s?", s, bits,
			whole, a)
	}
	return prefix, nil
}

// unmapped returns a prefix of IPv4 addresses in IPv6 form as it should be written.
func unmapped(a netip.Addr, length string) string {
	bits, err := strconv.Atoi(length)
	if err != nil || bits < 96 || bits > 128 {
		return "its IPv4 addresses, with a length of 0 to 32"
	}
	prefix, _ := a.Unmap().Prefix(bits - 96)
	return prefix.String()
}

// block returns an entry of a list of addresses.
func (vs values) block(v value) (block, bool) {
	b, err := parseBlock(v.Value)
	if err != nil {
		vs.errorf(v, "%v", err)
	}
	b.at = v
	return b, err == nil
}

// prefixes returns the well-formed prefixes, each once. The hint, which is added to errors, is
// what to write instead.
func (vs values) prefixes(all []value, hint string) (prefixes []netip.Prefix) {
	seen := map[netip.Prefix]value{}
	for _, v := range all {
		prefix, err := parsePrefix(v.Value)
		switch {
		case !strings.Contains(v.Value, "/"):
			vs.errorf(v, "%s is not a prefix: %s", Quote(v.Value), hint)
		case err != nil:
			vs.errorf(v, "%v", err)
		case once(vs.report, seen, prefix, v, "%s is listed twice, first in line %d", prefix):
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes
}

func parseRange(s string) (netipx.IPRange, error) {
	first, last, _ := strings.Cut(s, "-")
	first, last = strings.TrimSpace(first), strings.TrimSpace(last)
	if first == "" || last == "" {
		return netipx.IPRange{}, fmt.Errorf("%s is half a range: write both ends, such as 203.0.113.10-203.0.113.20", Quote(s))
	}
	from, err := parseAddr(first)
	if err != nil {
		return netipx.IPRange{}, err
	}
	if _, err := strconv.ParseUint(last, 10, 8); err == nil && from.Is4() {
		return netipx.IPRange{}, fmt.Errorf("%s is cut short: write %s-%s", s, from, first[:strings.LastIndexByte(first, '.')+1]+last)
	}
	to, err := parseAddr(last)
	switch {
	case err != nil:
		return netipx.IPRange{}, err
	case from.Is4() != to.Is4():
		return netipx.IPRange{}, fmt.Errorf("%s mixes IPv4 and IPv6: write two ranges", s)
	case to.Less(from):
		return netipx.IPRange{}, fmt.Errorf("%s runs backwards: write %s-%s", s, to, from)
	}
	return netipx.IPRangeFrom(from, to), nil
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// special are the addresses that no pool may contain.
var special = []struct {
	prefix netip.Prefix
	why    string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "are unspecified addresses, which name no host"},
	{netip.MustParsePrefix("127.0.0.0/8"), "are loopback addresses, which never leave a machine"},
	{netip.MustParsePrefix("169.254.0.0/16"), "are link-local addresses, which no router forwards"},
	{netip.MustParsePrefix("224.0.0.0/4"), "are multicast addresses, which name groups"},
	{netip.MustParsePrefix("255.255.255.255/32"), "is the broadcast address"},
	{netip.MustParsePrefix("240.0.0.0/4"), "are reserved addresses (class E), which hosts and routers drop"},
	{netip.MustParsePrefix("::/128"), "is the unspecified address, which names no host"},
	{netip.MustParsePrefix("::1/128"), "is the loopback address, which never leaves a machine"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "are IPv4 addresses in IPv6 form: write them as IPv4"},
	{netip.MustParsePrefix("fe80::/10"), "are link-local addresses, which no router forwards"},
	{netip.MustParsePrefix("ff00::/8"), "are multicast addresses, which name groups"},
}

// checkUsable returns why a pool must not contain the block.
func (b block) checkUsable() error {
	most := math.Pow(2, 32-minPrefix4)
	limit := fmt.Sprintf("an IPv4 entry holds at most as much as a /%d, %.0f addresses", minPrefix4, most)
	if b.From().Is6() {
		most = math.Pow(2, 128-minPrefix6)
		limit = fmt.Sprintf("an IPv6 entry holds at most as much as a /%d", minPrefix6)
	}
	if SizeOf(b.IPRange) > most {
		return errors.New(b.text + " is too large: " + limit)
	}
	for _, s := range special {
		if b.Overlaps(netipx.RangeOfPrefix(s.prefix)) {
			return fmt.Errorf("%s cannot be used: %s %s", b.text, s.prefix, s.why)
		}
	}
	return nil
}

// RangeText returns the range as the document has it: an address, a prefix or a range.
func RangeText(r netipx.IPRange) string {
	if r.From() == r.To() {
		return r.From().String()
	}
	if p, ok := r.Prefix(); ok {
		return p.String()
	}
	return r.String()
}

// SizeOf returns how many addresses a range has.
func SizeOf(r netipx.IPRange) float64 {
	from, to := r.From().As16(), r.To().As16()
	high := binary.BigEndian.Uint64(to[:8]) - binary.BigEndian.Uint64(from[:8])
	low, borrow := binary.BigEndian.Uint64(to[8:]), binary.BigEndian.Uint64(from[8:])
	if low < borrow {
		high--
	}
	return float64(high)*math.Pow(2, 64) + float64(low-borrow) + 1
}

// Whole returns the addresses that the pool has, withheld ones included.
func (p *Pool) Whole() *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddSet(p.Free)
	b.AddSet(p.Withheld)
	set, _ := b.IPSet() // only valid ranges go in
	return set
}

// overlap is two blocks that share addresses, in the order of the document.
type overlap struct{ first, second int }

// overlaps finds every block that shares an address with another one, each once. In the order
// of their first addresses a block overlaps an earlier one exactly if it overlaps the earlier
// one that reaches furthest.
func overlaps(blocks []block) []overlap {
	order := make([]int, len(blocks))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return blocks[i].From().Compare(blocks[j].From()) })
	var found []overlap
	for n, furthest := 1, 0; n < len(order); n++ {
		i, j := order[furthest], order[n]
		if blocks[j].From().Compare(blocks[i].To()) <= 0 {
			found = append(found, overlap{min(i, j), max(i, j)})
		}
		if blocks[i].To().Less(blocks[j].To()) {
			furthest = n
		}
	}
	return found
}

// touches reports whether the sorted ranges contain an address of r.
func touches(sorted []netipx.IPRange, r netipx.IPRange) bool {
	i, _ := slices.BinarySearchFunc(sorted, r, func(s, r netipx.IPRange) int { return s.To().Compare(r.From()) })
	return i < len(sorted) && sorted[i].From().Compare(r.To()) <= 0
}
