package podroutes

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// Names of the metrics.
const (
	metricWanted   = "lodestone_route_wanted"
	metricInForce  = "lodestone_route_in_force"
	metricProblems = "lodestone_route_problems"
	metricRestored = "lodestone_route_restored_total"
)

var (
	wantedDesc   = prometheus.NewDesc(metricWanted, "Routes to pods of other nodes that there should be on this node.", nil, nil)
	inForceDesc  = prometheus.NewDesc(metricInForce, "Routes to pods that the kernel has.", nil, nil)
	problemsDesc = prometheus.NewDesc(metricProblems, "Pod CIDRs of nodes that there is no route to, by reason.", []string{"reason"}, nil)
)

// collector reads the state of the routes at scrape.
type collector struct{ *Table }

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{wantedDesc, inForceDesc, problemsDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	v := c.published.Load()
	problems := map[plan.PodRefusal]int{}
	for _, p := range v.problems {
		problems[p.reason]++
	}
	for _, r := range v.want.Refused {
		problems[r.Reason]++
	}
	for reason, n := range problems {
		ch <- prometheus.MustNewConstMetric(problemsDesc, prometheus.GaugeValue, float64(n), string(reason))
	}
	ch <- prometheus.MustNewConstMetric(wantedDesc, prometheus.GaugeValue, float64(len(v.want.Routes)))
	ch <- prometheus.MustNewConstMetric(inForceDesc, prometheus.GaugeValue, float64(len(v.inForce)))
}
