package simulation

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
)

// Story is all that there is to say about the addresses of one Service.
type Story struct {
	// Service is "namespace/name".
	Service string
	// Foreign is why Lodestone does not serve the Service; empty: it does.
	Foreign string
	// Asks are sentences about what it asks for.
	Asks []string
	// Has are sentences about what it holds.
	Has []string
	// Verdict is the answer that it gets.
	Verdict ledger.Verdict
	// Considered is what each pool would do for it now.
	Considered []ipam.Consideration
	// Advice are sentences about what would help.
	Advice []string
}

// Explain tells the story of one Service of the cluster. Who announces what it
// holds, a Network knows.
func (c *Cluster) Explain(svc *corev1.Service) Story {
	s := Story{Service: ledger.NameOf(svc), Foreign: c.Scope.Foreign(svc)}
	if s.Foreign != "" {
		return s
	}
	l, verdicts := c.ledger()
	req, _ := ledger.RequestOf(svc, c.labels(svc.Namespace), compat.For(c.Config))
	s.Asks, s.Verdict, s.Considered = asks(req), verdicts[s.Service], l.Consider(svc, c.labels(svc.Namespace), c.Now)
	s.Has, s.Advice = s.Verdict.Has(), advice(s.Verdict, s.Considered)
	return s
}

// asks puts a request into words.
func asks(req ipam.Request) []string {
	var said []string
	all := "all of them or none"
	if !req.RequireAll {
		all = "both if possible"
	}
	switch families := text(req.Families); len(req.Families) {
	case 1:
		said = append(said, "one address of the family "+families)
	default:
		said = append(said, "addresses of the families "+families+", "+all)
	}
	if len(req.Addresses) > 0 {
		said = append(said, fmt.Sprintf("exactly %v", req.Addresses))
	}
	if len(req.Pools) > 0 {
		said = append(said, "from the pools "+strings.Join(req.Pools, ", ")+", in this order")
	}
	if req.Sharing != nil {
		said = append(said, fmt.Sprintf("shared with the Services of sharing key %q", req.Sharing.Key))
	}
	if req.Renumber {
		said = append(said, "other addresses in place of those that a new Service would not be given")
	}
	return said
}

func text(families []ipam.Family) string {
	names := make([]string, len(families))
	for i, f := range families {
		names[i] = string(f)
	}
	return strings.Join(names, " and ")
}

// remedy says what helps against the reason of a refusal.
func remedy(r ipam.Reason) string {
	if text, ok := ledger.Refusals()[r]; ok {
		return text.Cure
	}
	return ipam.Reasons()[r].Cure
}

// advice says what would help the Service.
func advice(v ledger.Verdict, considered []ipam.Consideration) []string {
	var said []string
	switch {
	case v.Refusal != nil:
		said = append(said, remedy(v.Refusal.Reason))
	case len(v.Conflicts) > 0:
		said = append(said, remedy(ledger.AddressConflict))
	case v.Stranded(), v.Draining():
		said = append(said, "kubectl annotate service NAME "+annotation.Renumber+"="+annotation.Renumbering+
			" gives it another address, and frees this one.")
	case v.Missing != "":
		said = append(said, remedy(ipam.FamilyUnavailable))
	default:
		return nil
	}
	if names := onRequest(considered); v.Refusal != nil && len(names) > 0 {
		said = append(said, fmt.Sprintf("These pools have addresses for Services that name them: %s.", strings.Join(names, ", ")))
	}
	return said
}

// onRequest returns the pools that would give an address if they were named.
func onRequest(considered []ipam.Consideration) []string {
	var names []string
	for _, c := range considered {
		if (c.Reason == ipam.NotAutoAssigned || c.Reason == ipam.PoolNotNamed) && c.Free > 0 && !slices.Contains(names, c.Pool) {
			names = append(names, c.Pool)
		}
	}
	return names
}
