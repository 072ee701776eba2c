package lodestone_test

import (
	"flag"
	"fmt"
	"go/ast"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lodestone-lb/lodestone/controller/leaseevents"
	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/reason"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/plan"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

var update = flag.Bool("update", false, "write the generated documents instead of comparing with them")

// reasonType is a type of reasons, and its section of the reference.
type reasonType struct {
	name, title string
	where       string // the reader meets them
	metrics     []string
	texts       map[string]reason.Text
}

var reasonTypes = []reasonType{
	{"ipam.Reason", "Why a Service has no address",
		"the Service's condition `lodestone.io/Allocated` while it is `False`, its Events, the controller's log, `lodestone explain service`",
		[]string{"lodestone_services_refused", "lodestone_refusals_total"}, texts(ipam.Reasons(), ledger.Refusals())},
	{"ledger.EventReason", "How a Service stands, and what happened to it",
		"the Service's condition `lodestone.io/Allocated` while it is `True`, its Events, the controller's log",
		nil, texts(ledger.EventReasons())},
	{"plan.Reason", "Why a node does not announce a VIP", "the speaker's log and its `/status`, `lodestone explain vip`",
		[]string{"lodestone_speaker_vips_silent", "lodestone_speaker_vips_unowned"}, texts(plan.Reasons())},
	{"segment.Reason", "Why the owner does not announce a VIP by layer 2", "the speaker's log and its `/status`",
		[]string{"lodestone_layer2_unannounced_vips", "lodestone_layer2_withheld_vips"}, texts(layer2.Reasons())},
	{"report.Reason", "Why a VIP changed hands", "the Events of Services, besides the reasons why a node does not announce a VIP",
		nil, texts(report.Reasons())},
	{"plan.ProblemReason", "What is wrong with a BGP session before it is tried", "the speaker's log, `lodestone bgp peers`",
		nil, texts(plan.ProblemReasons())},
	{"bgp.Cause", "Why a BGP session came up or ended", "the speaker's log",
		[]string{"lodestone_bgp_session_transitions_total"}, texts(bgp.Causes())},
	{"bgp.Withholding", "Why a prefix is withheld from a router", "the speaker's `/status`",
		[]string{"lodestone_bgp_withheld_prefixes"}, texts(bgp.Withholdings())},
	{"leaseevents.EventReason", "Events of what speakers report", "the Events of Nodes and Services",
		nil, texts(leaseevents.EventReasons())},
	{"bfd.Cause", "Why a BFD session came up or ended", "the speaker's log and its `/status`",
		[]string{"lodestone_bfd_transitions_total"}, texts(bfd.Causes())},
	{"bfd.Discard", "Why a BFD packet was not used", "the speaker's log",
		[]string{"lodestone_bfd_discarded_packets_total"}, texts(bfd.Discards())},
	{"direct.Discard", "Why a packet was not handed to another node", "the counters of `nft list table ip lodestone-direct` on the node",
		[]string{"lodestone_direct_dropped_packets_total"}, texts(direct.Discards())},
	{"plan.PodRefusal", "Why there is no route to the pods of a node", "the speaker's log, `podRoutes` of its `/status`",
		[]string{"lodestone_route_problems"}, texts(plan.PodRefusals(), podroutes.PodRefusals())},
	{"provider.EventReason", "Why a new node is not initialized", "the Events of Nodes",
		nil, texts(provider.EventReasons())},
	{"kube.EventReason", "Events on the ConfigMap", "the Events of the ConfigMap, the log of both components",
		nil, texts(kube.EventReasons())},
	{"quarantinestore.LossReason", "Why a released address is not on record", "the controller's log",
		[]string{"lodestone_quarantine_dropped_total"}, texts(quarantinestore.LossReasons())},
}

func texts[R ~string](all ...reason.Texts[R]) map[string]reason.Text {
	merged := map[string]reason.Text{}
	for _, part := range all {
		for r, text := range part {
			merged[string(r)] = text
		}
	}
	return merged
}

// isReasonType matches the names of types of reasons.
var isReasonType = regexp.MustCompile(`(Reason|Refusal|Cause|Discard|Withholding)$`)

// declaredReasons are the reasons in the code, by type.
func declaredReasons(t *testing.T) map[string][]string {
	t.Helper()
	declared := map[string][]string{}
	constants(t, func(s source, typeName, value string) {
		if value == "" || strings.HasPrefix(s.path, "test") || !isReasonType.MatchString(typeName) {
			return
		}
		declared[s.qualified(typeName, value)] = append(declared[s.qualified(typeName, value)], value)
	})
	return declared
}

// qualified returns the type of a constant with the name of its package.
func (s source) qualified(typeName, value string) string {
	qualified := s.file.Name.Name + "." + typeName
	ast.Inspect(s.file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 {
			return true
		}
		if x, ok := v.Type.(*ast.SelectorExpr); ok && x.Sel.Name == typeName {
			if text, ok := stringOf(v.Values[0]); ok && text == value {
				qualified = x.X.(*ast.Ident).Name + "." + typeName
			}
		}
		return true
	})
	return qualified
}

// TestEveryReasonIsExplained by a cause and a cure, and nothing else is.
func TestEveryReasonIsExplained(t *testing.T) {
	t.Parallel()
	declared := declaredReasons(t)
	for _, kind := range reasonTypes {
		for _, r := range declared[kind.name] {
			if text := kind.texts[r]; !isSentence(text.Cause) || !isSentence(text.Cure) {
				t.Errorf("%s %s: cause %q and cure %q must both be sentences", kind.name, r, text.Cause, text.Cure)
			}
		}
		for r := range kind.texts {
			if !slices.Contains(declared[kind.name], r) {
				t.Errorf("%s: no code gives the reason %s", kind.name, r)
			}
		}
		delete(declared, kind.name)
	}
	for name, values := range declared {
		t.Errorf("%s has reasons (%s) that reasonTypes does not list", name, strings.Join(values, ", "))
	}
}

// TestReasonsNameTheirKeys: whoever reads a reason that follows from a key reads its name.
// TestReasonsReference holds that a reference has the key.
func TestReasonsNameTheirKeys(t *testing.T) {
	t.Parallel()
	checked := 0
	for _, kind := range reasonTypes {
		for r, text := range kind.texts {
			for _, key := range text.Keys {
				checked++
				name := key
				if strings.Contains(key, "[]") {
					name = key[strings.LastIndex(key, ".")+1:]
				}
				if !regexp.MustCompile(`(^|\W)` + regexp.QuoteMeta(name) + `(\W|$)`).MatchString(text.Cause + " " + text.Cure) {
					t.Errorf("%s %s follows from %q, which neither its cause nor its cure names: %q %q", kind.name, r, key, text.Cause, text.Cure)
				}
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d keys were found", checked)
	}
}

// whereKeysAre returns, for each key that a table of the reference describes, its name in code
// type with a link to its section.
func whereKeysAre(docs map[string]string) map[string]string {
	links := map[string]string{}
	row := regexp.MustCompile("\\| `([^`]+)` \\|")
	for _, doc := range []string{"chart.md", "annotations.md", "configuration.md"} {
		section := ""
		for line := range strings.Lines(docs["docs/reference/"+doc]) {
			if strings.HasPrefix(line, "#") {
				for section = range anchorsOf(line) { // the only one
				}
			}
			if m := row.FindStringSubmatch(line); m != nil && strings.HasPrefix(line, "|") {
				links[m[1]] = fmt.Sprintf("[`%s`](%s#%s)", m[1], doc, section)
			}
		}
	}
	return links
}

func isSentence(text string) bool {
	return len(text) > 5 && strings.HasSuffix(text, ".") && strings.ToUpper(text[:1]) == text[:1]
}

// TestReasonsReference checks that docs/reference/reasons.md is what the code generates.
func TestReasonsReference(t *testing.T) {
	t.Parallel()
	const path = "docs/reference/reasons.md"
	docs := documents(t)
	guide, links := docs["docs/guides/troubleshooting.md"], whereKeysAre(docs)
	var b strings.Builder
	b.WriteString("# Reasons\n\n<!-- generated from the code by go test . -update -->\n\n" +
		"Conditions, Events, metrics, logs and the CLI give reasons by the same codes. What\n" +
		"each of them means, what helps, and by which keys of the configuration, annotations or\n" +
		"values of the chart it comes about:\n")
	for _, kind := range reasonTypes {
		fmt.Fprintf(&b, "\n## %s\n\nFound in: %s", kind.title, kind.where)
		for _, m := range kind.metrics {
			fmt.Fprintf(&b, ", `%s`", m)
		}
		b.WriteString(".\n\n| reason | cause | cure | keys |\n|---|---|---|---|\n")
		for _, r := range slices.Sorted(maps.Keys(kind.texts)) {
			code := "`" + r + "`"
			if strings.HasSuffix(kind.name, ".Reason") && strings.Contains(guide, "\n### "+r+"\n") {
				code = "[" + code + "](../guides/troubleshooting.md#" + strings.ToLower(r) + ")"
			}
			var keys []string
			for _, key := range kind.texts[r].Keys {
				if links[key] == "" {
					t.Errorf("%s %s follows from %q, which no table of the reference has", kind.name, r, key)
				}
				keys = append(keys, links[key])
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", code, kind.texts[r].Cause, kind.texts[r].Cure, strings.Join(keys, ", "))
		}
	}
	matches(t, path, b.String())
}

// matches compares a generated document with the file, or writes it.
func matches(t *testing.T, path, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := os.ReadFile(path); err != nil || string(is) != want {
		t.Errorf("%s is not what the code generates (err %v): run go test . -update, and review the difference", path, err)
	}
}

// TestReasonLabelsAreExplained: what a metric has as reason or cause is in the
// reference.
func TestReasonLabelsAreExplained(t *testing.T) {
	t.Parallel()
	var explained []string
	for _, kind := range reasonTypes {
		explained = append(explained, kind.metrics...)
	}
	for name, m := range documentedMetrics(t) {
		labelled := slices.Contains(m.labels, "reason") || slices.Contains(m.labels, "cause")
		if labelled != slices.Contains(explained, name) {
			t.Errorf("%s: labels %v, and reasonTypes lists it: %v", name, m.labels, !labelled)
		}
	}
}

// TestEventsHaveTypedReasons: an Event's reason is none that only its writer
// knows.
func TestEventsHaveTypedReasons(t *testing.T) {
	t.Parallel()
	events := 0
	for _, s := range parseSources(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 4 {
				return true
			}
			if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "Event" {
				return true
			}
			events++
			if _, literal := call.Args[2].(*ast.BasicLit); literal {
				t.Errorf("%s: the reason of an Event is a literal, not one of a type of reasons", s.at(call))
			}
			return true
		})
	}
	if events < 5 {
		t.Errorf("only %d Events were found", events)
	}
}
