package kube

import "github.com/prometheus/client_golang/prometheus"

// The metrics of the configuration.
const (
	MetricConfigValid    = "lodestone_config_valid"
	MetricConfigApplied  = "lodestone_config_applied_timestamp_seconds"
	MetricConfigInfo     = "lodestone_config_info"
	MetricConfigRestored = "lodestone_config_restored"
)

var (
	configValid    = prometheus.NewDesc(MetricConfigValid, "Whether the latest document is valid and in force.", nil, nil)
	configApplied  = prometheus.NewDesc(MetricConfigApplied, "When the configuration in force was taken over, in Unix time.", nil, nil)
	configRestored = prometheus.NewDesc(MetricConfigRestored,
		"Whether the configuration in force is the copy of the last valid document, because there was no valid document since the "+
			"start.", nil, nil)
	configInfo = prometheus.NewDesc(MetricConfigInfo, "The configuration in force, by the SHA-256 of its document.", []string{"digest"}, nil)
)

// Describe implements prometheus.Collector.
func (w *ConfigWatcher) Describe(ch chan<- *prometheus.Desc) {
	ch <- configValid
	ch <- configApplied
	ch <- configInfo
	ch <- configRestored
}

// Collect implements prometheus.Collector.
func (w *ConfigWatcher) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	cfg, state := w.Current()
	gauge(configValid, OneIf(state.Read && state.Err == nil))
	gauge(configRestored, OneIf(state.Restored))
	if cfg != nil {
		gauge(configApplied, float64(state.Since.UnixMilli())/1e3)
		gauge(configInfo, 1, cfg.Digest)
	}
}

// OneIf returns how a metric has what is so (1) or not (0).
func OneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
