package bfd

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// A peer that goes up and down without an end does not fill the log.
func TestFlapsWithoutEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &testnet.Log{}
		task := New(Options{Log: slog.New(slog.NewTextHandler(log, nil)), Registry: prometheus.NewRegistry()})
		states := [...]Status{{State: Down, Cause: PeerDown}, {State: Up, Cause: CameUp}}
		for i := range uint64(30_000) {
			states[i%2].Transitions = i
			task.logChange("tor", states[(i+1)%2], states[i%2])
		}
		assert.Equal(t, 10_000, strings.Count(log.String(), "BFD session up"))
		assert.Equal(t, 10_000, strings.Count(log.String(), "BFD session down"))
	})
}
