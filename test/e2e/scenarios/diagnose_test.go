package scenarios

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// finding is one of lodestone diagnose.
type finding struct {
	Check, Severity, Message, Hint string
	Nodes                          []string
}

// diagnose runs the command and returns what is not well.
func (s *story) diagnose(args ...string) (found []finding, code int) {
	s.Helper()
	out, code, err := s.CLI(s.ctx, "", append([]string{"diagnose", "-o", "json"}, args...)...)
	require.NoError(s, err)
	var d struct{ Findings []finding }
	require.NoError(s, json.NewDecoder(strings.NewReader(out)).Decode(&d), "%s", out)
	for _, f := range d.Findings {
		if f.Severity != "ok" {
			found = append(found, f)
		}
	}
	return found, code
}

// finds checks that the diagnosis has a finding of that check about the node,
// and returns it.
func (s *story) finds(check, node string, args ...string) (f finding) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s is found on %s", check, node), func() error {
		found, code := s.diagnose(args...)
		i := slices.IndexFunc(found, func(f finding) bool { return f.Check == check && slices.Contains(f.Nodes, node) })
		if i < 0 {
			return fmt.Errorf("found %+v, exit code %d", found, code)
		}
		f = found[i]
		return nil
	})
	return f
}

// on runs a program on a node.
func (s *story) on(ctx context.Context, node string, args ...string) {
	s.Helper()
	out, err := netns.Command(ctx, "ls-"+node, args...).CombinedOutput()
	require.NoError(s, err, "%s: %q: %s", node, args, out)
}

// The operator asks what is wrong: nothing, then what the test has done.
func TestDiagnosisFindsWhatIsWrong(t *testing.T) {
	s := begin(t)
	nodes := s.Lab.Nodes()
	require.GreaterOrEqual(t, len(nodes), 3)
	s.echo(int32(len(nodes)))
	s.service("web")
	vip := s.assigned("web")
	s.eventually("the client reaches it", func() error { return s.reachTCP(vip) })

	s.eventually("a healthy cluster is silent", func() error {
		if found, code := s.diagnose("--active"); len(found) > 0 || code != 0 {
			return fmt.Errorf("exit code %d: %+v", code, found)
		}
		return nil
	})

	// A node does not forward.
	always := context.WithoutCancel(s.ctx)
	s.afterwards(func() { s.on(always, nodes[1], "sysctl", "-qw", "net.ipv4.ip_forward=1") })
	s.on(s.ctx, nodes[1], "sysctl", "-qw", "net.ipv4.ip_forward=0")
	f := s.finds("ip-forward", nodes[1])
	assert.Equal(t, []string{nodes[1]}, f.Nodes)
	assert.Equal(t, "error", f.Severity)
	assert.Equal(t, "sysctl -w net/ipv4/ip_forward=1", f.Hint)
	s.on(s.ctx, nodes[1], "sysctl", "-qw", "net.ipv4.ip_forward=1")

	// A firewall between two nodes; by way of the third one they stay alive.
	s.afterwards(func() { s.on(always, nodes[1], "nft", "add table ip diagnosed; delete table ip diagnosed") })
	from := s.Lab.Addresses(nodes[0])[0].String()
	s.on(s.ctx, nodes[1], "nft", fmt.Sprintf("add table ip diagnosed; add chain ip diagnosed input { type filter hook input priority -10; }; "+
		"add rule ip diagnosed input ip saddr %[1]s tcp dport %[2]d drop; add rule ip diagnosed input ip saddr %[1]s udp dport %[2]d drop", from, lab.GossipPort))
	f = s.finds("membership-port", nodes[0], "--active")
	assert.Contains(t, f.Message, "the speaker of node "+nodes[1]+" does not answer")
	assert.Contains(t, f.Message, "TCP")
	assert.Contains(t, f.Message, "UDP")
	s.on(s.ctx, nodes[1], "nft", "delete table ip diagnosed")

	// A VIP that somebody has put on an interface of a node.
	owner, err := s.Owner(s.ctx, vip)
	require.NoError(t, err)
	other := nodes[slices.IndexFunc(nodes, func(n string) bool { return n != owner })]
	s.afterwards(func() { _ = netns.Command(always, "ls-"+other, "ip", "addr", "del", vip+"/32", "dev", "eth0").Run() })
	s.on(s.ctx, other, "ip", "addr", "add", vip+"/32", "dev", "eth0")
	assert.Contains(t, s.finds("arp", other).Message, "VIP "+vip+" is configured on eth0")
	s.on(s.ctx, other, "ip", "addr", "del", vip+"/32", "dev", "eth0")
}

// A speaker that hangs is named, and what the others tell is there.
func TestDiagnosisWithoutASpeaker(t *testing.T) {
	s := begin(t)
	node := s.Lab.Nodes()[1]
	pod := s.speakerOf(node)
	s.afterwards(func() { require.NoError(t, s.Signal(context.WithoutCancel(s.ctx), &pod, unix.SIGCONT)) })
	require.NoError(t, s.Signal(s.ctx, &pod, unix.SIGSTOP))
	found, code := s.diagnose()
	assert.Equal(t, 3, code, "the diagnosis is not complete")
	i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "complete" })
	require.GreaterOrEqual(t, i, 0, "%+v", found)
	assert.Equal(t, []string{node}, found[i].Nodes)
	assert.Contains(t, found[i].Message, "does not answer")
}

// What goes with a ticket is whole, and has no secret of the cluster in it.
func TestBundleForATicket(t *testing.T) {
	s := begin(t)
	s.service("web")
	s.assigned("web")
	secrets, err := s.Kube.CoreV1().Secrets(lodestone.Namespace).List(s.ctx, metav1.ListOptions{})
	require.NoError(t, err)
	name := filepath.Join(t.TempDir(), "ticket.tar.gz")
	_, _, err = s.CLI(s.ctx, "", "diagnose", "--bundle", name)
	require.NoError(t, err)
	files := unpack(t, name)
	for _, want := range []string{"config.yaml", "leases.json", "events.json", "status.json", "versions.json", "speakers/" + s.Lab.Nodes()[0] + ".json"} {
		assert.Contains(t, files, want)
	}
	assert.Contains(t, files["services.json"], s.namespace)
	for file, content := range files {
		assert.False(t, strings.HasPrefix(file, "logs/") && content == "", "%s is empty", file)
		for _, secret := range secrets.Items {
			for key, value := range secret.Data {
				if len(value) >= 16 && !strings.HasPrefix(secret.Name, "sh.helm.release") {
					assert.NotContains(t, content, string(value), "%s has %s of Secret %s", file, key, secret.Name)
				}
			}
		}
	}
}

// unpack returns the files of an archive, without the folder they are in.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	raw, err := os.ReadFile(name)
	require.NoError(t, err)
	compressed, err := gzip.NewReader(bytes.NewReader(raw))
	require.NoError(t, err)
	files := map[string]string{}
	for r := tar.NewReader(compressed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		_, file, _ := strings.Cut(header.Name, "/")
		files[file] = string(content)
	}
}
