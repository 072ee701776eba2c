package status

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
)

// Detection is how the speakers find out that one of them is lost. Its durations are in milliseconds.
type Detection struct {
	// Heartbeat is the time between two heartbeats. Silence is how long watchers hear nothing before they take a
	// speaker for lost.
	Heartbeat int64 `json:"heartbeatMilliseconds"`
	Silence   int64 `json:"silenceMilliseconds"`
	// Watchers are the nodes whose speakers watch that of a node, if all speakers whose pods are ready are alive.
	Watchers map[string][]string `json:"watchers"`
	// Late are the speakers whose loop was later than Silence in the last hour, so that the others may have taken them for
	// lost, the worst first.
	Late []Late `json:"late,omitempty"`
}

// Late is how late the speaker of a node was.
type Late struct {
	Node string `json:"node"`
	report.Late
}

// String describes it for people.
func (d *Detection) String() string {
	most := 0
	for _, w := range d.Watchers {
		most = max(most, len(w))
	}
	text := fmt.Sprintf("of a lost speaker by %s, after %d ms of silence, with a heartbeat each %d ms",
		output.Count(most, "other one", "others"), d.Silence, d.Heartbeat)
	if len(d.Late) == 0 {
		return text
	}
	var late []string
	for _, l := range d.Late {
		late = append(late, fmt.Sprintf("%s %s (%d or more times in the hour)", l.Node, l.Late, l.Times))
	}
	return text + "; " + output.List(late, 3)
}

// DetectionOf returns how losses are found out. Nil: what it takes could not be read.
func DetectionOf(o *cluster.Objects) *Detection {
	if !o.Has(cluster.Leases, cluster.Pods) || o.Config == nil {
		return nil
	}
	d := &Detection{}
	var members []watch.Member
	pods := o.SpeakerByNode()
	for _, l := range o.Leases {
		node, _ := report.NodeOf(l.Name)
		r := report.Of(l.Annotations)
		if r.Late.Milliseconds > 0 && o.Now.Sub(r.Late.At) < report.LateFor {
			d.Late = append(d.Late, Late{node, r.Late})
		}
		if at := r.Address; at.IsValid() && pods[node] != nil && cluster.IsReady(pods[node]) {
			members = append(members, watch.Member{Name: node, Addr: at})
		}
	}
	t := watch.Timing{Interval: o.Config.Membership.Heartbeat, Missed: o.Config.Membership.Missed}
	d.Heartbeat, d.Silence, d.Watchers = t.Interval.Milliseconds(), t.Allowance().Milliseconds(), watch.Watchers(members)
	slices.SortFunc(d.Late, func(a, b Late) int {
		return cmp.Or(cmp.Compare(b.Milliseconds, a.Milliseconds), cmp.Compare(a.Node, b.Node))
	})
	return d
}

// Watched returns the nodes whose speakers that of the node watches, sorted.
func (d *Detection) Watched(node string) (all []string) {
	for of, by := range d.Watchers {
		if slices.Contains(by, node) {
			all = append(all, of)
		}
	}
	slices.Sort(all)
	return all
}
