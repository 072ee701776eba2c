package servicelb

import (
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// situation is a configuration in a cluster. Both are immutable.
type situation struct {
	config *config.Config
	facts  *clusterfacts.Facts
}

// warn tells the operator, once each, what of the configuration makes no
// sense in this cluster.
func (c *Controller) warn() {
	cfg, _ := c.Config.Current()
	facts, ready := c.Facts.Current()
	now := situation{cfg, facts}
	if cfg == nil || !ready || now == c.examined {
		return
	}
	c.examined = now
	warnings := clusterfacts.Warnings(cfg, facts)
	for _, w := range warnings {
		if !slices.Contains(c.warned, w) {
			c.Log.Warn("configuration", "warning", w)
			c.Config.Warn(w)
		}
	}
	c.warned = warnings
	c.metrics.warnings.Set(float64(len(warnings)))
}
