package speaker

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The metrics.
const (
	MetricReady         = "lodestone_speaker_ready"
	MetricVIPsOwned     = "lodestone_speaker_vips_owned"
	MetricVIPOwner      = "lodestone_speaker_vip_owner"
	MetricVIPsSilent    = "lodestone_speaker_vips_silent"
	MetricVIPsUnowned   = "lodestone_speaker_vips_unowned"
	MetricTransitions   = "lodestone_speaker_ownership_transitions_total"
	MetricPlanDuration  = "lodestone_speaker_plan_duration_seconds"
	MetricPlanTimestamp = "lodestone_speaker_plan_timestamp_seconds"
	MetricUnmatched     = "lodestone_speaker_unmatched_advertisements"
)

// DefaultVIPMetrics is the number of owned VIPs up to which a speaker has a series for each of them. Each VIP that
// moves makes a new series in Prometheus: in a large cluster these would cost more than all other metrics here.
const DefaultVIPMetrics = 1000

var (
	readyDesc   = prometheus.NewDesc(MetricReady, "Whether the speaker is ready to own VIPs.", nil, nil)
	ownedDesc   = prometheus.NewDesc(MetricVIPsOwned, "VIPs that this node owns.", nil, nil)
	ownerDesc   = prometheus.NewDesc(MetricVIPOwner, "Always 1: this node owns the VIP.", []string{"vip"}, nil)
	silentDesc  = prometheus.NewDesc(MetricVIPsSilent, "VIPs that this node does not announce, by reason.", []string{"reason"}, nil)
	unownedDesc = prometheus.NewDesc(MetricVIPsUnowned, "VIPs for layer 2 alone that no node owns, by the reason of this node.",
		[]string{"reason"}, nil)
	timestampDesc = prometheus.NewDesc(MetricPlanTimestamp, "When the plan was last brought up to date, in Unix time.", nil, nil)
)

type metrics struct {
	gained, lost prometheus.Counter
	duration     prometheus.Histogram
}

func newMetrics(r prometheus.Registerer, s *Speaker) *metrics {
	transitions := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: MetricTransitions, Help: "VIPs that this node gained or lost.",
	}, []string{"transition"})
	m := &metrics{
		gained: transitions.WithLabelValues("gained"),
		lost:   transitions.WithLabelValues("lost"),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: MetricPlanDuration, Help: "How long it takes to bring the plan up to date.", Buckets: prometheus.ExponentialBuckets(1e-6, 4, 11),
		}),
	}
	r.MustRegister(transitions, m.duration, collector{s})
	return m
}

// collector reads the last decision of the loop at scrape time.
type collector struct{ *Speaker }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{readyDesc, ownedDesc, ownerDesc, silentDesc, unownedDesc, timestampDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	state := c.core.State()
	ready, owned, planned := ready(c.checks), len(state.Plan.Layer2), state.Planned
	silent, unowned := map[plan.Reason]int{}, map[plan.Reason]int{}
	for _, silence := range state.Plan.Silent {
		silent[silence.Reason]++
		if silence.Unowned {
			unowned[silence.Reason]++
		}
	}
	var vips []netip.Addr
	if owned <= c.VIPMetrics { // all or none: some of them would look like all
		vips = slices.Collect(maps.Keys(state.Plan.Layer2))
	}
	c.mu.Unlock()

	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if ready {
		gauge(readyDesc, 1)
	} else {
		gauge(readyDesc, 0)
	}
	gauge(ownedDesc, float64(owned))
	for _, vip := range vips {
		gauge(ownerDesc, 1, vip.String())
	}
	for reason, n := range silent {
		gauge(silentDesc, float64(n), string(reason))
	}
	for reason, n := range unowned {
		gauge(unownedDesc, float64(n), string(reason))
	}
	if !planned.IsZero() {
		gauge(timestampDesc, float64(planned.UnixMilli())/1e3)
	}
}
