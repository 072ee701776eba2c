package speaker

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// The metrics.
const (
	MetricReady         = "lodestone_speaker_ready"
	MetricVIPsOwned     = "lodestone_speaker_vips_owned"
	MetricVIPsSilent    = "lodestone_speaker_vips_silent"
	MetricTransitions   = "lodestone_speaker_ownership_transitions_total"
	MetricPlanDuration  = "lodestone_speaker_plan_duration_seconds"
	MetricPlanTimestamp = "lodestone_speaker_plan_timestamp_seconds"
)

var (
	readyDesc     = prometheus.NewDesc(MetricReady, "Whether the speaker is ready to own VIPs.", nil, nil)
	ownedDesc     = prometheus.NewDesc(MetricVIPsOwned, "VIPs that this node owns.", nil, nil)
	silentDesc    = prometheus.NewDesc(MetricVIPsSilent, "VIPs that this node does not announce, by reason.", []string{"reason"}, nil)
	timestampDesc = prometheus.NewDesc(MetricPlanTimestamp, "When the last plan was made, in Unix time.", nil, nil)
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
			Name: MetricPlanDuration, Help: "How long it takes to make a plan.", Buckets: prometheus.ExponentialBuckets(100e-6, 4, 7),
		}),
	}
	r.MustRegister(transitions, m.duration, collector{s})
	return m
}

// collector tells at scrape what the loop decided last.
type collector struct{ *Speaker }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{readyDesc, ownedDesc, silentDesc, timestampDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	p := c.published.Load()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	ready := 0.0
	if p.ready() {
		ready = 1
	}
	gauge(readyDesc, ready)
	gauge(ownedDesc, float64(len(p.plan.Layer2)))
	silent := map[plan.Reason]int{}
	for _, silence := range p.plan.Silent {
		silent[silence.Reason]++
	}
	for reason, n := range silent {
		gauge(silentDesc, float64(n), string(reason))
	}
	if !p.planned.IsZero() {
		gauge(timestampDesc, float64(p.planned.UnixMilli())/1e3)
	}
}
