package simulation

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// Story explains the addresses of one Service.
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
	// Advice are sentences about what would help, Keys what the reasons for it follow
	// from (reason.Text).
	Advice, Keys []string
}

// Explain explains one Service of the cluster. Who announces what it holds is in a Network.
func (c *Cluster) Explain(svc *corev1.Service) Story {
	s := Story{Service: ledger.NameOf(svc), Foreign: c.Scope.Foreign(svc)}
	if s.Foreign != "" {
		return s
	}
	l, verdicts := c.ledger()
	req, _ := ledger.RequestOf(svc, c.labels(svc.Namespace), compat.For(c.Config))
	consider := func(svc *corev1.Service) []ipam.Consideration { return l.Consider(svc, c.labels(svc.Namespace), c.Now) }
	s.Asks, s.Verdict, s.Considered = asks(req), verdicts[s.Service], consider(svc)
	s.Has = s.Verdict.Has()
	s.Advice, s.Keys = advice(s.Verdict, func() []string { return onRequest(svc, s.Considered, consider) })
	return s
}

// asks puts a request into words.
func asks(req ipam.Request) []string {
	var lines []string
	all := "all of them or none"
	if !req.RequireAll {
		all = "both if possible"
	}
	switch families := text(req.Families); {
	case req.Count > 1:
		lines = append(lines, fmt.Sprintf("%d addresses of each of the families %s, all of a family or none of it", req.Count, families))
	case len(req.Families) == 1:
		lines = append(lines, "one address of the family "+families)
	default:
		lines = append(lines, "addresses of the families "+families+", "+all)
	}
	if len(req.Addresses) > 0 {
		lines = append(lines, fmt.Sprintf("exactly %v", req.Addresses))
	}
	if len(req.Pools) > 0 {
		lines = append(lines, "from the pools "+strings.Join(req.Pools, ", ")+", in this order")
	}
	if req.Sharing != nil {
		lines = append(lines, fmt.Sprintf("shared with the Services of sharing key %q", req.Sharing.Key))
	}
	if req.Renumber {
		lines = append(lines, "other addresses in place of those that a new Service would not be given")
	}
	return lines
}

func text(families []ipam.Family) string {
	names := make([]string, len(families))
	for i, f := range families {
		names[i] = string(f)
	}
	return strings.Join(names, " and ")
}

// remedy is the text of the reason of a refusal.
func remedy(r ipam.Reason) reason.Text {
	if text, ok := ledger.Refusals()[r]; ok {
		return text
	}
	return ipam.Reasons()[r]
}

// advice returns what would help the Service, and the keys that its state follows from. elsewhere returns the
// pools that would give it an address if it named them.
func advice(v ledger.Verdict, elsewhere func() []string) (lines, keys []string) {
	var text reason.Text
	switch {
	case v.Refusal != nil:
		text = remedy(v.Refusal.Reason)
	case len(v.Conflicts) > 0:
		text = remedy(ledger.AddressConflict)
	case v.Stranded(), v.Draining():
		text = reason.Text{Keys: []string{annotation.Renumber}, Cure: "kubectl annotate service NAME " + annotation.Renumber + "=" +
			annotation.Renumbering + " gives it another address, and frees this one."}
	case v.Missing != "":
		text = remedy(ipam.FamilyUnavailable)
	default:
		return nil, nil
	}
	lines = append(lines, text.Cure)
	if v.Refusal != nil {
		if names := elsewhere(); len(names) > 0 {
			lines = append(lines, fmt.Sprintf("These pools have addresses for Services that name them: %s.", strings.Join(names, ", ")))
		}
	}
	return lines, text.Keys
}

// onRequest returns the pools that would give the Service an address if it named them.
func onRequest(svc *corev1.Service, considered []ipam.Consideration, consider func(*corev1.Service) []ipam.Consideration) (names []string) {
	for _, c := range considered {
		if c.Reason != ipam.NotAutoAssigned && c.Reason != ipam.PoolNotNamed || slices.Contains(names, c.Pool) {
			continue
		}
		named := svc.DeepCopy()
		metav1.SetMetaDataAnnotation(&named.ObjectMeta, annotation.AddressPool, c.Pool)
		if slices.ContainsFunc(consider(named), func(n ipam.Consideration) bool { return n.Pool == c.Pool && n.Reason == "" }) {
			names = append(names, c.Pool)
		}
	}
	return names
}
