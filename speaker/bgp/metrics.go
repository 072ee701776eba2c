package bgp

import (
	"maps"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Names of the metrics.
const (
	metricEstablished = "lodestone_bgp_session_established"
	metricTransitions = "lodestone_bgp_session_transitions_total"
	metricAdvertised  = "lodestone_bgp_advertised_prefixes"
	metricWithheld    = "lodestone_bgp_withheld_prefixes"
	metricUpdates     = "lodestone_bgp_updates_sent_total"
	metricDropped     = "lodestone_bgp_dropped_prefixes_total"
)

var (
	establishedDesc = prometheus.NewDesc(metricEstablished, "1 while the session with the peer is established, else 0.", []string{"peer"}, nil)
	transitionsDesc = prometheus.NewDesc(metricTransitions, "Sessions that came up (cause established) or went down, by cause.",
		[]string{"peer", "cause"}, nil)
	advertisedDesc = prometheus.NewDesc(metricAdvertised, "Prefixes announced to the peer.", []string{"peer"}, nil)
	withheldDesc   = prometheus.NewDesc(metricWithheld, "Prefixes withheld from the peer, by reason.", []string{"peer", "reason"}, nil)
	updatesDesc    = prometheus.NewDesc(metricUpdates, "UPDATE messages with routes sent.", []string{"peer"}, nil)
	droppedDesc    = prometheus.NewDesc(metricDropped, "Prefixes that the peer announced. All are dropped.", []string{"peer"}, nil)
)

// transitions counts those of a session by cause.
type transitions struct {
	mu sync.Mutex
	of map[Cause]int
}

func (t *transitions) count(cause Cause) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = map[Cause]int{}
	}
	t.of[cause]++
}

func (t *transitions) counts() map[Cause]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.of)
}

// collector reads the state of the sessions at scrape. The metrics of a peer go with the peer.
type collector struct{ *Announcer }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{establishedDesc, transitionsDesc, advertisedDesc, withheldDesc, updatesDesc, droppedDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	sessions := *c.published.Load()
	for _, p := range c.Peers() {
		s := sessions[p.Name]
		if s == nil { // it has come meanwhile
			continue
		}
		send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, value, append([]string{p.Name}, labels...)...)
		}
		established := 0.0
		if p.State == Established {
			established = 1
		}
		send(establishedDesc, prometheus.GaugeValue, established)
		for cause, n := range s.transitions.counts() {
			send(transitionsDesc, prometheus.CounterValue, float64(n), string(cause))
		}
		send(advertisedDesc, prometheus.GaugeValue, float64(p.Advertised))
		for reason, n := range p.Withheld {
			send(withheldDesc, prometheus.GaugeValue, float64(n), string(reason))
		}
		send(updatesDesc, prometheus.CounterValue, float64(s.updatesSent.Load()))
		send(droppedDesc, prometheus.CounterValue, float64(p.Dropped))
	}
}
