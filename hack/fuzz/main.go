// Command fuzz runs fuzz targets, one after the other, prints a line for each, and fails if one of them does. What go
// finds while it fuzzes is in its cache, on one machine. The inputs there that reach code that no input in the
// repository reaches are copied to the target's testdata/fuzz, where every test runs them from then on.
//
//	main.go  the flags
//	run.go   finds the targets and runs them
//	keep.go  chooses the inputs that are kept
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

func main() {
	duration := flag.Duration("time", 10*time.Second, "how long each target runs")
	run := flag.String("run", "", "the targets whose folder and name, as in ./pkg/config.FuzzParse, match this expression")
	keep := flag.Bool("keep", true, "copy inputs that reach more code to testdata/fuzz")
	args := flag.String("args", "", "further arguments of go test, as in -parallel=1")
	flag.Parse()
	if err := fuzz(".", *run, *duration, *keep, strings.Fields(*args), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}
