package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxPrinted is how many errors Errors.Error spells out.
const maxPrinted = 100

// Error is one thing that is wrong with a document.
type Error struct {
	// File is what the position counts in. Empty: the document itself, Key.
	File string
	// Line and Column count from 1; a column is a character, not a byte.
	Line, Column int
	// Path names the part of the document, such as `pools[1] "dmz"`. Empty:
	// the document as a whole.
	Path string
	// Message says what is wrong, with the value and the bound.
	Message string
}

// Error returns "file:line:column: path: message".
func (e Error) Error() string {
	file := cmp.Or(e.File, Key)
	if e.Path == "" {
		return fmt.Sprintf("%s:%d:%d: %s", file, e.Line, e.Column, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s: %s", file, e.Line, e.Column, e.Path, e.Message)
}

// Errors is everything that is wrong with a document, in its order.
type Errors []Error

// Error returns one line per error; of very many, the first hundred.
func (e Errors) Error() string {
	lines := make([]string, 0, min(len(e), maxPrinted)+1)
	for _, err := range e[:min(len(e), maxPrinted)] {
		lines = append(lines, err.Error())
	}
	if more := len(e) - maxPrinted; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more errors", more))
	}
	return strings.Join(lines, "\n")
}

// errorOrNil returns the sorted errors, or nil when there are none.
func (e Errors) errorOrNil() error {
	if len(e) == 0 {
		return nil
	}
	slices.SortStableFunc(e, func(a, b Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return e
}
