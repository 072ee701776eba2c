package annotation

import "strings"

// The most that UnmatchedAdvertisements tells, and the longest name of an
// advertisement: a DNS label.
const maxUnmatched, maxAdvertisement = 64, 63

// FormatUnmatchedAdvertisements returns the value of UnmatchedAdvertisements.
func FormatUnmatchedAdvertisements(names []string) string {
	return strings.Join(names[:min(len(names), maxUnmatched)], ",")
}

// ParseUnmatchedAdvertisements reads the value of UnmatchedAdvertisements.
// Whoever may write Leases may write anything: what is malformed or out of bounds
// is ignored.
func ParseUnmatchedAdvertisements(value string) (names []string) {
	for name := range strings.SplitSeq(value, ",") {
		if name != "" && len(name) <= maxAdvertisement && len(names) < maxUnmatched {
			names = append(names, name)
		}
	}
	return names
}
