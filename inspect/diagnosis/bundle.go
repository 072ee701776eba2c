package diagnosis

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// readme is what is first read of a bundle.
const readme = `Made by lodestone diagnose --bundle.

diagnosis.txt, diagnosis.json  what the checks found
facts/NODE.json                what the speaker of the node reported for it
status.txt, status.json        lodestone status
versions.json                  of the command, the cluster and the images
config.yaml                    the document in the ConfigMap
services.json                  Services of type LoadBalancer: names, ports, addresses, our annotations
leases.json, events.json       objects of that kind, ours
pods.json                      Lodestone's pods: node, images, condition
speakers/NODE.json             /status of the speaker
logs/POD.log, POD.before.log   the end of the logs, of this container and the one before
missing.txt                    what could not be read, and why

No Secret was read. What looks like a password, a token or a key was replaced by
REDACTED. Addresses and names are as they are: look through it before you hand
it on.
`

// bundle is an archive that is being written.
type bundle struct {
	d      *Diagnosis
	folder string

	mu      sync.Mutex // what follows is of several readers
	tar     *tar.Writer
	missing []string
	err     error
}

// Bundle writes what others need to help as a tar.gz archive. What cannot be
// read is named in it. The error is one of writing.
func (d *Diagnosis) Bundle(ctx context.Context, w io.Writer) error {
	compressed := gzip.NewWriter(w)
	b := &bundle{d: d, tar: tar.NewWriter(compressed), folder: "lodestone-" + d.Time.Format("20060102-150405") + "/"}
	b.add("README.txt", []byte(readme))
	b.page("diagnosis", d)
	for _, node := range slices.Sorted(maps.Keys(d.facts)) {
		b.json("facts/"+node+".json", d.facts[node])
	}
	b.page("status", status.Of(d.objects))
	b.versions()
	b.config(ctx)
	b.services()
	b.json("leases.json", trimmed(d.objects.Leases))
	b.events(ctx)
	b.pods(ctx)
	b.missing = append(b.missing, d.objects.Unread()...)
	b.add("missing.txt", []byte(strings.Join(b.missing, "\n")+"\n"))
	if err := cmp.Or(b.err, b.tar.Close(), compressed.Close()); err != nil {
		return fmt.Errorf("write the archive: %w", err)
	}
	return nil
}

// add adds a file. Everything in the archive passes through here, and what looks like a secret is taken out.
func (b *bundle) add(name string, text []byte) {
	text = Redact(text)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return
	}
	header := &tar.Header{Name: b.folder + name, Mode: 0o600, Size: int64(len(text)), ModTime: b.d.Time, Format: tar.FormatPAX}
	if b.err = b.tar.WriteHeader(header); b.err == nil {
		_, b.err = b.tar.Write(text)
	}
}

func (b *bundle) json(name string, v any) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		b.miss(name, err)
		return
	}
	b.add(name, text)
}

// page adds what a command prints, for people and for programs.
func (b *bundle) page(name string, p output.Page) {
	var text bytes.Buffer
	if err := output.Print(&text, output.Table, false, p); err != nil {
		b.miss(name, err)
	}
	b.add(name+".txt", text.Bytes())
	b.json(name+".json", p)
}

// miss notes what is not in the archive.
func (b *bundle) miss(name string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.missing = append(b.missing, name+": "+err.Error())
}

func (b *bundle) versions() {
	all := map[string]any{"lodestone": buildinfo.Get().String()}
	if server, err := b.d.client.Discovery().ServerVersion(); err == nil {
		all["kubernetes"] = server.String()
	} else {
		b.miss("version of Kubernetes", err)
	}
	speakers := map[string]string{}
	for node, f := range b.d.facts {
		speakers[node] = f.Version
	}
	all["speakers"] = speakers
	b.json("versions.json", all)
}

func (b *bundle) config(ctx context.Context) {
	o := b.d.objects
	cm, err := b.d.client.CoreV1().ConfigMaps(o.Namespace).Get(ctx, o.ConfigName, metav1.GetOptions{})
	if err != nil {
		b.miss("config.yaml", err)
		return
	}
	text, err := redactYAML([]byte(cm.Data[config.Key]))
	if err != nil {
		b.miss("config.yaml", fmt.Errorf("it is no YAML, and cannot be searched for secrets: %w", err))
		return
	}
	b.add("config.yaml", text)
}

// ours keeps Lodestone's annotations alone. Others may be private, and may hold whole objects.
func ours(annotations map[string]string) map[string]string {
	kept := map[string]string{}
	for name, value := range annotations {
		if strings.HasPrefix(name, "lodestone.io/") {
			kept[name] = value
		}
	}
	return kept
}

// service is what a bundle has of a Service.
type service struct {
	Namespace, Name string
	Class           string `json:",omitempty"`
	Policy          corev1.ServiceExternalTrafficPolicy
	Families        []corev1.IPFamily
	Ports           []corev1.ServicePort
	Annotations     map[string]string
	Status          corev1.ServiceStatus
}

func (b *bundle) services() {
	all := []service{}
	for _, s := range b.d.objects.Services {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		of := service{Namespace: s.Namespace, Name: s.Name, Policy: s.Spec.ExternalTrafficPolicy, Families: s.Spec.IPFamilies,
			Ports: s.Spec.Ports, Annotations: ours(s.Annotations), Status: s.Status}
		if s.Spec.LoadBalancerClass != nil {
			of.Class = *s.Spec.LoadBalancerClass
		}
		all = append(all, of)
	}
	b.json("services.json", all)
}

// trimmed returns the objects without what others wrote about them.
func trimmed[T interface {
	metav1.Object
	DeepCopy() T
}](all []T) []T {
	var kept []T
	for _, o := range all {
		o = o.DeepCopy()
		o.SetManagedFields(nil)
		o.SetAnnotations(ours(o.GetAnnotations()))
		kept = append(kept, o)
	}
	return kept
}

// event is what a bundle has of an Event.
type event struct {
	Last                  time.Time
	Count                 int32
	Type, Object          string
	Reason, Source, About string
}

// events adds those in Lodestone's namespace, and those that the controller
// wrote elsewhere.
func (b *bundle) events(ctx context.Context) {
	all := []event{}
	for namespace, fields := range map[string]string{b.d.objects.Namespace: "", "": "source=" + cluster.ElectionLease} {
		list, err := b.d.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: fields})
		if err != nil {
			b.miss("events.json", err)
			continue
		}
		for _, e := range list.Items {
			if fields != "" && e.Namespace == b.d.objects.Namespace {
				continue // it is there already
			}
			o := e.InvolvedObject
			all = append(all, event{e.LastTimestamp.Time, e.Count, e.Type, o.Kind + " " + o.Namespace + "/" + o.Name, e.Reason,
				e.Source.Component, e.Message})
		}
	}
	slices.SortStableFunc(all, func(a, b event) int { return a.Last.Compare(b.Last) })
	b.json("events.json", all)
}

// pod is what a bundle has of a pod. Its variables are left out.
type pod struct {
	Name, Node string
	Images     []string
	Status     corev1.PodStatus
}

// pods adds Lodestone's pods, their logs, and the speakers' /status.
func (b *bundle) pods(ctx context.Context) {
	all, o := []pod{}, b.d.objects
	var reads errgroup.Group
	reads.SetLimit(asksAtOnce)
	// read adds what a pod is asked for. A node that does not answer keeps none of the others waiting.
	read := func(name string, from func(context.Context) ([]byte, error)) {
		reads.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, lookTimeout)
			defer cancel()
			if text, err := from(ctx); err != nil {
				b.miss(name, err)
			} else {
				b.add(name, text)
			}
			return nil
		})
	}
	log := func(p *corev1.Pod, previous bool, suffix string) {
		read("logs/"+p.Name+suffix, func(ctx context.Context) ([]byte, error) { return b.d.pods.Log(ctx, p, previous) })
	}
	for _, p := range slices.Concat(o.Controllers, o.Speakers) {
		of := pod{Name: p.Name, Node: p.Spec.NodeName, Status: p.Status}
		restarted := false
		for _, c := range p.Spec.Containers {
			of.Images = append(of.Images, c.Image)
		}
		for _, c := range p.Status.ContainerStatuses {
			restarted = restarted || c.RestartCount > 0
		}
		all = append(all, of)
		log(p, false, ".log")
		if restarted {
			log(p, true, ".before.log")
		}
	}
	b.json("pods.json", all)
	for node := range b.d.facts {
		read("speakers/"+node+".json", func(ctx context.Context) ([]byte, error) {
			return b.d.pods.Get(ctx, b.d.speakers[node], "/status", nil)
		})
	}
	reads.Wait() //nolint:errcheck // they return nil
	slices.Sort(b.missing)
}
