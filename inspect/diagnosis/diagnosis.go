// Package diagnosis finds out what keeps an installation from working: it reads
// the cluster, asks every speaker about its node, has package diagnose check it,
// and packs what others need to help.
//
// The files, from the outside in:
//
//	diagnosis.go        the diagnosis: what is read and asked, and what is shown
//	cluster.go          the facts of the cluster, from its objects
//	ask.go              the facts of the nodes, from their speakers
//	implementations.go  other load balancers in the cluster, by their workloads
//	bundle.go           the archive for a ticket
//	redact.go           what of it is secret
package diagnosis

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// Diagnosis is what was found.
type Diagnosis struct {
	Time time.Time `json:"time"`
	// Nodes counts those that should have a speaker, Answered those whose speaker
	// answered.
	Nodes    int `json:"nodes"`
	Answered int `json:"answered"`
	diagnose.Report

	objects  *cluster.Objects
	client   kubernetes.Interface
	pods     Pods
	facts    map[string]diagnose.Facts
	speakers map[string]*corev1.Pod // that were asked, by node
}

// Options are the settings of a diagnosis.
type Options struct {
	Client kubernetes.Interface
	// Ask returns how pods are asked; the function Ask does.
	Ask func(ctx context.Context, client kubernetes.Interface, namespace string) (Pods, *diagnose.Clock, error)
	// Active has the speakers probe the network.
	Active bool
}

// Of returns the diagnosis of the installation whose objects were read.
func Of(ctx context.Context, o *cluster.Objects, options Options) *Diagnosis {
	d := &Diagnosis{Time: o.Now.UTC().Truncate(time.Second), objects: o, client: options.Client}
	c := clusterOf(o)
	c.Active = options.Active
	c.Others = implementations(ctx, c, o, options.Client)
	d.speakers, c.Mute = speakersOf(o)
	d.Nodes = len(d.speakers) + len(c.Mute)
	var err error
	if d.pods, c.APIServer, err = options.Ask(ctx, options.Client, o.Namespace); err != nil {
		c.Unread = append(c.Unread, err.Error())
	} else {
		a := askAll(ctx, d.pods, d.speakers, tries(c), options.Active)
		maps.Copy(c.Mute, a.mute)
		c.Facts, c.Clocks, d.facts = a.facts, a.clocks, a.facts
	}
	d.Answered = len(c.Facts)
	d.Report = diagnose.Check(c)
	return d
}

// speakersOf returns, by node, the speakers that can be asked, and why those of the other nodes cannot.
func speakersOf(o *cluster.Objects) (pods map[string]*corev1.Pod, mute map[string]string) {
	pods, mute = o.SpeakerByNode(), map[string]string{}
	if !o.Has(cluster.Pods, cluster.Nodes) {
		return pods, mute // who is missing is not known
	}
	for _, m := range status.SpeakersOf(o).Missing {
		if p := pods[m.Node]; p == nil || p.Status.Phase != corev1.PodRunning {
			delete(pods, m.Node)
			mute[m.Node] = m.Message
		}
	}
	return pods, mute
}

// tries returns what each speaker is to try, in the form of diagnose.ParamVIP.
func tries(c *diagnose.Cluster) map[string][]string {
	all := map[string][]string{}
	for node, vips := range c.Plan() {
		all[node] = output.Strings(vips)
	}
	return all
}

// Incomplete reports whether something could not be found out.
func (d *Diagnosis) Incomplete() bool { return d.Has(diagnose.Unknown) }

// Troubled reports whether somebody should look at what was found.
func (d *Diagnosis) Troubled() bool { return d.Has(diagnose.Error) || d.Has(diagnose.Warning) }

// Show implements output.Page.
func (d *Diagnosis) Show(c *output.Canvas) {
	var fine []string
	count := map[diagnose.Severity]int{}
	for _, f := range d.Findings {
		count[f.Severity]++
		if f.Severity == diagnose.OK {
			fine = append(fine, string(f.Check))
		}
	}
	c.Line(output.Heading, "%s, %s, %d unknown; %d of %s answered", output.Count(count[diagnose.Error], "error", "errors"),
		output.Count(count[diagnose.Warning], "warning", "warnings"), count[diagnose.Unknown], d.Answered,
		output.Count(d.Nodes, "speaker", "speakers"))
	for _, f := range d.Findings {
		if f.Severity != diagnose.OK {
			c.Blank()
			show(c, f)
		}
	}
	c.Blank()
	slices.Sort(fine)
	c.Line(output.Good, "ok: %s", cmp.Or(strings.Join(fine, ", "), "nothing"))
	if len(d.NotRun) > 0 {
		var names []string
		for _, id := range d.NotRun {
			names = append(names, string(id))
		}
		c.Line(output.Plain, "not run, for they send packets: %s; --active runs them", strings.Join(names, ", "))
	}
}

var tones = map[diagnose.Severity]output.Tone{diagnose.Error: output.Bad, diagnose.Warning: output.Warning,
	diagnose.Unknown: output.Warning}

func show(c *output.Canvas, f diagnose.Finding) {
	where := "cluster"
	if len(f.Nodes) > 0 {
		where = "node"
		if len(f.Nodes) > 1 {
			where = "nodes"
		}
		where += " " + output.List(f.Nodes, 5)
	}
	c.Rows(nil, [][]any{{output.Cell{Text: strings.ToUpper(string(f.Severity)), Tone: tones[f.Severity]}, f.Check, where}})
	c.Line(output.Plain, "  %s", f.Message)
	if f.Hint != "" {
		c.Line(output.Plain, "  do: %s", f.Hint)
	}
}
