package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"reflect"
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
		return nil, d.errs.errorOrNil()
	}
	return d.parseRoot(roots, doc)
}

// parseRoot compiles the one document of a stream.
func (d *decoder) parseRoot(roots []*yaml.Node, doc []byte) (*Config, error) {
	if len(roots) > 1 {
		second := roots[1]
		d.errorAt(second.Line, second.Column, "", "a second document starts here: put all configuration in one, without ---")
		return nil, d.errs.errorOrNil()
	}
	if len(roots) == 0 || blank(roots[0]) {
		d.errorAt(1, 1, "", "the document is empty: it needs at least apiVersion: %s and kind: %s", APIVersion, Kind)
		return nil, d.errs.errorOrNil()
	}
	root := value{Node: roots[0].Content[0]}
	if !d.isOurs(root) {
		return nil, d.errs.errorOrNil()
	}
	var raw rawConfig
	d.decode(root, reflect.ValueOf(&raw).Elem())
	if d.aliased > maxAliased {
		d.errs = nil
		d.errorf(root, "aliases (*) repeat more than %d values of the document: write them out", maxAliased)
		return nil, d.errs.errorOrNil()
	}
	d.header(&raw)
	c := d.compile(&raw)
	if err := d.errs.errorOrNil(); err != nil {
		return nil, err
	}
	digest := sha256.Sum256(doc)
	c.Digest = hex.EncodeToString(digest[:])
	return c, nil
}

func blank(document *yaml.Node) bool {
	n := document.Content[0]
	return n.Kind == yaml.ScalarNode && n.Value == ""
}

// isOurs reports whether the document is one that this version can say
// anything about; every key of another one would be unknown.
func (d *decoder) isOurs(root value) bool {
	if root.Kind != yaml.MappingNode {
		d.errorf(root, "the document must be a map with apiVersion: %s and kind: %s, not %s", APIVersion, Kind, describe(root.Node))
		return false
	}
	v, found := lookup(root.Node, "apiVersion")
	if found && v.Kind == yaml.ScalarNode && v.ShortTag() == "!!str" && v.Value != APIVersion {
		d.errorf(value{v, "apiVersion"}, "%s is not a version of this document: this program reads %s", quote(v.Value), APIVersion)
		return false
	}
	return true
}

func (d *decoder) header(raw *rawConfig) {
	oneOf(d, raw.APIVersion, []string{APIVersion})
	oneOf(d, raw.Kind, []string{Kind})
}

// lookup returns the value of a key of a mapping.
func lookup(mapping *yaml.Node, key string) (*yaml.Node, bool) {
	for i := 0; mapping.Kind == yaml.MappingNode && i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1], true
		}
	}
	return nil, false
}

// documents splits a text into its YAML documents, or records why it is none.
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
	roots, err := documentsOf(bytes.NewReader(text))
	if err != nil {
		d.syntaxError(text, err)
		return nil
	}
	return roots
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
