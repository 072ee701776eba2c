package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxPrinted is how many errors Errors.Error writes out.
	maxPrinted = 100
	// maxKept is how many errors Parse returns: the first ones of the document.
	// A document of 1 MiB can have half a million.
	maxKept = 1000
)

// Error is one thing that is wrong with a document.
type Error struct {
	// File is what the position counts in. Empty: the document itself, Key.
	File string `json:"-"`
	// Line and Column count from 1; a column is a character, not a byte.
	Line   int `json:"line"`
	Column int `json:"column"`
	// Path names the part of the document, such as `pools[1] "dmz"`. Empty:
	// the document as a whole.
	Path string `json:"path,omitempty"`
	// Message is what is wrong, with the value and the bound.
	Message string `json:"message"`
}

// Error returns "file:line:column: path: message".
func (e Error) Error() string {
	file := cmp.Or(e.File, Key)
	if e.Path == "" {
		return fmt.Sprintf("%s:%d:%d: %s", file, e.Line, e.Column, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s: %s", file, e.Line, e.Column, e.Path, e.Message)
}

// Errors is what is wrong with a document, in its order: everything, or the
// first maxKept errors of more.
type Errors []Error

// Error returns one line per error; of very many, the first hundred.
func (e Errors) Error() string {
	if len(e) >= maxKept {
		return Lines(e, "and at least %d more errors")
	}
	return Lines(e, "and %d more errors")
}

// Lines returns one line per error; of very many, the first hundred, and last how many more there are.
func Lines[E error](errs []E, andMore string) string {
	var lines []string
	for _, err := range errs[:min(len(errs), maxPrinted)] {
		lines = append(lines, err.Error())
	}
	if more := len(errs) - maxPrinted; more > 0 {
		lines = append(lines, fmt.Sprintf(andMore, more))
	}
	return strings.Join(lines, "\n")
}

// report collects errors and keeps the first maxKept of the document. Its file,
// line and column are where the document lies in a larger file.
type report struct {
	file         string
	line, column int
	errs         Errors
	full         bool // there were more errors, behind all that are kept
}

// errorAt records an error at a position of the document.
func (r *report) errorAt(line, column int, path, format string, args ...any) {
	r.add(Error{
		File: r.file, Line: line + r.line, Column: column + r.column,
		Path: path, Message: fmt.Sprintf(format, args...),
	})
}

// errorf records an error at a value.
func (r *report) errorf(v value, format string, args ...any) {
	if !r.isBeyond(v) {
		r.errorAt(v.Line, v.Column, v.where(), format, args...)
	}
}

// isBeyond reports whether an error at the value would be dropped.
func (r *report) isBeyond(v value) bool { return r.beyond(v.Line+r.line, v.Column+r.column) }

// lineOf is the line of a value as the reader of the file counts.
func (r *report) lineOf(v value) int { return v.Line + r.line }

// once refuses a value whose key another one has already. The last argument of the format is
// the line of that one. It reports whether the key is new.
func once[K comparable](r *report, seen map[K]value, key K, v value, format string, args ...any) bool {
	first, dup := seen[key]
	if dup && first.Line == v.Line && first.Column == v.Column {
		format += ", and an alias (*) repeats that one: write both out"
	}
	if dup {
		r.errorf(v, format, append(args, r.lineOf(first))...)
	} else {
		seen[key] = v
	}
	return !dup
}

// beyond reports whether an error at the position would be dropped.
func (r *report) beyond(line, column int) bool {
	return r.full && inDocument(r.errs[maxKept-1], Error{Line: line, Column: column}) <= 0
}

// add adds an error. The errors behind the first maxKept are dropped from time
// to time, so that an error costs as much as the sorting of its share.
func (r *report) add(e Error) {
	if r.beyond(e.Line, e.Column) {
		return
	}
	if r.errs = append(r.errs, e); len(r.errs) == 2*maxKept {
		r.sort()
	}
}

func (r *report) sort() {
	slices.SortStableFunc(r.errs, inDocument)
	if len(r.errs) > maxKept {
		clear(r.errs[maxKept:])
		r.errs, r.full = r.errs[:maxKept], true
	}
}

// inDocument compares the positions of two errors.
func inDocument(a, b Error) int {
	return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
}

// errorOrNil returns the sorted errors, or nil when there are none.
func (r *report) errorOrNil() error {
	if len(r.errs) == 0 {
		return nil
	}
	r.sort()
	return r.errs
}

// maxQuoted is how much of a value, in characters, an error repeats.
const maxQuoted = 64

// Quote quotes what a user wrote, the start of it if it is long.
// Letters beyond ASCII are written as escapes: many look like others.
func Quote(s string) string { return strconv.QuoteToASCII(clip(s)) }

// ascii is what the user wrote, without quotes.
func ascii(s string) string { return strings.Trim(strconv.QuoteToASCII(s), `"`) }

func clip(s string) string {
	runes := 0
	for i := range s {
		if runes == maxQuoted {
			return s[:i] + "..."
		}
		runes++
	}
	return s
}

// legacyKey is the first key of the configuration that MetalLB had in a ConfigMap.
const legacyKey = "address-pools"

// elsewhere are keys that people expect in places where they are not.
var elsewhere = map[string]string{
	legacyKey:      "this is the configuration of MetalLB before v0.13: lodestone migrate metallb makes one of ours of its ConfigMap",
	"draining":     "write state: draining",
	"ebgpMultiHop": "write multihop, with the number of hops",
	"localPref":    "write localPreference",
	"myASN":        "write localASN",
	"metadata":     "the document is no object of Kubernetes: remove it",
	"password":     "write passwordSecretRef, the password itself belongs in a Secret",
	"peerAddress":  "write address",
	"spec":         "the document is no object of Kubernetes: write what is below it without indentation",
	"shareLoad":    "it was removed: write forwarding: direct to have several nodes keep connections, or use several addresses or BGP",
	"<<":           "merge keys are not supported: write the keys out",
}

// advice is what an unknown key was probably meant to be.
func advice(path, unknown string, keys []key) string {
	if hint, ok := elsewhere[unknown]; ok {
		return hint
	}
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	if best := Nearest(unknown, names); best != "" {
		return "did you mean " + strconv.Quote(best) + "?"
	}
	if strings.HasSuffix(path, "Selector") {
		return "labels go under matchLabels"
	}
	if home := homeOf(unknown); home != "" {
		return "it belongs in " + home
	}
	return "the keys here are " + strings.Join(names, ", ")
}

// homeOf returns the place of the key when there is exactly one.
func homeOf(name string) string {
	var homes []string
	for _, path := range knownKeys() {
		if home, ok := strings.CutSuffix(path, "."+name); ok {
			homes = append(homes, home)
		}
	}
	if len(homes) != 1 {
		return ""
	}
	return homes[0]
}

// Nearest returns the name that differs least from an unknown one, if it differs in no more than a third of its
// letters.
func Nearest(unknown string, names []string) string {
	if len(unknown) > maxQuoted {
		return ""
	}
	best, at := "", 0
	for _, name := range names {
		if n := distance(strings.ToLower(unknown), strings.ToLower(name)); n <= max(1, len(name)/3) && (best == "" || n < at) {
			best, at = name, n
		}
	}
	return best
}

// distance is the Levenshtein distance of two short strings.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// join lists accepted values for a message.
func join[T ~string](values []T) string {
	var b strings.Builder
	for i, v := range values {
		if i > 0 {
			b.WriteString(" or ")
		}
		b.WriteString(string(v))
	}
	return b.String()
}
