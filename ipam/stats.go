package ipam

import "time"

// PoolStats are a pool's counters for one family. The counts of an IPv6 pool
// may exceed what an integer holds, hence float64.
type PoolStats struct {
	Pool   string
	Family Family
	// Size is how many addresses the pool may hand out; Free those of them
	// that can be given now; Assigned and Quarantined the others. Stranded
	// addresses are in no pool and not counted.
	Size, Free, Assigned, Quarantined float64
}

// Stats returns counters of every pool and family the pool has, in the order
// of the document, at a cost that does not depend on the pools' sizes.
func (a *Allocator) Stats(now time.Time) []PoolStats {
	a.tick(now)
	stats := make([]PoolStats, 0, len(families)*len(a.pools))
	for _, p := range a.pools {
		for _, s := range p.spaces {
			if s != nil {
				stats = append(stats, s.stats())
			}
		}
	}
	return stats
}

func (s *space) stats() PoolStats {
	assigned, resting := float64(s.assigned), float64(s.resting)
	return PoolStats{
		Pool: s.pool.Name, Family: s.family,
		Size: s.size, Free: s.size - assigned - resting, Assigned: assigned, Quarantined: resting,
	}
}
