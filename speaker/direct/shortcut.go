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
	// What the kernel refuses is tried again after firstRetry, and each time after twice as long: to remove rules lastRetry at
	// most, to write some lastWrite.
	firstRetry, lastRetry, lastWrite = time.Second, time.Minute, 10 * time.Second
)

// shortcut hands packets over at the interface where they come in (shortcutrules.go). The rules after conntrack
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
	left  [2]left
	// nextLook is when conntrack is read again if a Service has no shortcut, nextKept if connections are
	// excepted.
	nextLook, nextKept time.Time
	err                error
}

// left are rules in the kernel that are to be removed, whatever they are: those of an earlier Director, and those whose
// last change failed. Without a Director they would hand packets over until the guard ends.
type left struct {
	may bool // there may be some
	attempts
}

// attempts are those at something that the kernel may refuse.
type attempts struct {
	next time.Time
	wait time.Duration
	err  error // of the last one
}

// try does it, unless the kernel has refused it so short a time ago that the next attempt is not due.
func (a *attempts) try(now time.Time, most time.Duration, do func() error) error {
	if now.Before(a.next) {
		return a.err
	}
	if a.err = do(); a.err == nil {
		*a = attempts{}
	} else {
		a.wait = min(max(firstRetry, 2*a.wait), most)
		a.next = now.Add(a.wait)
	}
	return a.err
}

// restrict removes the shortcut of the Services that a change affects, in the transaction of that change.
// It returns the rest. Nil: there will be no rules.
func (s *shortcut) restrict(k kernel, i int, want *ruleset) (rest *ruleset, err error) {
	f, have := shortcuts[i], s.have[i]
	switch {
	case have == nil:
		return nil, nil
	case want == nil:
		return nil, k.change(f, have, nil, s.guard)
	}
	if rest = have.unchanged(want); len(rest.services) < len(have.services) {
		return rest, k.change(f, have, rest, s.guard)
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

// drop removes all rules of a family, after a change has failed. If that fails, too, clear tries it again.
func (s *shortcut) drop(i int, now time.Time) {
	s.have[i], s.left[i].may = nil, true
	s.clear(now)
}

// clear removes rules that are left.
func (s *shortcut) clear(now time.Time) {
	for i, f := range shortcuts {
		if l := &s.left[i]; l.may {
			l.may = l.try(now, lastRetry, func() error { return s.remove(f) }) != nil
		}
	}
}

// remove removes the rules of a family, if there are some.
func (s *shortcut) remove(f *family) error {
	k, err := s.line.open()
	if err != nil {
		return err
	}
	there, err := k.exists(f)
	if there {
		err = errors.Join(k.change(f, nil, nil, s.guard), k.flush(f))
	}
	if err != nil {
		s.line.End()
	}
	return err
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
			errs = errors.Join(errs, s.give(i, rules[i].shortcut(kept), now))
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
func (s *shortcut) give(i int, want *ruleset, now time.Time) error {
	k, err := s.line.open()
	if err != nil {
		return err
	}
	if err = k.change(shortcuts[i], s.have[i], want, s.guard); err == nil {
		err = k.flush(shortcuts[i])
	}
	if err != nil {
		s.line.End()
		s.drop(i, now)
		return err
	}
	s.have[i], s.left[i] = want, left{} // it was made anew if there was another one
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
