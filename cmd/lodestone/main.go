// Command lodestone is the operator's tool.
package main

import (
	"os"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/cli"
)

func main() {
	os.Exit(cli.Run(os.Args[1:], cli.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}))
}
