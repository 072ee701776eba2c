// Package tutorial follows the tutorial, and the guide to uninstalling, word for
// word.
package tutorial_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

// inTheLab replaces what a reader has, too, but under another name.
var inTheLab = strings.NewReplacer(
	"image.registry=registry.example.com/lodestone", "image.registry=lab.local",
	"image.tag=v0.1.0", "image.tag=dev",
	"--image=nginx", "--image="+lab.EchoImage,
	"--type=LoadBalancer --port=80", "--type=LoadBalancer --port=80 --target-port=8080",
	"203.0.113.0/26", "198.18.0.192/26",
	"203.0.113.1", "198.18.0.193",
	"203.0.113.2", "198.18.0.194",
)

// first is the lab's first place, which the documentation names: one test has it at a time, to the end of its cleanup.
var first sync.Mutex

func inTheFirstPlace(t *testing.T) {
	t.Parallel()
	first.Lock()
	t.Cleanup(first.Unlock)
}

func TestTutorials(t *testing.T) {
	inTheFirstPlace(t)
	progress := func(format string, args ...any) { t.Logf("lab: "+format, args...) }
	cluster, err := lab.Up(t.Context(), lab.Options{Place: 1, Progress: progress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if !t.Run("the lab", func(t *testing.T) { cluster = theLab(t, cluster) }) {
		return
	}
	uninstall(t, cluster) // the lab's; its images stay
	t.Run("the first service", func(t *testing.T) { theFirstService(t, cluster) })
}

func theFirstService(t *testing.T, cluster *lab.Cluster) {
	commands := commandsOf(document(t, cluster, "tutorial/first-service.md"))
	if len(commands) < 10 {
		t.Fatalf("%d blocks of commands", len(commands))
	}
	// A reader works in a clone of the repository, and leaves files there.
	clone := t.TempDir()
	if err := os.Symlink(filepath.Join(cluster.Root, "deploy"), filepath.Join(clone, "deploy")); err != nil {
		t.Fatal(err)
	}
	var installed string
	for _, c := range commands {
		c.run(t, cluster, clone)
		switch {
		case strings.Contains(c.text, "helm install"):
			installed = identities(t, cluster)
		case strings.Contains(c.text, "helm upgrade"):
			if now := identities(t, cluster); now != installed {
				t.Errorf("a change of the configuration made of\n%s\nthis:\n%s", installed, now)
			}
		}
	}
	nothingLeft(t, cluster)
}

// identities returns the identities of Lodestone's pods, and the key that the speakers
// share: neither may change with the configuration.
func identities(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	uids, err := c.Kubectl(t.Context(), "--namespace", lab.LodestoneNamespace, "get", "pods,secrets",
		"--selector", "app.kubernetes.io/name=lodestone",
		"--output", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.data.key}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	return uids
}

// document returns a page of the documentation.
func document(t *testing.T, c *lab.Cluster, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(c.Root, "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// command is a block of commands for a host.
type command struct {
	line int
	host string
	text string
}

// run runs the commands in the folder.
func (c command) run(t *testing.T, cluster *lab.Cluster, folder string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	cmd := cluster.Command(ctx, c.host, "bash", "-euo", "pipefail", "-c", inTheLab.Replace(c.text))
	cmd.Dir = folder
	output, err := cmd.CombinedOutput()
	t.Logf("line %d, on %s:\n%s", c.line, c.host, output)
	if err != nil {
		t.Fatalf("line %d: %v in\n%s", c.line, err, c.text)
	}
}

// commandsOf returns the fenced blocks marked as sh: plain for the
// administrator, "sh client" for the client.
func commandsOf(markdown string) []command {
	hosts := map[string]string{"```sh": lab.ControlPlane, "```sh client": lab.Client}
	var commands []command
	var open *command
	var body bytes.Buffer
	for i, line := range strings.Split(markdown, "\n") {
		switch {
		case open != nil && line == "```":
			open.text = body.String()
			commands, open = append(commands, *open), nil
		case open != nil:
			fmt.Fprintln(&body, line)
		case hosts[line] != "":
			open = &command{line: i + 1, host: hosts[line]}
			body.Reset()
		}
	}
	return commands
}
