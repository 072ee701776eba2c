// Package output prints the answers of commands: tables for people, with colours on a terminal, and JSON and
// YAML for programs. Control characters in texts of the cluster are replaced, so that they cannot steer a
// terminal.
package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// Formats are what Format.Set takes.
const Formats = "table, json or yaml"

// Format is in which form a command answers; it is a flag's value.
type Format string

// The formats.
const (
	Table Format = "table"
	JSON  Format = "json"
	YAML  Format = "yaml"
)

// String returns the format as the flag takes it.
func (f *Format) String() string { return string(*f) }

// Type names the flag's value.
func (f *Format) Type() string { return "format" }

// Set takes over the flag's value.
func (f *Format) Set(value string) error {
	switch Format(value) {
	case Table, JSON, YAML:
		*f = Format(value)
		return nil
	}
	return fmt.Errorf("the formats are %s", Formats)
}

// Page is what a command answers.
type Page interface {
	// Show writes it for people.
	Show(c *Canvas)
}

// Print writes the page in the format, with colours only on a terminal.
func Print(out io.Writer, f Format, color bool, p Page) error {
	var text []byte
	var err error
	switch f {
	case JSON, YAML:
		text, err = json.MarshalIndent(p, "", "  ")
		text = append(escape(text), '\n')
		if err == nil && f == YAML {
			text, err = toYAML(text)
		}
	default:
		c := &Canvas{color: color}
		p.Show(c)
		text = []byte(c.text.String())
	}
	if err != nil {
		return err
	}
	_, err = out.Write(text)
	return err
}

// Tone is what a text means to the reader.
type Tone string

// The tones, as the terminal takes them (ECMA-48 SGR).
const (
	Plain   Tone = ""
	Heading Tone = "\x1b[1m"
	Good    Tone = "\x1b[32m"
	Warning Tone = "\x1b[33m"
	Bad     Tone = "\x1b[31m"
	reset        = "\x1b[0m"
)

// Cell is a text with a tone.
type Cell struct {
	Text string
	Tone Tone
}

// Canvas is where a page is written.
type Canvas struct {
	color bool
	text  strings.Builder
}

// Line writes one line, whatever line breaks are in somebody else's text.
func (c *Canvas) Line(t Tone, format string, args ...any) {
	c.text.WriteString(c.paint(Clean(fmt.Sprintf(format, args...)), t) + "\n")
}

// Blank writes an empty line, unless the page is empty.
func (c *Canvas) Blank() {
	if c.text.Len() > 0 {
		c.text.WriteByte('\n')
	}
}

// Rows writes a table, and nothing if it has no rows. The cells of a row are
// strings or Cells. The header may be nil.
func (c *Canvas) Rows(header []string, rows [][]any) {
	if len(rows) == 0 {
		return
	}
	var all [][]Cell
	if header != nil {
		var head []Cell
		for _, h := range header {
			head = append(head, Cell{h, Heading})
		}
		all = append(all, head)
	}
	for _, row := range rows {
		var cells []Cell
		for _, v := range row {
			cell, ok := v.(Cell)
			if !ok {
				cell.Text = fmt.Sprint(v)
			}
			cell.Text = Clean(cell.Text)
			cells = append(cells, cell)
		}
		all = append(all, cells)
	}
	c.write(all)
}

// Table writes Rows after an empty line, and nothing if there are none.
func (c *Canvas) Table(header []string, rows [][]any) {
	if len(rows) > 0 {
		c.Blank()
		c.Rows(header, rows)
	}
}

// write aligns the columns; no line ends in spaces.
func (c *Canvas) write(rows [][]Cell) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell.Text))
		}
	}
	for _, row := range rows {
		last := len(row) - 1
		for last > 0 && row[last].Text == "" {
			last--
		}
		for i, cell := range row[:last+1] {
			c.text.WriteString(c.paint(cell.Text, cell.Tone))
			if i < last {
				c.text.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell.Text)+2))
			}
		}
		c.text.WriteByte('\n')
	}
}

func (c *Canvas) paint(text string, t Tone) string {
	if !c.color || t == Plain || text == "" {
		return text
	}
	return string(t) + text + reset
}

// Clean replaces the characters of a line that would steer the terminal or turn the direction of reading. The texts
// come from users of the cluster.
func Clean(line string) string {
	return strings.Map(func(r rune) rune {
		if steers(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, line)
}

func steers(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) }

// escape escapes in JSON the characters that steer the terminal and that package json leaves as they are. They
// can only be within strings.
func escape(text []byte) []byte {
	if !bytes.ContainsFunc(text, func(r rune) bool { return steers(r) && r != '\n' }) {
		return text
	}
	var out bytes.Buffer
	for _, r := range string(text) {
		if steers(r) && r != '\n' {
			fmt.Fprintf(&out, `\u%04x`, r)
		} else {
			out.WriteRune(r)
		}
	}
	return out.Bytes()
}

// toYAML writes JSON as YAML. The library escapes only some of the characters that steer the terminal. A text with others
// stays JSON, which is YAML, too.
func toYAML(text []byte) ([]byte, error) {
	out, err := yaml.JSONToYAML(text) // which refuses control characters
	if err != nil || bytes.ContainsFunc(out, func(r rune) bool { return steers(r) && r != '\n' }) {
		return text, err
	}
	return out, nil
}

// barWidth is how many characters a bar has.
const barWidth = 20

// Bar draws how much of the whole is used. It is empty only if nothing is used, and full only if all is.
func Bar(used, whole float64) string {
	n := 0
	if whole > 0 {
		n = int(barWidth * min(1, used/whole))
	}
	if n == 0 && used > 0 {
		n = 1
	}
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", barWidth-n) + "]"
}

// Age writes how long ago something was, in one unit.
func Age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Number writes a count; that of an IPv6 pool is rounded.
func Number(n float64) string {
	if n >= 1e15 {
		return fmt.Sprintf("about %.1e", n)
	}
	return fmt.Sprintf("%.0f", n)
}

// Count returns a number and what it counts.
func Count(n int, one, many string) string {
	if n == 1 {
		many = one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// Strings returns the text of each value.
func Strings[T fmt.Stringer](all []T) []string {
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = v.String()
	}
	return texts
}

// List joins the first few of the names, and counts the others.
func List(names []string, few int) string {
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
