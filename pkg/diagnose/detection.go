package diagnose

import (
	"fmt"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// Detection is how the failure detector of a node's speaker fares. Its durations are in milliseconds.
type Detection struct {
	// Heartbeat is the time between two heartbeats. Silence is how long its watchers hear nothing before they take
	// the speaker for lost.
	Heartbeat int64 `json:"heartbeatMilliseconds"`
	Silence   int64 `json:"silenceMilliseconds"`
	// RealTime is set if it runs with real-time priority.
	RealTime bool `json:"realTime"`
	// Late is how late its loop was.
	Late report.Late `json:"late"`
	// Watchers are the nodes whose speakers watch this one, Watched those that it watches.
	Watchers []string  `json:"watchers"`
	Watched  []Watched `json:"watched"`
	// Lost are the speakers that were lost in the last hour, the latest ones.
	Lost []Loss `json:"lost,omitempty"`
	// Accused is how many packets of others took this speaker for lost, since its start, and AccusedAt when the last
	// one did.
	Accused   uint64    `json:"accused"`
	AccusedAt time.Time `json:"accusedAt,omitzero"`
}

// Watched is a speaker that another one watches.
type Watched struct {
	Node      string `json:"node"`
	Heartbeat int64  `json:"heartbeatMilliseconds"`
	// Late is how late it reports to have been in the last seconds, Silent how long nothing has come from it.
	Late   int64 `json:"lateMilliseconds"`
	Silent int64 `json:"silentMilliseconds"`
}

// Loss is a speaker that was lost.
type Loss struct {
	Node string    `json:"node"`
	At   time.Time `json:"at"`
	// Silent is how long nothing had come from it. Zero: others watched it.
	Silent int64 `json:"silentMilliseconds,omitempty"`
}

// recently is how long it counts that a speaker was taken for lost.
const recently = time.Hour

func heartbeats(c *Cluster) (all []Finding) {
	for name, facts := range c.nodes() {
		d := facts.Detection
		if d == nil || d.AccusedAt.IsZero() || facts.Received.Sub(d.AccusedAt) >= recently {
			continue // an older speaker, or nobody took it for lost
		}
		reason := fmt.Sprintf("its heartbeats did not arrive, since its loop was never later than %d ms in the last hour", d.Late.Milliseconds)
		hint := "ip -s link and ethtool -S on the node and its switch ports: look for drops; lodestone diagnose --active finds whether the " +
			"membership port is closed"
		if d.Late.Milliseconds > d.Silence {
			reason = fmt.Sprintf("its loop was %s, and %d times in the last hour later than a heartbeat (%d ms)", d.Late, d.Late.Times, d.Heartbeat)
			hint = "the node's CPUs are overcommitted: helm upgrade with speaker.bgp.realTimeBFD=true, which gives heartbeats real-time priority, " +
				"too, or with a larger speaker.resources.requests.cpu"
			if d.RealTime {
				hint = "it has real-time priority, so the whole node stood still: was the virtual machine paused, moved or without CPU " +
					"(steal in top)? failover: conservative waits longer"
			}
		}
		all = append(all, found(Warning, name, hint, "others took the speaker for lost at %s UTC%s, and its VIPs moved: %s",
			d.AccusedAt.UTC().Format(time.TimeOnly), c.losers(name), reason))
	}
	return all
}

// losers names the nodes that lost the speaker of that node themselves.
func (c *Cluster) losers(node string) string {
	var names []string
	for name, facts := range c.nodes() {
		if d := facts.Detection; d != nil && slices.ContainsFunc(d.Lost, func(l Loss) bool { return l.Node == node && l.Silent > 0 }) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s heard nothing from it)", list(names))
}
