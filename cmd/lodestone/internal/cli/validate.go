package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

func validateCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate FILE|-|--live",
		Short: "Check a configuration and print everything that is wrong with it",
		Long: `Check a configuration and print everything that is wrong with it.

FILE is the configuration itself, or manifests with the ConfigMap that has it
under the key config.yaml; "-" is the standard input. With --live it is the one in
the cluster, and the command also prints what makes no sense there, such as pools
with addresses of nodes. How a FILE would fare there, lodestone plan shows.

Exits with 0 when the configuration is valid, 1 when it is not, 2 when it makes no
sense in the cluster, and 3 when something could not be read.`,
		Example: `  lodestone validate config.yaml
  lodestone validate --live
  lodestone validate config.yaml -o json | jq '.errors[].line'`,
	}
	live := cmd.Flags().Bool("live", false, "Check the configuration in the cluster.")
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		switch {
		case *live && len(args) > 0:
			return errors.New("--live checks the configuration in the cluster: leave the file out, or --live")
		case !*live && len(args) != 1:
			return fmt.Errorf("%d files given: name one, - for the standard input, or --live for the cluster", len(args))
		case !*live:
			return refuse(cmd.Flags(), "since without --live the cluster is not read (lodestone plan shows how a file would fare there)",
				"kubeconfig", "context", "namespace", "request-timeout", "lodestone-namespace", "config-name", "handle-classless",
				"load-balancer-classes")
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var v validity
		var err error
		if *live {
			v, err = validateLive(cmd.Context(), t)
		} else {
			v, err = validateFile(args[0], cmd.InOrStdin())
		}
		if err != nil {
			return err
		}
		return v.print(cmd, a)
	}
	return cmd
}

// validity is the answer about a configuration.
type validity struct {
	Name  string `json:"name"`
	Valid bool   `json:"valid"`
	// Errors are what is wrong with it.
	Errors         config.Errors `json:"errors"`
	Pools          int           `json:"pools"`
	Addresses      float64       `json:"addresses"`
	Advertisements int           `json:"advertisements"`
	Peers          int           `json:"peers"`
	// Warnings are what makes no sense in the cluster; Unread is what could not
	// be read of it.
	Warnings []string `json:"warnings,omitempty"`
	Unread   []string `json:"unread,omitempty"`
}

// validityOf takes over what parsing the document gave; other errors stay.
func validityOf(name string, c *config.Config, err error) (validity, error) {
	v := validity{Name: name, Valid: err == nil, Errors: config.Errors{}}
	if errors.As(err, &v.Errors) {
		return v, nil
	}
	if err != nil {
		return v, err
	}
	v.Pools, v.Advertisements, v.Peers = len(c.Pools), len(c.Advertisements), len(c.Peers)
	for i := range c.Pools {
		v.Addresses += c.Pools[i].Size()
	}
	return v, nil
}

func validateFile(arg string, stdin io.Reader) (validity, error) {
	name, text, err := read(arg, stdin)
	if err != nil {
		return validity{}, err
	}
	// A document of nothing but signs becomes more than a hundred times its size
	// while it is read: collect the garbage of that sooner than it doubles again.
	defer debug.SetGCPercent(debug.SetGCPercent(25))
	c, err := config.ParseFile(name, text)
	return validityOf(name, c, err)
}

func validateLive(ctx context.Context, t *target) (validity, error) {
	client, _, err := t.connect()
	if err != nil {
		return validity{}, err
	}
	var o *cluster.Objects
	err = t.within(ctx, func(ctx context.Context) error {
		o = cluster.Allocation(ctx, client, t.place)
		return o.Err(cluster.ConfigMaps)
	})
	switch {
	case err != nil:
		return validity{}, err
	case o.Config == nil && o.ConfigErr == nil:
		return validity{}, fmt.Errorf("there is no %s: see --lodestone-namespace and --config-name", o.ConfigMap())
	}
	v, err := validityOf(o.ConfigMap(), o.Config, o.ConfigErr)
	if err != nil || !v.Valid {
		return v, err
	}
	if v.Unread = o.Unread(); len(v.Unread) == 0 {
		v.Warnings = clusterfacts.Warnings(o.Config, o.Cluster().Facts)
	}
	return v, nil
}

// print answers. The error is what the command exits with; for people, it has
// what is wrong with the configuration.
func (v validity) print(cmd *cobra.Command, a *answer) error {
	switch {
	case v.Valid:
		return a.give(cmd, v, v.Unread, len(v.Warnings) > 0)
	case a.format == output.Table:
		return v.Errors
	}
	return cmp.Or(a.print(cmd.OutOrStdout(), v), errInvalid)
}

// Show writes the answer about a valid configuration.
func (v validity) Show(c *output.Canvas) {
	counts := []string{
		output.Count(v.Pools, "pool", "pools"),
		count(v.Addresses, "address", "addresses"),
		output.Count(v.Advertisements, "advertisement", "advertisements"),
	}
	if v.Peers > 0 {
		counts = append(counts, output.Count(v.Peers, "BGP peer", "BGP peers"))
	}
	c.Line(output.Plain, "%s: valid: %s", v.Name, strings.Join(counts, ", "))
	for _, text := range v.Warnings {
		c.Line(output.Warning, "warning: %s", text)
	}
	for _, text := range v.Unread {
		c.Line(output.Bad, "not read, so that it is not known what the configuration means for the cluster: %s", text)
	}
}

// read returns the text to validate, and its name for people. It reads no more of it than is needed to refuse
// it.
func read(arg string, stdin io.Reader) (name string, text []byte, err error) {
	name = "stdin"
	if arg != "-" {
		f, err := os.Open(arg)
		if err != nil {
			return "", nil, err
		}
		defer func() { _ = f.Close() }() // only read
		name, stdin = arg, f
	}
	text, err = io.ReadAll(io.LimitReader(stdin, config.MaxSize+1))
	if err != nil && arg == "-" { // the error of a file names it
		err = fmt.Errorf("read %s: %w", name, err)
	}
	return name, text, err
}

// count returns a number and what it counts; an IPv6 pool's is rounded.
func count(n float64, one, many string) string {
	if n == 1 {
		many = one
	}
	return output.Number(n) + " " + many
}
