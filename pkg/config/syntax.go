package config

import (
	"bytes"
	"io"
	"regexp"
	"strings"
)

// How far to look for the line that breaks a document: further is too slow
// for what it is worth.
const (
	maxSearchedBytes = 64 << 10
	maxSearchedLines = 200
)

var yamlPrefix = regexp.MustCompile(`^yaml: (line \d+: )?`)

// syntaxHints say what the YAML parser's complaints mean in practice.
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
}

// syntaxError records why the text is no YAML. The parser names no column and
// often a line nearby, so the place is found by trying.
func (d *decoder) syntaxError(text []byte, err error) {
	problem := yamlPrefix.ReplaceAllString(err.Error(), "")
	line := brokenLine(text)
	indent, tab := indentation(text, line)
	hint := syntaxHints[problem]
	if tab {
		hint = "indent with spaces, not with tabs"
	}
	if hint != "" {
		problem += ": " + hint
	}
	d.errorAt(line, indent+1, "", "this is not YAML: %s", problem)
}

// brokenLine returns the line after which nothing can make the text valid
// again: the first after the longest run of whole lines that is valid.
func brokenLine(text []byte) int {
	r := &trickle{text: text}
	_, _ = documentsOf(r)
	last, _ := position(text, max(r.read-1, 0))
	if len(text) > maxSearchedBytes {
		return last
	}
	for line := last; line > max(0, last-maxSearchedLines); line-- {
		if _, err := documentsOf(bytes.NewReader(firstLines(text, line-1))); err == nil {
			return line
		}
	}
	return last
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

// indentation returns the width of the white space that begins a line, and
// whether there is a tab in it.
func indentation(text []byte, line int) (width int, tab bool) {
	rest := string(text[len(firstLines(text, line-1)):])
	width = len(rest) - len(strings.TrimLeft(rest, " \t"))
	return width, strings.Contains(rest[:width], "\t")
}
