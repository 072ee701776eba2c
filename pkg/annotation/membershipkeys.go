package annotation

import (
	"regexp"
	"strings"
)

// MaxMembershipKeys is how many keys a speaker understands at most.
const MaxMembershipKeys = 8

var keyMark = regexp.MustCompile(`^[0-9a-f]{16}$`)

// ParseMembershipKeys reads the value of MembershipKeys. Whoever may write Leases may
// write anything: what is not a list of marks says nothing.
func ParseMembershipKeys(value string) []string {
	marks := strings.SplitN(value, ",", MaxMembershipKeys+1)
	for _, m := range marks {
		if !keyMark.MatchString(m) {
			return nil
		}
	}
	return marks[:min(len(marks), MaxMembershipKeys)]
}
