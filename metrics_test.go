package lodestone_test

import (
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/client-go/informers"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/limit"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

const metricsReference = "docs/reference/metrics.md"

// documentedMetric is a row of the metrics reference.
type documentedMetric struct {
	kind   string
	labels []string
}

// documentedMetrics are the rows of the metrics reference, by name.
func documentedMetrics(t *testing.T) map[string]documentedMetric {
	t.Helper()
	text, err := os.ReadFile(metricsReference)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]documentedMetric{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| (\\w+) \\| ([^|]*)\\| ").FindAllStringSubmatch(string(text), -1) {
		var labels []string
		for _, label := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(m[3], -1) {
			labels = append(labels, label[1])
		}
		if _, twice := rows[m[1]]; twice {
			t.Errorf("%s has two rows for %s", metricsReference, m[1])
		}
		rows[m[1]] = documentedMetric{m[2], labels}
	}
	return rows
}

// describer is a Registerer that notes what is registered.
type describer struct{ collectors []prometheus.Collector }

func (d *describer) Register(c prometheus.Collector) error {
	d.collectors = append(d.collectors, c)
	return nil
}

func (d *describer) MustRegister(all ...prometheus.Collector) {
	d.collectors = append(d.collectors, all...)
}

func (d *describer) Unregister(prometheus.Collector) bool { return false }

// described is a metric as its Desc has it.
type described struct {
	help   string
	labels []string
}

// metrics are all metrics of both components, by name.
func (d *describer) metrics(t *testing.T) map[string]described {
	t.Helper()
	// Desc has no accessors.
	form := regexp.MustCompile(`^Desc\{fqName: "(\w+)", help: "(.*)", constLabels: \{\}, variableLabels: \{([\w,]*)\}\}$`)
	all := map[string]described{}
	for _, c := range d.collectors {
		descs := make(chan *prometheus.Desc, 1000) // no collector has more
		c.Describe(descs)
		close(descs)
		for desc := range descs {
			m := form.FindStringSubmatch(desc.String())
			if m == nil {
				t.Fatalf("a description that is not understood: %s", desc)
			}
			all[m[1]] = described{m[2], strings.FieldsFunc(m[3], func(r rune) bool { return r == ',' })}
		}
	}
	return all
}

// components registers what both components register.
func components(t *testing.T) *describer {
	t.Helper()
	d, log, client := &describer{}, slog.New(slog.DiscardHandler), testapi.New()
	config := kube.NewConfigWatcher(client, kube.ConfigOptions{Log: log})
	services := informers.NewSharedInformerFactory(client, 0).Core().V1().Services()
	controller, err := servicelb.New(servicelb.Options{Services: services, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	d.MustRegister(config, controller, quarantinestore.New(client, "lodestone-system", log))

	members := membership.New(membership.Options{Log: log, Registry: d})
	layer2.New(layer2.Options{Log: log, Registry: d})
	limit.New(limit.Options{Log: log, Registry: d})
	direct.New(direct.Options{Log: log, Registry: d})
	podroutes.New(podroutes.Options{Log: log, Registry: d})
	bfd.New(bfd.Options{Log: log, Registry: d})
	bgp.New(bgp.Options{Log: log, Registry: d})
	if _, err := speaker.New(speaker.Options{Client: client, Members: members, Log: log, Registry: d}); err != nil {
		t.Fatal(err)
	}
	speaker.NewReporter(speaker.ReportOptions{Log: log, Registry: d})
	return d
}

// TestMetricsReference: the reference has each metric with its labels and its
// type, no document names another one, and all follow the conventions.
func TestMetricsReference(t *testing.T) {
	t.Parallel()
	rows, code := documentedMetrics(t), components(t).metrics(t)
	for name, m := range code {
		row, ok := rows[name]
		if !ok {
			t.Errorf("%s has no row for %s", metricsReference, name)
			continue
		}
		slices.Sort(row.labels)
		if slices.Sort(m.labels); !slices.Equal(row.labels, m.labels) {
			t.Errorf("%s: %s has the labels %v; in the code it has %v", metricsReference, name, row.labels, m.labels)
		}
		lint(t, name, row.kind, m.help)
	}
	for name := range rows {
		if _, ok := code[name]; !ok && strings.HasPrefix(name, "lodestone_") {
			t.Errorf("%s has a row for %s, which does not exist", metricsReference, name)
		}
	}
	for path, text := range documents(t) {
		// An archive of a release is lodestone_v0.2.0_linux_amd64.tar.gz.
		for _, name := range regexp.MustCompile(`\blodestone_(?:[a-uw-z]|v[a-z])[a-z0-9_]+`).FindAllString(text, -1) {
			if _, ok := code[strings.TrimSuffix(name, "_bucket")]; !ok {
				t.Errorf("%s names the metric %s, which does not exist", path, name)
			}
		}
	}
}

// TestEveryMetricIsRegistered: components makes all metrics that there are.
func TestEveryMetricIsRegistered(t *testing.T) {
	t.Parallel()
	code, name := components(t).metrics(t), regexp.MustCompile(`^lodestone_[a-z0-9_]+$`)
	constants(t, func(s source, _, value string) {
		if strings.HasPrefix(s.path, "test") || !name.MatchString(value) {
			return
		}
		if _, ok := code[value]; !ok {
			t.Errorf("%s: metric %s is not registered by what components makes", s.path, value)
		}
	})
}

// lint holds a metric to Prometheus' conventions. The type is that of the
// reference, so a wrong one there shows here.
func lint(t *testing.T, name, kind, help string) {
	t.Helper()
	number, ok := dto.MetricType_value[strings.ToUpper(kind)]
	if !ok {
		t.Errorf("%s: %s is no type of a metric", name, kind)
	}
	family := &dto.MetricFamily{Name: &name, Help: &help, Type: dto.MetricType(number).Enum()}
	problems, err := promlint.NewWithMetricFamilies([]*dto.MetricFamily{family}).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestTypesOfMetrics: the reference has the type of each metric that is there
// before anything has happened. The packages lint the others.
func TestTypesOfMetrics(t *testing.T) {
	t.Parallel()
	rows, registry := documentedMetrics(t), prometheus.NewPedanticRegistry()
	for _, c := range components(t).collectors {
		if _, controller := c.(*servicelb.Controller); !controller { // it needs a configuration
			registry.MustRegister(c)
		}
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if kind := strings.ToLower(f.GetType().String()); rows[f.GetName()].kind != kind {
			t.Errorf("%s: %s is a %s; in the code it is a %s", metricsReference, f.GetName(), rows[f.GetName()].kind, kind)
		}
	}
	if len(families) < 15 {
		t.Errorf("only %d metrics were gathered", len(families))
	}
}
