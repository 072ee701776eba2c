package limit

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/speaker/nft"
)

// Names of the metrics.
const (
	metricDropped = "lodestone_limit_dropped_connections_total"
	metricWanted  = "lodestone_limit_wanted"
	metricActive  = "lodestone_limit_active"
)

var (
	droppedDesc = prometheus.NewDesc(metricDropped,
		"Attempts to open a connection that were dropped because they exceeded the Service's limit.", []string{"service", "vip"}, nil)
	wantedDesc = prometheus.NewDesc(metricWanted, "Connection rate limits that there should be on this node.", nil, nil)
	activeDesc = prometheus.NewDesc(metricActive, "Connection rate limits that the kernel has.", nil, nil)
)

// collector asks the kernel at scrape.
type collector struct{ *Limiter }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{droppedDesc, wantedDesc, activeDesc} {
		ch <- d
	}
}

// Collect reports what the kernel counted. A limit that cannot be read counts as not active, and Run logs
// why.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	want := c.published.Load().want
	var counters map[string]uint64
	if len(want) > 0 {
		if conn, err := nft.Dial(); err == nil {
			counters, _ = readCounters(conn)
			conn.Close()
		}
	}
	active := 0
	for key := range want {
		if dropped, ok := counters[chainName(key)]; ok {
			active++
			ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(dropped), key.Service, key.VIP.String())
		}
	}
	ch <- prometheus.MustNewConstMetric(wantedDesc, prometheus.GaugeValue, float64(len(want)))
	ch <- prometheus.MustNewConstMetric(activeDesc, prometheus.GaugeValue, float64(active))
}
