package membership

import (
	"bytes"
	"context"
	"log"
	"log/slog"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// bridge returns a logger for memberlist, all of whose lines are debug lines:
// what matters to people is logged by us. What memberlist refuses to read it
// tells nobody but its logger, so that is counted here.
func bridge(l *slog.Logger, refused prometheus.Counter) *log.Logger {
	return log.New(writer{l, refused}, "", 0)
}

type writer struct {
	log     *slog.Logger
	refused prometheus.Counter
}

func (w writer) Write(line []byte) (int, error) {
	if refuses(line) {
		w.refused.Inc()
	}
	if w.log.Enabled(context.Background(), slog.LevelDebug) {
		w.log.Debug(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}

// refusals are in the errors about packets and connections that memberlist does
// not read, because they do not have the key or are damaged.
var refusals = [][]byte{
	[]byte("label"), // of another program, or none
	[]byte("Decrypt packet failed"),
	[]byte("failed to receive"), // a connection, for any reason
	[]byte("UDP packet too short"),
}

func refuses(line []byte) bool {
	if !bytes.HasPrefix(line, []byte("[ERR]")) || !bytes.Contains(line, []byte(" from=")) {
		return false
	}
	for _, r := range refusals {
		if bytes.Contains(line, r) {
			return true
		}
	}
	return false
}
