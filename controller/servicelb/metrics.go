package servicelb

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// The metrics of pools and Services.
const (
	MetricPoolSize      = "lodestone_pool_size"
	MetricPoolAddresses = "lodestone_pool_addresses"
	MetricPoolDraining  = "lodestone_pool_draining"
	MetricServices      = "lodestone_services"
	MetricRefused       = "lodestone_services_refused"
	MetricRefusals      = "lodestone_refusals_total"
	MetricAllocation    = "lodestone_allocation_duration_seconds"
	MetricPrimed        = "lodestone_primed"
	MetricWarnings      = "lodestone_config_warnings"
	MetricLeases        = "lodestone_leases"
	MetricLeasesLost    = "lodestone_leases_lost_total"
	MetricConflicts     = "lodestone_address_conflicts_total"
)

var (
	poolSize      = prometheus.NewDesc(MetricPoolSize, "Addresses that the pool may hand out.", []string{"pool", "family"}, nil)
	poolAddresses = prometheus.NewDesc(MetricPoolAddresses,
		"Addresses of the pool by what becomes of them: free, assigned, quarantined, conflicted (another host has them), reserved.",
		[]string{"pool", "family", "state"}, nil)
	poolDraining = prometheus.NewDesc(MetricPoolDraining, "Whether the pool gives no new addresses, because it is to be emptied.",
		[]string{"pool", "family"}, nil)
	services = prometheus.NewDesc(MetricServices,
		"Services served, by how they stand: allocated, partial, draining, stranded, conflicting (another host claims the address, too), "+
			"refused, unjudged.", []string{"state"}, nil)
	refused = prometheus.NewDesc(MetricRefused, "Services whose request is refused at present.", []string{"reason"}, nil)
	leases  = prometheus.NewDesc(MetricLeases,
		"Leases of a pool that leases its addresses, by how they stand: leased, overdue (not being extended), unconfirmed (held since "+
			"before the start), waiting.", []string{"pool", "state"}, nil)
	primed = prometheus.NewDesc(MetricPrimed,
		"Whether the ledger knows what the cluster's Services hold, so that addresses are allocated.", nil, nil)
)

// metrics are those that count; all others are computed from the ledger when
// they are asked for.
type metrics struct {
	refusals  *prometheus.CounterVec
	latency   prometheus.Histogram
	warnings  prometheus.Gauge
	lost      *prometheus.CounterVec
	conflicts prometheus.Counter
}

func newMetrics() metrics {
	return metrics{
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricRefusals, Help: "Requests that came to be refused, or refused for another reason."}, []string{"reason"}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: MetricAllocation, Help: "Time from taking up a Service to its new address standing in the API.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14)}),
		warnings: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: MetricWarnings, Help: "What of the configuration in force makes no sense in this cluster: see the Events on the ConfigMap."}),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: MetricLeasesLost, Help: "Leased addresses that Services lost because the lease was over."}, []string{"pool"}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: MetricConflicts, Help: "Addresses that Services were given and left at once because another host had them."}),
	}
}

func (m metrics) describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{poolSize, poolAddresses, poolDraining, services, refused, leases, primed} {
		ch <- d
	}
	for _, c := range m.counted() {
		c.Describe(ch)
	}
}

func (m metrics) counted() []prometheus.Collector {
	return []prometheus.Collector{m.refusals, m.latency, m.warnings, m.lost, m.conflicts}
}

func (m metrics) collect(l *lockedLedger, ready bool, ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	s := l.stats()
	for _, p := range s.Pools {
		family := string(p.Family)
		gauge(poolSize, p.Size, p.Pool, family)
		gauge(poolAddresses, p.Free, p.Pool, family, "free")
		gauge(poolAddresses, p.Assigned, p.Pool, family, "assigned")
		gauge(poolAddresses, p.Quarantined, p.Pool, family, "quarantined")
		gauge(poolAddresses, p.Conflicted, p.Pool, family, "conflicted")
		gauge(poolAddresses, p.Reserved, p.Pool, family, "reserved")
		gauge(poolDraining, kube.OneIf(p.Draining), p.Pool, family)
	}
	for state, n := range s.Services {
		gauge(services, n, state)
	}
	for reason, n := range s.Refused {
		gauge(refused, n, reason)
	}
	for pool, count := range s.Leases {
		m.lost.WithLabelValues(pool) // from 0: the first loss is an increase, too
		for _, state := range ledger.LeaseStates {
			gauge(leases, count[state], pool, state)
		}
	}
	gauge(primed, kube.OneIf(ready))
	for _, c := range m.counted() {
		c.Collect(ch)
	}
}
