package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// MaxSize is the largest document, in bytes: what a ConfigMap can hold.
const MaxSize = 1 << 20

// Parse reads a document. The error is an Errors with everything that is
// wrong with it.
func Parse(doc []byte) (*Config, error) {
	return (&decoder{}).parse(doc)
}

func (d *decoder) parse(doc []byte) (*Config, error) {
	roots := d.documents(doc)
	if len(d.errs) > 0 {
		return nil, d.errorOrNil()
	}
	return d.parseRoot(roots, doc)
}

// parseRoot compiles the one document of a stream.
func (d *decoder) parseRoot(roots []*yaml.Node, doc []byte) (*Config, error) {
	root, ok := d.root(roots)
	if !ok {
		return nil, d.errorOrNil()
	}
	var raw rawConfig
	d.decode(root, reflect.ValueOf(&raw).Elem())
	if d.repeatsTooMuch() {
		d.errs, d.full = nil, false
		d.errorf(root, "aliases (*) repeat more than %d values or %d bytes of the document: write them out", maxAliased, maxAliasedBytes)
		return nil, d.errorOrNil()
	}
	c := compile(&raw, &d.report)
	if err := d.errorOrNil(); err != nil {
		return nil, err
	}
	digest := sha256.Sum256(doc)
	c.Digest = hex.EncodeToString(digest[:])
	return c, nil
}

// root returns the top of the one document of a stream.
func (d *decoder) root(roots []*yaml.Node) (value, bool) {
	if len(roots) == 0 {
		d.errorAt(1, 1, "", "the document is empty: it needs at least apiVersion: %s and kind: %s", APIVersion, Kind)
		return value{}, false
	}
	root := value{Node: roots[0].Content[0]}
	if !d.isOurs(root) {
		return value{}, false
	}
	if len(roots) > 1 {
		d.errorf(value{Node: roots[1]}, "a second document starts here: put all configuration in one, without ---")
	}
	return root, len(roots) == 1
}

// blank reports whether there is nothing in a document, as after a trailing ---.
func blank(document *yaml.Node) bool {
	n := document.Content[0]
	return n.Kind == yaml.ScalarNode && n.Value == ""
}

// isOurs reports whether the document is of the version and kind that this program reads.
// Every key of another one would be unknown.
func (d *decoder) isOurs(root value) bool {
	if root.Kind != yaml.MappingNode {
		d.errorf(root, "the document must be a map with apiVersion: %s and kind: %s, not %s", APIVersion, Kind, describe(root.Node))
		return false
	}
	v, found := lookup(root.Node, "apiVersion")
	if values, ok := lookup(root.Node, "config"); ok && !found && values.Kind == yaml.MappingNode {
		d.errorf(value{Node: values, path: "config"}, "looks like a value of the chart, which makes the document of it: "+
			"helm template lodestone deploy/chart --values FILE --show-only templates/config.yaml | lodestone validate -")
		return false
	}
	if found && v.Kind == yaml.ScalarNode && v.ShortTag() == "!!str" && v.Value != APIVersion {
		hint := ""
		switch group, _, _ := strings.Cut(v.Value, "/"); {
		case strings.HasSuffix(group, "metallb.io"):
			hint = "; lodestone migrate metallb makes one of MetalLB's objects"
		case v.Value == "v1":
			hint = "; of Kubernetes' own objects a ConfigMap has one, under the key " + Key
		}
		d.errorf(value{Node: v, path: "apiVersion"}, "%s is not a version of this document: this program reads %s%s", Quote(v.Value),
			APIVersion, hint)
		return false
	}
	return true
}

// ParseFile reads a file that holds either a document or the manifest of a ConfigMap that has
// one under Key. There may be other manifests in it. Positions in errors are positions in the
// file, whose name they begin with.
func ParseFile(name string, text []byte) (*Config, error) {
	d := &decoder{report: report{file: name}}
	roots := d.documents(text)
	if len(d.errs) > 0 {
		return nil, d.errorOrNil()
	}
	maps := configMaps(roots)
	if len(maps) == 0 {
		return d.parseRoot(roots, text)
	}
	doc, ok := d.embedded(maps)
	if !ok {
		return nil, d.errorOrNil()
	}
	inner := &decoder{report: report{file: name}}
	inner.enter(doc, string(text))
	cfg, err := inner.parse([]byte(doc.Value))
	if err != nil && doc.Style&yaml.FoldedStyle != 0 {
		d.errorf(doc, "is written after >, which joins its lines: write %s: |", Key)
		return nil, d.errorOrNil()
	}
	return cfg, err
}

// configMaps returns the ConfigMaps among some manifests, those in a List
// included.
func configMaps(roots []*yaml.Node) []*yaml.Node {
	var maps []*yaml.Node
	for _, root := range roots {
		manifests := root.Content
		if items, ok := lookup(root.Content[0], "items"); ok && strings.HasSuffix(kindOf(root.Content[0]), "List") {
			manifests = items.Content
		}
		for _, m := range manifests {
			if m = target(m); kindOf(m) == "ConfigMap" {
				maps = append(maps, m)
			}
		}
	}
	return maps
}

func kindOf(manifest *yaml.Node) string {
	if kind, ok := lookup(manifest, "kind"); ok {
		return kind.Value
	}
	return ""
}

// withoutKey refuses a ConfigMap that has no document. It names the key that was probably meant to have it.
func (d *decoder) withoutKey(configMap *yaml.Node) {
	at, hint := configMap, "write the document there, after "+Key+": |"
	data, _ := lookup(configMap, "data")
	if data != nil && data.Kind == yaml.MappingNode {
		var names []string
		for i := 0; i+1 < len(data.Content); i += 2 {
			names = append(names, data.Content[i].Value)
		}
		near := Nearest(Key, names)
		old, isOld := lookup(data, "config")
		switch {
		case isOld && strings.Contains(old.Value, legacyKey+":"):
			hint = elsewhere[legacyKey]
		case near != "":
			at, hint = data.Content[2*slices.Index(names, near)], "rename "+Quote(near)
		}
	}
	if binary, _ := lookup(configMap, "binaryData"); data == nil && binary != nil {
		at, hint = binary, "binaryData is not read, and kubectl puts there what is not text in UTF-8"
	}
	d.errorf(value{Node: at}, "the ConfigMap has no key %s under data: %s", Key, hint)
}

// embedded returns the one document that the ConfigMaps hold.
func (d *decoder) embedded(maps []*yaml.Node) (value, bool) {
	var docs []value
	for _, m := range maps {
		data, _ := lookup(m, "data")
		if data == nil {
			continue
		}
		d.refuseDoubles(value{Node: m})
		d.refuseDoubles(value{Node: data, path: "data"})
		if doc, ok := lookup(data, Key); ok {
			docs = append(docs, value{Node: doc, path: "data[" + Key + "]"})
		}
	}
	switch {
	case len(docs) == 0:
		d.withoutKey(maps[0])
		return value{}, false
	case len(docs) > 1:
		d.errorf(docs[1], "the file has a second document, the first is in line %d: validate one at a time", d.lineOf(docs[0]))
		return value{}, false
	}
	return docs[0], d.is(docs[0], yaml.ScalarNode) && len(d.errs) == 0
}

// refuseDoubles refuses a key that is in a map twice, because parsers differ in which of the
// two counts.
func (d *decoder) refuseDoubles(mapping value) {
	if mapping.Kind == yaml.MappingNode {
		for range d.entries(mapping) {
		}
	}
}

// enter makes the decoder count positions from where the document begins in
// the file. Only in a literal block (|) does every line of the document have
// a line of its own; otherwise the error names both places.
func (d *decoder) enter(doc value, file string) {
	if doc.Style&yaml.LiteralStyle == 0 {
		d.file = fmt.Sprintf("%s:%d:%d: %s", d.file, doc.Line, doc.Column, Key)
		return
	}
	d.line = doc.Line
	inner, outer := strings.Split(doc.Value, "\n"), strings.Split(file, "\n")
	for i, line := range inner {
		if n := doc.Line + i; strings.TrimSpace(line) != "" && n < len(outer) {
			d.column = max(0, len(strings.TrimSuffix(outer[n], "\r"))-len(line))
			return
		}
	}
}

// lookup returns the value of a key of a mapping.
func lookup(mapping *yaml.Node, key string) (*yaml.Node, bool) {
	for i := 0; mapping.Kind == yaml.MappingNode && i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return target(mapping.Content[i+1]), true
		}
	}
	return nil, false
}

// documents splits a text into its YAML documents, or records why it is not YAML.
func (d *decoder) documents(text []byte) []*yaml.Node {
	if len(text) > MaxSize {
		d.errorAt(1, 1, "", "the document is larger than %d bytes (1 MiB), the most that a ConfigMap holds", MaxSize)
		return nil
	}
	if i := firstUnprintable(text); i >= 0 {
		line, column := position(text, i)
		d.errorAt(line, column, "", "byte 0x%02x is not text: write the document in UTF-8, without control characters", text[i])
		return nil
	}
	text = yaml11(text)
	roots, err := documentsOf(bytes.NewReader(text))
	if err != nil {
		d.syntaxError(text, err)
		return nil
	}
	return slices.DeleteFunc(roots, blank)
}

var yaml12 = regexp.MustCompile(`^(?:\x{feff}|[ \t]*(?:#[^\n]*)?\r?\n)*%YAML[ \t]+1\.2[ \t\r\n]`)

// yaml11 replaces the directive of YAML 1.2 by that of 1.1, which is all that the parser
// knows. Our documents mean the same in both.
func yaml11(text []byte) []byte {
	match := yaml12.FindIndex(text)
	if match == nil {
		return text
	}
	text = bytes.Clone(text)
	text[match[1]-2] = '1'
	return text
}

// documentsOf reads YAML documents until the end or an error.
func documentsOf(text io.Reader) ([]*yaml.Node, error) {
	var roots []*yaml.Node
	for dec := yaml.NewDecoder(text); ; {
		var n yaml.Node
		switch err := dec.Decode(&n); {
		case errors.Is(err, io.EOF):
			return roots, nil
		case err != nil:
			return nil, err
		}
		roots = append(roots, &n)
	}
}

// firstUnprintable returns the index of the first byte that YAML does not
// allow, or -1.
func firstUnprintable(text []byte) int {
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		if (r == utf8.RuneError && size == 1) || r == 0x7f || (r < 0x20 && r != '\t' && r != '\n' && r != '\r') {
			return i
		}
		i += size
	}
	return -1
}

// position returns line and column of a byte of the text.
func position(text []byte, offset int) (line, column int) {
	before := text[:offset]
	start := bytes.LastIndexByte(before, '\n') + 1
	return 1 + bytes.Count(before, []byte("\n")), 1 + utf8.RuneCount(before[start:])
}

// How far to look for the line that breaks a document: how many lines before
// the place where the parser stops, and how many bytes it may read again.
const (
	maxSearchedLines = 200
	maxSearchedBytes = 256 << 10
)

var yamlPrefix = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// syntaxHints are what the YAML parser's errors mean in practice.
var syntaxHints = map[string]string{
	"found character that cannot start any token":    "quote values that begin with @, %, ` or another sign",
	"mapping values are not allowed in this context": "check the indentation of this line, and quote values that contain ': '",
	"did not find expected key":                      "check the indentation of this line: the keys of a map begin in one column",
	"did not find expected '-' indicator":            "check the indentation of this line: the items of a list begin in one column",
	"could not find expected ':'":                    "a key is followed by ':' and a space",
	"found unexpected end of stream":                 "a quote opened here is not closed",
	"did not find expected ',' or ']'":               "a '[' opened here is not closed, or a comma is missing",
	"did not find expected ',' or '}'":               "a '{' opened here is not closed, or a comma is missing",
	"found unknown escape character":                 "in double quotes \\ begins an escape: use single quotes",
	"did not find expected <document start>":         "text follows the end of the document",
	"did not find expected node content":             "quote values that begin with ':', ',' or another sign",
}

// noBreakSpace looks like a space, and is none for YAML.
const noBreakSpace = "\u00a0"

// syntaxError records why the text is no YAML. The parser names no column and
// often a line nearby, so the place is found by trying.
func (d *decoder) syntaxError(text []byte, err error) {
	problem := yamlPrefix.ReplaceAllString(err.Error(), "")
	named := 0 // the line that the parser names: often that of the bracket or quote
	if match := yamlPrefix.FindStringSubmatch(err.Error()); match != nil {
		named, _ = strconv.Atoi(match[1]) // 0 where it names none
	}
	line := brokenLine(text, named)
	for n := line; n > max(0, line-2); n-- {
		if column, key, rest, found := withoutSpace(lineOf(text, n)); found {
			d.errorAt(n, column, "", "this is not YAML: a key is followed by ':' and a space: write %s: %s", key, ascii(clip(rest)))
			return
		}
		code, _, _ := strings.Cut(lineOf(text, n), "#")
		if before, _, found := strings.Cut(code, noBreakSpace); found {
			d.errorAt(n, utf8.RuneCountInString(before)+1, "", "this is not YAML: here is a no-break space (U+00A0), as web pages "+
				"have them: type an ordinary one")
			return
		}
	}
	broken := lineOf(text, line)
	indent, tab := indentation(broken)
	hint := syntaxHints[problem]
	switch {
	case tab:
		hint = "indent with spaces, not with tabs"
	case tabAfterDash.MatchString(broken):
		hint = "write a space after -, not a tab"
	case strings.HasPrefix(broken, "%"):
		hint = "a line that begins with % is a directive, which only %YAML and %TAG are: quote what is meant as text"
	case strings.HasPrefix(broken[indent:], "@") || strings.HasPrefix(broken[indent:], "`"):
		hint = "quote values that begin with @, %, ` or another sign"
	}
	if hint != "" {
		problem += ": " + hint
	}
	d.errorAt(line, indent+1, "", "this is not YAML: %s", problem)
}

// brokenLine returns the line that breaks the text: the first one after the longest run of
// whole lines that is valid. It searches near the line where the parser stops and near the
// line that the parser names. It returns the latter when it has read as much as it may.
func brokenLine(text []byte, named int) int {
	r := &trickle{text: text}
	_, _ = documentsOf(r)
	last, _ := position(text, max(r.read-1, 0))
	read := 0
	isValid := func(lines int) bool {
		before := firstLines(text, lines)
		read += len(before)
		_, err := documentsOf(bytes.NewReader(before))
		return err == nil
	}
	for line := last; line > max(0, last-maxSearchedLines) && read+r.read <= maxSearchedBytes; line-- {
		if isValid(line - 1) {
			return line
		}
	}
	if named == 0 || named > last {
		return last
	}
	for line := named; line > max(0, named-2) && r.read <= maxSearchedBytes; line-- {
		if isValid(line - 1) {
			return line
		}
	}
	return named
}

// trickle gives its text byte by byte, so that it knows how far its reader
// has come.
type trickle struct {
	text []byte
	read int
}

func (t *trickle) Read(p []byte) (int, error) {
	if t.read == len(t.text) || len(p) == 0 {
		return 0, io.EOF
	}
	p[0] = t.text[t.read]
	t.read++
	return 1, nil
}

// firstLines returns the first n lines of the text.
func firstLines(text []byte, n int) []byte {
	end := 0
	for range n {
		next := bytes.IndexByte(text[end:], '\n')
		if next < 0 {
			return text
		}
		end += next + 1
	}
	return text[:end]
}

// lineOf returns a line of the text.
func lineOf(text []byte, line int) string {
	rest, _, _ := bytes.Cut(text[len(firstLines(text, line-1)):], []byte("\n"))
	return string(rest)
}

// indentation returns the width of the white space that begins a line, and
// whether there is a tab in it.
func indentation(line string) (width int, tab bool) {
	width = len(line) - len(strings.TrimLeft(line, " \t"))
	return width, strings.Contains(line[:width], "\t")
}

var (
	tabAfterDash = regexp.MustCompile(`^ *-\t`)
	keyAndColon  = regexp.MustCompile(`^( *(?:- +)*)([A-Za-z][A-Za-z0-9]*):(\S.*)$`)
)

// withoutSpace finds a key of the document that is followed by ':' without a
// space: the parser takes it for text, and complains about what follows.
func withoutSpace(line string) (column int, key, rest string, found bool) {
	match := keyAndColon.FindStringSubmatch(strings.TrimRight(line, " \r"))
	if match == nil {
		return 0, "", "", false
	}
	isKey := func(path string) bool { return path == match[2] || strings.HasSuffix(path, "."+match[2]) }
	if !slices.ContainsFunc(knownKeys(), isKey) {
		return 0, "", "", false
	}
	return len(match[1]) + 1, match[2], match[3], true
}
