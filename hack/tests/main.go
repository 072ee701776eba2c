// Command tests runs the project's tests and prints what a reader needs: a line per package, the output
// of what failed in full, why a test was skipped, and a last line of counts. It fails when a test failed and, with
// -strict, when one was skipped. What follows the kind of tests (unit, e2e or all) goes to go test.
//
//	main.go     the flags
//	plan.go     which packages run together, and when
//	run.go      go test is run, and its events are read
//	summary.go  what is printed
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	strict := flag.Bool("strict", false, "fail when a test was skipped")
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := newSummary(os.Stdout)
	p, err := newPlan(ctx, ".", flag.Arg(0))
	if err == nil {
		err = run(ctx, p, flag.Args()[1:], s)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "tests: %v\n", err)
	}
	if ctx.Err() != nil {
		fmt.Fprintln(os.Stderr, "tests: interrupted; a lab may still be up: make lab-down")
	}
	if !s.close(*strict) || err != nil {
		os.Exit(1)
	}
}
