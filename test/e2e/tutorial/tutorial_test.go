// Package tutorial does what the tutorial says, word for word.
package tutorial_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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

func TestTheFirstService(t *testing.T) {
	progress := func(format string, args ...any) { t.Logf("lab: "+format, args...) }
	cluster, err := lab.Up(t.Context(), lab.Options{Progress: progress})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	start := clean(t, cluster)
	text, err := os.ReadFile(filepath.Join(cluster.Root, "docs/tutorial/first-service.md"))
	if err != nil {
		t.Fatal(err)
	}

	// A reader works in a clone of the repository, and leaves files there.
	clone := t.TempDir()
	if err := os.Symlink(filepath.Join(cluster.Root, "deploy"), filepath.Join(clone, "deploy")); err != nil {
		t.Fatal(err)
	}
	commands := commandsOf(string(text))
	if len(commands) < 10 {
		t.Fatalf("%d blocks of commands", len(commands))
	}
	var installed string
	for _, c := range commands {
		ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
		cmd := cluster.Command(ctx, c.host, "bash", "-euo", "pipefail", "-c", inTheLab.Replace(c.text))
		cmd.Dir = clone
		output, err := cmd.CombinedOutput()
		cancel()
		t.Logf("line %d, on %s:\n%s", c.line, c.host, output)
		if err != nil {
			t.Fatalf("line %d: %v in\n%s", c.line, err, c.text)
		}
		switch {
		case strings.Contains(c.text, "helm install"):
			installed = identities(t, cluster)
		case strings.Contains(c.text, "helm upgrade"):
			if now := identities(t, cluster); now != installed {
				t.Errorf("a change of the configuration made of\n%s\nthis:\n%s", installed, now)
			}
		}
	}
	if end := objects(t, cluster); end != start {
		t.Errorf("before the tutorial:\n%s\nafter it:\n%s", start, end)
	}
}

// clean takes Lodestone out of the lab, which has it and its images, and
// returns what is left.
func clean(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	if _, err := c.Helm(t.Context(), "uninstall", "lodestone", "--namespace", lab.LodestoneNamespace, "--wait"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubectl(t.Context(), "delete", "namespace", lab.LodestoneNamespace); err != nil {
		t.Fatal(err)
	}
	return objects(t, c)
}

// objects lists what Lodestone's installation or the tutorial could leave
// behind.
func objects(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	names, err := c.Kubectl(t.Context(), "get", "namespaces,services,deployments,clusterroles,clusterrolebindings,rolebindings,leases",
		"--all-namespaces", "--output", `jsonpath={range .items[*]}{.kind} {.metadata.namespace} {.metadata.name}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// identities tells Lodestone's pods apart, and the key that the speakers share:
// neither is to change with the configuration.
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

// command is a block of commands for a host.
type command struct {
	line int
	host string
	text string
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
