package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

func validate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|-",
		Short: "Check a configuration and print everything that is wrong with it",
		Long: `Check a configuration and print everything that is wrong with it.

FILE is the configuration itself, or manifests with the ConfigMap that has it
under the key config.yaml; "-" is the standard input.

Exits with 0 when the configuration is valid, 1 when it is not, and 3 when it
could not be read.`,
		Example: `  lodestone validate config.yaml
  kubectl -n lodestone-system get configmap lodestone-config -o yaml | lodestone validate -`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, text, err := read(args[0], cmd.InOrStdin())
			if err != nil {
				return err
			}
			c, err := config.ParseFile(name, text)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: valid: %s\n", name, summary(c))
			return err
		},
	}
}

// read returns the text to validate, no more of it than is needed to refuse
// it, and the name that people know it by.
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
	if err != nil {
		return "", nil, fmt.Errorf("read %s: %w", name, err)
	}
	return name, text, nil
}

// summary says in numbers what a configuration contains.
func summary(c *config.Config) string {
	var addresses float64
	for i := range c.Pools {
		addresses += c.Pools[i].Size()
	}
	counts := []string{
		count(float64(len(c.Pools)), "pool", "pools"),
		count(addresses, "address", "addresses"),
		count(float64(len(c.Advertisements)), "advertisement", "advertisements"),
	}
	if len(c.Peers) > 0 {
		counts = append(counts, count(float64(len(c.Peers)), "BGP peer", "BGP peers"))
	}
	return strings.Join(counts, ", ")
}

// count returns a number and what it counts; an IPv6 pool's is rounded.
func count(n float64, one, many string) string {
	if n == 1 {
		many = one
	}
	return number(n) + " " + many
}

func number(n float64) string {
	if n >= 1e15 {
		return fmt.Sprintf("about %.1e", n)
	}
	return fmt.Sprintf("%.0f", n)
}
