package dhcp

import (
	"fmt"
	"net/netip"
	"time"
)

// Lease is an address that a client may use until the lease expires.
type Lease struct {
	Addr netip.Addr
	// Subnet is the subnet of the address, as the server gives it. The zero
	// Prefix: it gives none.
	Subnet netip.Prefix
	// Server is the identifier of the server that granted it last.
	Server netip.Addr
	// Acquired is when this process was first granted it. From Renew on its
	// server is asked to extend it, from Rebind on any server.
	Acquired, Renew, Rebind, Expires time.Time
}

// State is how a client stands.
type State struct {
	// Lease is shared and never modified. Nil: there is none.
	Lease *Lease
	// Err is why there is no lease, or why it is not being extended.
	Err error
	// Lost is the address, in Client.Last or leased, that the client may not
	// use any more, because its server refused it, gave another instead, or
	// the lease expired. It stays until the address is leased again. Without
	// Lease and Lost nothing is known yet: Client.Last may be used on.
	Lost netip.Addr
}

// states returns the states of all clients. failed is why the interface cannot be used, nil if
// it can.
func (t *machine) states(failed error) map[string]State {
	waiting := 0
	for _, s := range t.byID {
		if s.lease == nil && s.phase != idle {
			waiting++
		}
	}
	states := make(map[string]State, len(t.byID))
	for id, s := range t.byID {
		st := State{Lease: s.lease, Lost: s.lost, Err: s.err}
		why := t.silence(s, waiting)
		if failed != nil && s.phase != idle && s.phase != bound {
			why = failed
		}
		switch {
		case s.err == nil:
			st.Err = why
		case why != nil:
			st.Err = fmt.Errorf("%w; %w", s.err, why)
		}
		states[id] = st
	}
	return states
}

// silence returns an error that names the server which has not answered, and since when. Nil: no
// answer is late.
func (t *machine) silence(s *client, waiting int) error {
	if s.tries < 2 && (s.phase != selecting || t.unanswered < silent) {
		return nil
	}
	since := clock(s.began)
	switch s.phase {
	case rebooting:
		return fmt.Errorf("no DHCP server on interface %q has confirmed %v since %s", t.name, s.Last, since)
	case requesting:
		return fmt.Errorf("DHCP server %v offered %v and has not confirmed it since %s", s.offer.server, s.offer.addr, since)
	case renewing:
		return fmt.Errorf("DHCP server %v has not extended the lease of %v since %s: all servers are asked from %s, and it ends at %s",
			s.lease.Server, s.lease.Addr, since, clock(s.lease.Rebind), clock(s.lease.Expires))
	case rebinding:
		return fmt.Errorf("no DHCP server on interface %q has extended the lease of %v since %s: it ends at %s", t.name, s.lease.Addr, since,
			clock(s.lease.Expires))
	}
	hint := "check that a server or a relay serves its segment"
	if t.heard.After(s.began) {
		hint = "a server answers others, so its range may be used up: enlarge it"
	}
	return fmt.Errorf("no DHCP server on interface %q has offered an address since %s (VIPs waiting: %d); %s", t.name, since, waiting, hint)
}

// clock writes a time for people.
func clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }
