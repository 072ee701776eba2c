package quarantinestore

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// The metrics of the record of addresses in quarantine.
const (
	MetricRecords = "lodestone_quarantine_records"
	MetricSize    = "lodestone_quarantine_size_bytes"
	MetricWrites  = "lodestone_quarantine_writes_total"
	MetricDropped = "lodestone_quarantine_dropped_total"
)

// The results of a write.
const (
	resultSaved    = "saved"
	resultConflict = "conflict"
	resultFailed   = "failed"
)

// LossReason is a stable code for why a record is dropped.
type LossReason string

// The reasons.
const (
	LostFull       LossReason = "full"
	LostUnreadable LossReason = "unreadable"
)

// LossReasons describes each LossReason.
func LossReasons() reason.Texts[LossReason] {
	return reason.Texts[LossReason]{
		LostFull: {Cause: "The record has no room for the release.",
			Cure: "Nothing at once: the address stays in quarantine all the same, until the controller restarts. If it goes on, shorten " +
				"quarantine or delete fewer Services at a time.", Keys: []string{"quarantine"}},
		LostUnreadable: {Cause: "A line of the record is none, after an edit by hand.",
			Cure: "Leave the ConfigMap lodestone-quarantine alone. The next write removes the line."},
	}
}

var (
	recordCount = prometheus.NewDesc(MetricRecords, "Addresses in quarantine that are on record.", nil, nil)
	textSize    = prometheus.NewDesc(MetricSize, "Size of the record of released addresses when it was last written or read.", nil, nil)
)

// metrics are those that count; the others are computed when they are asked
// for.
type metrics struct{ writes, dropped *prometheus.CounterVec }

func newMetrics() metrics {
	m := metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricWrites, Help: "Attempts to write the record of released addresses, by result: saved, conflict, failed."},
			[]string{"result"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricDropped, Help: "Records of released addresses that were lost, by reason: full, unreadable."}, []string{"reason"}),
	}
	for _, result := range []string{resultSaved, resultConflict, resultFailed} {
		m.writes.WithLabelValues(result)
	}
	for _, why := range []LossReason{LostFull, LostUnreadable} {
		m.dropped.WithLabelValues(string(why))
	}
	return m
}

// resultOf names the result of a write.
func resultOf(err error) string {
	switch {
	case err == nil:
		return resultSaved
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
		return resultConflict
	default:
		return resultFailed
	}
}

// Describe implements prometheus.Collector.
func (s *Store) Describe(ch chan<- *prometheus.Desc) {
	ch <- recordCount
	ch <- textSize
	s.metrics.writes.Describe(ch)
	s.metrics.dropped.Describe(ch)
}

// Collect implements prometheus.Collector.
func (s *Store) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	live, _ := s.sift(time.Now())
	size := s.size
	s.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(recordCount, prometheus.GaugeValue, float64(len(live)))
	ch <- prometheus.MustNewConstMetric(textSize, prometheus.GaugeValue, float64(size))
	s.metrics.writes.Collect(ch)
	s.metrics.dropped.Collect(ch)
}
