package ledger

import (
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
)

// Stats are counters, for metrics and people.
type Stats struct {
	// Pools are the counters of the pools. Those with leased addresses are left out, because
	// only the server knows how many are free.
	Pools []ipam.PoolStats
	// Services are counted by their state, Refused by the reason of the refusal.
	Services, Refused map[string]float64
	// Leases are counted by pool and by LeaseStates.
	Leases map[string]map[string]float64
}

// Stats counts.
func (l *Ledger) Stats(now time.Time) Stats {
	s := Stats{
		Services: map[string]float64{"allocated": 0, "partial": 0, "draining": 0, "stranded": 0, "conflicting": 0, "refused": 0, "unjudged": 0},
		Refused:  map[string]float64{}, Leases: l.leasing.count(),
	}
	s.Pools = slices.DeleteFunc(l.held.Stats(now), func(p ipam.PoolStats) bool { _, leases := s.Leases[p.Pool]; return leases })
	for _, a := range l.accounts {
		switch v := a.verdict; {
		case v.Refusal != nil:
			s.Services["refused"]++
			s.Refused[string(v.Refusal.Reason)]++
		case v.Undecided:
			s.Services["unjudged"]++
		case len(v.Conflicts) > 0:
			s.Services["conflicting"]++
		case v.Stranded():
			s.Services["stranded"]++
		case v.Draining():
			s.Services["draining"]++
		case v.Missing != "":
			s.Services["partial"]++
		default:
			s.Services["allocated"]++
		}
	}
	return s
}
