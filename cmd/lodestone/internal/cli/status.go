package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/browse"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// redraw is the time between two screens of --watch.
const redraw = 2 * time.Second

// clearScreen puts the cursor home and clears the terminal (ECMA-48 CUP, ED).
const clearScreen = "\x1b[H\x1b[2J"

// answer is how a command answers.
type answer struct {
	format output.Format
	color  bool
}

// answerFlags adds the flags of a command that answers in several formats.
func answerFlags(cmd *cobra.Command, s Streams) *answer {
	a := &answer{output.Table, s.Color}
	cmd.Flags().VarP(&a.format, "output", "o", "Format of the answer: "+output.Formats+".")
	return a
}

// print answers.
func (a *answer) print(out io.Writer, p output.Page) error {
	return output.Print(out, a.format, a.color, p)
}

// give answers. The error is what the command exits with.
func (a *answer) give(cmd *cobra.Command, p output.Page, unread []string, troubled bool) error {
	if err := a.print(cmd.OutOrStdout(), p); err != nil {
		return err
	}
	switch {
	case len(unread) > 0:
		return incomplete(unread)
	case troubled:
		return errFound
	}
	return nil
}

// incomplete ends a command whose answer lists what could not be read.
func incomplete(unread []string) error {
	return fmt.Errorf("the answer is not complete: %s not read", output.Count(len(unread), "thing was", "things were"))
}

func statusCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how the whole installation stands, what is wrong with it first",
		Long: `Show how the whole installation stands, what is wrong with it first: the
configuration, the controller, the speakers, how full the pools are, which
Services wait for what, who announces the VIPs, the BGP sessions, and addresses
that other machines have.

The command asks the API server alone. Who announces a VIP is decided by the
speakers' own code ("by the plan"); a speaker counts as alive if its pod is ready.
It needs the right to read Services, EndpointSlices, Nodes, Namespaces and
ServiceCIDRs, and ConfigMaps, Leases and Pods in Lodestone's namespace. What may
not be read is listed, and the rest is shown.

Exits with 0 when all is well, 1 when the configuration in the cluster is
invalid, 2 when there are other warnings, and 3 when something could not be read.
With --watch it draws until it is interrupted.`,
		Example: `  lodestone status
  lodestone status --watch
  lodestone status -o json | jq .warnings`,
		Args: usage.Args(0, 0),
	}
	a := answerFlags(cmd, s)
	watch := cmd.Flags().BoolP("watch", "w", false, "Draw again every "+redraw.String()+".")
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *watch {
			return watchStatus(cmd.Context(), t, a, watching{cmd.OutOrStdout(), cmd.ErrOrStderr(), s.Terminal, redraw})
		}
		return showStatus(cmd.Context(), t, a, cmd.OutOrStdout())
	}
	return cmd
}

// showStatus prints the status. The error is what the command exits with.
func showStatus(ctx context.Context, t *target, a *answer, out io.Writer) error {
	o, err := t.readAll(ctx)
	if err != nil {
		return err
	}
	s := status.Of(o)
	if err := a.print(out, s); err != nil {
		return err
	}
	switch {
	case len(s.Unread) > 0:
		return incomplete(s.Unread)
	case o.ConfigErr != nil:
		return errInvalid
	case len(s.Warnings) > 0:
		return errFound
	}
	return nil
}

// watching is where and how often status draws.
type watching struct {
	out, errs io.Writer
	terminal  bool
	every     time.Duration
}

// watchStatus draws until ctx ends. A cluster that cannot be reached may come
// back: that is drawn, too.
func watchStatus(ctx context.Context, t *target, a *answer, w watching) error {
	for ctx.Err() == nil {
		var page bytes.Buffer
		if err := showStatus(ctx, t, a, &page); err != nil && page.Len() == 0 {
			to := w.errs
			if a.format == output.Table || w.terminal {
				to = &page
			}
			complain(to, "lodestone: "+advised(err).Error())
		}
		before := ""
		switch {
		case w.terminal:
			before = clearScreen
		case a.format == output.YAML && page.Len() > 0:
			before = "---\n"
		}
		if _, err := io.WriteString(w.out, before+page.String()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(w.every):
		}
	}
	return nil
}

func dashboardCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dashboard",
		Short: "Show the dashboard in a browser on this machine",
		Long: `Show the dashboard in a browser on this machine: print the address of a page that
this command serves on the loopback interface, until it is interrupted.

The page comes from a controller, through the API server, as with kubectl
port-forward. The controller is shown a token of the service account
lodestone-dashboard, which may see the dashboard and nothing else; your own
credentials go to the API server alone. The address has a secret in it: whoever on
this machine does not know it sees nothing.

It needs the rights that the Role lodestone-dashboard-user in Lodestone's namespace
has: to list pods, to forward ports to them, and to create tokens of that account.

Exits with 3 when the dashboard may not be seen, or cannot be reached.`,
		Example: `  lodestone dashboard
  lodestone dashboard --port 8080 --context prod`,
		Args: usage.Args(0, 0),
	}
	port := cmd.Flags().Uint16("port", 0, "Port of the loopback interface. 0: any that is free.")
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return serveDashboard(ctx, t, *port, cmd.OutOrStdout())
	}
	return cmd
}

// serveDashboard prints the address of the page and serves it until ctx ends.
// It opens nothing before the page may be seen.
func serveDashboard(ctx context.Context, t *target, port uint16, out io.Writer) error {
	client, _, err := t.connect()
	if err != nil {
		return err
	}
	config, err := t.restConfig()
	if err != nil {
		return err
	}
	tunnel := &browse.Tunnel{Client: client, Config: config, Namespace: t.place.Namespace}
	account := &browse.Account{Client: client, Namespace: t.place.Namespace}
	return browse.Serve(ctx, browse.Options{Port: port, Target: tunnel.Transport(), Token: account, Timeout: t.timeout, Out: out})
}
