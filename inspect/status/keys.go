package status

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// membershipKeys reads from the speakers' Leases which membership key they use, and which of them
// hold up the change to another one.
func (s *Status) membershipKeys(leases []*coordinationv1.Lease) {
	has := map[string][]string{} // nodes by what they have
	for _, l := range leases {
		marks := report.Of(l.Annotations).Keys
		if l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" && marks != nil {
			all := strings.Join(marks, ", ")
			has[all] = append(has[all], strings.TrimPrefix(l.Name, annotation.SpeakerLeasePrefix))
		}
	}
	sets := slices.Sorted(maps.Keys(has))
	switch {
	case len(sets) == 0:
		return
	case len(sets) == 1 && !strings.Contains(sets[0], ","):
		s.Speakers.MembershipKey = sets[0]
		return
	}
	for i, all := range sets {
		slices.Sort(has[all])
		sets[i] = fmt.Sprintf("%s on %s", all, output.List(has[all], 3))
	}
	s.warn("speaker", "the membership key is being replaced: speakers use the new one when all have both, within two minutes; a speaker that "+
		"is gone delays that until its Lease is deleted: %s", strings.Join(sets, "; "))
}
