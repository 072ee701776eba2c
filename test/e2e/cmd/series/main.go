// Command series finds the series that PromQL expressions read. It takes a JSON
// array of expressions on standard input and answers with an array of the same
// length, each element the selectors of one expression.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// Selector is a selector of series in an expression.
type Selector struct {
	Name     string    `json:"name"`
	Matchers []Matcher `json:"matchers"`
}

// Matcher is a condition on a label, as in cause="bfd".
type Matcher struct {
	Label string `json:"label"`
	Type  string `json:"type"` // =, !=, =~ or !~
	Value string `json:"value"`
}

// Expression is what an expression reads.
type Expression struct {
	Selectors []Selector `json:"selectors"`
	// Grouping are the labels that it aggregates or matches by.
	Grouping []string `json:"grouping"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "series:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	var expressions []string
	if err := json.NewDecoder(in).Decode(&expressions); err != nil {
		return fmt.Errorf("read expressions: %w", err)
	}
	read := make([]Expression, len(expressions))
	for i, text := range expressions {
		e, err := parser.NewParser(parser.Options{}).ParseExpr(text)
		if err != nil {
			return fmt.Errorf("parse %q: %w", text, err)
		}
		read[i] = inspect(e)
	}
	return json.NewEncoder(out).Encode(read)
}

func inspect(e parser.Expr) Expression {
	var read Expression
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			read.Selectors = append(read.Selectors, selector(n))
		case *parser.AggregateExpr:
			read.Grouping = append(read.Grouping, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				read.Grouping = append(read.Grouping, n.VectorMatching.MatchingLabels...)
				read.Grouping = append(read.Grouping, n.VectorMatching.Include...)
			}
		}
		return nil
	})
	return read
}

func selector(n *parser.VectorSelector) Selector {
	s := Selector{Name: n.Name}
	for _, m := range n.LabelMatchers {
		if m.Name != labels.MetricName {
			s.Matchers = append(s.Matchers, Matcher{m.Name, m.Type.String(), m.Value})
		}
	}
	return s
}
