package direct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/nft"
)

// perMessage is how many elements fit into a netlink attribute of 64 KiB, also with the longest names of Services. (The library
// writes the length of a longer one without its high bits.)
const perMessage = 200

// ruleset has the variable parts of a family's table. The keys of its maps are the keys in
// the kernel.
type ruleset struct {
	interfaces map[string]bool
	hardware   map[string]bool
	services   map[string]served
	tables     map[int]*buckets
	kept       map[string]bool // only in the tables before conntrack

	// What they were made from, of tables after conntrack: the backends of each table of buckets, and the nodes that
	// packets can be handed to.
	madeOf map[int]string
	peers  map[string]neighbour
}

// buckets is a table as one node uses it: the node to which packets are handed, by bucket. The
// zero value: they stay here.
type buckets struct {
	// open is where packets are handed first. next is where segments go that stayed here and
	// are of no known connection.
	open, next []hop
	// held is set for buckets whose node does not answer: nothing is handed over. waits is set
	// for buckets with a node in the ring that does not answer, and may keep the connection.
	held, waits []bool
}

// hop is a node that packets are handed to.
type hop struct {
	addr   netip.Addr
	device uint32
}

// steer is how a Service's packets find their bucket.
type steer struct {
	table   int
	buckets int
	// seed decides which flow is in which bucket.
	seed uint32
	// ring is how many nodes a segment of an unknown connection visits.
	ring int
	// byClient is set if all connections of a client are in one bucket.
	byClient bool
	// switchedOff is set if new connections stay here, as without a table.
	switchedOff bool
	// interfaces are the interfaces that lead to nodes, as text, so that steers are comparable.
	interfaces string
}

// served is a Service at a VIP and port.
type served struct {
	steer
	// service is its name, for people and for a later Director.
	service string
}

// indexes returns the interfaces that lead to nodes.
func (s steer) indexes() (all []uint32) {
	for text := range strings.SplitSeq(s.interfaces, "-") {
		if n, err := strconv.ParseUint(text, 10, 32); err == nil {
			all = append(all, uint32(n))
		}
	}
	return all
}

func newRuleset() *ruleset {
	return &ruleset{interfaces: map[string]bool{}, hardware: map[string]bool{}, services: map[string]served{},
		tables: map[int]*buckets{}, kept: map[string]bool{}}
}

// steers returns the chains that the services need.
func (r *ruleset) steers() map[steer]bool {
	steers := map[steer]bool{}
	for _, s := range r.services {
		steers[s.steer] = true
	}
	return steers
}

// The maps and sets of a table of buckets have its number and size in their names.
func openName(table, size int) string { return fmt.Sprintf("open-%d-%d", table, size) }
func nextName(table, size int) string { return fmt.Sprintf("next-%d-%d", table, size) }

// on returns the name of the map for one interface, held that of the set of held buckets.
func on(maps string, index uint32) string { return fmt.Sprint(maps, "-", index) }
func held(maps string) string             { return maps + "-held" }

// chain returns the name of the chain, which has all fields of the steer.
func (s steer) chain() string {
	return fmt.Sprintf("steer-%d-%d-%d-%d%s%s-%s", s.table, s.buckets, s.seed, s.ring,
		given(s.byClient, "-client"), given(s.switchedOff, "-drains"), s.interfaces)
}

// parseSteer returns the steer whose chain has that name. ok is not set if no steer has.
func parseSteer(chain string) (s steer, ok bool) {
	fmt.Sscanf(chain, "steer-%d-%d-%d-%d", &s.table, &s.buckets, &s.seed, &s.ring) //nolint:errcheck // the name is compared below
	rest := strings.TrimPrefix(chain, strings.TrimSuffix(s.chain(), "-"))
	rest, s.byClient = strings.CutPrefix(rest, "-client")
	rest, s.switchedOff = strings.CutPrefix(rest, "-drains")
	s.interfaces = strings.TrimPrefix(rest, "-")
	return s, s.chain() == chain
}

func (s steer) second() string { return "second" + strings.TrimPrefix(s.chain(), "steer") }

func given(so bool, text string) string {
	if so {
		return text
	}
	return ""
}

// kernel is a connection to nftables, with the state of a transaction.
type kernel struct {
	nft.Conn
	sets *uint32 // how many sets were added, which is the last one's number in the transaction
	// further is a second transaction, with the rules that the library cannot encode.
	further *[]netlink.Message
}

func dial() (kernel, error) { return converse(nft.Dial()) }

func converse(c nft.Conn, err error) (kernel, error) {
	return kernel{c, new(uint32), &[]netlink.Message{}}, err
}

// line is the connection for changes, which stays open.
type line struct{ nft.Line }

func (l *line) open() (kernel, error) { return converse(l.Open()) }

// permitted returns an error if the process may not change rules. That is cheaper than to try.
func (l *line) permitted() error {
	k, err := l.open()
	if err != nil {
		return err
	}
	if _, err := k.ListTables(); err != nil {
		l.End()
		return fmt.Errorf("list nftables tables: %w", err)
	}
	return nil
}

// change adds the messages that change have to want to the transaction. have is nil if there is no
// table, or none of use, want if none is wanted.
func (k kernel) change(f *family, have, want *ruleset, guard time.Duration) error {
	if want == nil {
		k.AddTable(f.table) // to delete a missing table would be an error
		k.DelTable(f.table)
		return nil
	}
	if have == nil || f.ingress && !maps.Equal(have.interfaces, want.interfaces) {
		k.create(f, want, guard)
		have = newRuleset()
	}
	if err := errors.Join(k.take(f, have, want), k.give(f, have, want)); err != nil {
		return fmt.Errorf("encode nftables table %s: %w", f.name(), err)
	}
	return nil
}

// take removes the elements and chains that are not wanted, those that refer to others first.
func (k kernel) take(f *family, have, want *ruleset) error {
	err := k.changeServices(f, have, want, (*nftables.Conn).SetDeleteElements)
	err = errors.Join(err, k.changeSets(f, have, want, (*nftables.Conn).SetDeleteElements))
	steers := want.steers()
	for s := range have.steers() {
		if !steers[s] {
			k.deleteSteer(f, s)
		}
	}
	for _, id := range have.others(want) {
		for _, m := range have.sets(f, id) {
			after := want.sets(f, id)[m.set.Name]
			if after == nil {
				k.DelSet(m.set)
				continue
			}
			err = errors.Join(err, k.changeBuckets(m, after, (*nftables.Conn).SetDeleteElements))
		}
	}
	return err
}

// give adds the wanted elements and chains that are missing, in the opposite order.
func (k kernel) give(f *family, have, want *ruleset) (err error) {
	for _, id := range want.others(have) {
		before := have.sets(f, id)
		for name, m := range want.sets(f, id) {
			if before[name] == nil {
				err = errors.Join(err, k.addSet(m.set))
			}
			err = errors.Join(err, k.changeBuckets(m, before[name], (*nftables.Conn).SetAddElements))
		}
	}
	steers := have.steers()
	for s := range want.steers() {
		if !steers[s] {
			k.addSteer(f, s)
		}
	}
	return errors.Join(err, k.changeSets(f, want, have, (*nftables.Conn).SetAddElements),
		k.changeServices(f, want, have, (*nftables.Conn).SetAddElements))
}

// bucketSet is a map or set of buckets.
type bucketSet struct {
	set *nftables.Set
	of  []hop  // of a map: the hop of each bucket
	has []bool // of a set: which buckets are in it
	// device is the interface of the hops in the map.
	device uint32
}

// in returns the hop of a bucket, and whether the bucket is in the map or set.
func (s *bucketSet) in(bucket int) (hop, bool) {
	if s.of == nil {
		return hop{}, s.has[bucket]
	}
	return s.of[bucket], s.of[bucket].device == s.device
}

// sets returns the maps and sets of a table of buckets, by name. Names differ for tables of
// different sizes.
func (r *ruleset) sets(f *family, id int) map[string]*bucketSet {
	t := r.tables[id]
	if t == nil {
		return nil
	}
	sets := map[string]*bucketSet{}
	add := func(name string, of []hop, has []bool) {
		for index := range r.interfaces {
			device := binaryutil.NativeEndian.Uint32([]byte(index))
			sets[on(name, device)] = &bucketSet{f.buckets(on(name, device), true, len(t.open)), of, nil, device}
		}
		if !f.ingress {
			sets[held(name)] = &bucketSet{f.buckets(held(name), false, len(t.open)), nil, has, 0}
		}
	}
	add(openName(id, len(t.open)), t.open, t.held)
	if !f.ingress {
		add(nextName(id, len(t.open)), t.next, t.waits)
	}
	return sets
}

// others returns the tables of buckets that are not the same in the other ruleset.
func (r *ruleset) others(than *ruleset) (ids []int) {
	moved := !maps.Equal(r.interfaces, than.interfaces)
	for _, id := range slices.Sorted(maps.Keys(r.tables)) {
		if moved || r.tables[id] != than.tables[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// flush commits all changes in one transaction.
func (k kernel) flush(f *family) error {
	if err := k.InTime().Flush(); err != nil {
		return fmt.Errorf("change the nftables table %s: %w", f.name(), err)
	}
	return k.flushFurther(f)
}

// absent are the kernel's answers when there is no table, or no nftables, or when the process may not ask: then it could
// not have made one.
var absent = []error{unix.ENOENT, unix.EPERM, unix.EACCES, unix.EINVAL, unix.EOPNOTSUPP, unix.EAFNOSUPPORT}

// exists reports whether there is a table. An error is no answer.
func (k kernel) exists(f *family) (bool, error) {
	_, err := k.ListTableOfFamily(f.table.Name, f.table.Family)
	if err == nil || slices.ContainsFunc(absent, func(answer error) bool { return errors.Is(err, answer) }) {
		return err == nil, nil
	}
	return false, fmt.Errorf("look for the nftables table %s: %w", f.name(), err)
}

// exists asks over a new socket: after a failed change, the old one may have unread answers, or its deadline has passed.
func exists(f *family) (bool, error) {
	k, err := dial()
	if err != nil {
		return false, err
	}
	defer k.Close()
	return k.exists(f)
}

// create makes the table anew, without services.
func (k kernel) create(f *family, r *ruleset, guard time.Duration) {
	k.AddTable(f.table)
	k.DelTable(f.table)
	k.AddTable(f.table)
	for _, s := range f.sets() {
		k.addSet(s) //nolint:errcheck // it fails for anonymous sets alone
	}
	k.SetAddElements(f.sets()[0], guards(guard)) //nolint:errcheck // as above
	for _, name := range counters {
		k.AddObj(&nftables.NamedObj{Table: f.table, Name: name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
	for _, base := range f.bases(r) {
		k.AddRule(&nftables.Rule{Table: f.table, Chain: k.AddChain(base), Exprs: f.baseRule()})
	}
}

// guards returns the element of the guard set: TCP.
func guards(guard time.Duration) []nftables.SetElement {
	return []nftables.SetElement{{Key: []byte{unix.IPPROTO_TCP}, Timeout: guard}}
}

// addSet adds a set and numbers it itself: the library's numbers come from a variable that all
// goroutines share.
func (k kernel) addSet(set *nftables.Set) error {
	*k.sets++
	set.ID = *k.sets
	return k.AddSet(set, nil)
}

// guarded reports whether there is a table whose guard has not expired.
func (k kernel) guarded(f *family) (bool, error) {
	if there, err := k.exists(f); !there {
		return false, err
	}
	guards, err := k.GetSetElements(f.sets()[0])
	if err != nil {
		return false, fmt.Errorf("look for the guard of the nftables table %s: %w", f.name(), err)
	}
	return len(guards) > 0, nil
}

// refresh sets the guard of the table to expire after that time.
func (k kernel) refresh(f *family, guard time.Duration) error {
	set := f.sets()[0]
	k.SetAddElements(set, guards(guard)) //nolint:errcheck // it is right
	k.SetDeleteElements(set, guards(0))  //nolint:errcheck // it is right
	k.SetAddElements(set, guards(guard)) //nolint:errcheck // it is right
	return k.flush(f)
}

func (k kernel) addSteer(f *family, s steer) {
	if f.ingress {
		k.addShortcut(f, s)
		return
	}
	second := k.AddChain(&nftables.Chain{Table: f.table, Name: s.second()}) // before a rule leads to it
	k.addRules(f, second, f.second(s))
	k.addRules(f, k.AddChain(&nftables.Chain{Table: f.table, Name: s.chain()}), f.steer(s))
}

func (k kernel) addRules(f *family, chain *nftables.Chain, rules [][]expr.Any) {
	for _, exprs := range rules {
		k.AddRule(&nftables.Rule{Table: f.table, Chain: chain, Exprs: exprs})
	}
}

// deleteSteer deletes the chains of a steer that no service uses.
func (k kernel) deleteSteer(f *family, s steer) {
	for _, c := range f.chains(s) {
		k.FlushChain(c)
	}
	for _, c := range f.chains(s) {
		k.DelChain(c)
	}
}

// chains returns the chains of a steer.
func (f *family) chains(s steer) []*nftables.Chain {
	chains := []*nftables.Chain{{Table: f.table, Name: s.chain()}}
	if !f.ingress {
		chains = append(chains, &nftables.Chain{Table: f.table, Name: s.second()})
	}
	return chains
}

// encode is SetAddElements or SetDeleteElements.
type encode = func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error

func (k kernel) encode(set *nftables.Set, elements []nftables.SetElement, do encode) (err error) {
	for part := range slices.Chunk(elements, perMessage) {
		err = errors.Join(err, do(k.Conn.Conn, set, part))
	}
	return err
}

// changeBuckets encodes the elements that m has and other has not, without collecting them first: they
// are many. other may be nil.
func (k kernel) changeBuckets(m, other *bucketSet, do encode) (err error) {
	differ := make([]nftables.SetElement, 0, perMessage)
	for bucket := range max(len(m.of), len(m.has)) {
		h, is := m.in(bucket)
		if !is {
			continue
		}
		if other != nil {
			if before, was := other.in(bucket); was && before == h {
				continue
			}
		}
		e := nftables.SetElement{Key: []byte(number(uint32(bucket)))}
		if m.set.IsMap {
			e.Val = h.addr.AsSlice()
		}
		if differ = append(differ, e); len(differ) == perMessage {
			err, differ = errors.Join(err, k.encode(m.set, differ, do)), differ[:0]
		}
	}
	return errors.Join(err, k.encode(m.set, differ, do))
}

// changeServices encodes the elements of the map of services that are missing in others or have
// another chain there.
func (k kernel) changeServices(f *family, r, others *ruleset, do encode) error {
	var differ []nftables.SetElement
	for _, key := range slices.Sorted(maps.Keys(r.services)) {
		if other, ok := others.services[key]; !ok || other != r.services[key] {
			differ = append(differ, nftables.SetElement{Key: []byte(key), Comment: r.services[key].service,
				VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: r.services[key].chain()}})
		}
	}
	return k.encode(f.sets()[3], differ, do)
}

// changeSets encodes the elements of the other sets that r has and others has not.
func (k kernel) changeSets(f *family, r, others *ruleset, do encode) (err error) {
	sets := f.sets()
	for i, of := range []struct{ elements, others map[string]bool }{1: {r.interfaces, others.interfaces}, 2: {r.hardware, others.hardware},
		4: {r.kept, others.kept}} {
		var differ []nftables.SetElement
		for _, key := range slices.Sorted(maps.Keys(of.elements)) {
			if !of.others[key] {
				differ = append(differ, nftables.SetElement{Key: []byte(key)})
			}
		}
		if len(differ) > 0 {
			err = errors.Join(err, k.encode(sets[i], differ, do))
		}
	}
	return err
}

// services returns the content of the map of services, without elements of other programs.
func (k kernel) services(f *family) (map[string]served, error) {
	all := map[string]served{}
	elements, err := k.GetSetElements(f.sets()[3])
	if err != nil {
		return nil, fmt.Errorf("list the Services of the nftables table %s: %w", f.name(), err)
	}
	for _, e := range elements {
		if s, ok := parseServed(e); ok {
			all[string(e.Key)] = s
		}
	}
	return all, nil
}

// parseServed returns the Service of an element of the map of services. ok is not set if another program has added it.
func parseServed(e nftables.SetElement) (of served, ok bool) {
	of.service = e.Comment
	of.steer, ok = parseSteer(nft.ChainOf(e.Val))
	return of, ok && of.service != ""
}

// hops returns the nodes to which a steer hands packets.
func (k kernel) hops(f *family, s steer) map[netip.Addr]bool {
	hops := map[netip.Addr]bool{}
	for _, index := range s.indexes() {
		for _, name := range []string{openName(s.table, s.buckets), nextName(s.table, s.buckets)} {
			elements, _ := k.GetSetElements(f.buckets(on(name, index), true, s.buckets)) // without it there are none
			for _, e := range elements {
				if a, ok := netip.AddrFromSlice(e.Val); ok {
					hops[a] = true
				}
			}
		}
	}
	return hops
}

// generation returns a number that changes with each change of tables, chains, rules and elements of nftables by a program.
func (k kernel) generation() (uint32, error) {
	answers, err := k.Socket.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}})
	if err != nil {
		return 0, fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	for _, answer := range answers {
		if len(answer.Data) < nl.SizeofNfgenmsg {
			continue
		}
		attributes, err := netlink.NewAttributeDecoder(answer.Data[nl.SizeofNfgenmsg:])
		if err != nil {
			continue
		}
		attributes.ByteOrder = binary.BigEndian
		for attributes.Next() {
			if attributes.Type() == unix.NFTA_GEN_ID {
				return attributes.Uint32(), attributes.Err()
			}
		}
	}
	return 0, errors.New("ask for the generation of nftables: no answer has one")
}

// sound reports whether the table still has its chains, and if elements is set, its elements: another program may have
// flushed it, or restored older ones. A chain also goes with its interface. Elements of buckets are not checked, as they are many.
func (k kernel) sound(f *family, want *ruleset, elements bool) (bool, error) {
	table, err := k.ListTableOfFamily(f.table.Name, f.table.Family)
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look for the nftables table: %w", err)
	}
	// All chains, sets and counters use the table. Listing them would list those of kube-proxy.
	bases := f.bases(want)
	uses := len(bases) + len(f.chains(steer{}))*len(want.steers()) + len(f.sets()) + len(counters)
	for id := range want.tables {
		uses += len(want.sets(f, id))
	}
	// The library reads the kernel's big-endian number in the machine's order.
	if int(table.Use) != uses && int(bits.ReverseBytes32(table.Use)) != uses {
		return false, nil
	}
	for _, base := range bases {
		rules, err := k.GetRules(f.table, base)
		if err != nil {
			return false, fmt.Errorf("list nftables rules: %w", err)
		}
		if len(rules) != 1 {
			return false, nil
		}
	}
	if !elements {
		return true, nil
	}
	for i, set := range []struct {
		size int
		has  func(nftables.SetElement) bool
	}{
		{1, func(nftables.SetElement) bool { return true }}, // the guard
		{len(want.interfaces), func(e nftables.SetElement) bool { return want.interfaces[string(e.Key)] }},
		{len(want.hardware), func(e nftables.SetElement) bool { return want.hardware[string(e.Key)] }},
		{len(want.services), func(e nftables.SetElement) bool {
			s, ok := parseServed(e)
			return ok && s == want.services[string(e.Key)]
		}},
	} {
		elements, err := k.GetSetElements(f.sets()[i])
		if err != nil {
			return false, fmt.Errorf("list the elements of the nftables set %s: %w", f.sets()[i].Name, err)
		}
		if len(elements) != set.size || slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return !set.has(e) }) {
			return false, nil
		}
	}
	return true, nil
}

// counts returns how many packets each of the counters of tables has counted since they were made, by name of the table.
// Those that the kernel does not have are left out.
func counts(of []*family) (map[string]map[string]uint64, error) {
	k, err := dial()
	if err != nil {
		return nil, err
	}
	defer k.Close()
	packets := map[string]map[string]uint64{}
	for _, f := range of {
		if there, err := k.exists(f); err != nil {
			return nil, err
		} else if !there {
			continue
		}
		objects, err := k.GetNamedObjects(f.table)
		if err != nil {
			return nil, fmt.Errorf("read the counters of the nftables table %s: %w", f.name(), err)
		}
		packets[f.name()] = map[string]uint64{}
		for _, o := range objects {
			if o, ok := o.(*nftables.NamedObj); ok {
				if counter, ok := o.Obj.(*expr.Counter); ok {
					packets[f.name()][o.Name] = counter.Packets
				}
			}
		}
	}
	return packets, nil
}
