package membership

import (
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// published is what this speaker publishes, in its own record. Its exported methods are the Task's.
type published struct{ *table }

// SetReady publishes whether this speaker is ready to own VIPs. It reaches the others within some
// intervals of gossip.
func (p published) SetReady(ready bool) { p.publish(func(m *metadata) { m.ready = ready }) }

// Claim publishes what this speaker owns and keeps; see report.Claims. The claims count here at once, and
// on other nodes some intervals of gossip later.
func (p published) Claim(claims report.Claims) { p.publish(func(m *metadata) { m.claims = claims }) }

// See publishes whether the API server answers this speaker, and whether this speaker has
// given up on it.
func (p published) See(answered, blind bool) {
	p.publish(func(m *metadata) { m.view.answered, m.view.blind = answered, blind })
}

// SetSick publishes whether kube-proxy on this node is not healthy.
func (p published) SetSick(sick bool) { p.publish(func(m *metadata) { m.view.sick = sick }) }

// setDown sets which interfaces count as down on this node, and which of them are published as down. The
// names are separated by commas. It reports whether the former have changed.
func (p published) setDown(here, published string) bool {
	p.mu.Lock()
	if p.down != published {
		p.down = published
		notify.Wake(p.send)
	}
	p.mu.Unlock()
	return p.publish(func(m *metadata) { m.down = here })
}

// publish changes what this speaker publishes, and reports whether that is different from before.
func (p published) publish(change func(*metadata)) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	own := p.peers[p.options.Node]
	m := own.metadata
	change(&m)
	if m == own.metadata {
		return false
	}
	p.record(own, m)
	notify.Wake(p.send)
	return true
}

// current returns what this speaker publishes. It is not ready while it is apart from the others.
func (p published) current() metadata {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.peers[p.options.Node].metadata
	m.ready, m.down = m.ready && p.apart.from() == "", p.down
	return m
}
