// Command lodestone is the operator's tool.
package main

import (
	"os"

	"github.com/go-logr/logr"
	"golang.org/x/term"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/cli"
)

func main() {
	klog.SetLogger(logr.Discard()) // what client-go logs there, it also returns
	terminal := term.IsTerminal(int(os.Stdout.Fd()))
	plugin, args := cli.Invocation(os.Args[0], os.Args[1:])
	os.Exit(cli.Run(args, cli.Streams{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Plugin: plugin,
		Terminal: terminal, Color: terminal && os.Getenv("NO_COLOR") == "", // https://no-color.org
	}))
}
