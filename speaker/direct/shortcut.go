package direct

import (
	"errors"
	"log/slog"
	"maps"
	"time"
)

const (
	// keptInterval is how often the excepted connections are looked up again, so that those that have
	// ended go.
	keptInterval = time.Minute
	// lookFactor is how many times as long as the last look took the Director waits for the next one, a
	// keptInterval at most: conntrack may have a million entries.
	lookFactor = 20
)

// shortcut hands packets over where they come in, at the interface (ingress.go). The rules after
// conntrack would hand over the same ones. But conntrack makes an entry for each packet that it does not
// know, and forgets it: that costs more than all the rest, and a full conntrack drops the packet.
//
// A packet that the shortcut leaves alone comes to the rules after conntrack. So a Service may be without
// the shortcut at any time. It is while its table changes: then this node may keep connections that the
// new table has at another node. From when the table is in force, those connections only become fewer:
// new ones go to the other node. So they are looked up in conntrack (kept.go) and excepted, and the Service
// has the shortcut again. The ring finds a connection that was missed.
type shortcut struct {
	log   *slog.Logger
	line  *line
	guard time.Duration
	have  [2]*ruleset // by family, what the kernel took over last
	began bool        // what an earlier Director left is gone
	// nextLook is when conntrack is looked into again if a Service has no shortcut, nextKept if
	// connections are excepted.
	nextLook, nextKept time.Time
	err                error
}

// restrict takes the shortcut from the Services that a change concerns, in the transaction of that change.
// It returns what is left. Nil: there will be no rules.
func (s *shortcut) restrict(k kernel, i int, want *ruleset) (rest *ruleset, err error) {
	f, have := shortcuts[i], s.have[i]
	if have == nil || want == nil {
		if (have != nil || !s.began) && k.exists(f) {
			err = k.change(f, have, nil, s.guard)
		}
		return nil, err
	}
	if left := have.unchanged(want); len(left.services) < len(have.services) {
		return left, k.change(f, have, left, s.guard)
	}
	return have, nil
}

// unchanged returns the part of a shortcut that a change of the rules after conntrack does not concern.
func (r *ruleset) unchanged(want *ruleset) *ruleset {
	left := *r
	left.services = map[string]served{}
	if maps.Equal(want.interfaces, r.interfaces) && maps.Equal(want.hardware, r.hardware) {
		for key, service := range r.services {
			if want.services[key] == service && want.tables[service.table] == r.tables[service.table] {
				left.services[key] = service
			}
		}
	}
	return &left
}

// drop removes all rules of a family, after a change has failed.
func (s *shortcut) drop(i int) error {
	s.have[i] = nil
	k, err := s.line.open()
	if err != nil || !k.exists(shortcuts[i]) {
		return err
	}
	return errors.Join(k.change(shortcuts[i], nil, nil, s.guard), k.flush(shortcuts[i]))
}

// extend gives the shortcut to the Services that have none, out of the rules after conntrack. It reports
// whether anything may have changed.
func (s *shortcut) extend(now time.Time, rules [2]*ruleset) (looked bool) {
	if now.Before(s.nextLook) {
		return false
	}
	var errs error
	var took time.Duration
	for i, all := range rules {
		if all == nil || s.have[i].covers(all) && (len(s.have[i].kept) == 0 || now.Before(s.nextKept)) {
			continue
		}
		start := time.Now()
		kept, err := keptBy(shortcuts[i], all)
		took += time.Since(start)
		if err == nil {
			err = s.give(i, all.shortcut(kept))
		}
		errs, looked = errors.Join(errs, err), true
	}
	if !looked {
		return false
	}
	s.nextLook, s.nextKept = now.Add(min(keptInterval, lookFactor*took)), now.Add(keptInterval)
	if errs != nil {
		s.nextLook = s.nextKept
		if s.err == nil {
			s.log.Warn("packets are handed over after conntrack, which costs more", "err", errs,
				"hint", "the kernel needs the modules nft_fwd_netdev and nf_conntrack_netlink")
		}
	}
	s.err = errs
	return true
}

// covers reports whether all Services that may have the shortcut have it.
func (r *ruleset) covers(all *ruleset) bool {
	if r == nil {
		return false
	}
	for key, s := range all.services {
		if _, has := r.services[key]; !has && !s.drains {
			return false
		}
	}
	return true
}

// shortcut returns the shortcut of these rules: that of all Services but those with too many connections to except.
// What drains has none: its new connections stay here.
func (r *ruleset) shortcut(kept *kept) *ruleset {
	short := newRuleset()
	short.interfaces, short.hardware, short.kept = r.interfaces, r.hardware, kept.flows()
	for key, service := range r.services {
		if !service.drains && !kept.crowded[key] {
			short.services[key], short.tables[service.table] = service, r.tables[service.table]
		}
	}
	return short
}

// give gives a family its shortcut.
func (s *shortcut) give(i int, want *ruleset) error {
	k, err := s.line.open()
	if err != nil {
		return err
	}
	if err = k.change(shortcuts[i], s.have[i], want, s.guard); err == nil {
		err = k.flush(shortcuts[i])
	}
	if err != nil {
		s.line.End()
		return errors.Join(err, s.drop(i))
	}
	s.have[i] = want
	return nil
}

// services counts the VIPs and ports that have the shortcut.
func (s *shortcut) services() (n int) {
	for _, r := range s.have {
		if r != nil {
			n += len(r.services)
		}
	}
	return n
}
