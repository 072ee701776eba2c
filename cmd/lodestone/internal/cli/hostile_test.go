package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// Users write Services, machines that were taken over write Leases and answer as
// speakers: none of their words reaches the operator's terminal as a command to it,
// whatever is asked and in whatever form.
func TestNobodyInTheClusterSteersTheTerminal(t *testing.T) {
	t.Parallel()
	const evil = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202egnirts\r\nERROR  forged\n"
	w := diagnosed(t)
	hostile := service("hostile", "")
	hostile.Annotations = map[string]string{annotation.AddressPool: evil, annotation.SharingKey: evil}
	asks := service("asks", "")
	asks.Annotations = map[string]string{annotation.Addresses: evil}
	w.add(hostile, asks)
	w.drop("lodestone-speaker-n1")
	dead := pod("speaker", "n1", evil, false)
	dead.Status.ContainerStatuses = []corev1.ContainerStatus{
		{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: evil}}}}
	w.add(dead, lease("n1", map[string]string{annotation.Report: hostileReport(t, evil)}))
	object[*corev1.Node](w, "n2").Annotations = map[string]string{annotation.BGPASN: evil, annotation.BGPRouterID: evil}
	w.change("n2", func(f *diagnose.Facts) {
		f.Version, f.Alive, f.Conditions[0] = evil, []string{evil}, diagnose.Condition{Name: evil, Message: evil}
		f.Interfaces[0].Name = evil
		f.Unread = map[string]string{"capabilities": evil}
	})
	clean := func(args ...string) {
		t.Helper()
		for _, format := range []string{"table", "json", "yaml"} {
			_, out := w.run(append(args, "-o", format)...)
			assert.NotContains(t, out, "owned\x07", "%q", args)
			assert.NotRegexp(t, `(?m)^\s*ERROR  forged`, out, "%q", args)
			for _, r := range strings.ReplaceAll(out, "\n", "") {
				if r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u202e' && format == "table" {
					assert.Failf(t, "steers the terminal", "%q -o %s: %q in %q", args, format, r, out)
					break
				}
			}
		}
	}
	for _, args := range [][]string{
		{"status"}, {"diagnose", "--active"}, {"explain", "service", "hostile"}, {"explain", "service", "asks"},
		{"explain", "vip", "203.0.113.10"},
		{"explain", "node", "n1"}, {"explain", "node", "n2"}, {"explain", "pool", "lan"}, {"explain", "peer", "tor-a"}, {"explain", "node", evil},
		{"bgp", "peers"}, {"bgp", "routes"}, {"simulate", "lose", "n1"}, {"validate", "--live"},
		{"plan", "--config", edited(t, "203.0.113.19", "203.0.113.10")},
	} {
		clean(args...)
	}
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = header + "\"" + `\e]0;owned\a` +
		"\": 1\npools: [{name: \"\\e[2J\", addresses: [\"\\e[2J\"]}]\n"
	w.client = nil
	for _, args := range [][]string{{"status"}, {"diagnose"}, {"explain", "service", "hostile"}, {"validate", "--live"}} {
		clean(args...)
	}
}

// hostileReport is a report that no speaker writes.
func hostileReport(t *testing.T, evil string) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{
		"unmatchedAdvertisements": []string{evil}, "segments": []string{"203.0.113.0/24 eth" + evil}, "podRoutes": evil,
		"membershipKeys": []string{evil},
		"bgpSessions": []any{map[string]any{"peer": "tor-a", "message": evil, "since": time.Now()},
			map[string]any{"peer": "tor-b", "bfd": evil, "since": time.Now()}, map[string]any{"peer": evil, "message": evil, "since": time.Now()}},
	})
	require.NoError(t, err)
	return string(text)
}
