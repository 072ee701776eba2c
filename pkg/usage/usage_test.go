package usage

import (
	"io"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// command is one that has flags of all types, and others.
func command(args ...string) error {
	nothing := func(*cobra.Command, []string) error { return nil }
	root := &cobra.Command{Use: "root", Args: Args(0, 0), RunE: nothing, SilenceErrors: true, SilenceUsage: true}
	root.SetFlagErrorFunc(FlagError)
	one := &cobra.Command{Use: "one NAME", Args: Args(1, 1), RunE: nothing}
	none := &cobra.Command{Use: "none", Args: Args(0, 0), RunE: nothing}
	for _, c := range []*cobra.Command{root, one} {
		c.Flags().Uint16("port", 0, "")
		c.Flags().Duration("hand-over", time.Second, "")
		c.Flags().Int("vip-metrics", 0, "")
		c.Flags().Bool("handle-classless", true, "")
		c.Flags().String("kubeconfig", "", "")
	}
	root.AddCommand(one, none)
	root.SetArgs(args)
	root.SetOut(io.Discard)
	return root.Execute()
}

func TestMistakesAreInWordsForPeople(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		`--port is "99999", not a number from 0 to 65535: see root --help`:                    {"--port=99999"},
		`--port is "-1", not a number from 0 to 65535: see root one --help`:                   {"one", "x", "--port=-1"},
		`--hand-over is "5", not a time with its unit, such as 30s or 1m30s: see root --help`: {"--hand-over=5"},
		`--hand-over is "", not a time with its unit, such as 30s or 1m30s: see root --help`:  {"--hand-over="},
		`--vip-metrics is "x", not a whole number: see root --help`:                           {"--vip-metrics=x"},
		`--handle-classless is "maybe", not true or false: see root --help`:                   {"--handle-classless=maybe"},
		`unknown flag: --kubecnfig, did you mean --kubeconfig?: see root --help`:              {"--kubecnfig=x"},
		`unknown flag: --strict: see root --help`:                                             {"--strict"},
		`unknown shorthand flag: 'x' in -x: see root --help`:                                  {"-x"},
		`unknown command "non" for "root", did you mean none?: see root --help`:               {"non"},
		`unknown command "other" for "root": see root --help`:                                 {"other"},
		`root none takes no argument, and "x" is one: see root none --help`:                   {"none", "x"},
		`0 arguments given, and the command is root one NAME: see root one --help`:            {"one"},
		`2 arguments given, and the command is root one NAME: see root one --help`:            {"one", "a", "b"},
		`flag needs an argument: --port: see root --help`:                                     {"--port"},
	} {
		require.EqualError(t, command(args...), want)
	}
	require.NoError(t, command("one", "x", "--port=1"))
}

func TestNamesAndClasses(t *testing.T) {
	t.Parallel()
	require.NoError(t, Name("--node-name", "n1.example"))
	require.EqualError(t, Name("--node-name", "N_1"), `--node-name is "N_1", not a name in Kubernetes, of a-z, 0-9, '-' and '.'`)
	require.Error(t, Name("--node-name", ""))
	require.NoError(t, Classes(true, nil))
	require.NoError(t, Classes(false, []string{"a/b"}))
	require.ErrorContains(t, Classes(false, nil), "no Service at all would be served")
	require.ErrorContains(t, Classes(true, []string{"a/b", ""}), `"a/b,": one of the classes is empty`)
}
