package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/inspect/diagnosis"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// diagnoseTimeout bounds a diagnosis: hundreds of speakers that probe, and the
// logs of their pods.
const diagnoseTimeout = 10 * time.Minute

func diagnoseCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "diagnose",
		Short: "Check the cluster and every node for what keeps Services from working",
		Long: `Check the cluster and every node for what keeps Services from working, and print
what to do about it, the worst first. docs/reference/checks.md has all checks.

The speakers look at their nodes: kernel settings, interfaces, capabilities,
clocks, who else listens. They are asked through the API server (pods/proxy),
with a token of the ServiceAccount lodestone-diagnose, which may do nothing else.

With --active they probe the network, too, for some seconds: the membership port
of all other nodes, ARP and NDP for the addresses of some, and each VIP once from
another node of its segment, with one TCP packet that opens no connection. The
packets are those that any neighbour sends; a VIP whose Service chooses its
clients (loadBalancerSourceRanges) is asked for by ARP or NDP alone.

--bundle writes an archive for a ticket: the diagnosis, the status, the
configuration, Leases, Events, the speakers' reports, and the ends of the logs.
It reads no Secrets, and replaces what looks like one.

It needs the rights of lodestone status, and in Lodestone's namespace those to
create serviceaccounts/token and to get pods/proxy; to list DaemonSets and
Deployments, to find other implementations; for --bundle, to get pods/log and to
list Events.

Exits with 0 when all is well, 1 when the configuration in the cluster is
invalid, 2 when there are errors or warnings, and 3 when something could not be
found out, which the findings marked UNKNOWN name.`,
		Example: `  lodestone diagnose
  lodestone diagnose --active
  lodestone diagnose --active --bundle ticket.tar.gz
  lodestone diagnose -o json | jq '.findings[] | select(.severity != "ok")'`,
		Args: usage.Args(0, 0),
	}
	active := cmd.Flags().Bool("active", false, "Have the nodes probe the network.")
	bundle := cmd.Flags().String("bundle", "", "Write an archive for a ticket to this file, which must not exist.")
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	ask := s.Ask
	if ask == nil {
		ask = diagnosis.Ask
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *bundle == "" && cmd.Flags().Changed("bundle") {
			return errors.New("--bundle is empty: name a file for the archive, or leave the flag out")
		}
		if _, err := os.Lstat(*bundle); err == nil {
			return fmt.Errorf("%s is there already: name another file for the archive", *bundle)
		}
		if _, err := os.Stat(filepath.Dir(*bundle)); err != nil { // a diagnosis takes minutes
			return fmt.Errorf("no place for the archive: %w", err)
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), diagnoseTimeout)
		defer cancel()
		client, _, err := t.connect()
		if err != nil {
			return err
		}
		o, err := t.readAll(ctx)
		if err != nil {
			return err
		}
		d := diagnosis.Of(ctx, o, diagnosis.Options{Client: client, Ask: ask, Active: *active})
		if err := a.print(cmd.OutOrStdout(), d); err != nil {
			return err
		}
		if *bundle != "" {
			if err := writeBundle(ctx, d, *bundle); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "wrote %s: look through it before you hand it on\n", *bundle)
		}
		switch {
		case d.Incomplete():
			return errors.New("the diagnosis is not complete: see what is marked UNKNOWN")
		case o.ConfigErr != nil:
			return errInvalid
		case d.Troubled():
			return errFound
		}
		return nil
	}
	return cmd
}

// writeBundle writes the archive, all of it or nothing.
func writeBundle(ctx context.Context, d *diagnosis.Diagnosis, name string) error {
	file, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*.incomplete") // whoever interrupts it leaves that
	if err != nil {
		return err
	}
	if err = errors.Join(d.Bundle(ctx, file), file.Close()); err == nil {
		err = os.Rename(file.Name(), name)
	}
	if err != nil {
		os.Remove(file.Name())
	}
	return err
}
