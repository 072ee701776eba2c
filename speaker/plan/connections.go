package plan

import (
	"cmp"
	"maps"
	"net/netip"
)

// connections has, for each Service at each of its VIPs, how this node limits connections and whether
// it forwards them directly.
type connections struct {
	limits    shared[Limit]
	limitErrs shared[error]
	direct    shared[Direct]
	gone      map[LimitKey]bool // Services that have lost a VIP since the last Update
}

func newConnections() connections {
	same := func(a, b error) bool { return a == b }
	return connections{newShared(Limit.Equal), newShared(same), newShared(Direct.Equal), map[LimitKey]bool{}}
}

// shared is a map that is copied before it is modified, because others may have it, too.
type shared[V any] struct {
	all   map[LimitKey]V
	own   bool // nobody else has the map
	equal func(V, V) bool
}

func newShared[V any](equal func(V, V) bool) shared[V] {
	return shared[V]{map[LimitKey]V{}, false, equal}
}

// set replaces the value of a key, or removes it if the key is to have none.
func (s *shared[V]) set(key LimitKey, value V, has bool) {
	if !has {
		s.remove(key)
	} else if before, had := s.all[key]; !had || !s.equal(before, value) {
		s.modify()[key] = value
	}
}

func (s *shared[V]) remove(key LimitKey) {
	if _, has := s.all[key]; has {
		delete(s.modify(), key)
	}
}

func (s *shared[V]) modify() map[LimitKey]V {
	if !s.own {
		s.all, s.own = maps.Clone(s.all), true
	}
	return s.all
}

// share returns the map, which is never modified again, and whether it has changed since the last call.
func (s *shared[V]) share() (all map[LimitKey]V, changed bool) {
	changed, s.own = s.own, false
	return s.all, changed
}

// lose notes that a Service has lost its VIPs, and take notes that it has them.
func (c *connections) lose(s *Service) {
	for _, vip := range s.VIPs {
		c.gone[LimitKey{vip, s.Name}] = true
	}
}

func (c *connections) take(s *Service) {
	for _, vip := range s.VIPs {
		delete(c.gone, LimitKey{vip, s.Name})
	}
}

// forget removes everything about the Services that have lost a VIP, at that VIP.
func (c *connections) forget() {
	for key := range c.gone {
		c.limits.remove(key)
		c.limitErrs.remove(key)
		c.direct.remove(key)
	}
	c.gone = map[LimitKey]bool{}
}

// connect updates the connections to a VIP of these Services.
func (p *Planner) connect(vip netip.Addr, sharers []*Service, s *scope, v Verdict) {
	for _, svc := range sharers {
		key := LimitKey{vip, svc.Name}
		direct := Direct{Ports: svc.Ports, ByClient: svc.ByClient, Seed: svc.Seed, Local: svc.Local}
		forwarded := s.direct && len(svc.Ports) > 0
		if forwarded {
			direct.Backends = s.backends(svc, vip)
		}
		p.connections.direct.set(key, direct, forwarded)
		limit, limited := p.limitAt(vip, s, v, svc)
		p.connections.limits.set(key, limit, limited && svc.LimitErr == nil)
		p.connections.limitErrs.set(key, svc.LimitErr, limited && svc.LimitErr != nil)
	}
}

// limitAt returns the limit of a Service at a VIP, and whether this node applies it. It does if it
// announces the VIP, or keeps connections that other nodes receive.
func (p *Planner) limitAt(vip netip.Addr, s *scope, v Verdict, svc *Service) (limit Limit, limited bool) {
	if svc.Limit.PerSecond == 0 && svc.LimitErr == nil {
		return Limit{}, false
	}
	limit = svc.Limit
	announced := v.Owned || v.Peers != nil
	d, direct := p.connections.direct.all[LimitKey{vip, svc.Name}]
	var kept part
	if direct {
		kept = s.part(p.node, cmp.Or(v.owner(p.node), p.node), vip, d)
	}
	switch {
	case !announced && kept.of == 0:
		return Limit{}, false
	case announced && direct && !limit.onlyTCP(): // connections of other protocols all stay on this node
	case kept.of > 0:
		limit.PerSecond = uint32((uint64(limit.PerSecond)*uint64(kept.of) + uint64(kept.all) - 1) / uint64(kept.all))
	}
	return limit, true
}

// publish puts the limits and what is forwarded into the plan.
func (p *Planner) publish(changes *Changes) {
	p.connections.forget()
	if errs, changed := p.connections.limitErrs.share(); changed {
		all := make(map[string]error, len(errs))
		for key, err := range errs {
			all[key.Service] = err
		}
		changes.Limits = !maps.Equal(all, p.plan.LimitErrs)
		p.plan.LimitErrs = all
	}
	limits, changed := p.connections.limits.share()
	p.plan.Limits, changes.Limits = limits, changes.Limits || changed
	p.forward()
}
