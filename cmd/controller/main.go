// Command lodestone-controller gives Services of type LoadBalancer their
// addresses and initializes nodes. It is a cloud controller manager: the
// flags and what the secure port serves are the framework's; /readyz is ours.
//
// changedDefaults has the differences from the framework's defaults, with their reasons. The other
// differences: Lodestone's own service controller runs in place of the framework's, which can be switched on by
// name and then drives the Services without a class. The framework's webhooks have no flags and no port; our
// webhook is on the secure port. The leader gives its lease back when it is asked to stop.
//
// The files, from the outside in:
//
//	main.go        the program: flags, and when it ends
//	flags.go       our flags, and the defaults of the framework that we change
//	process.go     the parts of the process, and how they are wired
//	lifecycle.go   what starts when this replica leads, and ends before it does not
//	election.go    who leads, and when a leader gives up
//	health.go      /readyz: which checks there are
//	secureport.go  what the secure port serves, its certificates, and limits of connections
//	admission.go   the webhook that refuses a broken configuration
//	dashboard.go   the dashboard, if it is on
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/component-base/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stderr))
}

// run runs the command line until it ends or the context does.
func run(ctx context.Context, args []string, stderr io.Writer) (code int) {
	p := newProcess(ctx)
	cmd, err := p.command()
	if err != nil {
		fmt.Fprintln(stderr, "lodestone-controller:", err)
		return 1
	}
	cmd.SetArgs(args)
	ended := make(chan error, 1)
	go func() { ended <- cli.RunNoErrOutput(cmd) }()
	select {
	case err := <-ended:
		if err != nil && p.stopped.Err() == nil {
			if !p.ran { // otherwise the command has printed why
				fmt.Fprintln(stderr, "lodestone-controller:", err)
			}
			return 1
		}
	case <-p.stopped.Done():
	}
	p.end()
	return 0
}
