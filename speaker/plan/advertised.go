package plan

import (
	"slices"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// advertised has the advertisements for each pool, as far as somebody asked. The key nil is for VIPs outside all pools.
type advertised map[*config.Pool][]*config.Advertisement

// of returns the advertisements of the configuration that announce VIPs of the pool, of those that the function selects.
func (ad advertised) of(pool *config.Pool, c *config.Config, selects func(*config.Advertisement) bool) []*config.Advertisement {
	all, ok := ad[pool]
	if ok || c == nil {
		return all
	}
	for i := range c.Advertisements {
		if a := &c.Advertisements[i]; selects(a) && (pool == nil || pool.AdvertisedBy(a.Name)) {
			all = append(all, a)
		}
	}
	ad[pool] = all
	return all
}

// applied returns which of the advertisements apply to a VIP of these Services, in the form of
// scopeKey.applied. It takes one selected Service, so that no Service silences others at its address.
func applied(advertisements []*config.Advertisement, services []*Service) string {
	if !slices.ContainsFunc(advertisements, func(a *config.Advertisement) bool { return len(a.ServiceSelector) > 0 }) {
		return ""
	}
	each := make([]byte, len(advertisements))
	for i, a := range advertisements {
		if slices.ContainsFunc(services, func(s *Service) bool { return a.ServiceSelector.Matches(s.Labels) }) {
			each[i] = 1
		}
	}
	return string(each)
}
