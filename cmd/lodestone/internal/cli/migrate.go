package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/foreign"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/migrate"
)

// origin is a load balancer to migrate from.
type origin struct {
	name, title, namespace string
	// what is read, in words.
	what    string
	convert func([]migrate.Object) (*migrate.Result, error)
	read    func(ctx context.Context, t *target, client kubernetes.Interface, namespace string) ([]migrate.Object, error)
	example string
}

var origins = []origin{
	{
		name: "metallb", title: "MetalLB", namespace: "metallb-system",
		what: "the IPAddressPools, L2Advertisements, BGPAdvertisements, BGPPeers,\nBFDProfiles and Communities of MetalLB, or the " +
			"ConfigMap that it had before v0.13,\nand the flags of its Deployment and DaemonSet",
		convert: migrate.MetalLB,
		read: func(ctx context.Context, t *target, client kubernetes.Interface, namespace string) ([]migrate.Object, error) {
			d, err := t.dynamic()
			if err != nil {
				return nil, err
			}
			return foreign.MetalLB(ctx, d, client, namespace)
		},
		example: "  lodestone migrate metallb > lodestone-config.yaml\n  kubectl -n metallb-system get ipaddresspools,l2advertisements -o " +
			"yaml | lodestone migrate metallb -",
	},
	{
		name: "kube-vip", title: "kube-vip", namespace: "kube-system",
		what:    "the DaemonSet or the Pods of kube-vip, and the ConfigMap kubevip of its\ncloud provider",
		convert: migrate.KubeVIP,
		read: func(ctx context.Context, _ *target, client kubernetes.Interface, namespace string) ([]migrate.Object, error) {
			return foreign.KubeVIP(ctx, client, namespace)
		},
		example: "  lodestone migrate kube-vip > lodestone-config.yaml\n  lodestone migrate kube-vip kube-vip.yaml kubevip-configmap.yaml " +
			"--as values",
	},
}

func migrateCommand(s Streams) *cobra.Command {
	var from []*cobra.Command
	for _, o := range origins {
		from = append(from, migrateFrom(s, o))
	}
	return group("migrate", "Write the configuration that does what another load balancer does", from...)
}

func migrateFrom(s Streams, o origin) *cobra.Command {
	cmd := &cobra.Command{
		Use:   o.name + " [FILE|-]...",
		Short: "Write the configuration that does what " + o.title + " does",
		Long: "Write the configuration that does what " + o.title + " does, to the standard output, and to\n" +
			"the standard error what has no counterpart, what somebody has to decide (!), and\n" +
			"the annotations of ours for the Services that are among what was read.\n\n" +
			"It reads " + o.what + `.
They come from the files, from the standard input ("-"), or without either from
the cluster. From there it also lists, by the code of the controller, which
Services would keep the addresses that they have. It changes nothing.

What to do with the configuration, and in which order, is in the guide
docs/guides/migrate.md.

Exits with 0 when all is done, 1 when the objects make no sense, 2 when there is
something to decide, and 3 when they could not be read.`,
		Example: o.example,
	}
	form, namespace, format := manifest, "", output.Table
	cmd.Flags().Var(&form, "as", "What to write the configuration as: "+forms+".")
	cmd.Flags().StringVar(&namespace, "from-namespace", o.namespace, "Namespace that "+o.title+" is installed in.")
	cmd.Flags().VarP(&format, "output", "o", "Format of the answer: "+output.Formats+
		". JSON and YAML have the notes, too, and nothing is written elsewhere.")
	t := targetFlags(cmd, s)
	cmd.Args = func(cmd *cobra.Command, files []string) error {
		if format != output.Table {
			if err := refuse(cmd.Flags(), "since with --output the configuration is a part of the answer", "as"); err != nil {
				return err
			}
		}
		if len(files) == 0 {
			return nil
		}
		return refuse(cmd.Flags(), "since beside files the cluster is not read", "kubeconfig", "context", "namespace", "request-timeout",
			"from-namespace", "handle-classless", "load-balancer-classes")
	}
	cmd.RunE = func(cmd *cobra.Command, files []string) error {
		result, err := o.migrate(cmd.Context(), t, files, cmd.InOrStdin(), namespace)
		var invalid migrate.Errors
		if errors.As(err, &invalid) {
			complain(cmd.ErrOrStderr(), err.Error())
			return errInvalid
		}
		if err != nil {
			return err
		}
		if err := printMigration(cmd, result, t, format, form); err != nil {
			return err
		}
		if result.Decisions() {
			return errFound
		}
		return nil
	}
	return cmd
}

// migrate reads what there is, from files or from the cluster.
func (o origin) migrate(ctx context.Context, t *target, files []string, stdin io.Reader, namespace string) (result *migrate.Result,
	err error) {
	if len(files) > 0 {
		objects, err := readObjects(files, stdin)
		if err != nil {
			return nil, err
		}
		return o.convert(objects)
	}
	client, _, err := t.connect()
	if err != nil {
		return nil, err
	}
	err = t.within(ctx, func(ctx context.Context) error {
		objects, err := o.read(ctx, t, client, namespace)
		if err != nil {
			return err
		}
		if result, err = o.convert(objects); err != nil {
			return err
		}
		result.Notes = append(result.Notes, t.takeover(ctx, client, result.Config)...)
		return nil
	})
	return result, err
}

func readObjects(files []string, stdin io.Reader) (objects []migrate.Object, err error) {
	for _, file := range files {
		name, in := "stdin", stdin
		if file != "-" {
			f, err := os.Open(file)
			if err != nil {
				return nil, err
			}
			defer func() { _ = f.Close() }() // only read
			name, in = file, f
		}
		more, err := migrate.Read(name, in)
		if err != nil {
			return nil, err
		}
		objects = append(objects, more...)
	}
	return objects, nil
}

// takeover returns which Services would keep the addresses that they have.
func (t *target) takeover(ctx context.Context, client kubernetes.Interface, c *config.Config) []migrate.Note {
	const about = "take-over"
	cluster, err := t.read(ctx, client)
	if err != nil {
		return []migrate.Note{{Object: about, Message: "which Services would keep their addresses was not looked at: " + err.Error(),
			Decision: true}}
	}
	cluster.Config = c
	var notes []migrate.Note
	kept := 0
	verdicts := cluster.Allocation().Verdicts
	for _, svc := range cluster.Services {
		has := kube.StatusAddresses(svc)
		v, served := verdicts[ledger.NameOf(svc)]
		switch {
		case !served || len(has) == 0:
		case v.Refusal != nil || !v.Holds(has...):
			notes = append(notes, migrate.Note{Object: "Service " + ledger.NameOf(svc), Field: "status.loadBalancer", Message: "it has " +
				fmt.Sprint(has) + ", and with this configuration: " + v.String(), Decision: true})
		default:
			kept++
		}
	}
	slices.SortFunc(notes, func(a, b migrate.Note) int { return strings.Compare(a.Object, b.Object) })
	return append(notes, migrate.Note{Object: about,
		Message: output.Count(kept, "Service that has addresses keeps them", "Services that have addresses keep them")})
}

// form is what the configuration is written as; it is a flag's value.
type form string

const (
	manifest form = "configmap"
	values   form = "values"
	document form = "document"

	forms = "configmap (a manifest), values (of the chart) or document (the configuration alone)"
)

// String returns the form as the flag takes it.
func (f *form) String() string { return string(*f) }

// Type names the flag's value.
func (f *form) Type() string { return "form" }

// Set takes over the flag's value.
func (f *form) Set(value string) error {
	if !slices.Contains([]form{manifest, values, document}, form(value)) {
		return fmt.Errorf("the forms are %s", forms)
	}
	*f = form(value)
	return nil
}

// write returns the document in the form.
func (f form) write(doc string, t *target) string {
	switch f {
	case manifest:
		return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: %s\n  namespace: %s\ndata:\n  %s: |\n%s",
			t.place.ConfigName, t.place.Namespace, config.Key, indented(doc, "    "))
	case values:
		return "config:\n" + indented(doc, "  ")
	default:
		return doc
	}
}

func indented(text, by string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(by + line)
	}
	return b.String()
}

// migrated is the answer for programs: the configuration, and the notes that people read.
type migrated struct {
	Configuration any               `json:"configuration"`
	Services      []migrate.Service `json:"services"`
	Notes         []migrate.Note    `json:"notes"`
}

// Show writes what is not in the configuration.
func (p migrated) Show(c *output.Canvas) {
	for _, n := range p.Notes {
		if n.Decision {
			c.Line(output.Warning, "!  %s", n)
		}
	}
	for _, n := range p.Notes {
		if !n.Decision {
			c.Line(output.Plain, "-  %s", n)
		}
	}
	if len(p.Services) == 0 {
		return
	}
	c.Blank()
	c.Line(output.Heading, "Annotations of ours, for when compatibility is taken out of the configuration:")
	for _, s := range p.Services {
		c.Line(output.Plain, "%s", s.Command())
	}
}

func printMigration(cmd *cobra.Command, r *migrate.Result, t *target, format output.Format, form form) error {
	p := migrated{Services: r.Services, Notes: r.Notes}
	if format != output.Table {
		if err := yaml.Unmarshal([]byte(r.Document), &p.Configuration); err != nil {
			return err
		}
		return output.Print(cmd.OutOrStdout(), format, false, p)
	}
	if _, err := io.WriteString(cmd.OutOrStdout(), form.write(r.Document, t)); err != nil {
		return err
	}
	return output.Print(cmd.ErrOrStderr(), format, false, p)
}
