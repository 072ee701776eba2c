package loglimit

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// Lines of one kind are bounded, whatever their attributes are. Those of other kinds are logged meanwhile.
func TestLinesOfOneKind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var written bytes.Buffer
		log := Logger(slog.New(slog.NewTextHandler(&written, nil)))
		lines := func() []string {
			defer written.Reset()
			return strings.Split(strings.TrimSuffix(written.String(), "\n"), "\n")
		}
		up := func(n int) {
			for i := range n {
				log.With("peer", i).WithGroup("of").Info("up", "number", i)
			}
		}
		up(3 * burst)
		got := lines()
		assert.Len(t, got, burst)
		assert.NotContains(t, got[burst-1], "left_out")

		log.Debug("not logged at this level")
		log.Warn("another kind")
		got = lines()
		assert.Len(t, got, 1)
		assert.Contains(t, got[0], `level=WARN msg="another kind"`)

		time.Sleep(time.Second)
		up(2)
		got = lines()
		assert.Len(t, got, 1)
		assert.Contains(t, got[0], "msg=up peer=0 of.number=0 of.left_out=20000")
		time.Sleep(time.Second)
		up(1)
		got = lines()
		assert.Len(t, got, 1)
		assert.Contains(t, got[0], "left_out=1")

		time.Sleep(burst * time.Second)
		up(2 * burst)
		assert.Len(t, lines(), burst)
	})
}
