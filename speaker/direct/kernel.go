package direct

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
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
	services   map[string]steer
	tables     map[int]*buckets
	hands      map[string]neighbour // by chain
}

// buckets is a table as one node has it: the chain that a packet goes to, by bucket, empty if
// it stays here.
type buckets struct {
	// open is where new connections go, next where the rest of those goes that are not known
	// and stayed here.
	open, next []string
}

// steer is how a Service's packets find their bucket.
type steer struct {
	table   int
	buckets uint32
	// seed decides which flow is in which bucket.
	seed uint32
	// byClient: all of a client's are in one.
	byClient bool
	// drains: new connections stay here, as without a table.
	drains bool
}

func newRuleset() *ruleset {
	return &ruleset{map[string]bool{}, map[string]bool{}, map[string]steer{}, map[int]*buckets{}, map[string]neighbour{}}
}

// steers returns the chains that the services need.
func (r *ruleset) steers() map[steer]bool {
	steers := map[steer]bool{}
	for _, s := range r.services {
		steers[s] = true
	}
	return steers
}

func openName(table int) string { return fmt.Sprint("open-", table) }
func nextName(table int) string { return fmt.Sprint("next-", table) }

// chain returns the name of the chain, which says all of what it does.
func (s steer) chain() string {
	return fmt.Sprintf("steer-%d-%d-%x%s%s", s.table, s.buckets, s.seed, given(s.byClient, "-client"), given(s.drains, "-drains"))
}

func (s steer) second() string { return "second" + strings.TrimPrefix(s.chain(), "steer") }

func given(so bool, text string) string {
	if so {
		return text
	}
	return ""
}

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
	haveSteers, wantSteers := have.steers(), want.steers()
	err := errors.Join(
		k.services(f, have.services, want.services, (*nftables.Conn).SetDeleteElements),
		k.plainElements(f, have, want, (*nftables.Conn).SetDeleteElements),
	)
	for s := range haveSteers {
		if !wantSteers[s] {
			k.deleteSteer(f, s)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(have.tables)) {
		if after := want.tables[id]; after == nil || len(after.open) != len(have.tables[id].open) {
			k.DelSet(f.buckets(openName(id)))
			k.DelSet(f.buckets(nextName(id)))
		} else {
			err = errors.Join(err, k.buckets(f, id, have.tables[id], after, (*nftables.Conn).SetDeleteElements))
		}
	}
	k.hands(f, have.hands, want.hands)
	for _, id := range slices.Sorted(maps.Keys(want.tables)) {
		before, after := have.tables[id], want.tables[id]
		if before == nil || len(before.open) != len(after.open) {
			err = errors.Join(err, k.AddSet(f.buckets(openName(id)), nil), k.AddSet(f.buckets(nextName(id)), nil))
			before = &buckets{}
		}
		err = errors.Join(err, k.buckets(f, id, after, before, (*nftables.Conn).SetAddElements))
	}
	for s := range wantSteers {
		if !haveSteers[s] {
			k.addSteer(f, s)
		}
	}
	for _, chain := range slices.Sorted(maps.Keys(have.hands)) {
		if _, ok := want.hands[chain]; !ok {
			k.DelChain(&nftables.Chain{Table: f.table, Name: chain})
		}
	}
	err = errors.Join(err,
		k.plainElements(f, want, have, (*nftables.Conn).SetAddElements),
		k.services(f, want.services, have.services, (*nftables.Conn).SetAddElements),
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

// exists reports whether there is a table. Who may not know has none.
func (k kernel) exists(f *family) bool {
	_, err := k.ListTableOfFamily(tableName, f.table.Family)
	return err == nil
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

func (k kernel) addSteer(f *family, s steer) {
	second := k.AddChain(&nftables.Chain{Table: f.table, Name: s.second()}) // before a rule leads to it
	k.addRules(f, second, f.second(s))
	k.addRules(f, k.AddChain(&nftables.Chain{Table: f.table, Name: s.chain()}), f.steer(s))
}

func (k kernel) addRules(f *family, chain *nftables.Chain, rules [][]expr.Any) {
	for _, exprs := range rules {
		k.AddRule(&nftables.Rule{Table: f.table, Chain: chain, Exprs: exprs})
	}
}

// deleteSteer deletes chains that no service leads to.
func (k kernel) deleteSteer(f *family, s steer) {
	chains := []*nftables.Chain{{Table: f.table, Name: s.chain()}, {Table: f.table, Name: s.second()}}
	for _, c := range chains {
		k.FlushChain(c)
	}
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
		k.addRules(f, chain, rules)
	}
}

// encode is SetAddElements or SetDeleteElements.
type encode = func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error

// buckets encodes the elements that t has and other has not.
func (k kernel) buckets(f *family, id int, t, other *buckets, do encode) error {
	return errors.Join(
		k.bucketMap(f.buckets(openName(id)), t.open, other.open, do), k.bucketMap(f.buckets(nextName(id)), t.next, other.next, do))
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

// services encodes the elements of the map of services that others lacks or has another
// chain for.
func (k kernel) services(f *family, elements, others map[string]steer, do encode) error {
	var differ []nftables.SetElement
	for _, key := range slices.Sorted(maps.Keys(elements)) {
		if other, ok := others[key]; !ok || other != elements[key] {
			differ = append(differ, nftables.SetElement{Key: []byte(key),
				VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: elements[key].chain()}})
		}
	}
	return k.encode(f.services(), differ, do)
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
	if !k.exists(f) {
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
	return len(rules) == 1 && there == 1+2*len(want.steers())+len(want.hands), nil
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
