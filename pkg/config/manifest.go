package config

import (
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ParseFile reads a file that holds either a document or the manifest of a
// ConfigMap that has one under Key, other manifests beside it notwithstanding.
// Positions in errors are positions in the file, whose name they begin with.
func ParseFile(name string, text []byte) (*Config, error) {
	d := &decoder{file: name}
	roots := d.documents(text)
	if len(d.errs) > 0 {
		return nil, d.errs.errorOrNil()
	}
	maps := configMaps(roots)
	if len(maps) == 0 {
		return d.parseRoot(roots, text)
	}
	doc, ok := d.embedded(maps)
	if !ok {
		return nil, d.errs.errorOrNil()
	}
	d.enter(doc, string(text))
	return d.parse([]byte(doc.Value))
}

// configMaps returns the ConfigMaps among some manifests.
func configMaps(roots []*yaml.Node) []*yaml.Node {
	var maps []*yaml.Node
	for _, root := range roots {
		if kind, ok := lookup(root.Content[0], "kind"); ok && kind.Value == "ConfigMap" {
			maps = append(maps, root.Content[0])
		}
	}
	return maps
}

// embedded returns the one document that the ConfigMaps hold.
func (d *decoder) embedded(maps []*yaml.Node) (value, bool) {
	var docs []value
	for _, m := range maps {
		data, _ := lookup(m, "data")
		if data == nil {
			continue
		}
		if doc, ok := lookup(data, Key); ok {
			docs = append(docs, value{doc, "data[" + Key + "]"})
		}
	}
	switch {
	case len(docs) == 0:
		d.errorf(value{Node: maps[0]}, "the ConfigMap has no key %s under data", Key)
		return value{}, false
	case len(docs) > 1:
		d.errorf(docs[1], "the file has a second document, the first is in line %d: validate one at a time", d.lineOf(docs[0]))
		return value{}, false
	}
	return docs[0], d.is(docs[0], yaml.ScalarNode)
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
