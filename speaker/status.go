package speaker

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/speaker/core"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// stalled is how old the loop's last sign of life may be before the loop counts as dead.
const stalled = 60 * time.Second

// health checks all conditions of being ready, for the core and for people. Whether there is a
// configuration, the core checks itself.
func (s *Speaker) health(current *config.Config, state kube.State) (core.Health, []diagnose.Condition) {
	var h core.Health
	caches := diagnose.Condition{Name: "caches", OK: s.cluster.hasSynced(), Message: "waiting for the API server"}
	if h.Synced = caches.OK; caches.OK {
		caches.Message = "synced"
	}
	config := diagnose.Condition{Name: "configuration", OK: current != nil, Message: "waiting for the API server"}
	switch {
	case current != nil && state.Err != nil:
		config.Message = "in force, but the latest document is not: " + state.Err.Error()
		config.Public = "in force, but the latest document is not: /status and the log have the reason"
	case current != nil:
		config.Message = "in force"
	case state.Err != nil:
		config.Message, config.Public = state.Err.Error(), "none that is valid: /status and the log have the reason"
	}
	membership, dataPlane := diagnose.Condition{Name: "membership"}, diagnose.Condition{Name: "kube-proxy"}
	membership.OK, membership.Message = s.Members.Joined()
	dataPlane.OK, h.Sick, dataPlane.Message = s.DataPlane.Health()
	forwarding := diagnose.Condition{Name: "direct forwarding", Message: "waiting for the first rules"}
	if notify.Closed(s.Forwarder.Ready()) {
		forwarding.OK, forwarding.Message = true, "the first rules are there, if there are any"
	}
	h.Joined, h.Healthy, h.Forwards = membership.OK, dataPlane.OK, forwarding.OK
	return h, []diagnose.Condition{caches, config, membership, dataPlane, forwarding}
}

// Status is the speaker's last decision, as the status page shows it.
type Status struct {
	Node string `json:"node"`
	// Ready is whether the speaker is ready to own VIPs. Checks are the conditions of that.
	Ready  bool                 `json:"ready"`
	Checks []diagnose.Condition `json:"checks"`
	// ConfigDigest identifies the document that the plan was made from.
	ConfigDigest string    `json:"configDigest,omitempty"`
	Planned      time.Time `json:"planned,omitzero"`
	// Speakers are the speakers that are alive; the value is whether the speaker is ready.
	Speakers map[string]bool `json:"speakers"`
	Owned    []Owned         `json:"owned"`
	Silent   []Silent        `json:"silent"`
	// Unlimited are the Services at owned VIPs with an invalid connection rate limit.
	Unlimited []Unlimited `json:"unlimited,omitempty"`
}

// Owned is a VIP that this node owns.
type Owned struct {
	VIP   netip.Addr `json:"vip"`
	Since time.Time  `json:"since"`
	// Interfaces are the patterns of the interfaces to announce on. Empty: all interfaces.
	Interfaces []string `json:"interfaces,omitempty"`
}

// Silent is a VIP that this node does not announce.
type Silent struct {
	VIP     netip.Addr  `json:"vip"`
	Reason  plan.Reason `json:"reason"`
	Owner   string      `json:"owner,omitempty"`
	Message string      `json:"message"`
}

// Unlimited is a Service whose connection rate limit is invalid.
type Unlimited struct {
	Service string `json:"service"`
	Message string `json:"message"`
}

// Status returns the loop's last decision.
func (s *Speaker) Status() Status {
	status := Status{Node: s.Node, Speakers: s.Members.Speakers(), Owned: []Owned{}, Silent: []Silent{}}
	s.mu.Lock()
	state := s.core.State()
	status.Ready, status.Checks, status.ConfigDigest, status.Planned = ready(s.checks), s.checks, state.Digest, state.Planned
	for vip, l := range state.Plan.Layer2 {
		status.Owned = append(status.Owned, Owned{vip, state.Since[vip], l.Interfaces})
	}
	for vip, silence := range state.Plan.Silent {
		status.Silent = append(status.Silent, Silent{vip, silence.Reason, silence.Owner, silence.Message})
	}
	for _, name := range slices.Sorted(maps.Keys(state.Plan.LimitErrs)) {
		status.Unlimited = append(status.Unlimited, Unlimited{name, state.Plan.LimitErrs[name].Error()})
	}
	s.mu.Unlock()
	slices.SortFunc(status.Owned, func(a, b Owned) int { return a.VIP.Compare(b.VIP) })
	slices.SortFunc(status.Silent, func(a, b Silent) int { return a.VIP.Compare(b.VIP) })
	return status
}

// Checks returns the conditions of being ready, as of the loop's last look.
func (s *Speaker) Checks() []diagnose.Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.checks
}

func (s *Speaker) setChecks(checks []diagnose.Condition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks = checks
}

func ready(checks []diagnose.Condition) bool {
	return len(checks) > 0 && !slices.ContainsFunc(checks, func(c diagnose.Condition) bool { return !c.OK })
}

// Alive returns an error when the loop hangs.
func (s *Speaker) Alive() error {
	beat := s.beat.Load()
	if beat == nil {
		return nil
	}
	if age := time.Since(*beat); age > stalled {
		return fmt.Errorf("the loop has not moved for %s", age.Round(time.Second))
	}
	return nil
}
