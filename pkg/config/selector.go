package config

import "slices"

// Operator is the relation of a Requirement, as in Kubernetes label
// selectors.
type Operator string

// The operators of Kubernetes label selectors.
const (
	In           Operator = "In"
	NotIn        Operator = "NotIn"
	Exists       Operator = "Exists"
	DoesNotExist Operator = "DoesNotExist"
)

// Requirement is one condition on a label.
type Requirement struct {
	Key      string
	Operator Operator
	// Values has at least one element for In and NotIn, none otherwise.
	Values []string
}

// Selector is a Kubernetes label selector; all its requirements must hold.
// The empty selector selects everything.
type Selector []Requirement

// Matches reports whether the labels satisfy every requirement.
func (s Selector) Matches(labels map[string]string) bool {
	for _, r := range s {
		if !r.matches(labels) {
			return false
		}
	}
	return true
}

func (r Requirement) matches(labels map[string]string) bool {
	value, ok := labels[r.Key]
	switch r.Operator {
	case Exists:
		return ok
	case DoesNotExist:
		return !ok
	case NotIn:
		return !ok || !slices.Contains(r.Values, value)
	default:
		return ok && slices.Contains(r.Values, value)
	}
}
