package speaker

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// leavingPoll is how often an ending speaker asks whether all its VIPs have
// arrived.
const leavingPoll = 10 * time.Millisecond

// leaving is a VIP that moves to another node and is answered for here until
// that node is heard, but not longer than until.
type leaving struct {
	plan.Layer2
	until time.Time
}

// leave has the VIPs that this node gives up answered for until their next
// owners take them, and reports whether others have stopped leaving: they are
// back, or have nowhere to go. alive are the speakers that were known before.
//
// Only a sound node may call it. A next owner that was not known before comes
// out of a partition, in which it has owned the VIP all the time: it has
// nothing to announce, so there is nothing to wait for.
func (s *Speaker) leave(changes []plan.Change, alive map[string]bool) (stopped bool) {
	until := time.Now().Add(s.HandOver)
	for _, c := range changes {
		_, known := alive[c.After.Silence.Owner]
		reason := c.After.Silence.Reason
		orderly := known && reason != plan.NetworkUnavailable && reason != plan.LinkDown
		_, leaves := s.leaving[c.VIP]
		switch {
		case orderly && c.Before.Owned:
			c.Before.Layer2.Leaving = true
			s.leaving[c.VIP] = leaving{c.Before.Layer2, until}
		case !orderly && leaves:
			delete(s.leaving, c.VIP)
			stopped = true
		}
	}
	return stopped
}

// endLeaving withdraws the VIPs whose time is up, and all if this node is not
// sound. It reports whether there were any.
func (s *Speaker) endLeaving(sound bool) bool {
	before, now := len(s.leaving), time.Now()
	maps.DeleteFunc(s.leaving, func(_ netip.Addr, l leaving) bool { return !sound || !now.Before(l.until) })
	return len(s.leaving) < before
}

// leavingEnds returns a channel that fires when the time of the first VIP that
// leaves is up. Nil: there is none.
func (s *Speaker) leavingEnds() <-chan time.Time {
	var first time.Time
	for _, l := range s.leaving {
		if first.IsZero() || l.until.Before(first) {
			first = l.until
		}
	}
	if first.IsZero() {
		return nil
	}
	return time.After(time.Until(first))
}

// want is what the announcer is to announce: what the plan says, and the VIPs
// that leave.
func (s *Speaker) want() map[netip.Addr]plan.Layer2 {
	owned := s.planner.Plan().Layer2
	if len(s.leaving) == 0 {
		return owned
	}
	want := maps.Clone(owned)
	for vip, l := range s.leaving {
		want[vip] = l.Layer2
	}
	return want
}

// handOver gives all VIPs to the others, then stops announcing.
func (s *Speaker) handOver() error {
	sound := ready(s.Checks())
	s.setChecks([]Check{{Name: "shutdown", Message: "handing over"}})
	s.Members.SetReady(false)
	s.Log.Info("handing over", "vips", len(s.planner.Plan().Layer2))
	ctx, cancel := context.WithTimeout(context.Background(), setTimeout+max(s.HandOver, s.Drain))
	defer cancel()
	var routers sync.WaitGroup
	defer routers.Wait()
	routed := len(s.planner.Plan().BGP.VIPs)
	routers.Go(func() { s.leaveRouters(ctx, routed) })
	if sound {
		s.giveUp(ctx)
	}
	if err := s.Announcer.Set(ctx, nil); err != nil {
		return fmt.Errorf("withdraw all: %w", err)
	}
	return nil
}

// giveUp makes the plan of a node that is not ready, and waits until the next
// owners have taken what they are to take.
func (s *Speaker) giveUp(ctx context.Context) {
	alive := s.speakers
	s.observe(s.Members.Changed())
	changes := s.update()
	s.leave(changes.VIPs, alive)
	if len(s.leaving) > 0 {
		s.apply(ctx, s.want())
	}
	s.tell(changes)
	poll := time.NewTicker(leavingPoll)
	defer poll.Stop()
	for end := time.Now().Add(s.HandOver); s.Announcer.Leaving() > 0; <-poll.C {
		if time.Now().After(end) {
			s.Log.Warn("next owners not heard, stopping all the same", "vips", s.Announcer.Leaving(), "waited", s.HandOver)
			return
		}
	}
}
