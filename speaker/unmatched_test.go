package speaker

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// fakeLoop stands for the Speaker.
type fakeLoop struct {
	changes
	moves  []report.Move
	labels map[string]string
}

func (f *fakeLoop) Moves() []report.Move {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.moves
}

func (f *fakeLoop) Labels() (map[string]string, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.labels, f.labels != nil
}

// An advertisement that matches no interface of a node is reported once this is certain, and removed
// from the report when it is over.
func TestUnmatchedAdvertisements(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		interfaces, cfg, loop := &fakeNetwork{}, &fakeConfig{}, &fakeLoop{}
		r := NewReporter(ReportOptions{Loop: loop, Interfaces: interfaces, Config: cfg, Log: slog.New(slog.NewTextHandler(&log, nil)),
			Registry: prometheus.NewPedanticRegistry()})
		look := func() []string { r.lookForUnmatched(time.Now()); return r.unmatched }
		interfaces.interfaces = []netstate.Interface{ethernet(2, "eth0", "198.18.0.11/24")}
		cfg.config = &config.Config{Advertisements: []config.Advertisement{
			{Name: "routed", BGP: &config.BGP{}},
			{Name: "every", Layer2: &config.Layer2{}},
			{Name: "storage", Layer2: &config.Layer2{Interfaces: []string{"bond*", "ens9"}}},
			{Name: "elsewhere", Layer2: &config.Layer2{Interfaces: []string{"ens9"}, NodeSelector: labelled("rack", "b")}},
		}}
		require.Empty(t, look(), "the node's labels are not known")
		require.False(t, r.checked)
		loop.labels = map[string]string{"rack": "a"}
		require.Empty(t, look())
		require.False(t, r.checked, "the interface may be late")
		time.Sleep(unmatchedFor)
		for range 3 {
			require.Equal(t, []string{"storage"}, look())
			require.True(t, r.checked)
		}
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
		require.Contains(t, log.String(), `no interface of this node matches the advertisement`)
		require.Contains(t, log.String(), `advertisement=storage interfaces="[bond* ens9]"`)

		down := ethernet(3, "bond0")
		down.Up = false
		interfaces.interfaces = append(interfaces.interfaces, down)
		require.Empty(t, look(), "one that is down is another matter")
		require.Contains(t, log.String(), "level=INFO")
		loop.labels = map[string]string{"rack": "b"}
		look()
		time.Sleep(unmatchedFor)
		require.Equal(t, []string{"elsewhere"}, look(), "the node has another label")
	})
}

func labelled(key, value string) config.Selector {
	return config.Selector{{Key: key, Operator: config.In, Values: []string{value}}}
}
