package main

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the generated part of the documentation")

// document is the page whose tables are generated from the flags.
var document = filepath.Join("..", "..", "docs", "reference", "controller-flags.md")

const (
	ownMark     = "<!-- generated: own -->\n"
	changedMark = "<!-- generated: changed -->\n"
	endMark     = "<!-- end -->\n"
)

func command(t *testing.T) (*process, *cobra.Command) {
	t.Helper()
	p := newProcess(t.Context())
	cmd, err := p.command()
	if err != nil {
		t.Fatal(err)
	}
	return p, cmd
}

// TestDocument checks that the documentation lists our flags and changed
// defaults as they are: go test ./cmd/controller -update writes it.
func TestDocument(t *testing.T) {
	p, cmd := command(t)
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	own := "| flag | default | meaning |\n|---|---|---|\n"
	sets := p.flags.sets()
	sets.FlagSet(flagSection).VisitAll(func(f *pflag.Flag) {
		own += "| `--" + f.Name + "` | `" + f.DefValue + "` | " + f.Usage + " |\n"
	})
	changed := "| flag | default here | why |\n|---|---|---|\n"
	for _, d := range changedDefaults {
		changed += "| `--" + d.flag + "` | `" + cmd.Flags().Lookup(d.flag).DefValue + "` | " + d.why + " |\n"
	}
	want := fill(t, fill(t, string(text), ownMark, own), changedMark, changed)
	if *update {
		if err := os.WriteFile(document, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(text) {
		t.Errorf("%s is out of date: go test ./cmd/controller -update", document)
	}
	for _, named := range regexp.MustCompile(`--([a-z][a-z-]*)`).FindAllStringSubmatch(want, -1) {
		if cmd.Flags().Lookup(named[1]) == nil && named[1] != "help" {
			t.Errorf("%s names --%s, which does not exist", document, named[1])
		}
	}
}

// fill replaces what stands between the mark and the end mark after it.
func fill(t *testing.T, text, mark, content string) string {
	t.Helper()
	before, rest, ok := strings.Cut(text, mark)
	_, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		t.Fatalf("%s has no %s ... %s", document, mark, endMark)
	}
	return before + mark + content + endMark + after
}

// Whoever mistypes a flag reads what is wrong in one line, not the usage of hundreds of flags, and not nothing.
func TestWrongCommandLinesAreExplained(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for want, args := range map[string][]string{
		"unknown flag: --dashbord, did you mean --dashboard?: see lodestone-controller --help": {"--dashbord"},
		`"lodestone-controller" does not take any arguments, got ["extra"]`:                    {"extra"},
		`--leader-elect-lease-duration is "10", not a time with its unit, such as 30s or 1m30s: see lodestone-controller --help`: {
			"--leader-elect-lease-duration=10"},
		`--config-name is "x_Y", not a name in Kubernetes, of a-z, 0-9, '-' and '.'`:   {"--config-name=x_Y"},
		`--config-namespace is "", not a name in Kubernetes, of a-z, 0-9, '-' and '.'`: {"--config-namespace="},
		"--handle-classless=false and no class in --load-balancer-classes: no Service at all would be served, change one of them": {
			"--handle-classless=false", "--load-balancer-classes="},
		"--concurrent-service-syncs is 0: no Service at all would be served, let it be 1 or more": {"--concurrent-service-syncs=0"},
		"--use-service-account-credentials is not for this controller: a replica that does not lead any more could still write by these " +
			"accounts, leave it out": {"--use-service-account-credentials"},
		"--kubeconfig: stat /nowhere: no such file or directory":           {"--kubeconfig=/nowhere"},
		"find the API server: this is no pod: name a file by --kubeconfig": {},
	} {
		var stderr strings.Builder
		if code := run(t.Context(), args, &stderr); code != 1 || stderr.String() != "lodestone-controller: "+want+"\n" {
			t.Errorf("%q: exit code %d, %s", args, code, stderr.String())
		}
	}
}

func TestDefaults(t *testing.T) {
	p, cmd := command(t)
	if err := cmd.ParseFlags([]string{"--load-balancer-classes=a/b,c/d", "--handle-classless=false"}); err != nil {
		t.Fatal(err)
	}
	if strings.Join(p.flags.classes, " ") != "a/b c/d" || p.flags.handleClassless || p.flags.configName != "lodestone-config" {
		t.Errorf("flags %+v", p.flags)
	}
	get := func(name string) time.Duration {
		d, err := cmd.Flags().GetDuration(name)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	lease, renew, retry := get("leader-elect-lease-duration"), get("leader-elect-renew-deadline"), get("leader-elect-retry-period")
	if renew >= lease || retry >= renew || renew <= 5*time.Second {
		t.Errorf("lease %v, renew deadline %v, retry period %v", lease, renew, retry)
	}
	for _, d := range changedDefaults {
		if f := cmd.Flags().Lookup(d.flag); f.DefValue != d.value || f.Changed {
			t.Errorf("--%s: default %q, changed %v", d.flag, f.DefValue, f.Changed)
		}
	}
	if cmd.Flags().Lookup("webhook-secure-port") != nil {
		t.Error("there are webhook flags")
	}
	for _, name := range []string{"lodestone-service", "service-lb-controller", "node-route-controller", "cloud-node-controller"} {
		if !strings.Contains(cmd.Flags().Lookup("controllers").Usage, name) {
			t.Errorf("--controllers does not know %s", name)
		}
	}
	if !strings.Contains(cmd.Flags().Lookup("controllers").Usage, "Disabled-by-default controllers: service-lb-controller") {
		t.Errorf("--controllers: %s", cmd.Flags().Lookup("controllers").Usage)
	}
}
