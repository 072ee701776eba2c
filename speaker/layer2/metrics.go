package layer2

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
)

// Names of the metrics.
const (
	metricRequests      = "lodestone_layer2_requests_total"
	metricReplies       = "lodestone_layer2_replies_total"
	metricAnnouncements = "lodestone_layer2_announcements_total"
	metricConflicts     = "lodestone_layer2_conflicts_total"
	metricErrors        = "lodestone_layer2_errors_total"
	metricMalformed     = "lodestone_layer2_malformed_total"
	metricOwned         = "lodestone_layer2_owned_vips"
	metricWithheld      = "lodestone_layer2_withheld_vips"
	metricUnannounced   = "lodestone_layer2_unannounced_vips"
)

var withheldDesc = prometheus.NewDesc(metricWithheld,
	"VIPs that this node owns and does not announce on the interface: Probing, AddressConflict, Yielded to another speaker.",
	[]string{"interface", "family", "reason"}, nil)

var unannouncedDesc = prometheus.NewDesc(metricUnannounced,
	"VIPs that this node owns and announces on no interface: NoInterface may, NoLinkLocalAddress for IPv6, InterfaceFailed.",
	[]string{"reason"}, nil)

type metrics struct {
	requests, replies, announcements, conflicts, malformed, errors *prometheus.CounterVec
}

// collector counts at scrape time the VIPs that are withheld, and those that cannot be announced.
type collector struct{ *Announcer }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- withheldDesc
	ch <- unannouncedDesc
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	now, unannounced := c.published.Load(), map[Reason]int{}
	for vip := range now.vips {
		unannounced[now.of(vip).Reason]++
	}
	for _, reason := range []Reason{NoInterface, NoLinkLocalAddress, InterfaceFailed} {
		ch <- prometheus.MustNewConstMetric(unannouncedDesc, prometheus.GaugeValue, float64(unannounced[reason]), string(reason))
	}
	for key, s := range now.sockets {
		n := s.withheld()
		for _, reason := range []Reason{Probing, AddressConflict, Yielded} {
			ch <- prometheus.MustNewConstMetric(withheldDesc, prometheus.GaugeValue, float64(n[reason]), key.name, key.protocol.Family(),
				string(reason))
		}
	}
}

func newMetrics(r prometheus.Registerer, a *Announcer) *metrics {
	owned := func() float64 { return float64(len(a.published.Load().vips)) }
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append(labels, "interface", "family"))
		r.MustRegister(c)
		return c
	}
	r.MustRegister(collector{a}, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: metricOwned, Help: "VIPs that this node owns on the local segment, also those that leave it or arrive."}, owned))
	return &metrics{
		requests:      counter(metricRequests, "Requests for the address of a VIP that this node owns."),
		replies:       counter(metricReplies, "Requests answered."),
		announcements: counter(metricAnnouncements, "Gratuitous announcement frames sent."),
		conflicts: counter(metricConflicts,
			"Packets in which a foreign host claims a VIP that this node announces, and claims in the name of a speaker that did not "+
				"answer for them."),
		malformed: counter(metricMalformed, "ARP and NDP packets that were dropped because they break the protocol: cut short, a wrong "+
			"checksum, nobody's address."),
		errors: counter(metricErrors, "Errors of sockets, by operation: open, receive, send, join.", "operation"),
	}
}

// counters are the metrics of one socket.
type counters struct {
	requests, replies, announcements, conflicts, malformed, openErrors, receiveErrors, sendErrors, groupErrors prometheus.Counter
}

func (m *metrics) of(key socketKey) counters {
	on := func(c *prometheus.CounterVec) prometheus.Counter {
		return c.WithLabelValues(key.name, key.protocol.Family())
	}
	failed := func(operation string) prometheus.Counter {
		return m.errors.WithLabelValues(operation, key.name, key.protocol.Family())
	}
	return counters{
		requests:      on(m.requests),
		replies:       on(m.replies),
		announcements: on(m.announcements),
		conflicts:     on(m.conflicts),
		malformed:     on(m.malformed),
		openErrors:    failed("open"),
		receiveErrors: failed("receive"),
		sendErrors:    failed("send"),
		groupErrors:   failed("join"),
	}
}

// add counts the effects of a step of the segment's machine.
func (c *counters) add(e *segment.Effects) {
	add := func(to prometheus.Counter, n int) {
		if n > 0 {
			to.Add(float64(n))
		}
	}
	add(c.requests, e.Requests)
	add(c.replies, e.Replies)
	add(c.announcements, e.Announcements)
	add(c.conflicts, e.Conflicts)
}
