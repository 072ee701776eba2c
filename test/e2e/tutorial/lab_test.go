package tutorial_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/demo"
	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// What make demo does.
func TestTheDemo(t *testing.T) {
	inTheFirstPlace(t)
	var lines []string
	err := demo.Run(t.Context(), lab.Options{Place: 1, Progress: t.Logf}, false, func(format string, args ...any) {
		lines = append(lines, fmt.Sprintf(format, args...))
	})
	require.NoError(t, err)
	text := strings.Join(lines, "\n")
	require.Regexp(t, `^nodes=3 initialized=yes\nvip=198\.18\.0\.200 reachable=yes owner=n\d\n`+
		`failover old=n\d new=n\d outage_ms=\d+\nok$`, text)
}

const (
	labCommand = "go run ./cmd/lab "
	webVIP     = "198.18.0.200"
)

// promised is the expected output of commands, by the words after labCommand.
var promised = map[string]string{
	"kubectl get nodes":                          `(?m)^n1 +Ready .*\nn2 +Ready .*\nn3 +Ready `,
	"kubectl get service web":                    `(?m)^web +LoadBalancer +[0-9.]+ +198\.18\.[0-9.]+ +80:\d+/TCP`,
	"exec client -- curl":                        `^{"pod":"web-`,
	"exec client -- arping":                      `(?s)(bytes from [0-9a-f:]{17} .*){3}`,
	"exec cp -- ../../bin/lodestone explain vip": `\bn[123]\b`,
	"exec cp -- ../../bin/lodestone bgp peers":   `(?s)(established.*){6}`,
	"exec cp -- ../../bin/lodestone bgp routes":  `198\.18\.16\.1/32`,
	"exec router -- ip route show":               `(?s)(nexthop via 198\.18\.0\.\d+ dev .*){3}`,
	"exec remote -- curl":                        `^{"pod":"web-`,
}

// reader follows the tutorial about the lab.
type reader struct {
	*testing.T
	*lab.Cluster
	dir     string   // where the shell is
	web     []string // the commands that made the Service
	answers string   // the hosts that answered arping
	leave   func()   // the other terminal
	visited int      // how many commands
}

// theLab follows the tutorial in a lab as of make lab-up. Another lab comes up in this
// process, too, so that no other program takes its place meanwhile.
func theLab(t *testing.T, c *lab.Cluster) *lab.Cluster {
	r := &reader{T: t, Cluster: c, dir: c.Root}
	text := document(t, c, "tutorial/lab.md")
	name := filepath.Join(c.Root, "test", "e2e", "config.yaml")
	require.NoError(t, os.WriteFile(name, []byte(fenced(t, text, "yaml")), 0o600))
	t.Cleanup(func() { require.NoError(t, os.Remove(name)) })

	for _, c := range prompted(text, "# ") {
		r.follow(c.text)
	}
	require.Greater(t, r.visited, 15)
	_, err := r.Kubectl(t.Context(), "delete", "deployment,service", "web") // which make lab-down does
	require.NoError(t, err)
	return r.Cluster
}

// follow runs a command as a reader does.
func (r *reader) follow(command string) {
	r.Helper()
	r.visited++
	args := strings.TrimPrefix(command, labCommand)
	switch {
	case command == "make lab-up" || command == "make lab-down": // the test does
	case strings.HasPrefix(command, "cd "):
		r.dir = filepath.Join(r.dir, strings.TrimPrefix(command, "cd "))
	case args == "up --router both":
		r.routers()
	case strings.Contains(args, "while sleep"):
		r.inAnotherTerminal(command)
	case strings.HasPrefix(args, "fault node-loss "):
		owner, err := r.Owner(netip.MustParseAddr(webVIP))
		require.NoError(r, err)
		r.see(labCommand + "fault node-loss " + owner)
	case strings.HasPrefix(args, "exec client -- arping"):
		before := r.answers
		r.answers = hardwareAddress.FindString(r.see(command))
		require.NotEqual(r, before, r.answers, "the node without power answers")
	case strings.HasPrefix(args, "kubectl create deployment web"), strings.HasPrefix(args, "kubectl expose deployment web"):
		r.web = append(r.web, command)
		r.see(command)
	case strings.Contains(args, "kubectl replace"):
		r.see(command)
		for _, again := range r.web {
			r.see(again)
		}
	default:
		r.see(command)
	}
}

var hardwareAddress = regexp.MustCompile(`[0-9a-f:]{17}`)

// inAnotherTerminal runs a command until the reader leaves it.
func (r *reader) inAnotherTerminal(command string) {
	r.Helper()
	leave := untilLeft(r.T, func(ctx context.Context) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "bash", "-c", command)
		cmd.Dir = r.dir
		return cmd
	})
	r.leave = func() {
		output := leave()
		r.Logf("# %s\n%s", command, output)
		require.Contains(r, output, `"pod":"web-`)
	}
}

// untilLeft starts a command that goes on until it is left, and has printed something then.
func untilLeft(t *testing.T, command func(context.Context) *exec.Cmd) (leave func() string) {
	t.Helper()
	var output bytes.Buffer
	ctx, end := context.WithCancel(t.Context())
	cmd := command(ctx)
	cmd.Stdout = &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the loop is a grandchild
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	require.NoError(t, cmd.Start())
	return func() string {
		end()
		_ = cmd.Wait() // it is killed
		return output.String()
	}
}

// routers brings the other lab up.
func (r *reader) routers() {
	r.Helper()
	r.leave()
	c, err := lab.Up(r.Context(), lab.Options{Router: lab.RouterBoth, Place: 1, Progress: r.Logf})
	require.NoError(r, err)
	r.Cluster = c
}

// see runs a command, again until it shows what is promised: pods take their time.
func (r *reader) see(command string) (output string) {
	r.Helper()
	want := regexp.MustCompile("")
	for begin, text := range promised {
		if strings.HasPrefix(command, labCommand+begin) {
			want = regexp.MustCompile(text)
		}
	}
	err := lodestone.Wait(r.Context(), command, func() (err error) {
		if output, err = r.shell(r.Context(), command); err == nil && !want.MatchString(output) {
			err = fmt.Errorf("it does not match %s: %s", want, output)
		}
		return err
	})
	require.NoError(r, err)
	r.Logf("# %s\n%s", command, output)
	return output
}

func (r *reader) shell(ctx context.Context, command string) (string, error) {
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", command)
	cmd.Dir = r.dir
	output, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, output)
	}
	return string(output), err
}

// prompted returns the commands of a text that stand after a prompt, each with the
// lines that go on with it. Blocks marked as "console client" are for the client.
func prompted(markdown, prompt string) (commands []command) {
	hosts := map[string]string{"```console": lab.ControlPlane, "```console client": lab.Client}
	host := ""
	for i, line := range strings.Split(markdown, "\n") {
		switch {
		case strings.HasPrefix(line, "```"):
			host = hosts[line]
		case host != "" && strings.HasPrefix(line, prompt):
			commands = append(commands, command{i + 1, host, strings.TrimPrefix(line, prompt)})
		case host != "" && strings.HasPrefix(line, "    "):
			commands[len(commands)-1].text += "\n" + line
		}
	}
	return commands
}
