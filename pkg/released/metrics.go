package released

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// The metrics of the record of released addresses.
const (
	MetricRecords = "lodestone_released_records"
	MetricSize    = "lodestone_released_size_bytes"
	MetricWrites  = "lodestone_released_writes_total"
	MetricDropped = "lodestone_released_dropped_total"
)

// The results of a write.
const (
	resultSaved    = "saved"
	resultConflict = "conflict"
	resultFailed   = "failed"
)

// Why records are dropped.
const (
	droppedFull       = "full"
	droppedUnreadable = "unreadable"
)

var (
	recordCount = prometheus.NewDesc(MetricRecords, "Released addresses on record that nobody else may have yet.", nil, nil)
	textSize    = prometheus.NewDesc(MetricSize, "Size of the record of released addresses when it was last written or read.", nil, nil)
)

// metrics are those that count; the others are computed when they are asked
// for.
type metrics struct{ writes, dropped *prometheus.CounterVec }

func newMetrics() metrics {
	m := metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricWrites, Help: "Attempts to write the record of released addresses, by result: saved, conflict, failed."}, []string{"result"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricDropped, Help: "Records of released addresses that were lost, by reason: full, unreadable."}, []string{"reason"}),
	}
	for _, result := range []string{resultSaved, resultConflict, resultFailed} {
		m.writes.WithLabelValues(result)
	}
	for _, reason := range []string{droppedFull, droppedUnreadable} {
		m.dropped.WithLabelValues(reason)
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
func (b *Book) Describe(ch chan<- *prometheus.Desc) {
	ch <- recordCount
	ch <- textSize
	b.metrics.writes.Describe(ch)
	b.metrics.dropped.Describe(ch)
}

// Collect implements prometheus.Collector.
func (b *Book) Collect(ch chan<- prometheus.Metric) {
	b.mu.Lock()
	live, _ := b.sift(time.Now())
	size := b.size
	b.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(recordCount, prometheus.GaugeValue, float64(len(live)))
	ch <- prometheus.MustNewConstMetric(textSize, prometheus.GaugeValue, float64(size))
	b.metrics.writes.Collect(ch)
	b.metrics.dropped.Collect(ch)
}
