package config

import (
	"fmt"
	"iter"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	// maxAliased bounds what a document may repeat through aliases: values and
	// keys, and the bytes in them.
	maxAliased, maxAliasedBytes = 10_000, MaxSize
	// maxItems is how many maps a list may have.
	maxItems = 10_000
)

// value is a part of the document: its text, its position, and its path for people. The zero
// value is a key that is not there.
type value struct {
	*yaml.Node
	path string // of the value, or of the list that it is an item of
	item int    // counts the items of the list from 1; 0: the value is no item
}

func (v value) present() bool { return v.Node != nil }

// where returns the path of the value. The path of an item is made only then, because a
// document can have hundreds of thousands of items, and most have no error.
func (v value) where() string {
	if v.item == 0 {
		return v.path
	}
	return fmt.Sprintf("%s[%d]%s", v.path, v.item-1, nameOf(v.Node))
}

// child is the path of a key below the path of a map.
func child(path, name string) string {
	switch {
	case path == "":
		return name
	case strings.HasSuffix(path, `"`):
		return path + " " + name
	default:
		return path + "." + name
	}
}

// pair is a key and its value in a map of any keys.
type pair struct{ Key, Value value }

// decoder turns a text into raw structs.
type decoder struct {
	report
	inAlias      int // how many aliases lead to the present value
	aliased      int // values and keys reached through aliases
	aliasedBytes int // what is written in them
}

// decode fills a field of a raw struct from v, if v is of the kind that belongs there.
func (d *decoder) decode(v value, into reflect.Value) bool {
	if v.Kind == yaml.AliasNode {
		d.inAlias++
		defer func() { d.inAlias-- }()
		here := *v.Alias
		here.Line, here.Column = v.Line, v.Column // what is wrong with it is wrong here
		v.Node = &here
	}
	d.countAliased(v.Node)
	if d.repeatsTooMuch() {
		return false // refused as a whole
	}
	switch into.Interface().(type) {
	case value:
		return d.scalar(v, into)
	case []pair:
		return d.pairs(v, into)
	default:
		return d.collection(v, into)
	}
}

// target returns what an alias stands for, and any other node itself.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// countAliased counts a value that is read through an alias, with its keys.
func (d *decoder) countAliased(n *yaml.Node) {
	if d.inAlias == 0 {
		return
	}
	d.aliased += 1 + len(n.Content)/2
	d.aliasedBytes += len(n.Value)
	for i := 0; n.Kind == yaml.MappingNode && i < len(n.Content); i += 2 {
		d.aliasedBytes += len(n.Content[i].Value)
	}
}

func (d *decoder) repeatsTooMuch() bool {
	return d.aliased > maxAliased || d.aliasedBytes > maxAliasedBytes
}

func (d *decoder) collection(v value, into reflect.Value) bool {
	switch into.Kind() {
	case reflect.Slice:
		return d.list(v, into)
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		return d.mapping(v, into.Elem())
	default:
		return d.mapping(v, into)
	}
}

func (d *decoder) scalar(v value, into reflect.Value) bool {
	if !d.is(v, yaml.ScalarNode) || d.isTagged(v) {
		return false
	}
	into.Set(reflect.ValueOf(v))
	return true
}

func (d *decoder) list(v value, into reflect.Value) bool {
	if !d.is(v, yaml.SequenceNode) {
		return false
	}
	into.Set(reflect.MakeSlice(into.Type(), 0, 0)) // [] is not an absent key
	elem := into.Type().Elem()
	item := reflect.New(elem).Elem()
	path := v.where()
	for i, n := range v.Content {
		if d.repeatsTooMuch() {
			break
		}
		at := value{n, path, i + 1}
		if i == maxItems && elem != reflect.TypeFor[value]() {
			d.errorf(at, "is one too many: a list has at most %d maps", maxItems)
			break
		}
		item.SetZero()
		if d.decode(at, item) {
			into.Set(reflect.Append(into, item))
		}
	}
	return true
}

func (d *decoder) pairs(v value, into reflect.Value) bool {
	if !d.is(v, yaml.MappingNode) {
		return false
	}
	var pairs []pair
	for key, val := range d.entries(v) {
		p := pair{Key: key}
		if d.decode(val, reflect.ValueOf(&p.Value).Elem()) {
			pairs = append(pairs, p)
		}
	}
	into.Set(reflect.ValueOf(pairs))
	return true
}

func (d *decoder) mapping(v value, into reflect.Value) bool {
	if !d.is(v, yaml.MappingNode) {
		return false
	}
	if at := into.FieldByName("At"); at.IsValid() {
		at.Set(reflect.ValueOf(v))
	}
	keys := keysOf(into.Type())
	for k, val := range d.entries(v) {
		d.key(k, val, keys, into)
	}
	for _, k := range keys {
		if _, found := lookup(v.Node, k.name); k.required && !found {
			d.errorf(v, "key %q is missing%s", k.name, missingAdvice(k))
		}
	}
	return true
}

// key decodes one entry of a mapping into the field that it belongs to.
func (d *decoder) key(k, val value, keys []key, into reflect.Value) {
	for _, known := range keys {
		if known.name != k.Value {
			continue
		}
		field := into.Field(known.index)
		d.decode(val, field)
		if list := target(val.Node); known.nonempty && list.Kind == yaml.SequenceNode && len(list.Content) == 0 {
			d.errorf(val, "is empty: %s", emptyAdvice(known))
		}
		return
	}
	if !d.isBeyond(k) {
		d.errorf(k, "unknown key %s: %s", Quote(k.Value), advice(k.path, k.Value, keys))
	}
}

// missingAdvice is what to write for the keys that every document begins with.
func missingAdvice(k key) string {
	switch k.name {
	case "apiVersion":
		return ": write apiVersion: " + APIVersion
	case "kind":
		return ": write kind: " + Kind
	}
	return ""
}

func emptyAdvice(k key) string {
	switch {
	case k.required:
		return "list at least one"
	case k.name == "addresses":
		return "list at least one, or write dhcp in place of addresses to lease them"
	}
	return "leave the key out, or list at least one"
}

// entries yields the keys and values of a mapping, each key once.
func (d *decoder) entries(v value) iter.Seq2[value, value] {
	return func(yield func(value, value) bool) {
		seen, path := map[string]value{}, v.where()
		for i := 0; i+1 < len(v.Content); i += 2 {
			k := value{Node: v.Content[i], path: path}
			if k.Kind != yaml.ScalarNode || k.ShortTag() == "!!null" {
				d.errorf(k, "a key must be text, not %s", describe(k.Node))
				continue
			}
			if d.isTagged(k) {
				continue
			}
			if first, dup := seen[k.Value]; dup {
				d.errorf(k, "key %s is already set in line %d", Quote(k.Value), d.lineOf(first))
				continue
			}
			seen[k.Value] = k
			if !yield(k, value{Node: v.Content[i+1], path: child(path, clip(k.Value))}) {
				return
			}
		}
	}
}

// is reports whether v is of the kind, and records an error if not.
func (d *decoder) is(v value, kind yaml.Kind) bool {
	switch plain := plainTags[kind]; {
	case v.Kind == yaml.ScalarNode && v.ShortTag() == "!!null":
		d.errorf(v, "has no value: write %s, or remove it", something[kind])
	case v.Kind != kind:
		d.errorf(v, "must be %s, not %s%s", kinds[kind], describe(v.Node), kindHint(v, kind))
	case plain != "" && v.ShortTag() != plain:
		d.errorf(v, "has the tag %s, which means nothing here: remove it", ascii(clip(v.Tag)))
	default:
		return true
	}
	return false
}

// isTagged reports whether the value has a tag, and records an error. The kind of a value
// follows from its key, so that a tag could only contradict it. !!str is accepted as another
// way to write quotes.
func (d *decoder) isTagged(v value) bool {
	if v.Style&yaml.TaggedStyle == 0 || v.ShortTag() == "!!str" {
		return false
	}
	d.errorf(v, "has the tag %s, which means nothing here: remove it", ascii(clip(v.Tag)))
	return true
}

// plainTags are the tags of collections without one.
var plainTags = map[yaml.Kind]string{yaml.MappingNode: "!!map", yaml.SequenceNode: "!!seq"}

// kindHint shows how to write what was probably meant.
func kindHint(v value, want yaml.Kind) string {
	switch {
	case want == yaml.SequenceNode && v.Kind == yaml.ScalarNode:
		return ": write [" + ascii(clip(v.Value)) + "]"
	case want == yaml.MappingNode && v.Kind == yaml.ScalarNode && strings.HasSuffix(v.path, "passwordSecretRef"):
		return ": write {name: NAME}, the name of a Secret that has the password under the key password" // the text may be the password
	case want == yaml.ScalarNode && v.Kind == yaml.MappingNode:
		return ": write it in quotes, or after | on lines of its own, to make it text"
	}
	return ""
}

var something = map[yaml.Kind]string{
	yaml.MappingNode: "a map ({} for all defaults)", yaml.SequenceNode: "a list", yaml.ScalarNode: "one",
}

var kinds = map[yaml.Kind]string{
	yaml.MappingNode: "a map", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value", yaml.AliasNode: "an alias",
}

var scalarTags = map[string]string{
	"!!str": "text", "!!int": "a number", "!!float": "a number", "!!bool": "true or false",
	"!!null": "nothing", "!!timestamp": "a date", "!!merge": "a merge key",
}

// describe names the kind of thing that a node is.
func describe(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		return kinds[n.Kind]
	}
	if s, ok := scalarTags[n.ShortTag()]; ok {
		return s
	}
	return "a value tagged " + ascii(clip(n.Tag))
}

// nameOf returns the name that a list item gives itself, quoted, with a space
// before it, for paths.
func nameOf(n *yaml.Node) string {
	if n = target(n); n.Kind != yaml.MappingNode {
		return ""
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, v := n.Content[i].Value, target(n.Content[i+1])
		if (key == "name" || key == "service") && v.Kind == yaml.ScalarNode && v.Value != "" {
			return " " + Quote(v.Value)
		}
	}
	return ""
}
