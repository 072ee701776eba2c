// Package monitoring_test holds the alerts and the dashboard to what they
// promise: they read only metrics, labels and values that Lodestone has, every
// alert fires and ends, and every alert has a runbook that can be followed.
package monitoring_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

const (
	root      = "../../.."
	rulesFile = root + "/deploy/chart/monitoring/rules.yaml"
	dashboard = root + "/deploy/chart/monitoring/dashboard.json"
	runbooks  = root + "/docs/runbooks"
)

var builder = program.Builder{Root: absolute(root), Progress: func(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}}

func absolute(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		panic(err)
	}
	return abs
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(content)
}

// rule is an alert.
type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// alerts are those of the rules file, in its order.
func alerts(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []rule `json:"rules"`
		} `json:"groups"`
	}
	require.NoError(t, yaml.UnmarshalStrict([]byte(read(t, rulesFile)), &file))
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// run runs a program and returns what it printed.
func run(t *testing.T, input, name string, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &out
	err := cmd.Run()
	return out.String(), err
}

// expression is what a PromQL expression reads; see cmd/series.
type expression struct {
	Selectors []struct {
		Name     string
		Matchers []struct{ Label, Type, Value string }
	}
	Grouping []string
}

// inspect has cmd/series parse expressions.
func inspect(t *testing.T, expressions []string) []expression {
	t.Helper()
	series, err := builder.Own(t.Context(), "series")
	require.NoError(t, err)
	input, err := json.Marshal(expressions)
	require.NoError(t, err)
	out, err := run(t, string(input), series)
	require.NoError(t, err, out)
	var parsed []expression
	require.NoError(t, json.Unmarshal([]byte(out), &parsed))
	require.Len(t, parsed, len(expressions))
	return parsed
}

// scraped are the labels that scraping adds.
var scraped = []string{"job", "node", "instance"}

// metrics are the labels of all metrics by name: those of the reference, which
// the root package's tests hold against the code, and those of every target.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	labels := map[string][]string{"up": nil, "process_cpu_seconds_total": nil, "process_resident_memory_bytes": nil}
	rows := regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| (\\w+) \\| ([^|]*)\\| ").FindAllStringSubmatch(read(t, root+
		"/docs/reference/metrics.md"), -1)
	require.Greater(t, len(rows), 50)
	for _, m := range rows {
		var of []string
		for _, label := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(m[3], -1) {
			of = append(of, label[1])
		}
		labels[m[1]] = of
		if m[2] == "histogram" {
			labels[m[1]+"_bucket"] = append(slices.Clone(of), "le")
		}
	}
	return labels
}

// check reports what an expression reads that does not exist.
func check(t *testing.T, where string, e expression) {
	t.Helper()
	known := metrics(t)
	values := read(t, root+"/docs/reference/metrics.md") + read(t, root+"/docs/reference/reasons.md")
	grouping := slices.Clone(scraped)
	for _, s := range e.Selectors {
		labels, ok := known[s.Name]
		if !assert.True(t, ok, "%s: there is no metric %s", where, s.Name) {
			continue
		}
		labels = append(slices.Clone(labels), scraped...)
		grouping = append(grouping, labels...)
		for _, m := range s.Matchers {
			assert.Contains(t, labels, m.Label, "%s: %s has no such label", where, s.Name)
			for value := range strings.SplitSeq(m.Value, "|") {
				plain := regexp.MustCompile(`^[\w-]+$`).MatchString(value)
				if plain && !slices.Contains([]string{"job", "method", "code"}, m.Label) {
					assert.True(t, strings.Contains(values, "`"+value+"`"), "%s: no document knows the value %q of %s", where, value, m.Label)
				}
			}
		}
	}
	for _, label := range e.Grouping {
		assert.Contains(t, grouping, label, "%s: no series has it", where)
	}
}

func TestAlertsReadWhatExists(t *testing.T) {
	all := alerts(t)
	var expressions []string
	for _, a := range all {
		expressions = append(expressions, a.Expr)
	}
	for i, e := range inspect(t, expressions) {
		check(t, all[i].Alert, e)
	}
}

// TestAlertsAreComplete: every alert has a summary, a severity and a runbook.
func TestAlertsAreComplete(t *testing.T) {
	for _, a := range alerts(t) {
		assert.Regexp(t, `^Lodestone[A-Z]\w+$`, a.Alert)
		assert.Contains(t, []string{"critical", "warning", "info"}, a.Labels["severity"], a.Alert)
		assert.NotEmpty(t, a.Annotations["summary"], a.Alert)
		assert.Regexp(t, `\.$`, a.Annotations["description"], a.Alert)
		assert.Equal(t, "https://github.com/lodestone-lb/lodestone/blob/main/docs/runbooks/"+a.Alert+".md", a.Annotations["runbook_url"])
		assert.Len(t, a.Annotations, 3, a.Alert)
	}
}

// TestRunbooks: each alert has one with all sections, whose commands exist, and
// there are no others.
func TestRunbooks(t *testing.T) {
	cli := read(t, root+"/docs/reference/cli.md")
	wanted := map[string]bool{"README.md": true}
	for _, a := range alerts(t) {
		name := a.Alert + ".md"
		wanted[name] = true
		text := read(t, filepath.Join(runbooks, name))
		assert.True(t, strings.HasPrefix(text, "# "+a.Alert+"\n"), name)
		var headings []string
		for _, m := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(text, -1) {
			headings = append(headings, m[1])
		}
		assert.Equal(t, []string{"Meaning", "Impact", "Diagnosis", "Cure"}, headings, name)
		for _, m := range regexp.MustCompile(`(?m)(?:^\$ |\| |\x60)lodestone ([^\n\x60]*)`).FindAllStringSubmatch(text, -1) {
			assert.True(t, isCommand(cli, m[1]), "%s: there is no command lodestone %s", name, m[1])
		}
		assert.Contains(t, text, "```console\n$ ", "%s: no command", name)
		assert.Contains(t, read(t, filepath.Join(runbooks, "README.md")), "]("+name+")")
	}
	files, err := os.ReadDir(runbooks)
	require.NoError(t, err)
	for _, f := range files {
		assert.True(t, wanted[f.Name()], "%s is of no alert", f.Name())
	}
}

// isCommand reports whether the line begins with a command of the reference that
// has all its flags.
func isCommand(reference, line string) bool {
	for section := range strings.SplitSeq(reference, "\n## lodestone ") {
		command, _, _ := strings.Cut(section, "\n")
		if !strings.HasPrefix(strings.TrimSpace(line)+" ", command+" ") {
			continue
		}
		flags := regexp.MustCompile(`--[a-z-]+`).FindAllString(line, -1)
		return !slices.ContainsFunc(flags, func(f string) bool { return !strings.Contains(section, "| `"+f+"` |") })
	}
	return false
}

// panel is a panel of a dashboard.
type panel struct {
	ID         int
	Type       string
	Title      string
	Datasource *source
	GridPos    struct{ H, W, X, Y int }
	Targets    []struct {
		Expr       string
		Datasource *source
	}
}

type source struct{ Type, UID string }

// TestDashboard: it reads what exists, from the data source that its user
// chooses, and its panels do not overlap.
func TestDashboard(t *testing.T) {
	text := read(t, dashboard)
	var d struct {
		Title, UID string
		Panels     []panel
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(text), &d))
	require.NotEmpty(t, d.UID)
	require.Len(t, d.Templating.List, 1)
	assert.Equal(t, "datasource", d.Templating.List[0].Type)
	chosen := &source{"prometheus", "${" + d.Templating.List[0].Name + "}"}

	var expressions, where []string
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		assert.False(t, ids[p.ID], "%s: the ID is another panel's", p.Title)
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				assert.Empty(t, cells[[2]int{x, y}], "%s lies on another panel", p.Title)
				cells[[2]int{x, y}] = p.Title
			}
		}
		assert.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		if p.Type == "row" {
			continue
		}
		assert.Equal(t, chosen, p.Datasource, p.Title)
		assert.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			assert.Equal(t, chosen, target.Datasource, p.Title)
			expressions = append(expressions, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
			where = append(where, p.Title)
		}
	}
	require.Greater(t, len(expressions), 30)
	for i, e := range inspect(t, expressions) {
		check(t, where[i], e)
	}
}
