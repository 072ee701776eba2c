package config

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// shape is a family of documents that differ in size alone.
type shape struct {
	name string
	// write returns a document of about the size, in bytes, and not more.
	write func(size int) string
}

// worstShapes returns the shapes that could cost most. They follow from the
// schema and from the corpus, so that a new key, list or error is among them
// without anybody adding it here.
func worstShapes() []shape { return slices.Concat(families()...) }

func families() [][]shape {
	return [][]shape{listShapes(), pairShapes(), mapShapes(), corpusShapes(), syntaxShapes(), manifestShapes()}
}

// list is a list, or a map of any keys, of the schema.
type list struct {
	path  []string // from the top; the last element is the list's own key
	elem  reflect.Type
	pairs bool
}

func (l list) String() string { return strings.Join(l.path, ".") }

// listsOf returns the lists below a raw type.
func listsOf(t reflect.Type, path []string) []list {
	var all []list
	switch {
	case t == reflect.TypeFor[value]():
	case t == reflect.TypeFor[[]pair]():
		all = append(all, list{path, t.Elem(), true})
	case t.Kind() == reflect.Slice:
		all = append(all, list{path, t.Elem(), false})
		all = append(all, listsOf(t.Elem(), path)...)
	case t.Kind() == reflect.Pointer:
		return listsOf(t.Elem(), path)
	default:
		for _, k := range keysOf(t) {
			all = append(all, listsOf(t.Field(k.index).Type, append(slices.Clone(path), k.name))...)
		}
	}
	return all
}

// mapsOf returns the paths of the mappings below a raw type.
func mapsOf(t reflect.Type, path []string) [][]string {
	switch {
	case t == reflect.TypeFor[value]() || t == reflect.TypeFor[pair]():
		return nil
	case t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer:
		return mapsOf(t.Elem(), path)
	}
	all := [][]string{path}
	for _, k := range keysOf(t) {
		all = append(all, mapsOf(t.Field(k.index).Type, append(slices.Clone(path), k.name))...)
	}
	return all
}

// samples are values of each kind that the schema knows. Which of them a key
// takes is found by trying.
var samples = []func(n int) string{
	func(n int) string { return "n" + strconv.Itoa(n) },
	func(n int) string { return address(n) },
	func(n int) string { return address(n) + "-" + address(n) },
	func(n int) string { return address(n) + "/32" },
	func(n int) string { return fmt.Sprintf("2001:db8::%x", n) },
	func(n int) string { return fmt.Sprintf("2001:db8::%x/128", n) },
	func(n int) string { return strconv.Itoa(1 + n%100) },
	func(n int) string { return strconv.Itoa(20 + n%8) },
	func(n int) string { return strconv.Itoa(64000 + n) },
	func(n int) string { return fmt.Sprintf("%dms", 20+n%50) },
	func(n int) string { return fmt.Sprintf("%ds", 10+n%50) },
	func(int) string { return "true" },
	func(n int) string { return fmt.Sprintf("a/n%d", n) },
	func(n int) string { return fmt.Sprintf("1:%d", n%65536) },
	func(n int) string { return fmt.Sprintf("1:2:%d", n) },
	func(n int) string { return []string{"In", "Exists"}[n%2] },
	func(n int) string { return []string{"kernel", "bgp"}[n%2] },
	func(n int) string { return []string{"metallb", "kube-vip"}[n%2] },
	func(n int) string { return []string{"fast", "normal"}[n%2] },
	func(n int) string { return []string{"active", "draining"}[n%2] },
}

// address spreads numbers over addresses that are not beside each other.
func address(n int) string {
	n = 2*n + 1
	return fmt.Sprintf("10.%d.%d.%d", n>>16&255, n>>8&255, n&255)
}

// broken are values that no key takes.
var broken = []string{`""`, "~", "{}", "[]", "*x", "!!int a", "a b", "1.2.3", "'1'", strings.Repeat("a", 65)}

// accepted is which samples each leaf takes, by its path.
var accepted = map[string][]func(n int) string{
	"apiVersion": {func(int) string { return APIVersion }},
	"kind":       {func(int) string { return Kind }},
}

// samplesFor returns the samples that the leaf of that path takes, and at least one.
func samplesFor(name string) []func(n int) string {
	if found, ok := accepted[name]; ok {
		return found
	}
	accepted[name] = samples[:1] // while others are tried
	var found []func(n int) string
	for _, sample := range samples {
		doc := document(map[string]func(int) string{name: func(int) string { return "\n" + sample(0) + "\n" }},
			strings.Split(name, "."))
		line := 0
		for n, text := range strings.Split(doc, "\n") {
			if text == sample(0) {
				line = n + 1
			}
		}
		_, err := Parse([]byte(doc))
		errs, _ := err.(Errors)
		if !slices.ContainsFunc(errs, func(e Error) bool { return e.Line == line }) {
			found = append(found, sample)
		}
	}
	if len(found) == 0 {
		found = samples[:1]
	}
	accepted[name] = found
	return found
}

// mold is how to write a document: what is at some paths, and how many items the
// lists have.
type mold struct {
	leaves map[string]func(n int) string // overrides by path
	counts map[string]int                // items of a list; 1 for a list that is not here
	full   map[string]bool               // lists whose items have every key
	wanted map[string]bool               // paths that have to be there
}

// document writes a document in which the path is there, with single items.
func document(leaves map[string]func(int) string, path []string) string {
	m := newMold()
	m.leaves = leaves
	m.want(path)
	return m.document()
}

func (m *mold) want(path []string) {
	for i := range path {
		m.wanted[strings.Join(path[:i+1], ".")] = true
	}
}

// document writes the document. There is something to refer to.
func (m *mold) document() string {
	for _, path := range [][]string{{"peers", "address"}, {"peers", "localASN"}, {"advertisements", "layer2"}, {"pools", "addresses"}} {
		if path[0] != "pools" || !m.wanted["pools.dhcp"] {
			m.want(path)
		}
	}
	var b strings.Builder
	m.mapping(&b, reflect.TypeFor[rawConfig](), "", 0, false)
	return strings.TrimSuffix(strings.TrimPrefix(b.String(), "{"), "}") + "\n"
}

// mapping writes a mapping. The path is one text, because of long lists it is looked up for every item.
func (m *mold) mapping(b *strings.Builder, t reflect.Type, path string, n int, full bool) {
	b.WriteString("{")
	separator := ""
	for _, k := range keysOf(t) {
		child := k.name
		if path != "" {
			child = path + "." + k.name
		}
		if !k.required && !full && !m.wanted[child] {
			continue
		}
		b.WriteString(separator)
		b.WriteString(k.name)
		b.WriteString(": ")
		m.any(b, t.Field(k.index).Type, child, n, full)
		if separator = ","; path == "" {
			separator = "\n"
		}
	}
	b.WriteString("}")
}

func (m *mold) any(b *strings.Builder, t reflect.Type, path string, n int, full bool) {
	switch {
	case t == reflect.TypeFor[value]():
		m.leaf(b, path, n)
	case t == reflect.TypeFor[[]pair]():
		b.WriteString("{")
		for i := range max(m.counts[path], 1) {
			fmt.Fprintf(b, "n%d: ", n+i)
			m.leaf(b, path, n+i)
			b.WriteString(",")
		}
		b.WriteString("}")
	case t.Kind() == reflect.Slice:
		b.WriteString("[")
		count, isGrown := m.counts[path]
		full = full || m.full[path]
		for i := range max(count, 1) {
			if !isGrown {
				i = n
			}
			m.any(b, t.Elem(), path, i, full)
			b.WriteString(",")
			if isGrown && i%1000 == 999 {
				b.WriteString("\n")
			}
		}
		b.WriteString("]")
	case t.Kind() == reflect.Pointer:
		m.any(b, t.Elem(), path, n, full)
	default:
		if write, ok := m.leaves[path]; ok {
			b.WriteString(write(n))
			return
		}
		m.mapping(b, t, path, n, full)
	}
}

func (m *mold) leaf(b *strings.Builder, path string, n int) {
	if write, ok := m.leaves[path]; ok {
		b.WriteString(write(n))
		return
	}
	b.WriteString(samplesFor(path)[0](n))
}

// grown returns about the largest document within the size in which the lists have
// as many items as possible, each the same share of it.
func grown(size int, make func() *mold, lists ...list) string {
	write := func(n int) string {
		m := make()
		for _, l := range lists {
			m.counts[l.String()] = n
		}
		return m.document()
	}
	probe, degree := 1000, 1.0
	if len(lists) == 2 && strings.HasPrefix(lists[1].String(), lists[0].String()+".") { // a list in each item of the other one
		probe, degree = 30, 2
	}
	base := len(write(1))
	per := max(1, float64(len(write(probe))-base)/math.Pow(float64(probe), degree))
	for n := max(1, int(math.Pow(float64(size-base)/per, 1/degree))); ; {
		doc := write(n)
		if len(doc) <= size || n == 1 {
			return doc
		}
		n = max(1, min(n-1, n*size/len(doc))) // later items are longer than those of the probe
	}
}

func newMold(lists ...list) *mold {
	m := &mold{leaves: map[string]func(int) string{}, counts: map[string]int{}, full: map[string]bool{}, wanted: map[string]bool{}}
	for _, l := range lists {
		m.want(l.path)
	}
	return m
}

// schemaLists are the lists of the document.
func schemaLists() []list { return listsOf(reflect.TypeFor[rawConfig](), nil) }

// listShapes are long lists: of each kind of item that is taken, of each that is
// not, of the same item; of structs with the keys that have to be there, with
// all, and with one more each.
func listShapes() []shape {
	var all []shape
	add := func(l list, what string, edit func(m *mold)) {
		all = append(all, shape{l.String() + "/" + what, func(size int) string {
			return grown(size, func() *mold { m := newMold(l); edit(m); return m }, l)
		}})
	}
	for _, l := range schemaLists() {
		name := l.String()
		add(l, "among everything", func(m *mold) {
			for _, other := range schemaLists() {
				m.want(other.path)
				m.full[other.path[0]] = true
			}
		})
		for _, text := range broken {
			add(l, "broken "+text[:min(len(text), 8)], func(m *mold) { m.leaves[name] = func(int) string { return text } })
		}
		if l.elem.Kind() != reflect.Struct || l.elem == reflect.TypeFor[value]() || l.pairs {
			for i, sample := range samplesFor(name) {
				add(l, "valid "+strconv.Itoa(i), func(m *mold) { m.leaves[name] = sample })
			}
			add(l, "same", func(m *mold) { same := samplesFor(name)[0](0); m.leaves[name] = func(int) string { return same } })
			add(l, "unknown", func(m *mold) { m.leaves[name] = func(n int) string { return "wrong" + strconv.Itoa(n) } })
			continue
		}
		add(l, "minimal", func(*mold) {})
		add(l, "full", func(m *mold) { m.full[name] = true })
		for _, k := range keysOf(l.elem) {
			child := append(slices.Clone(l.path), k.name)
			add(l, "with "+k.name, func(m *mold) { m.want(child) })
			if l.elem.Field(k.index).Type != reflect.TypeFor[value]() {
				continue
			}
			for i, sample := range samplesFor(strings.Join(child, ".")) {
				add(l, fmt.Sprintf("with %s %d", k.name, i), func(m *mold) { m.want(child); m.leaves[strings.Join(child, ".")] = sample })
			}
			add(l, "same "+k.name, func(m *mold) {
				m.want(child)
				same := samplesFor(strings.Join(child, "."))[0](0)
				m.leaves[strings.Join(child, ".")] = func(int) string { return same }
			})
		}
	}
	return all
}

// pairShapes are two long lists in one document, because each may be compared
// with each; and a list of names that are not in the other. Two lists inside
// selectors are not compared: a selector is, as a whole.
func pairShapes() []shape {
	var all []shape
	lists := schemaLists()
	wrong := func(n int) string { return "wrong" + strconv.Itoa(n) }
	for _, l := range lists {
		for _, other := range lists {
			if l.elem != reflect.TypeFor[value]() || len(other.path) > 1 || l.path[0] == other.path[0] {
				continue
			}
			all = append(all, shape{fmt.Sprintf("%s wrong x %s", l, other), func(size int) string {
				return grown(size, func() *mold { m := newMold(l, other); m.leaves[l.String()] = wrong; return m }, l, other)
			}})
		}
	}
	inSelector := func(l list) bool { return strings.Contains(l.String(), "Selector.") }
	for i, l := range lists {
		for _, other := range lists[i+1:] {
			if inSelector(l) && inSelector(other) {
				continue
			}
			all = append(all, shape{fmt.Sprintf("%s x %s", l, other), func(size int) string {
				return grown(size, func() *mold {
					m := newMold(l, other)
					m.full[l.String()] = strings.HasPrefix(other.String(), l.String()+".") // a list in each item of the other
					return m
				}, l, other)
			}})
		}
	}
	return all
}

// mapShapes are maps with many keys that they do not have, or have already.
func mapShapes() []shape {
	var all []shape
	for _, path := range mapsOf(reflect.TypeFor[rawConfig](), nil) {
		for _, key := range []string{"unknown", "name%d", "a.%d", "? [] #"} {
			all = append(all, shape{"map " + strings.Join(path, ".") + "/" + key, func(size int) string {
				var b strings.Builder
				b.WriteString("\n{")
				for n := 0; b.Len() < size-1000; n++ {
					fmt.Fprintf(&b, "%s: a,", strings.ReplaceAll(key, "%d", strconv.Itoa(n)))
					if strings.HasSuffix(key, "#") || n%1000 == 999 {
						b.WriteString("\n")
					}
				}
				b.WriteString("}\n")
				if len(path) == 0 {
					return b.String()
				}
				return document(map[string]func(int) string{strings.Join(path, "."): func(int) string { return b.String() }}, path)
			}})
		}
	}
	return all
}

// corpusShapes are the documents of testdata, each list of each with its items
// repeated: as they are, and with other values.
func corpusShapes() []shape {
	var all []shape
	for _, dir := range []string{"invalid", "valid"} {
		files, _ := filepath.Glob(filepath.Join("testdata", dir, "*.yaml"))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				panic(err)
			}
			var root yaml.Node
			if len(text) > 64<<10 || yaml.Unmarshal(text, &root) != nil || root.Kind == 0 {
				continue
			}
			for i := range sequences(&root) {
				for _, distinct := range []bool{false, true} {
					all = append(all, shape{fmt.Sprintf("%s/%d/%t", filepath.Base(file), i, distinct), func(size int) string {
						return repeated(text, i, distinct, size)
					}})
				}
			}
		}
	}
	return all
}

// sequences returns the lists with items below a node.
func sequences(n *yaml.Node) []*yaml.Node {
	var all []*yaml.Node
	if n.Kind == yaml.SequenceNode && len(n.Content) > 0 {
		all = append(all, n)
	}
	for _, child := range n.Content {
		all = append(all, sequences(child)...)
	}
	return all
}

// repeated repeats the items of one list of a document.
func repeated(text []byte, which int, distinct bool, size int) string {
	write := func(n int) string {
		var root yaml.Node
		if err := yaml.Unmarshal(text, &root); err != nil {
			panic(err)
		}
		seq := sequences(&root)[which]
		items := seq.Content
		for i := range n {
			item := items[i%len(items)]
			if distinct {
				item = renumbered(item, i)
			}
			seq.Content = append(seq.Content, item)
		}
		doc, err := yaml.Marshal(&root)
		if err != nil {
			return string(text)
		}
		return string(doc)
	}
	base := len(write(0))
	per := max(1, (len(write(256))-base)/256)
	for n := max(1, (size-base)/per); ; n = n * 15 / 16 {
		if doc := write(n); len(doc) <= size || n <= 1 {
			return doc
		}
	}
}

// renumbered copies a node with values that no other copy has.
func renumbered(n *yaml.Node, number int) *yaml.Node {
	c := *n
	c.Anchor = ""
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
		switch parts := strings.Split(n.Value, "."); {
		case len(parts) == 4 && len(parts[3]) <= 3:
			c.Value = address(number)
		case strings.ContainsAny(n.Value, "./:"):
		default:
			c.Value += strconv.Itoa(number)
		}
	}
	c.Content = nil
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			c.Content = append(c.Content, child)
			continue
		}
		c.Content = append(c.Content, renumbered(child, number))
	}
	return &c
}

// syntaxShapes are texts that are no YAML, or hardly.
func syntaxShapes() []shape {
	var all []shape
	add := func(name string, write func(size int) string) { all = append(all, shape{"syntax " + name, write}) }
	fill := func(unit string, size int) string { return strings.Repeat(unit, max(0, size)/len(unit)) }
	head := "apiVersion: " + APIVersion + "\nkind: " + Kind + "\n"
	units := []string{"[", "{", "- ", "? ", "'", "\"", "a: ", "a:\n", "*a ", "&a ", "!!str ", "#\n", "# a\n", "|\n", "a,", "\t", "%",
		"---\n", "...\n", "a: &a [*a]\n",
		"- a\n", "- - - a\n", "- {}\n", "a\n", "\n", " ", " \n", "[]", "{}", "a b ", "'' ", "a: b # c\n", "- # c\n", "# a\n- b\n",
		"\r\n", "\r", "ü", "\u2028", "\ufeff", "- |\n a\n", "- >\n\n a\n", "\"\\x41\"", "<<: *a\n", "? a\n: b\n"}
	for _, unit := range units {
		add(fmt.Sprintf("%q", unit), func(size int) string { return fill(unit, size) })
		add(fmt.Sprintf("%q after the header", unit), func(size int) string { return head + fill(unit, size-len(head)) })
		for _, before := range []string{"pools: [", "pools: {", "pools: \"", "pools: '", "pools: |\n  ", "pools:\n- ", "? ",
			"pools: &a ", "x: ["} {
			add(fmt.Sprintf("%q after %q", unit, before),
				func(size int) string { return head + before + fill(unit, size-len(head)-len(before)) })
		}
	}
	mistakes, _ := filepath.Glob(filepath.Join("testdata", "invalid", "yaml-*.yaml"))
	for _, file := range mistakes {
		text, err := os.ReadFile(file)
		if err != nil {
			panic(err)
		}
		for _, filler := range []string{"# a\n", "\n", "a%d: b\n", "a%d:\n- b: c\n"} {
			fillOf := func(size int) string {
				var b strings.Builder
				for n := 0; b.Len() < size-len(text)-20; n++ {
					b.WriteString(strings.ReplaceAll(filler, "%d", strconv.Itoa(n)))
				}
				return b.String()
			}
			add(fmt.Sprintf("%s after %q", filepath.Base(file), filler), func(size int) string { return fillOf(size) + string(text) })
			add(fmt.Sprintf("%s after 60 KB of %q", filepath.Base(file), filler),
				func(size int) string { return fillOf(min(size, 60_000)) + string(text) })
			add(fmt.Sprintf("%s before %q", filepath.Base(file), filler), func(size int) string { return string(text) + fillOf(size) })
		}
	}
	return all
}

// wrapper writes a document into the manifest of a ConfigMap.
type wrapper struct{ name, before, newline, quote, after string }

const manifestHead = "apiVersion: v1\nkind: ConfigMap\ndata:\n  "

func (w wrapper) of(doc string) string {
	switch w.quote {
	case `"`:
		doc = strings.Trim(strconv.Quote(doc), `"`)
	case "'":
		doc = strings.ReplaceAll(doc, "'", "''")
	}
	return manifestHead + w.before + w.quote + strings.ReplaceAll(doc, "\n", w.newline) + w.quote + w.after + "\n"
}

// wrappers are the ways that YAML has.
var wrappers = []wrapper{
	{"literal", "config.yaml: |\n    ", "\n    ", "", ""},
	{"folded", "config.yaml: >\n    ", "\n\n    ", "", ""},
	{"single quotes", "config.yaml: ", "\n\n    ", "'", ""},
	{"double quotes", "config.yaml: ", `\n`, `"`, ""},
	{"beside another key", "config.yaml: |\n    ", "\n    ", "", "\n  other: a"},
}

// manifestShapes are documents in manifests, manifests beside a document, and manifests without
// one.
func manifestShapes() []shape {
	minimal := "config.yaml: \"apiVersion: " + APIVersion + "\\nkind: " + Kind + "\\n\"\n"
	var all []shape
	for _, inner := range slices.Concat(listShapes(), mapShapes(), syntaxShapes()) {
		_, what, _ := strings.Cut(inner.name, "/")
		if !slices.Contains([]string{"among everything", "full", "same", "unknown", "broken ~"}, what) &&
			!(strings.HasPrefix(inner.name, "syntax yaml-") && strings.HasSuffix(inner.name, ` after "# a\n"`)) {
			continue
		}
		for _, w := range wrappers {
			write := func(size int) string { return w.of(inner.write(size)) }
			all = append(all, shape{"manifest " + w.name + " of " + inner.name, func(size int) string { return within(size, write) }})
		}
	}
	repeat := func(before, unit string) {
		all = append(all, shape{fmt.Sprintf("manifests %q after %.12q", unit, before), func(size int) string {
			var b strings.Builder
			b.WriteString(before)
			for n := 0; b.Len() < size-200; n++ {
				b.WriteString(strings.ReplaceAll(unit, "%d", strconv.Itoa(n)))
			}
			return b.String()
		}})
	}
	for _, unit := range []string{"---\nkind: ConfigMap\n", "---\nkind: ConfigMap\ndata: {a%d: b}\n", "---\n" + manifestHead + minimal,
		"---\nkind: ConfigMap\ndata: {a: b, a: b}\n", "---\nkind: List\nitems: [{kind: ConfigMap}]\n", "---\na%d: b\n", "  a%d: b\n"} {
		repeat("", unit)
		repeat(manifestHead+minimal, unit)
	}
	for _, item := range []string{"", ", data: {a%d: b}", ", data: {config.yaml: a}"} {
		repeat("kind: List\nitems:\n", "- {kind: ConfigMap"+item+"}\n")
	}
	return all
}

// within writes as much as leaves the text within the size.
func within(size int, write func(size int) string) string {
	for n := size; ; n = n * 15 / 16 {
		if text := write(n); len(text) <= size || n < 1000 {
			return text
		}
	}
}

// What a document may cost lodestone validate, on one core.
const (
	mostTime   = 2 * time.Second
	mostMemory = 300 << 20
)

var (
	shapeFilter = flag.String("shapes", "", "measure the shapes whose names contain this")
	everyShape  = flag.Bool("shapes.all", false, "measure every shape, which takes an hour")
	shapeLog    = flag.String("shapes.log", "", "a file to which each shape adds a line: milliseconds, MB, name")
)

// selected returns the shapes to measure: those that the flags name, or the worst
// of each family.
func selected(t testing.TB) (shapes []shape) {
	if *shapeFilter == "" && !*everyShape {
		for _, family := range families() {
			shapes = append(shapes, worstOf(family)...)
		}
		return shapes
	}
	shapes = slices.DeleteFunc(worstShapes(), func(s shape) bool { return !strings.Contains(s.name, *shapeFilter) })
	require.NotEmpty(t, shapes)
	return shapes
}

// worstOf returns the shapes whose documents of 64 KiB cost most to parse: the
// worst in time, and the worst in memory.
func worstOf(family []shape) []shape {
	const size, each = 64 << 10, 10
	costs := map[string]testcost.Cost{}
	for _, s := range family {
		doc := []byte(s.write(size))
		costs[s.name] = testcost.Of(func() { _, _ = ParseFile("f", doc) })
	}
	slices.SortFunc(family, func(s, t shape) int { return cmp.Compare(costs[t.name].Time, costs[s.name].Time) })
	rest := slices.Clone(family[min(each, len(family)):])
	slices.SortFunc(rest, func(s, t shape) int { return cmp.Compare(costs[t.name].Bytes, costs[s.name].Bytes) })
	return append(family[:min(each, len(family))], rest[:min(each, len(rest))]...)
}

// The worst lists, pairs of lists, maps and mistakes, as large as a document can
// be: lodestone validate, as a process on one core, keeps to its bounds.
func BenchmarkWorst(b *testing.B) {
	dir := b.TempDir()
	build := exec.Command("go", "build", "-o", dir+"/lodestone", "../../cmd/lodestone")
	output, err := build.CombinedOutput()
	require.NoError(b, err, string(output))
	shapes := selected(b)
	var log io.Writer = io.Discard
	if *shapeLog != "" {
		file, err := os.OpenFile(*shapeLog, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		require.NoError(b, err)
		defer file.Close()
		log = file
	}
	for b.Loop() {
		var slowest time.Duration
		var largest int64
		for _, s := range shapes {
			spent, memory := validate(b, dir, s.write(MaxSize))
			if spent > mostTime || memory > mostMemory {
				b.Errorf("%s takes %s and %d MB", s.name, spent, memory>>20)
			}
			fmt.Fprintf(log, "%d %d %s\n", spent.Milliseconds(), memory/1e6, s.name)
			slowest, largest = max(slowest, spent), max(largest, memory)
		}
		b.ReportMetric(float64(len(shapes)), "shapes")
		b.ReportMetric(float64(len(worstShapes())), "of")
		b.ReportMetric(float64(slowest.Milliseconds()), "max-ms")
		b.ReportMetric(float64(largest)/1e6, "max-MB")
	}
}

// validate runs the command with a document, and returns the processor's time
// and the most memory that it took.
//
// A process that runs another one hands its own peak of memory down to it (execve keeps the
// greater one). This process made the document and is large, so a new one
// runs the command: TestRunMeasured.
func validate(b *testing.B, dir, doc string) (spent time.Duration, memory int64) {
	file := filepath.Join(dir, "config.yaml")
	require.NoError(b, os.WriteFile(file, []byte(doc), 0o600))
	cmd := exec.Command(os.Args[0], "-test.run=^TestRunMeasured$", "-test.v")
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", measured+"="+dir+"/lodestone validate "+file)
	output, err := cmd.CombinedOutput()
	require.NoError(b, err, string(output))
	_, figures, _ := strings.Cut(string(output), measured)
	_, err = fmt.Sscanf(figures, "%d %d", &spent, &memory)
	require.NoError(b, err, string(output))
	return spent, memory
}

// measured names the variable with the command that TestRunMeasured runs.
const measured = "CONFIG_TEST_MEASURED"

// TestRunMeasured runs a command for validate, and prints what it took.
func TestRunMeasured(t *testing.T) {
	command := strings.Fields(os.Getenv(measured))
	if len(command) == 0 {
		return // it is BenchmarkWorst's
	}
	cmd := exec.Command(command[0], command[1:]...)
	output, err := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 0 && code != 1 {
		t.Fatalf("%v: %.2000s", err, output)
	}
	usage := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	fmt.Println(measured, int64(cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()), usage.Maxrss<<10)
}

// The document in a manifest is read once, however it is written.
func TestAManifestsDocumentIsReadOnce(t *testing.T) {
	m := newMold()
	m.counts["pools.addresses"] = 3000
	doc := m.document()
	var literal uint64
	for _, w := range wrappers {
		manifest := []byte(w.of(doc))
		cost := testcost.Of(func() {
			_, err := ParseFile("f", manifest)
			require.NoError(t, err, w.name)
		})
		if literal == 0 {
			literal = cost.Bytes
		}
		require.Less(t, cost.Bytes, literal*5/4, w.name)
	}
}

// Those that took seconds to minutes, at a size at which they took seconds, and
// the other lists that are compared with each other.
func TestCostOfWhatIsCompared(t *testing.T) {
	known := []string{
		"pools.addresses x pools.exclude", "pools.addresses x reservations", "pools.namespaces x pools.requesters",
		"pools.advertise x advertisements", "advertisements.bgp.peers x peers", "bgpPermit x routes.cidrs",
		"pools.addresses/among everything", // aggregates of scattered addresses
		"pools.advertise wrong x advertisements", "advertisements.bgp.peers wrong x peers",
		"advertisements x advertisements.bgp.nodeSelector.matchLabels",
		"pools.addresses x bgpPermit", "manifest folded of pools.addresses/among everything",
		`syntax yaml-no-space.yaml after "a%d: b\n"`, `syntax yaml-tab-after-dash.yaml after "# a\n"`, // where it is was searched for
	}
	found := 0
	for _, s := range worstShapes() {
		if slices.Contains(known, s.name) {
			found++
			growsAsTheDocument(t, s, 32<<10)
		}
	}
	require.Equal(t, len(known), found)
}

// growsAsTheDocument parses documents of the size and of about four times the size. Some shapes
// are written in large steps.
func growsAsTheDocument(t *testing.T, s shape, size int) {
	t.Helper()
	small := s.write(size)
	large := s.write(testcost.Growth * size)
	for more := testcost.Growth * size; len(large) > testcost.Growth*len(small)*11/10; large = s.write(more) {
		more -= more / 8
	}
	testcost.Grows(t, s.name, small, large, func(text string) { _, _ = ParseFile("f", []byte(text)) })
}

// What anybody writes costs what its length explains, also when a part of it is
// repeated until there is much of it.
func FuzzCost(f *testing.F) {
	for _, dir := range []string{"invalid", "valid"} {
		files, _ := filepath.Glob(filepath.Join("testdata", dir, "*.yaml"))
		for i, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(f, err)
			f.Add(text, i%2 == 0, uint16(i), uint16(i/10))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, commas bool, from, to uint16) {
		const size = 4 << 10
		if len(text) > size {
			return
		}
		separator := byte('\n')
		if commas {
			separator = ','
		}
		small := testcost.Repeat(text, separator, int(from), int(to), size)
		large := testcost.Repeat(text, separator, int(from), int(to), testcost.Growth*len(small))
		testcost.Grows(t, fmt.Sprintf("ParseFile of %d bytes", len(small)), small, large,
			func(text string) { _, _ = ParseFile("f", []byte(text)) })
	})
}
