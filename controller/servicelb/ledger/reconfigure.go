package ledger

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Situation is what the ledger decides by, besides the Services. Config and Facts are
// immutable.
type Situation struct {
	// Config is the configuration in force. Nil: there is none, and Err is why, if that is
	// known.
	Config *config.Config
	Err    error
	// Facts are which addresses must never be handed out. Nil: there are none.
	Facts *clusterfacts.Facts
}

// Follow takes over what is in force, and ends what is over by now. Without a configuration
// the last one stays in force. Nothing happens before Prime.
func (l *Ledger) Follow(s Situation, now time.Time) {
	switch {
	case s.Config == nil || !l.primed:
		l.Err = s.Err
		return
	case s.Config == l.Config && s.Facts == l.Facts:
		if ended := l.conflicts.withheld.expire(l.conflicts.reported, now); ended || l.foreign.moved {
			l.reconfigure(now)
		}
		return
	}
	first := l.Config == nil
	if d := compat.For(s.Config); d != l.dialects {
		l.dialects = d
		l.edition++
	}
	l.Situation = s
	l.selective = slices.ContainsFunc(s.Config.Pools, func(p config.Pool) bool { return p.ServiceSelector != nil })
	l.leasing.configure(s.Config)
	l.conflicts.follow(s.Facts)
	l.reconfigure(now)
	l.held.quarantineRecorded(now)
	if first || takesOver(s.Config) {
		l.held.confirmAll(l.accounts, takesOver(s.Config), now)
	}
	if l.conflicts.withholdIdle(now) {
		l.reconfigure(now)
	}
}

// reconfigure makes the allocator go by what is in force and what is leased.
func (l *Ledger) reconfigure(now time.Time) {
	l.waiters.swept, l.foreign.moved = false, false
	l.leasing.drop(now)
	s := ipam.Setup{Pools: l.Config.Pools, Quarantine: l.Config.Quarantine, Reservations: l.Config.Reservations,
		Conflicted: slices.SortedFunc(maps.Keys(l.conflicts.withheld.addrs), netip.Addr.Compare)}
	for _, f := range slices.Concat(clusterfacts.Forbid(l.Config, l.Facts), l.foreign.forbidden()) {
		s.Forbidden = append(s.Forbidden, ipam.Forbidden{Range: f.Range, Why: f.Why})
	}
	l.leasing.addTo(&s)
	l.leasing.vacated = false
	l.held.Configure(s)
}

// unavailable is the refusal for want of any configuration.
func unavailable(err error) *ipam.Refusal {
	message := "the configuration has not been read yet"
	if err != nil {
		message = "no valid configuration: " + err.Error()
		message = message[:min(len(message), 4*maxQuoted)]
	}
	return &ipam.Refusal{Reason: ConfigUnavailable, Message: strings.ToValidUTF8(message, "")}
}
