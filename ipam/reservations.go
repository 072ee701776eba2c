package ipam

import "net/netip"

// reservations are free addresses that nobody draws: those that are reserved for a Service,
// and those that another host has.
type reservations struct {
	apart map[netip.Addr]apart
	// of has the addresses of each Service.
	of map[string][]netip.Addr
}

// apart is why an address is not drawn.
type apart struct {
	service  string // that it is reserved for; empty: for none
	conflict bool   // another host has it
}

func newReservations(setup Setup) reservations {
	rs := reservations{map[netip.Addr]apart{}, map[string][]netip.Addr{}}
	for _, addr := range setup.Conflicted {
		rs.apart[canonical(addr)] = apart{conflict: true}
	}
	for _, r := range setup.Reservations {
		for _, addr := range r.Addresses {
			addr = canonical(addr)
			why := rs.apart[addr]
			if why.service != "" || !addr.IsValid() {
				continue
			}
			why.service = r.Service
			rs.apart[addr] = why
			rs.of[r.Service] = append(rs.of[r.Service], addr)
		}
	}
	return rs
}

// take takes an address out of its space in which it is free, or set apart.
func (rs *reservations) take(addr netip.Addr, s *space) {
	if why, ok := rs.apart[addr]; ok && s.pool != nil {
		*s.counter(why)--
	} else {
		s.take(addr)
	}
}

// put undoes take.
func (rs *reservations) put(addr netip.Addr, s *space) {
	if why, ok := rs.apart[addr]; ok && s.pool != nil {
		*s.counter(why)++
	} else {
		s.put(addr)
	}
}

// counter counts the addresses of the space that are set apart for the reason,
// and neither held nor in quarantine.
func (s *space) counter(why apart) *int {
	if why.conflict {
		return &s.conflicted
	}
	return &s.reserved
}
