package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const header = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"

// run runs the command as a shell would, in a directory of its own.
func run(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = Run(args, Streams{In: strings.NewReader(stdin), Out: &out, Err: &err})
	return code, out.String(), err.String()
}

func TestOperatorValidatesBeforeApplying(t *testing.T) {
	t.Chdir(t.TempDir())
	write := func(text string) { require.NoError(t, os.WriteFile("config.yaml", []byte(text), 0o600)) }

	// A valid file is summed up.
	write(header + "pools:\n- {name: lan, addresses: [203.0.113.0/24]}\n- {name: dmz, addresses: [198.51.100.1-198.51.100.55]}\n")
	code, out, err := run(t, "", "validate", "config.yaml")
	assert.Equal(t, ExitOK, code)
	assert.Equal(t, "config.yaml: valid: 2 pools, 309 addresses, 1 advertisement\n", out)
	assert.Empty(t, err)

	// Every mistake is printed, and only to stderr.
	write(header + "quarantine: 30\npools:\n- {name: lan, addresses: [203.0.113.1/24]}\n")
	code, out, err = run(t, "", "validate", "config.yaml")
	assert.Equal(t, ExitInvalid, code)
	assert.Empty(t, out)
	assert.Equal(t, `config.yaml:3:13: quarantine: 30 has no unit: write 30s for seconds
config.yaml:5:27: pools[0] "lan": 203.0.113.1/24 has bits set after its first 24: did you mean the prefix 203.0.113.0/24, or the one address 203.0.113.1?
`, err)
}

func TestOperatorValidatesWhatTheClusterHas(t *testing.T) {
	manifest := "apiVersion: v1\nkind: ConfigMap\ndata:\n  config.yaml: |\n    " + strings.ReplaceAll(header, "\n", "\n    ")

	code, out, err := run(t, manifest+"pools: [{name: one, addresses: [203.0.113.1]}]\n", "validate", "-")
	assert.Equal(t, ExitOK, code, err)
	assert.Equal(t, "stdin: valid: 1 pool, 1 address, 1 advertisement\n", out)

	code, _, err = run(t, manifest+"pool: []\n", "validate", "-")
	assert.Equal(t, ExitInvalid, code)
	assert.Equal(t, "stdin:7:5: unknown key \"pool\": did you mean \"pools\"?\n", err)
}

func TestHugePoolsAreCountedInPowersOfTen(t *testing.T) {
	_, out, _ := run(t, header+"pools: [{name: v6, addresses: [\"2001:db8::/64\"]}]\n", "validate", "-")
	assert.Equal(t, "stdin: valid: 1 pool, about 1.8e+19 addresses, 1 advertisement\n", out)
	_, out, _ = run(t, header+"pools: [{name: v4, addresses: [10.0.0.0/8]}]\n", "validate", "-")
	assert.Equal(t, "stdin: valid: 1 pool, 16777214 addresses, 1 advertisement\n", out)
}

func TestTooLargeAFileIsNotReadToItsEnd(t *testing.T) {
	code, _, err := run(t, strings.Repeat("#", 1<<21), "validate", "-")
	assert.Equal(t, ExitInvalid, code)
	assert.Contains(t, err, "stdin:1:1: the document is larger than 1048576 bytes")
}

func TestWrongUsageExitsWith3(t *testing.T) {
	for want, args := range map[string][]string{
		"lodestone: no command given; see lodestone --help\n":                {},
		"lodestone: 0 files given: name one, - for the standard input":       {"validate"},
		"lodestone: 2 files given: name one, - for the standard input":       {"validate", "a", "b"},
		"lodestone: unknown command \"valid\" for \"lodestone\"":             {"valid"},
		"lodestone: unknown flag: --strict: see lodestone validate --help\n": {"validate", "--strict", "-"},
		"lodestone: open no/such/file: no such file or directory":            {"validate", filepath.Join("no", "such", "file")},
		"lodestone: read .: is a directory\n":                                {"validate", "."},
		"lodestone: lodestone plan takes no argument, and \"new.yaml\" is one: see lodestone plan --help\n": {
			"plan", "new.yaml"},
		"lodestone: lodestone bgp peers takes no argument, and \"tor-a\" is one": {
			"bgp", "peers", "tor-a"},
		"lodestone: unknown command \"peer\" for \"lodestone bgp\"": {"bgp", "peer"},
	} {
		code, out, err := run(t, "", args...)
		assert.Equal(t, ExitFailed, code, "%q", args)
		assert.Empty(t, out)
		assert.Contains(t, err, want)
	}

	var out, errs bytes.Buffer
	code := Run([]string{"validate", "-"}, Streams{In: iotest.ErrReader(errors.New("broken pipe")), Out: &out, Err: &errs})
	assert.Equal(t, ExitFailed, code)
	assert.Equal(t, "lodestone: read stdin: broken pipe\n", errs.String())
}

// Each error has what was written, what is possible, and where the help is.
func TestMistypedCommandsAndFlagsAreExplained(t *testing.T) {
	for want, args := range map[string][]string{
		"lodestone: unknown flag: --kubecnfig, did you mean --kubeconfig?: see lodestone status --help\n": {
			"status", "--kubecnfig=x"},
		"lodestone: unknown command \"statu\" for \"lodestone\", did you mean status?: see lodestone --help\n": {
			"statu"},
		"lodestone: 0 arguments given, and the command is lodestone explain vip ADDRESS: see lodestone explain vip --help\n": {
			"explain", "vip"},
		"lodestone: --port is \"99999\", not a number from 0 to 65535: see lodestone dashboard --help\n": {
			"dashboard", "--port=99999"},
		"lodestone: --request-timeout is -1s: write a time above 0, or 0 to wait without a limit\n": {
			"status", "--request-timeout=-1s"},
		"lodestone: --lodestone-namespace is \"\", not a name in Kubernetes": {
			"status", "--lodestone-namespace="},
		"lodestone: --config-name is \"\", not a name in Kubernetes": {
			"plan", "--config=x", "--config-name="},
		"lodestone: --namespace is \"shop/\", not a name in Kubernetes": {
			"explain", "service", "web", "-n", "shop/"},
		"lodestone: --handle-classless=false and no class in --load-balancer-classes: no Service at all would be served": {
			"status", "--handle-classless=false", "--load-balancer-classes="},
		"lodestone: --bundle is empty: name a file": {
			"diagnose", "--bundle="},
		"lodestone: \"lan\" is not an address": {
			"explain", "vip", "lan"},
		"lodestone: \"a/b/c\" is not a Service": {
			"explain", "service", "a/b/c"},
		"lodestone: \"/web\" is not a Service": {
			"explain", "service", "/web"},
		"lodestone: \"shop/\" is not a Service": {
			"explain", "service", "shop/"},
	} {
		code, out, err := run(t, "", args...)
		assert.Equal(t, ExitFailed, code, "%q", args)
		assert.Empty(t, out)
		assert.Contains(t, err, want)
	}
}

// Flags from which nothing would follow are refused: whoever gives them expects another answer.
func TestFlagsThatContradictEachOtherAreRefused(t *testing.T) {
	for want, args := range map[string][]string{
		"lodestone: --live checks the configuration in the cluster: leave the file out, or --live": {"validate", "--live", "-"},
		"lodestone: --context has no effect here, since without --live the cluster is not read":    {"validate", "-", "--context=prod"},
		"lodestone: --config-name has no effect here, since without --live":                        {"validate", "-", "--config-name=x"},
		"lodestone: --request-timeout has no effect here, since without --live":                    {"validate", "-", "--request-timeout=1s"},
		"lodestone: --from-namespace has no effect here, since beside files the cluster is not read": {
			"migrate", "metallb", "-", "--from-namespace=metallb"},
		"lodestone: --kubeconfig has no effect here, since beside files the cluster is not read": {
			"migrate", "kube-vip", "-", "--kubeconfig=x"},
		"lodestone: --as has no effect here, since with --output the configuration is a part of the answer": {
			"migrate", "metallb", "--as=values", "-o", "json"},
		"lodestone: the Service shop/web is not in --namespace other": {"explain", "service", "shop/web", "-n", "other"},
	} {
		code, out, err := run(t, "", args...)
		assert.Equal(t, ExitFailed, code, "%q", args)
		assert.Empty(t, out)
		assert.Contains(t, err, want)
	}
}

// A wrong name in a cluster of thousands of nodes does not print them all.
func TestWrongNameListsSome(t *testing.T) {
	var names []string
	for i := range 5000 {
		names = append(names, fmt.Sprintf("n%04d", i))
	}
	require.NoError(t, among("node", "n4999", names))
	assert.ErrorContains(t, among("node", "m1", names), "there is no node \"m1\"; there are: n0000, n0001, ")
	assert.ErrorContains(t, among("node", "m1", names), "n0019 and 4980 more")
	assert.EqualError(t, among("node", "m1", names[:2]), `there is no node "m1"; there are: n0000, n0001`)
}

func TestVersion(t *testing.T) {
	code, out, _ := run(t, "", "version")
	assert.Equal(t, ExitOK, code)
	assert.Regexp(t, `^lodestone \S+ \(commit \S+, date \S+, go\S+ \w+/\w+\)\n$`, out)
}

// kubectl lodestone is the same command, and speaks of itself by that name.
func TestKubectlRunsItAsAPlugin(t *testing.T) {
	for file, want := range map[string]struct {
		plugin bool
		args   []string
	}{
		"/usr/local/bin/lodestone":              {false, []string{"status"}},
		"/opt/krew/bin/kubectl-lodestone":       {true, []string{"status"}},
		"kubectl-lodestone.exe":                 {true, []string{"status"}},
		"/usr/bin/kubectl_complete-lodestone":   {true, []string{"__complete", "status"}},
		"/usr/local/bin/kubectl-lodestone-test": {false, []string{"status"}},
	} {
		plugin, args := Invocation(file, []string{"status"})
		assert.Equal(t, want.plugin, plugin, file)
		assert.Equal(t, want.args, args, file)
	}
	var out bytes.Buffer
	require.Equal(t, ExitOK, Run([]string{"explain", "vip", "--help"}, Streams{Out: &out, Err: &out, Plugin: true}))
	assert.Contains(t, out.String(), "Usage:\n  kubectl lodestone explain vip ADDRESS [flags]")
}

// Text of a file or a cluster does not steer the terminal when it is in an error.
func TestErrorsDoNotSteerTheTerminal(t *testing.T) {
	code, _, err := run(t, "apiVersion: lodestone.io/v1alpha1\nkind: Config\n\"\\e]0;owned\\a\": 1\n", "validate", "-")
	assert.Equal(t, ExitInvalid, code)
	assert.NotContains(t, err, "\x1b")
	code, _, err = run(t, "", "validate", "no\x1b[2Jsuch\u202efile")
	assert.Equal(t, ExitFailed, code)
	assert.Equal(t, "lodestone: open no?[2Jsuch?file: no such file or directory\n", err)
}

func TestHelpIsOnStdout(t *testing.T) {
	code, out, err := run(t, "", "validate", "--help")
	assert.Equal(t, ExitOK, code)
	assert.Contains(t, out, "lodestone validate FILE|-")
	assert.Empty(t, err)
}
