package speaker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/core"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// apply executes the core's effects in their order, and reports failures to the core. It returns
// when the next decision is due, and the error of setting the VIPs.
func (s *Speaker) apply(ctx context.Context, e core.Effects) (next time.Time, err error) {
	s.Members.SetReady(e.Ready)
	if e.BecameReady {
		close(s.ready)
	}
	if e.StateChanged {
		s.changed.Notify()
	}
	if e.PodRoutes != nil {
		s.PodRoutes.Set(*e.PodRoutes)
	}
	if e.NewPlan {
		s.Members.Claim(e.Claims)
	}
	if e.Limits != nil {
		s.Limiter.Set(e.Limits)
	}
	if e.Forwarding != nil {
		s.Forwarder.Set(*e.Forwarding)
	}
	if e.SetVIPs {
		err = s.setVIPs(ctx, e.VIPs)
	}
	if len(e.Gone) > 0 {
		s.Announcer.Forget(e.Gone)
	}
	routed := s.setRoutes(ctx, e)
	s.logChanges(e.Changes)
	for _, l := range e.Log {
		if l.Warn {
			s.Log.Warn(l.Text, l.Args...)
		} else {
			s.Log.Info(l.Text, l.Args...)
		}
	}
	next = e.Next
	if err != nil {
		next = s.step(core.VIPsFailed{}).Next
	}
	if !routed {
		next = s.step(core.RoutesFailed{}).Next
	}
	return next, err
}

// setVIPs sets what is announced on the segment.
func (s *Speaker) setVIPs(ctx context.Context, want map[netip.Addr]plan.Layer2) error {
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	err := s.Announcer.Set(ctx, want)
	if err == nil || errors.Is(err, context.Canceled) {
		return nil
	}
	s.Log.Error("announcements not set", "err", err, "retry", core.RetryAfter)
	return fmt.Errorf("set VIPs: %w", err)
}

// setRoutes executes the effects on routers, and reports whether they need not be executed again.
func (s *Speaker) setRoutes(ctx context.Context, e core.Effects) (done bool) {
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	var errs error
	if e.BeginDrain {
		errs = s.Router.Drain(ctx, true)
	}
	if r := e.Routes; r != nil {
		s.Detector.Set(ctx, r.BGP)
		if r.All {
			errs = errors.Join(errs, s.Router.Set(ctx, r.BGP))
		} else {
			errs = errors.Join(errs, s.Router.Update(ctx, r.BGP, r.Changed))
		}
	}
	if e.EndDrain {
		errs = errors.Join(errs, s.Router.Drain(ctx, false))
	}
	if e.StopRouters {
		s.Router.Stop(true)
	}
	if errs == nil || errors.Is(errs, bgp.ErrStopped) || errors.Is(errs, context.Canceled) { // the latter two when it ends
		return true
	}
	s.Log.Error("routes not sent", "err", errs, "retry", core.RetryAfter)
	return false
}

// logChanges logs and counts the VIPs that came and went. It is called after the effects on the
// network: a failover must not wait for the log.
func (s *Speaker) logChanges(changes plan.Changes) {
	slices.SortFunc(changes.VIPs, func(a, b plan.Change) int { return a.VIP.Compare(b.VIP) })
	for _, c := range changes.VIPs {
		reason := []any{"vip", c.VIP, "message", "no Service has it any more"}
		if silence := c.After.Silence; c.After.Owned {
			reason = []any{"vip", c.VIP, "message", "this node announces it by layer 2 alone now"}
		} else if silence.Reason != "" {
			reason = []any{"vip", c.VIP, "reason", silence.Reason, "owner", silence.Owner, "message", silence.Message}
		}
		switch {
		case c.Before.Owned == c.After.Owned:
		case c.After.Owned:
			s.metrics.gained.Inc()
			s.Log.Info("vip gained", "vip", c.VIP, "before", c.Before.Silence.Message)
		default:
			s.metrics.lost.Inc()
			s.Log.Info("vip lost", reason...)
		}
		switch {
		case slices.Equal(c.Before.Peers, c.After.Peers):
		case len(c.After.Peers) > 0:
			s.Log.Info("vip routed", "vip", c.VIP, "peers", c.After.Peers)
		default:
			s.Log.Info("vip not routed", reason...)
		}
	}
}
