package world

// Shrink returns a smaller scenario in which the same invariant does not hold: with fewer faults, then with fewer and
// shorter ones, nodes and Services. It returns the scenario itself if all hold in it.
func Shrink(s Scenario) Scenario {
	first := Run(s, nil)
	if first == nil {
		return s
	}
	fails := func(t Scenario) bool {
		f := Run(t, nil)
		return f != nil && f.Invariant == first.Invariant
	}
	for smaller := true; smaller; {
		smaller = false
		for _, t := range s.smaller() {
			if fails(t) {
				s, smaller = t, true
				break
			}
		}
	}
	return s
}

// smaller returns scenarios that are a step smaller, the smallest first.
func (s Scenario) smaller() (all []Scenario) {
	for size := len(s.Faults) / 2; size > 0; size /= 2 {
		for from := 0; from+size <= len(s.Faults); from += size {
			all = append(all, s.without(from, from+size))
		}
	}
	if s.Nodes > 2 {
		all = append(all, s.WithNodes(2), s.WithNodes(s.Nodes-1))
	}
	if s.Services > 1 {
		t := s
		t.Services = 1
		u := s
		u.Services--
		all = append(all, t, u)
	}
	if s.Segments > 1 {
		t := s
		t.Segments, t.Home, t.API = 1, 0, 0
		all = append(all, t)
	}
	return all
}
