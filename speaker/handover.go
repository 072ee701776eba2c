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

// kubeProxyLag is how long kube-proxy may take until it forwards to an endpoint that
// is new: it brings its rules up to date once a second (minSyncPeriod), which takes
// a moment. It is shorter than DefaultHandOver, for which the owner waits.
const kubeProxyLag = 1500 * time.Millisecond

// arriving is a VIP that this node is to own because of an endpoint here that is
// new, while its owner has endpoints, too: he keeps it until then.
type arriving struct {
	from  string
	until time.Time
}

// put hands a Service to the planner, and notes since when it has endpoints here.
func (s *Speaker) put(svc plan.Service) {
	for _, vip := range svc.VIPs {
		if _, known := s.endpoints[vip]; !svc.EndpointsAt(vip).ServingNodes[s.Node] {
			delete(s.endpoints, vip)
		} else if !known {
			s.endpoints[vip] = time.Now()
		}
	}
	s.planner.Put(svc)
}

// arrive keeps back the VIPs that this node is to own before kube-proxy is likely
// to serve them here. It reports whether any is kept back no longer.
func (s *Speaker) arrive(changes plan.Changes, now time.Time) bool {
	for _, vip := range changes.Gone() {
		delete(s.endpoints, vip)
	}
	for _, c := range changes.VIPs {
		began, local := s.endpoints[c.VIP]
		a := arriving{c.Before.Silence.Owner, began.Add(min(kubeProxyLag, s.HandOver/4*3))}
		if local && !c.Before.Owned && c.After.Owned && s.waits(c.VIP, a, now) {
			s.arriving[c.VIP] = a
		}
	}
	before := len(s.arriving)
	maps.DeleteFunc(s.arriving, func(vip netip.Addr, a arriving) bool { return !s.waits(vip, a, now) })
	return len(s.arriving) < before
}

// waits reports whether the VIP is better off where it is.
func (s *Speaker) waits(vip netip.Addr, a arriving, now time.Time) bool {
	_, owned := s.planner.Plan().Layer2[vip]
	return owned && now.Before(a.until) && s.speakers[a.from] && s.planner.Why(vip, a.from) == plan.NotOwner
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

// handOversEnd returns a channel that fires when the time of the first VIP that
// leaves or arrives is up. Nil: there is none.
func (s *Speaker) handOversEnd() <-chan time.Time {
	var first time.Time
	sooner := func(until time.Time) {
		if first.IsZero() || until.Before(first) {
			first = until
		}
	}
	for _, l := range s.leaving {
		sooner(l.until)
	}
	for _, a := range s.arriving {
		sooner(a.until)
	}
	if first.IsZero() {
		return nil
	}
	return time.After(time.Until(first))
}

// want is what the announcer is to announce: what the plan says, and the VIPs
// that leave, without those that arrive.
func (s *Speaker) want() map[netip.Addr]plan.Layer2 {
	owned := s.planner.Plan().Layer2
	if len(s.leaving)+len(s.arriving) == 0 {
		return owned
	}
	want := maps.Clone(owned)
	for vip := range s.arriving {
		delete(want, vip)
	}
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
	s.logChanges(changes)
	poll := time.NewTicker(leavingPoll)
	defer poll.Stop()
	for end := time.Now().Add(s.HandOver); s.Announcer.Leaving() > 0; <-poll.C {
		if time.Now().After(end) {
			s.Log.Warn("next owners not heard, stopping all the same", "vips", s.Announcer.Leaving(), "waited", s.HandOver)
			return
		}
	}
}
