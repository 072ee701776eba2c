package bfd

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Names of the metrics.
const (
	metricUp          = "lodestone_bfd_session_up"
	metricTransitions = "lodestone_bfd_transitions_total"
	metricPackets     = "lodestone_bfd_packets_total"
	metricGaps        = "lodestone_bfd_packet_gap_ratio"
	metricLost        = "lodestone_bfd_lost_packets_total"
	metricSendErrors  = "lodestone_bfd_send_errors_total"
	metricDiscarded   = "lodestone_bfd_discarded_packets_total"
)

var (
	upDesc          = prometheus.NewDesc(metricUp, "1 while the BFD session with the peer is Up.", []string{"peer"}, nil)
	transitionsDesc = prometheus.NewDesc(metricTransitions, "How often the session came to be Up, or ceased to be, by reason.",
		[]string{"peer", "reason"}, nil)
	packetsDesc = prometheus.NewDesc(metricPackets, "Control packets of the session, received and sent.",
		[]string{"peer", "direction"}, nil)
	gapsDesc = newGaps("").Desc()
	lostDesc = prometheus.NewDesc(metricLost, "Packets of the peer that did not arrive while the session was Up, estimated from gaps.",
		[]string{"peer"}, nil)
	sendErrorsDesc = prometheus.NewDesc(metricSendErrors, "Packets that could not be sent.", []string{"peer"}, nil)
	discardedDesc  = prometheus.NewDesc(metricDiscarded, "Received packets that were not used, by reason.", []string{"reason"}, nil)
)

// newGaps returns the gaps of a session. Peers draw a random interval of 0.75 to 1
// (RFC 5880, section 6.8.7); at the multiplier, mostly 3, the session ends.
func newGaps(peer string) prometheus.Histogram {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: metricGaps, Help: "Time between packets of the peer while the session was Up, as a share of the interval that was agreed on: " +
			"up to 1 is as it should be.",
		Buckets: []float64{0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3},
	}, []string{"peer"})
	return v.WithLabelValues(peer).(prometheus.Histogram) //nolint:errcheck // it is one
}

// collector reads at scrape what the loop counts. The loop never waits for it.
type collector struct{ *Task }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{upDesc, transitionsDesc, packetsDesc, gapsDesc, lostDesc, sendErrorsDesc, discardedDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for _, s := range *c.published.Load() {
		up := 0.0
		if s.published.Load().Up() {
			up = 1
		}
		ch <- prometheus.MustNewConstMetric(upDesc, prometheus.GaugeValue, up, s.name)
		for i, cause := range causes {
			count(transitionsDesc, s.counters.transitions[i].Load(), s.name, string(cause))
		}
		count(packetsDesc, s.counters.received.Load(), s.name, "received")
		count(packetsDesc, s.counters.sent.Load(), s.name, "sent")
		ch <- s.counters.gaps
		count(lostDesc, s.counters.lost.Load(), s.name)
		count(sendErrorsDesc, s.counters.sendErrors.Load(), s.name)
	}
	for i, why := range discards {
		count(discardedDesc, c.discarded[i].Load(), string(why))
	}
}
