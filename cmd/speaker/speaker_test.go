package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// part is a runner that ends when its context does, or fails at once.
type part struct {
	name  string
	err   error
	ended chan string
}

func (p part) String() string { return p.name }

func (p part) Run(ctx context.Context) error {
	if p.err == nil {
		<-ctx.Done()
	}
	if p.ended != nil {
		p.ended <- p.name
	}
	return p.err
}

// A part that fails ends the loop and all other parts, and the process names it.
func TestOnePartThatFailsEndsAll(t *testing.T) {
	t.Parallel()
	broken, ended := errors.New("address already in use"), make(chan string, 3)
	err := runParts(t.Context(), part{name: "loop", ended: ended}, part{name: "server", err: broken, ended: ended},
		part{name: "membership", ended: ended})
	require.ErrorIs(t, err, broken)
	require.EqualError(t, err, "run server: address already in use")
	close(ended)
	require.ElementsMatch(t, []string{"loop", "server", "membership"}, slices.Collect(func(yield func(string) bool) {
		for name := range ended {
			yield(name)
		}
	}))
}

// The first error is the one that people read, not what follows from it.
func TestTheFirstErrorIsNamed(t *testing.T) {
	t.Parallel()
	late := part{name: "late", ended: make(chan string, 1)}
	err := runParts(t.Context(), part{name: "loop"}, part{name: "first", err: errors.New("no route")}, failsAtTheEnd{late})
	require.EqualError(t, err, "run first: no route")
	require.Equal(t, "late", <-late.ended)
}

// A loop that cannot hand over because a part has failed does not hide why that is.
func TestTheCauseIsNamedAndNotWhatFollowsFromIt(t *testing.T) {
	t.Parallel()
	err := runParts(t.Context(), failsAtTheEnd{part{name: "loop"}}, part{name: "server", err: errors.New("address already in use")})
	require.EqualError(t, err, "run server: address already in use")
	err = runParts(t.Context(), part{name: "loop", err: errors.New("no such node")}, failsAtTheEnd{part{name: "late"}})
	require.EqualError(t, err, "no such node\nrun late: ended in the middle of something")
}

type failsAtTheEnd struct{ part }

func (p failsAtTheEnd) Run(ctx context.Context) error {
	return errors.Join(p.part.Run(ctx), errors.New("ended in the middle of something"))
}

// The loop hands over with the parts that it needs for that: they end after it.
func TestPartsOutliveTheLoop(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	needed := part{name: "announcer", ended: make(chan string, 1)}
	stop()
	require.NoError(t, runParts(ctx, handsOver{needed.ended}, needed))
	require.Equal(t, "announcer", <-needed.ended)
}

// So does it when another part fails, such as the one that finds that the Node has another address.
func TestPartsOutliveTheLoopWhenOneFails(t *testing.T) {
	t.Parallel()
	needed := part{name: "announcer", ended: make(chan string, 1)}
	loop := witness{handsOver{needed.ended}, make(chan error, 1)}
	err := runParts(t.Context(), loop, part{name: "address", err: errors.New("another address")}, needed)
	require.EqualError(t, err, "run address: another address")
	require.NoError(t, <-loop.result)
}

// witness is a loop of which the result is known, too.
type witness struct {
	handsOver
	result chan error
}

func (w witness) Run(ctx context.Context) error {
	err := w.handsOver.Run(ctx)
	w.result <- err
	return err
}

// handsOver is a loop that takes a moment to end, and fails if the other part has ended meanwhile.
type handsOver struct{ other chan string }

func (handsOver) String() string { return "loop" }

func (h handsOver) Run(ctx context.Context) error {
	<-ctx.Done()
	select {
	case name := <-h.other:
		return errors.New(name + " ended before the hand-over")
	case <-time.After(50 * time.Millisecond):
		return nil
	}
}

// parsed are the flags of a command line.
func parsed(t *testing.T, args ...string) *flags {
	t.Helper()
	f := newFlags()
	set := pflag.NewFlagSet("speaker", pflag.ContinueOnError)
	f.register(set)
	require.NoError(t, set.Parse(args))
	return f
}

func TestWrongFlagsAreNamedWithTheirValue(t *testing.T) {
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", strings.Repeat("k", 32))
	t.Setenv("NODE_NAME", "")
	t.Setenv("NODE_IP", "")
	for want, args := range map[string][]string{
		"no node name: set --node-name or NODE_NAME":            {"--node-ip=203.0.113.1"},
		`--node-ip or NODE_IP is "", not an address`:            {"--node-name=n1"},
		`--node-ip or NODE_IP is "n1.example", not an address`:  {"--node-name=n1", "--node-ip=n1.example"},
		`--log-level is "loud", not debug, info, warn or error`: {"--node-name=n1", "--node-ip=203.0.113.1", "--log-level=loud"},
		`--log-format is "xml", not text or json`:               {"--node-name=n1", "--node-ip=203.0.113.1", "--log-format=xml"},
		`read the membership key: open /nowhere: no such file or directory`: {"--node-name=n1", "--node-ip=203.0.113.1",
			"--membership-key-file=/nowhere"},
	} {
		_, err := parsed(t, args...).settings()
		require.EqualError(t, err, want)
	}
}

// A speaker that started with one of these would work otherwise than is meant, or end once it has begun.
func TestNoSpeakerStartsByValuesThatMakeNoSense(t *testing.T) {
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", strings.Repeat("k", 32))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	empty := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	for args, want := range map[string]string{
		"--node-ip=0.0.0.0":               `--node-ip or NODE_IP is "0.0.0.0", not an address by which other nodes reach this one`,
		"--node-ip=fe80::1%eth0":          "not an address by which other nodes reach this one",
		"--node-ip=224.0.0.1":             "not an address by which other nodes reach this one",
		"--node-name=N_1":                 `--node-name or NODE_NAME is "N_1", not a name in Kubernetes`,
		"--namespace=":                    `--namespace or POD_NAMESPACE is "", not a name in Kubernetes`,
		"--configmap=":                    `--configmap is "", not a name in Kubernetes`,
		"--listen=":                       `--listen is "", not an address and a port, such as :9743`,
		"--listen=9743":                   `--listen is "9743", not an address and a port`,
		"--listen=:99999":                 `--listen is ":99999", not an address and a port`,
		"--listen=:":                      `--listen is ":", not an address and a port`,
		"--tls-cert-file=/cert":           "--tls-cert-file and --tls-private-key-file belong together",
		"--tls-private-key-file=/key":     "--tls-cert-file and --tls-private-key-file belong together",
		"--kube-proxy-healthz-url=:10256": `--kube-proxy-healthz-url is ":10256", not a URL such as http://127.0.0.1:10256/healthz`,
		"--kube-proxy-healthz-url=localhost:10256/healthz": "not a URL such as",
		"--kube-proxy-healthz-url=ftp://localhost":         "not a URL such as",
		"--hand-over=-1s":               "--hand-over -1s, --drain 2s, --vip-metrics 1000: none of them may be below 0",
		"--drain=-1s":                   "none of them may be below 0",
		"--vip-metrics=-1":              "none of them may be below 0",
		"--load-balancer-classes=a/b,,": "one of the classes is empty",
		"--handle-classless=false --load-balancer-classes=":   "no Service at all would be served",
		"--kubeconfig=" + empty:                               "--kubeconfig: " + empty + " has no cluster in it",
		"--kubeconfig=/nowhere":                               "--kubeconfig: stat /nowhere: no such file or directory",
		"--kubeconfig=":                                       "this is no pod: name a file by --kubeconfig",
		"--listen=[2001:db8::1]:9743 --hand-over=0 --drain=0": "this is no pod: name a file by --kubeconfig", // is right
	} {
		_, err := parsed(t, append([]string{"--node-name=n1", "--node-ip=203.0.113.1"}, strings.Fields(args)...)...).settings()
		require.ErrorContains(t, err, want, args)
	}
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", "short")
	_, err := parsed(t, "--node-name=n1", "--node-ip=203.0.113.1").settings()
	require.EqualError(t, err,
		"LODESTONE_MEMBERSHIP_KEY: the membership key has 5 characters, and 16 are the least: put random ones into the Secret")
}

// Without a key anybody would be a member.
func TestNoSpeakerStartsWithoutAMembershipKey(t *testing.T) {
	short := filepath.Join(t.TempDir(), "key")
	for text, want := range map[string]error{"": keys.ErrNone, " \n": keys.ErrNone, strings.Repeat("k", 15): nil} {
		t.Setenv("LODESTONE_MEMBERSHIP_KEY", text)
		require.NoError(t, os.WriteFile(short, []byte(text), 0o600))
		for _, args := range [][]string{nil, {"--membership-key-file=" + short}} {
			err := run(t.Context(), parsed(t, append(args, "--node-name=n1", "--node-ip=127.0.0.1")...))
			require.ErrorContains(t, err, "membership key")
			require.ErrorIs(t, err, cmp.Or(want, err), text)
		}
	}
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", strings.Repeat("k", 32))
	require.ErrorContains(t, run(t.Context(), parsed(t, "--node-name=n1", "--node-ip=127.0.0.1", "--membership-key-file=/nowhere")),
		"read the membership key", "the environment is no substitute for the file")
}

// What strangers can ask for has bounds of its own. client-go's would be shared with those who are no strangers.
func TestReviewsDoNotWaitForClientGo(t *testing.T) {
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", strings.Repeat("k", 32))
	path := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(path, []byte(`{clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], current-context: c, `+
		`contexts: [{name: c, context: {cluster: c}}]}`), 0o600))
	s, err := parsed(t, "--node-name=n1", "--node-ip=127.0.0.1", "--kubeconfig="+path).settings()
	require.NoError(t, err)
	require.Nil(t, s.reviewer.AuthenticationV1().RESTClient().GetRateLimiter())
	require.NotNil(t, s.client.CoreV1().RESTClient().GetRateLimiter())
}

// The file changes while the speaker runs, the environment cannot: the file counts.
func TestKeyFileWinsOverTheEnvironment(t *testing.T) {
	fromFile, fromEnvironment := strings.Repeat("f", 32), strings.Repeat("e", 32)
	t.Setenv("LODESTONE_MEMBERSHIP_KEY", fromEnvironment)
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(fromFile+"\n"), 0o600))
	marks := map[string]string{}
	for name, f := range map[string]*flags{"file": parsed(t, "--membership-key-file", path), "environment": parsed(t)} {
		secret, err := f.secret()
		require.NoError(t, err)
		key, err := secret.Of("")
		require.NoError(t, err)
		marks[name] = key.Mark()
	}
	require.NotEqual(t, marks["environment"], marks["file"])

	require.NoError(t, os.WriteFile(path, []byte(fromEnvironment), 0o600))
	again, err := parsed(t, "--membership-key-file", path).secret()
	require.NoError(t, err)
	key, err := again.Of("")
	require.NoError(t, err)
	require.Equal(t, marks["environment"], key.Mark(), "the file is read anew")
}

// Support and lodestone diagnose read /status by these keys.
func TestKeysOfStatus(t *testing.T) {
	t.Parallel()
	text, err := json.Marshal(status{})
	require.NoError(t, err)
	var keys map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(text, &keys))
	require.ElementsMatch(t, []string{"node", "ready", "checks", "speakers", "owned", "silent", "layer2", "limit", "directForwarding",
		"bgp", "bfd", "podRoutes", "detection"}, slices.Collect(maps.Keys(keys)))
}

func TestABlindSpeakerIsNotReady(t *testing.T) {
	t.Parallel()
	all, routers := []diagnose.Condition{{Name: "membership"}}, diagnose.Condition{Name: "routers"}
	require.Equal(t, append(all, routers), checks(all, routers, false))
	require.Equal(t, "api-server", checks(all, routers, true)[2].Name)
	require.Len(t, all, 1)
}
