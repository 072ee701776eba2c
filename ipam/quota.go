package ipam

import (
	"fmt"
	"slices"
)

// usages is what counts for the quota of each namespace, nil without a quota.
type usages map[string]usage

// usage counts the addresses that the Services of a namespace hold, and those in
// quarantine after their last use by one of them. A namespace could otherwise take
// one address after the other, and give each back.
type usage struct{ held, quarantined int }

// add counts for the quota of a namespace. There are no usages where there is no quota.
func (us usages) add(namespace string, change usage) {
	u := us[namespace]
	u.held, u.quarantined = u.held+change.held, u.quarantined+change.quarantined
	if us[namespace] = u; u == (usage{}) {
		delete(us, namespace)
	}
}

// fills reports whether the quota of the namespace has no room for an address of the space:
// the one of a holding, one in quarantine, or a free one. An address that counts for the
// namespace already always fits.
func (p *proposal) fills(s *space, g *holding, r *quarantined) bool {
	if s.usages == nil || g != nil && (g.inhabited(p.me.namespace, p.holder) || p.holds(g) && p.wants(g)) {
		return false
	}
	used := p.used(s)
	if r != nil && namespaceOf(r.name) == p.me.namespace {
		used-- // it counts already
	}
	return used >= s.pool.NamespaceQuota
}

// used returns how many addresses of the space the namespace uses after the proposal. These are
// the ones that it holds and the ones in quarantine, without those that it gives back,
// and with those that it takes.
func (p *proposal) used(s *space) int {
	now := s.usages[p.me.namespace]
	used := now.held + now.quarantined
	if p.holder != nil {
		for _, g := range p.holder.holdings {
			if g.space == s && !p.wants(g) && !g.inhabited(p.me.namespace, p.holder) {
				used--
			}
		}
	}
	for _, k := range p.picks {
		switch {
		case k.space != s, k.holding != nil && k.holding.inhabited(p.me.namespace, nil):
		case k.holding == nil && p.quarantine.at[k.addr] != nil: // it counts already
		default:
			used++
		}
	}
	return used
}

// wants reports whether the proposal keeps the holding.
func (p *proposal) wants(g *holding) bool {
	return slices.Contains(p.wishes[0], g.addr) || slices.Contains(p.wishes[1], g.addr) ||
		slices.ContainsFunc(p.picks, func(k pick) bool { return k.kept && k.holding == g })
}

// refuseQuota refuses an address of a space of which the namespace has enough.
func (p *proposal) refuseQuota(s *space) *Refusal {
	var w wording
	p.describeQuota(&w, s)
	return w.refuse(QuotaExceeded, s.name())
}

// describeQuota writes what the namespace has of its quota.
func (p *proposal) describeQuota(w *wording, s *space) {
	waiting := s.usages[p.me.namespace].quarantined
	fmt.Fprintf(&w.fact, "namespace %q has its %d %s addresses of pool %q", p.me.namespace, s.pool.NamespaceQuota, s.family, s.name())
	w.counts = true
	defer func() { w.counts = false }()
	w.add("namespace %q holds %d of its %d %s addresses of pool %q",
		p.me.namespace, p.used(s)-waiting, s.pool.NamespaceQuota, s.family, s.name())
	if waiting > 0 {
		w.aside("%d in quarantine after their last use, which count, too", waiting)
	}
	w.endAsides()
}
