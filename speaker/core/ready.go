package core

// decideReady decides whether this node may own VIPs. A node without a configuration may not: it would
// win VIPs and not know how to announce them. A node whose data plane is sick may: it is the last
// choice, see report.Network.
func (c *Core) decideReady() {
	h := c.facts.health
	c.ready = h.Synced && c.facts.config != nil && h.Joined && h.Forwards && (h.Healthy || h.Sick)
	c.out.Ready = c.ready
	if c.ready && !c.everReady {
		c.everReady, c.out.BecameReady = true, true
		c.log(false, "ready to own VIPs")
	}
}
