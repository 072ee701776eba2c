package cli

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/inspect/explain"
)

func TestOperatorAsksBeforeTheReboot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// n1 owns a VIP that others can have; n2 has all endpoints of another.
	w.ask("drain-n1.txt", ExitOK, "simulate", "drain", "n1")
	w.ask("lose-n2.txt", ExitFound, "simulate", "lose", "n2")
	// n3 alone has a session with tor-b.
	w.ask("lose-n3.txt", ExitOK, "simulate", "lose", "n3")

	var r explain.Removal
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "simulate", "drain", "n2", "-o", "json")), &r))
	require.Len(t, r.Orphaned, 1)
	assert.Equal(t, "203.0.113.11", r.Orphaned[0].VIP.String())
	assert.Empty(t, r.Notice, "a drain is told to routers")

	assert.Contains(t, w.ask("", ExitFailed, "simulate", "drain", "n9"), `there is no node "n9"; there are: n1, n2, n3`)
}

func TestWhatIsSilentAlreadyChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.drop("local-1")
	assert.Contains(t, w.ask("", ExitOK, "simulate", "lose", "n2"), "Announced by nobody even now: 203.0.113.11")
}
