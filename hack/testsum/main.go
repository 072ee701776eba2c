// Command testsum reads the events of `go test -json` from standard input and
// prints what a reader needs: a line per package, the output of what failed
// in full, why a test was skipped, and a last line of counts. It fails when a
// test failed and, with -strict, when one was skipped.
//
//	main.go     the flags
//	summary.go  what is printed
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	strict := flag.Bool("strict", false, "fail when a test was skipped")
	flag.Parse()
	s := newSummary(os.Stdout)
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "read test events: %v\n", err)
		os.Exit(2)
	}
	if !s.close(*strict) {
		os.Exit(1)
	}
}
