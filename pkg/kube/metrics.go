package kube

import "github.com/prometheus/client_golang/prometheus"

// The metrics of the configuration.
const (
	MetricConfigValid   = "lodestone_config_valid"
	MetricConfigApplied = "lodestone_config_applied_timestamp_seconds"
	MetricConfigInfo    = "lodestone_config_info"
)

var (
	configValid   = prometheus.NewDesc(MetricConfigValid, "Whether the latest document is valid and in force.", nil, nil)
	configApplied = prometheus.NewDesc(MetricConfigApplied, "When the configuration in force was taken over, in Unix time.", nil, nil)
	configInfo    = prometheus.NewDesc(MetricConfigInfo, "The configuration in force, by the SHA-256 of its document.", []string{"digest"}, nil)
)

// Describe implements prometheus.Collector.
func (w *ConfigWatcher) Describe(ch chan<- *prometheus.Desc) {
	ch <- configValid
	ch <- configApplied
	ch <- configInfo
}

// Collect implements prometheus.Collector.
func (w *ConfigWatcher) Collect(ch chan<- prometheus.Metric) {
	cfg, state := w.Current()
	valid := 0.0
	if state.Read && state.Err == nil {
		valid = 1
	}
	ch <- prometheus.MustNewConstMetric(configValid, prometheus.GaugeValue, valid)
	if cfg != nil {
		ch <- prometheus.MustNewConstMetric(configApplied, prometheus.GaugeValue, float64(state.Since.UnixMilli())/1e3)
		ch <- prometheus.MustNewConstMetric(configInfo, prometheus.GaugeValue, 1, cfg.Digest)
	}
}
