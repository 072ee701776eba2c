package direct

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// timeout bounds the conversation with the kernel.
	timeout = 10 * time.Second
	// buffer holds a transaction and its acknowledgements, which the kernel sends before we
	// can read one.
	buffer = 64 << 20
	// perMessage elements fit into a netlink attribute, which holds 64 KiB.
	perMessage = 400
	// guardTime is how long the rules work without a speaker that refreshes them.
	guardTime = 10 * time.Minute
)

// ruleset is what varies in the table of a family.
type ruleset struct {
	interfaces map[string]bool // indexes
	nodes      map[string]bool // hardware addresses
	services   map[string]int  // the table of a VIP and port
	tables     map[int]*tableRules
	hands      map[string]neighbour // by chain
}

// tableRules is a table of buckets as one node has it: the chain that a packet goes to, by
// bucket, empty if it stays here.
type tableRules struct {
	shape
	// open is where new connections go, next where the rest of those goes that are not known
	// and stayed here.
	open, next []string
}

func newRuleset() *ruleset {
	return &ruleset{map[string]bool{}, map[string]bool{}, map[string]int{}, map[int]*tableRules{}, map[string]neighbour{}}
}

func openName(id int) string   { return fmt.Sprint("open-", id) }
func nextName(id int) string   { return fmt.Sprint("next-", id) }
func steerName(id int) string  { return fmt.Sprint("steer-", id) }
func secondName(id int) string { return fmt.Sprint("second-", id) }

// kernel is a conversation with nftables.
type kernel struct{ *nftables.Conn }

func dial() (kernel, error) {
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetReadBuffer(buffer), c.SetWriteBuffer(buffer), c.SetDeadline(time.Now().Add(timeout)))
	}))
	if err != nil {
		return kernel{}, fmt.Errorf("open a netlink socket to nftables: %w", err)
	}
	return kernel{conn}, nil
}

func (k kernel) close() { k.CloseLasting() } //nolint:errcheck // nothing is lost with it

// change leads from have to want in one transaction. Nil: there is no table, or it is of no
// use, or none is wanted.
func (k kernel) change(f *family, have, want *ruleset) error {
	if want == nil {
		return k.remove(f)
	}
	if have == nil {
		k.create(f)
		have = newRuleset()
	}
	err := errors.Join(
		k.elements(f.services(), have.services, want.services, (*nftables.Conn).SetDeleteElements, chainOfTable),
		k.plainElements(f, have, want, (*nftables.Conn).SetDeleteElements),
	)
	for _, id := range ids(have.tables) {
		if want.tables[id] == nil || have.tables[id].shape != want.tables[id].shape {
			k.deleteTable(f, id)
		} else {
			err = errors.Join(err, k.buckets(f, id, have.tables[id], want.tables[id], (*nftables.Conn).SetDeleteElements))
		}
	}
	k.hands(f, have.hands, want.hands)
	for _, id := range ids(want.tables) {
		before := have.tables[id]
		if before == nil || before.shape != want.tables[id].shape {
			err = errors.Join(err, k.addTable(f, id, want.tables[id].shape))
			before = &tableRules{}
		}
		err = errors.Join(err, k.buckets(f, id, want.tables[id], before, (*nftables.Conn).SetAddElements))
	}
	for _, chain := range slices.Sorted(maps.Keys(have.hands)) {
		if _, ok := want.hands[chain]; !ok {
			k.DelChain(&nftables.Chain{Table: f.table, Name: chain})
		}
	}
	err = errors.Join(err,
		k.plainElements(f, want, have, (*nftables.Conn).SetAddElements),
		k.elements(f.services(), want.services, have.services, (*nftables.Conn).SetAddElements, chainOfTable),
	)
	if err != nil {
		return fmt.Errorf("encode nftables table %s: %w", tableName, err)
	}
	return k.flush()
}

func (k kernel) flush() error {
	if err := k.Flush(); err != nil {
		return fmt.Errorf("change the nftables table %s: %w", tableName, err)
	}
	return nil
}

// remove removes the table, if there is one.
func (k kernel) remove(f *family) error {
	k.AddTable(f.table) // what is not there cannot be deleted
	k.DelTable(f.table)
	return k.flush()
}

// create makes the table anew, without services.
func (k kernel) create(f *family) {
	k.AddTable(f.table)
	k.DelTable(f.table)
	k.AddTable(f.table)
	for _, s := range append(f.plainSets(), f.services()) {
		k.AddSet(s, nil) //nolint:errcheck // it fails for anonymous sets alone
	}
	k.SetAddElements(f.plainSets()[2], guard) //nolint:errcheck // as above
	k.AddRule(&nftables.Rule{Table: f.table, Chain: k.AddChain(f.base()), Exprs: f.baseRule()})
}

var guard = []nftables.SetElement{{Key: guardElement, Timeout: guardTime}}

// refresh has the table work for guardTime from now on.
func (k kernel) refresh(f *family) error {
	set := f.plainSets()[2]
	k.SetAddElements(set, guard)                                         //nolint:errcheck // it is right
	k.SetDeleteElements(set, []nftables.SetElement{{Key: guardElement}}) //nolint:errcheck // it is right
	k.SetAddElements(set, guard)                                         //nolint:errcheck // it is right
	return k.flush()
}

func (k kernel) addTable(f *family, id int, s shape) error {
	open, next := f.buckets(openName(id)), f.buckets(nextName(id))
	err := errors.Join(k.AddSet(open, nil), k.AddSet(next, nil))
	second := k.AddChain(&nftables.Chain{Table: f.table, Name: secondName(id)})
	for _, exprs := range f.second(s, next.Name) {
		k.AddRule(&nftables.Rule{Table: f.table, Chain: second, Exprs: exprs})
	}
	steer := k.AddChain(&nftables.Chain{Table: f.table, Name: steerName(id)})
	for _, exprs := range f.steer(s, open.Name, next.Name, second.Name) {
		k.AddRule(&nftables.Rule{Table: f.table, Chain: steer, Exprs: exprs})
	}
	return err
}

// deleteTable deletes a table that no service leads to.
func (k kernel) deleteTable(f *family, id int) {
	chains := []*nftables.Chain{{Table: f.table, Name: steerName(id)}, {Table: f.table, Name: secondName(id)}}
	for _, c := range chains {
		k.FlushChain(c)
	}
	k.DelSet(f.buckets(openName(id)))
	k.DelSet(f.buckets(nextName(id)))
	for _, c := range chains {
		k.DelChain(c)
	}
}

// hands writes the chains of nodes that are new or not as they were.
func (k kernel) hands(f *family, have, want map[string]neighbour) {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		to := want[name]
		if before, ok := have[name]; ok && before.same(to) {
			continue
		}
		chain := k.AddChain(&nftables.Chain{Table: f.table, Name: name})
		k.FlushChain(chain)
		rules := hand(to)
		if to.silent {
			rules = hold()
		}
		for _, exprs := range rules {
			k.AddRule(&nftables.Rule{Table: f.table, Chain: chain, Exprs: exprs})
		}
	}
}

// encode is SetAddElements or SetDeleteElements.
type encode = func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error

// buckets encodes the elements that t has and other has not.
func (k kernel) buckets(f *family, id int, t, other *tableRules, do encode) error {
	return errors.Join(k.bucketMap(f.buckets(openName(id)), t.open, other.open, do), k.bucketMap(f.buckets(nextName(id)), t.next, other.next, do))
}

func (k kernel) bucketMap(set *nftables.Set, chains, others []string, do encode) error {
	var differ []nftables.SetElement
	for bucket, chain := range chains {
		if chain == "" || len(others) > 0 && others[bucket] == chain {
			continue
		}
		differ = append(differ, nftables.SetElement{Key: binaryutil.NativeEndian.PutUint32(uint32(bucket)),
			VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}})
	}
	return k.encode(set, differ, do)
}

func (k kernel) encode(set *nftables.Set, elements []nftables.SetElement, do encode) (err error) {
	for part := range slices.Chunk(elements, perMessage) {
		err = errors.Join(err, do(k.Conn, set, part))
	}
	return err
}

func chainOfTable(id int) *expr.Verdict {
	return &expr.Verdict{Kind: expr.VerdictGoto, Chain: steerName(id)}
}

// elements encodes the elements of a map that others lacks, or has another verdict for.
func (k kernel) elements(set *nftables.Set, elements, others map[string]int, do encode, verdict func(int) *expr.Verdict) error {
	var differ []nftables.SetElement
	for _, key := range slices.Sorted(maps.Keys(elements)) {
		if other, ok := others[key]; !ok || other != elements[key] {
			differ = append(differ, nftables.SetElement{Key: []byte(key), VerdictData: verdict(elements[key])})
		}
	}
	return k.encode(set, differ, do)
}

// plainElements encodes the elements of the sets that others lacks.
func (k kernel) plainElements(f *family, r, others *ruleset, do encode) (err error) {
	sets := f.plainSets()
	for i, of := range []struct{ elements, others map[string]bool }{{r.interfaces, others.interfaces}, {r.nodes, others.nodes}} {
		var differ []nftables.SetElement
		for _, key := range slices.Sorted(maps.Keys(of.elements)) {
			if !of.others[key] {
				differ = append(differ, nftables.SetElement{Key: []byte(key)})
			}
		}
		err = errors.Join(err, k.encode(sets[i], differ, do))
	}
	return err
}

// sound reports whether the table has the chains that it is to have. Somebody may have
// flushed it.
func (k kernel) sound(f *family, want *ruleset) (bool, error) {
	if _, err := k.ListTableOfFamily(tableName, f.table.Family); errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	chains, err := k.ListChainsOfTableFamily(f.table.Family)
	if err != nil {
		return false, fmt.Errorf("list nftables chains: %w", err)
	}
	there := 0
	for _, c := range chains {
		if c.Table.Name == tableName {
			there++
		}
	}
	rules, err := k.GetRules(f.table, f.base())
	if err != nil {
		return false, fmt.Errorf("list nftables rules: %w", err)
	}
	return len(rules) == 1 && there == 1+2*len(want.tables)+len(want.hands), nil
}

// Handed returns how many packets this node has handed to each address, or has held for it.
func Handed() (map[netip.Addr]uint64, error) {
	k, err := dial()
	if err != nil {
		return nil, err
	}
	defer k.close()
	handed := map[netip.Addr]uint64{}
	for _, f := range families {
		chains, err := k.ListChainsOfTableFamily(f.table.Family)
		if err != nil {
			return nil, fmt.Errorf("list nftables chains: %w", err)
		}
		for _, c := range chains {
			addr, ok := addrOf(c.Name)
			if c.Table.Name != tableName || !ok {
				continue
			}
			rules, err := k.GetRules(f.table, c)
			if err != nil {
				return nil, fmt.Errorf("list the rules of nftables chain %s: %w", c.Name, err)
			}
			for _, r := range rules {
				if counter, ok := r.Exprs[0].(*expr.Counter); ok {
					handed[addr] += counter.Packets
				}
			}
		}
	}
	return handed, nil
}

func ids(tables map[int]*tableRules) []int { return slices.Sorted(maps.Keys(tables)) }
