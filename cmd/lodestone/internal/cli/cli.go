// Package cli is the lodestone command, all but the process around it.
//
// The files, from the outside in:
//
//	cli.go       the command, its exit codes, and how an error is shown
//	cluster.go   which cluster, by which credentials, and what is read from it
//	status.go    lodestone status and dashboard, and how all commands print an answer
//	explain.go   lodestone explain
//	bgp.go       lodestone bgp
//	validate.go  lodestone validate
//	plan.go      lodestone plan and simulate
//	diagnose.go  lodestone diagnose
//	migrate.go   lodestone migrate
//	man.go       lodestone man, which releases are made with
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/diagnosis"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// What the command exits with.
const (
	ExitOK      = 0
	ExitInvalid = 1 // the configuration is invalid
	ExitFound   = 2 // the answer is there, and somebody should look at it
	ExitFailed  = 3 // wrong usage, unreadable file, unreachable cluster
)

// errFound ends a command that has printed what it found, errInvalid one that has printed what is
// wrong with the configuration.
var errFound, errInvalid = errors.New("found"), errors.New("invalid")

// Streams are where the command reads, writes and asks.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
	// Terminal is set if people watch Out, Color if they want colours there.
	Terminal, Color bool
	// Plugin is set if kubectl runs the command, as kubectl lodestone.
	Plugin bool
	// Connect returns a client of the cluster, and the namespace of what the
	// command is about. Nil: those of the kubeconfig.
	Connect func() (kubernetes.Interface, string, error)
	// Dynamic returns a client for resources of others. Nil: that of the kubeconfig.
	Dynamic func() (dynamic.Interface, error)
	// Ask returns how pods are asked, as diagnosis.Ask does, which is taken if it
	// is nil.
	Ask func(ctx context.Context, client kubernetes.Interface, namespace string) (diagnosis.Pods, *diagnose.Clock, error)
}

// root returns the command with all that it can do.
func root(s Streams) *cobra.Command {
	root := &cobra.Command{
		Use:           "lodestone",
		Short:         "See what the Lodestone load balancer does, and why",
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("no command given; see lodestone --help")
		},
		Args: usage.Args(0, 0),
	}
	if s.Plugin {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl lodestone"}
	}
	root.SetFlagErrorFunc(usage.FlagError)
	root.AddCommand(statusCommand(s), diagnoseCommand(s), dashboardCommand(s), bgpCommand(s), validateCommand(s), planCommand(s),
		explainCommand(s), simulateCommand(s), migrateCommand(s), versionCommand(), manCommand())
	return root
}

// Invocation returns how the command was called, by the name of its file: kubectl
// runs kubectl-lodestone as its plugin, and kubectl_complete-lodestone to complete
// what is typed.
func Invocation(file string, args []string) (plugin bool, _ []string) {
	switch strings.TrimSuffix(filepath.Base(file), ".exe") {
	case "kubectl-lodestone":
		return true, args
	case "kubectl_complete-lodestone":
		return true, append([]string{cobra.ShellCompRequestCmd}, args...)
	}
	return false, args
}

// Run runs the command and returns what to exit with.
func Run(args []string, s Streams) int {
	root := root(s)
	root.SetArgs(args)
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.SetContext(context.Background())

	err := root.Execute()
	var invalid config.Errors
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, errFound):
		return ExitFound
	case errors.Is(err, errInvalid):
		return ExitInvalid
	case errors.As(err, &invalid):
		complain(s.Err, err.Error()) // names the file, or the ConfigMap
		return ExitInvalid
	default:
		complain(s.Err, "lodestone: "+advised(err).Error())
		return ExitFailed
	}
}

// advised adds what to do to an error of the way to the API server. What the API server answers has it already.
func advised(err error) error {
	var request *url.Error
	switch {
	case apierrors.IsUnauthorized(err):
		return cluster.ErrCredentials
	case errors.As(err, &request) && !errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: is it the right cluster (--context, --kubeconfig), and does its API server run?", err)
	}
	return err
}

// complain writes an error. Others write parts of the text, so it is cleaned.
func complain(out io.Writer, text string) {
	for line := range strings.SplitSeq(text, "\n") {
		fmt.Fprintln(out, output.Clean(line))
	}
}

// group returns a command that has others and does nothing itself.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: usage.Args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(commands...)
	return cmd
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  usage.Args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "lodestone", buildinfo.Get())
			return err
		},
	}
}
