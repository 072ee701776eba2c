package limit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/nft"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

const (
	tableName = "lodestone"
	baseName  = "prerouting"
	// format is in the comment of the base rules. A table of another format, from another version of
	// Lodestone, is replaced as a whole.
	format = "lodestone connection rate limits, format 2"
	// perMessage elements of a map fit into a netlink attribute, which holds 64 KiB.
	perMessage = 100
)

// table is inet, so that one chain sees both families.
var table = &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}

// ruleset is the variable part of the table, as it is in the kernel or as it should be.
type ruleset struct {
	// chains are the limits per second by chain. Each VIP of a Service has a chain, and each chain a
	// counter of the same name.
	chains   map[string]uint32
	counters map[string]bool
	// elements lead from a VIP and port, see elementKey, to a chain.
	elements map[string]string
}

func newRuleset() ruleset {
	return ruleset{map[string]uint32{}, map[string]bool{}, map[string]string{}}
}

// desired returns the ruleset for the limits. If two Services have the same port of a VIP, the first one by
// name gets it: otherwise the transaction, which has all limits, would fail.
func desired(want map[plan.LimitKey]plan.Limit) ruleset {
	r := newRuleset()
	for _, key := range keys(want) {
		name := chainName(key)
		r.chains[name], r.counters[name] = want[key].PerSecond, true
		for _, p := range want[key].Ports {
			if element := elementKey(key.VIP, p); r.elements[element] == "" {
				r.elements[element] = name
			}
		}
	}
	return r
}

// chainName returns a name that nft(8) can read, so that a saved ruleset can be loaded.
func chainName(key plan.LimitKey) string {
	return "service/" + key.Service + "/" + strings.ReplaceAll(key.VIP.String(), ":", "-")
}

// elementKey returns the key of the maps: address, protocol and port, each padded to four bytes.
func elementKey(vip netip.Addr, p plan.Port) string {
	key := append(vip.AsSlice(), p.Protocol, 0, 0, 0)
	key = binary.BigEndian.AppendUint16(key, p.Number)
	return string(append(key, 0, 0))
}

func (r ruleset) equal(other ruleset) bool {
	return maps.Equal(r.chains, other.chains) && maps.Equal(r.counters, other.counters) && maps.Equal(r.elements, other.elements)
}

// apply changes the kernel's table to the wanted limits by one transaction, which is good for the time of the guard, and
// reports whether anything else had to be changed.
func apply(l *nft.Line, want map[plan.LimitKey]plan.Limit, guard time.Duration) (changed bool, err error) {
	conn, err := l.Open()
	if err == nil {
		changed, err = change(conn, want, guard)
	}
	if err != nil {
		l.End()
	}
	return changed, err
}

func change(conn nft.Conn, want map[plan.LimitKey]plan.Limit, guard time.Duration) (changed bool, err error) {
	there, err := exists(conn)
	if err != nil {
		return false, err
	}
	if len(want) == 0 {
		if there {
			conn.DelTable(table)
		}
		return there, flush(conn)
	}
	have, sound, err := read(conn, there)
	if err != nil {
		return false, err
	}
	wanted := desired(want)
	if !sound {
		if err := writeBase(conn.Conn); err != nil {
			return false, err
		}
		have = newRuleset()
	}
	if err := errors.Join(write(conn.Conn, have, wanted), refresh(conn.Conn, guard)); err != nil {
		return false, err
	}
	return !sound || !have.equal(wanted), flush(conn)
}

func flush(conn nft.Conn) error {
	if err := conn.InTime().Flush(); err != nil {
		return fmt.Errorf("change the nftables table inet %s: %w", tableName, err)
	}
	return nil
}

func exists(conn nft.Conn) (bool, error) {
	_, err := conn.InTime().ListTableOfFamily(tableName, table.Family)
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look for the nftables table inet %s: %w", tableName, err)
	}
	return true, nil
}

// read returns the content of the kernel's table. It is sound if the hook and the maps are as we write them.
//
// The kernel may skip objects while somebody else changes nftables. So everything that is written must also
// be right if the object exists already.
func read(conn nft.Conn, there bool) (have ruleset, sound bool, err error) {
	if !there {
		return have, false, nil
	}
	have = newRuleset()
	rules, err := comments(conn, base)
	if err != nil || !slices.Equal(rules, []string{format, format}) {
		return have, false, err
	}
	for _, f := range families { // the rules keep the maps from being deleted
		elements, err := conn.InTime().GetSetElements(f.vips)
		if err != nil {
			return have, false, fmt.Errorf("list the elements of nftables map %s: %w", f.vips.Name, err)
		}
		for _, e := range elements {
			have.elements[string(e.Key)] = nft.ChainOf(e.Val)
		}
	}
	chains, err := conn.InTime().ListChainsOfTableFamily(table.Family)
	if err != nil {
		return have, false, fmt.Errorf("list nftables chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name != tableName || c.Name == baseName {
			continue
		}
		if have.chains[c.Name], err = readLimit(conn, c); err != nil {
			return have, false, err
		}
	}
	counters, err := readCounters(conn)
	for name := range counters {
		have.counters[name] = true
	}
	return have, true, err
}

// readLimit returns the chain's limit, or 0 if the chain is not as we write it.
func readLimit(conn nft.Conn, c *nftables.Chain) (uint32, error) {
	rules, err := comments(conn, c)
	if err != nil || len(rules) != 1 {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSuffix(rules[0], perSecond), 10, 32)
	if err != nil {
		return 0, nil //nolint:nilerr // not a comment of ours
	}
	return uint32(n), nil
}

// comments returns the comments of a chain's rules, which identify what we wrote.
func comments(conn nft.Conn, c *nftables.Chain) ([]string, error) {
	rules, err := conn.InTime().GetRules(table, c)
	if err != nil {
		return nil, fmt.Errorf("list the rules of nftables chain %s: %w", c.Name, err)
	}
	var comments []string
	for _, r := range rules {
		comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
		comments = append(comments, comment)
	}
	return comments, nil
}

// readCounters returns how many packets each chain has dropped.
func readCounters(conn nft.Conn) (map[string]uint64, error) {
	objects, err := conn.InTime().GetNamedObjects(table)
	if err != nil {
		return nil, fmt.Errorf("list nftables counters: %w", err)
	}
	counters := map[string]uint64{}
	for _, o := range objects {
		if named, ok := o.(*nftables.NamedObj); ok {
			if c, ok := named.Obj.(*expr.Counter); ok {
				counters[named.Name] = c.Packets
			}
		}
	}
	return counters, nil
}
