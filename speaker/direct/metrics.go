package direct

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Names of the metrics.
const (
	metricFailing    = "lodestone_direct_failing"
	metricServices   = "lodestone_direct_services"
	metricTables     = "lodestone_direct_tables"
	metricNeighbours = "lodestone_direct_neighbours"
	metricConntrack  = "lodestone_direct_conntrack_full"
	metricHanded     = "lodestone_direct_handed_packets_total"
	metricDropped    = "lodestone_direct_dropped_packets_total"
)

var (
	failingDesc    = prometheus.NewDesc(metricFailing, "Whether the rules are not as they are to be.", nil, nil)
	servicesDesc   = prometheus.NewDesc(metricServices, "Services at VIPs, by what becomes of their connections.", []string{"state"}, nil)
	tablesDesc     = prometheus.NewDesc(metricTables, "Tables of nodes that keep connections.", nil, nil)
	neighboursDesc = prometheus.NewDesc(metricNeighbours, "Addresses of other nodes, by whether connections can be handed to them.",
		[]string{"state"}, nil)
	conntrackDesc = prometheus.NewDesc(metricConntrack, "Whether conntrack has little room, or none.", nil, nil)
	handedDesc    = prometheus.NewDesc(metricHanded, "Packets that were handed to other nodes, by nftables table.", []string{"table"}, nil)
	droppedDesc   = prometheus.NewDesc(metricDropped, "Packets that were not handed to other nodes, by nftables table and reason.",
		[]string{"reason", "table"}, nil)
)

// collector reads the state of the Director and the kernel's counters at scrape.
type collector struct{ *Director }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{failingDesc, servicesDesc, tablesDesc, neighboursDesc, conntrackDesc, handedDesc, droppedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It leaves out the counters of packets if they cannot be read.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c.Status()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	flag := map[bool]int{true: 1}
	gauge(failingDesc, flag[s.Err != nil])
	gauge(servicesDesc, len(s.Want.Services), "forwarded")
	gauge(servicesDesc, len(s.switchedOff), "draining")
	gauge(servicesDesc, s.Without, "without_table")
	gauge(tablesDesc, s.Tables)
	states := map[NeighbourState]int{}
	for _, n := range s.Neighbours {
		states[n.State]++
	}
	for _, state := range []NeighbourState{Reachable, Unknown, Silent, Gone, Elsewhere} {
		gauge(neighboursDesc, states[state], string(state))
	}
	gauge(conntrackDesc, flag[s.ConntrackFull])
	if !s.InForce {
		return
	}
	packets, err := counts(allTables)
	if err != nil {
		return
	}
	for table, counters := range packets { // a sum would fall when a table goes, which is read as a restart
		count := func(d *prometheus.Desc, counter string, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(counters[counter]), append(labels, table)...)
		}
		count(handedDesc, handedCounter)
		for discard := range Discards() {
			count(droppedDesc, string(discard), string(discard))
		}
	}
}
