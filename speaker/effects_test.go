package speaker

import (
	"bytes"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The log has why a VIP is no longer announced by BGP.
func TestWhyAVIPIsNotRouted(t *testing.T) {
	t.Parallel()
	for why, after := range map[string]plan.Verdict{
		"no Service has it any more":                  {},
		"this node announces it by layer 2 alone now": {Owned: true},
		"n2 announces it":                             {Silent: true, Silence: plan.Silence{Reason: plan.NotOwner, Message: "n2 announces it"}},
	} {
		var log bytes.Buffer
		s := &Speaker{metrics: newMetrics(prometheus.NewRegistry(), nil)}
		s.Log = slog.New(slog.NewTextHandler(&log, nil))
		before := plan.Verdict{Owned: after.Owned, Peers: []string{"tor"}}
		s.logChanges(plan.Changes{VIPs: []plan.Change{{VIP: netip.MustParseAddr("192.0.2.1"), Before: before, After: after}}})
		assert.Contains(t, log.String(), `msg="vip not routed"`)
		assert.Contains(t, log.String(), `message="`+why+`"`)
	}
}
