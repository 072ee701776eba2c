package direct

import (
	"errors"
	"log/slog"
	"maps"
	"time"
)

const (
	// keptInterval is how often the excepted connections are looked up again, to remove those that have
	// ended.
	keptInterval = time.Minute
	// After a look-up in conntrack, which may have a million entries, the Director waits for lookFactor
	// times as long as the look-up took, a keptInterval at most.
	lookFactor = 20
)

// shortcut hands packets over at the interface where they come in (ingress.go). The rules after conntrack
// would hand over the same packets. But conntrack makes and discards an entry for each packet of a
// connection that it does not know: that costs more than all the rest, and a full conntrack drops the packet.
//
// A packet that the shortcut passes on comes to the rules after conntrack. So a Service may be without the
// shortcut at any time. It has none while its table changes: this node may then keep connections that the
// new table has at another node. Once the table is in force, their number only falls, because new ones go
// to the other node. So they are looked up in conntrack (kept.go) and excepted, and the Service gets the
// shortcut again. A connection that was missed is found by the ring.
type shortcut struct {
	log   *slog.Logger
	line  *line
	guard time.Duration
	have  [2]*ruleset // by family: the rules that the kernel has
	began bool        // the rules of an earlier Director are gone
	// nextLook is when conntrack is read again if a Service has no shortcut, nextKept if connections are
	// excepted.
	nextLook, nextKept time.Time
	err                error
}

// restrict removes the shortcut of the Services that a change affects, in the transaction of that change.
// It returns the rest. Nil: there will be no rules.
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

// unchanged returns the part of a shortcut that a change of the rules after conntrack does not affect.
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

// extend gives the Services without a shortcut one, made from the rules after conntrack. It reports
// whether anything may have changed.
func (s *shortcut) extend(now time.Time, rules [2]*ruleset) (looked bool) {
	if now.Before(s.nextLook) {
		return false
	}
	var without [2]*ruleset // the shortcut, or with connections kept that may have ended
	for i, all := range rules {
		if all != nil && (!s.have[i].covers(all) || len(s.have[i].kept) > 0 && !now.Before(s.nextKept)) {
			without[i], looked = all, true
		}
	}
	if !looked {
		return false
	}
	start := time.Now()
	kept, errs := keptBy(without)
	took := time.Since(start)
	for i, kept := range kept {
		if kept != nil {
			errs = errors.Join(errs, s.give(i, rules[i].shortcut(kept)))
		}
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
		if _, has := r.services[key]; !has && !s.switchedOff {
			return false
		}
	}
	return true
}

// shortcut returns the shortcut of these rules, for all Services except those with too many connections to except, and
// switched-off ones, whose new connections stay on this node.
func (r *ruleset) shortcut(kept *kept) *ruleset {
	short := newRuleset()
	short.interfaces, short.hardware, short.kept = r.interfaces, r.hardware, kept.flows()
	for key, service := range r.services {
		if !service.switchedOff && !kept.crowded[key] {
			short.services[key], short.tables[service.table] = service, r.tables[service.table]
		}
	}
	return short
}

// give writes the shortcut of a family.
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
