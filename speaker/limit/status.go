package limit

import "net/netip"

// Status is the state of the limiter.
type Status struct {
	// Limits are the wanted limits, by VIP and Service.
	Limits []LimitStatus `json:"limits"`
	// Error is why they are not all in force. The limiter tries again.
	Error string `json:"error,omitempty"`
}

// LimitStatus is the limit of a Service at a VIP.
type LimitStatus struct {
	VIP     netip.Addr `json:"vip"`
	Service string     `json:"service"`
	// PerSecond is how many connections may be opened in a second.
	PerSecond uint32 `json:"perSecond"`
}

// Status returns the state of the limiter.
func (l *Limiter) Status() Status {
	s := l.published.Load()
	status := Status{Limits: []LimitStatus{}}
	for _, key := range keys(s.want) {
		status.Limits = append(status.Limits, LimitStatus{key.VIP, key.Service, s.want[key].PerSecond})
	}
	if s.err != nil {
		status.Error = s.err.Error()
	}
	return status
}
