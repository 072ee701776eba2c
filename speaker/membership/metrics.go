package membership

import "github.com/prometheus/client_golang/prometheus"

// The metrics.
const (
	MetricSpeakers      = "lodestone_membership_speakers"
	MetricReadySpeakers = "lodestone_membership_ready_speakers"
	MetricChanges       = "lodestone_membership_changes_total"
	MetricLate          = "lodestone_membership_late_seconds"
	MetricAccused       = "lodestone_membership_accused_total"
	MetricHealthScore   = "lodestone_membership_health_score"
	MetricRefused       = "lodestone_membership_refused_total"
	MetricKeys          = "lodestone_membership_keys"
	MetricKeyRefused    = "lodestone_membership_key_refused"
)

type metrics struct {
	changes *prometheus.CounterVec
	refused prometheus.Counter
}

func newMetrics(r prometheus.Registerer, t *Task) *metrics {
	m := &metrics{
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricChanges, Help: "Changes seen in other speakers: join, leave, update (of readiness or links).",
		}, []string{"change"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: MetricRefused, Help: "Packets and connections at the membership port that were dropped: without the key, or damaged.",
		}),
	}
	for _, change := range []string{"join", "leave", "update"} {
		m.changes.WithLabelValues(change)
	}
	r.MustRegister(
		m.changes, m.refused,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricSpeakers, Help: "Speakers that are alive, this one included.",
		}, func() float64 { return float64(len(t.Speakers())) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricReadySpeakers, Help: "Speakers that are alive and ready to own VIPs.",
		}, func() float64 {
			n := 0
			for _, ready := range t.Speakers() {
				if ready {
					n++
				}
			}
			return float64(n)
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricKeys, Help: "Membership keys that this speaker understands: more than one while speakers change to another.",
		}, func() float64 { return float64(len(t.ring.gossipKeys())) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricKeyRefused, Help: "Whether what the Secret has now is no membership key: then the one before stays in force.",
		}, t.ring.isRefused),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricLate, Help: "How late the loop ran that sends heartbeats, at most in the last 5 to 10 seconds.",
		}, func() float64 { return t.beats.status().Lately.Seconds() }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: MetricAccused, Help: "Packets of other speakers that take this one for lost.",
		}, func() float64 { return float64(t.beats.status().Accused) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: MetricHealthScore, Help: "How badly this speaker keeps the protocol's time limits: 0 is well.",
		}, func() float64 {
			if list := t.list.Load(); list != nil {
				return float64(list.GetHealthScore())
			}
			return 0
		}),
	)
	return m
}
