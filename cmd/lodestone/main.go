// Command lodestone is the operator's tool.
package main

import (
	"os"

	"golang.org/x/term"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/cli"
)

func main() {
	terminal := term.IsTerminal(int(os.Stdout.Fd()))
	plugin, args := cli.Invocation(os.Args[0], os.Args[1:])
	os.Exit(cli.Run(args, cli.Streams{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Plugin: plugin,
		Terminal: terminal, Color: terminal && os.Getenv("NO_COLOR") == "", // https://no-color.org
	}))
}
