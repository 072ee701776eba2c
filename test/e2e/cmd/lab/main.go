// Command lab brings a Kubernetes cluster up on this machine, breaks it on
// request, and takes it down.
//
//	main.go      the command line
//	commands.go  up, down, load, status and demo
//	hosts.go     kubectl, helm and commands on the hosts, and faults
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := root().ExecuteContext(ctx)
	stop()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		os.Exit(ended.ExitCode()) // the command has printed why
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "lab",
		Short:         "A real Kubernetes cluster on this machine, in network namespaces",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(up(), down(), load(), status(), fault(), execute(), kubectl(), helm(), tour())
	return cmd
}
