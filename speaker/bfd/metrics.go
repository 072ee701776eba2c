package bfd

import (
	"math"
	"sync/atomic"

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
	transitionsDesc = prometheus.NewDesc(metricTransitions, "How often the session came to be Up, or ceased to be, by reason.", []string{"peer", "reason"}, nil)
	packetsDesc     = prometheus.NewDesc(metricPackets, "Control packets of the session, received and sent.", []string{"peer", "direction"}, nil)
	gapsDesc        = prometheus.NewDesc(metricGaps, "Time between packets of the peer while the session was Up, as a share of the interval that was agreed on: up to 1 is as it should be.", []string{"peer"}, nil)
	lostDesc        = prometheus.NewDesc(metricLost, "Packets of the peer that did not arrive while the session was Up, estimated from gaps.", []string{"peer"}, nil)
	sendErrorsDesc  = prometheus.NewDesc(metricSendErrors, "Packets that could not be sent.", []string{"peer"}, nil)
	discardedDesc   = prometheus.NewDesc(metricDiscarded, "Received packets that were not used, by reason.", []string{"reason"}, nil)
)

// gapBounds are the upper bounds of the buckets of gaps. Peers draw a random
// interval of 0.75 to 1 (RFC 5880, section 6.8.7); at the multiplier, mostly 3,
// the session ends.
var gapBounds = [...]float64{0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3}

// gaps is a histogram with one writer, the loop.
type gaps struct {
	counts [len(gapBounds) + 1]atomic.Uint64
	sum    atomic.Uint64 // the bits of a float64
}

func (g *gaps) observe(ratio float64) {
	i := 0
	for i < len(gapBounds) && ratio > gapBounds[i] {
		i++
	}
	g.counts[i].Add(1)
	g.sum.Store(math.Float64bits(math.Float64frombits(g.sum.Load()) + ratio))
}

func (g *gaps) metric(peer string) prometheus.Metric {
	count, buckets := uint64(0), map[float64]uint64{}
	for i, bound := range gapBounds {
		count += g.counts[i].Load()
		buckets[bound] = count
	}
	count += g.counts[len(gapBounds)].Load()
	return prometheus.MustNewConstHistogram(gapsDesc, count, math.Float64frombits(g.sum.Load()), buckets, peer)
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
		ch <- s.counters.gaps.metric(s.name)
		count(lostDesc, s.counters.lost.Load(), s.name)
		count(sendErrorsDesc, s.counters.sendErrors.Load(), s.name)
	}
	for i, why := range discards {
		count(discardedDesc, c.discarded[i].Load(), string(why))
	}
}
