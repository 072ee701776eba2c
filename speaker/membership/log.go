package membership

import (
	"context"
	"log"
	"log/slog"
	"strings"
)

// bridge returns a logger for memberlist, all of whose lines are debug lines:
// what matters to people is logged by us.
func bridge(l *slog.Logger) *log.Logger { return log.New(writer{l}, "", 0) }

type writer struct{ log *slog.Logger }

func (w writer) Write(line []byte) (int, error) {
	if w.log.Enabled(context.Background(), slog.LevelDebug) {
		w.log.Debug(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}
