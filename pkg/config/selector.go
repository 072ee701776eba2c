package config

import (
	"fmt"
	"slices"
	"strings"
)

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

// String returns the selector as kubectl takes it after -l.
func (s Selector) String() string {
	var all []string
	for _, r := range s {
		all = append(all, r.String())
	}
	return strings.Join(all, ",")
}

// String returns the requirement as kubectl takes it after -l.
func (r Requirement) String() string {
	switch {
	case r.Operator == Exists:
		return r.Key
	case r.Operator == DoesNotExist:
		return "!" + r.Key
	case r.Operator == In && len(r.Values) == 1:
		return r.Key + "=" + r.Values[0]
	default:
		return fmt.Sprintf("%s %s (%s)", r.Key, strings.ToLower(string(r.Operator)), strings.Join(r.Values, ","))
	}
}

// selector returns nil when there is none, and not nil when it is empty.
func (vs values) selector(raw *rawSelector) Selector {
	if raw == nil {
		return nil
	}
	s := Selector{}
	for _, p := range raw.MatchLabels {
		key, _ := vs.text(p.Key, checkLabelKey)
		val, _ := vs.text(p.Value, checkLabelValue)
		s = append(s, Requirement{Key: key, Operator: In, Values: []string{val}})
	}
	for _, r := range raw.MatchExpressions {
		s = append(s, vs.requirement(r))
	}
	return s
}

var operators = []Operator{In, NotIn, Exists, DoesNotExist}

func (vs values) requirement(raw rawRequirement) Requirement {
	key, _ := vs.text(raw.Key, checkLabelKey)
	r := Requirement{Key: key, Operator: Operator(raw.Operator.text()), Values: vs.texts(raw.Values, checkLabelValue)}
	switch r.Operator {
	case In, NotIn:
		if len(raw.Values) == 0 {
			vs.errorf(raw.At, "operator %s needs values: list at least one", r.Operator)
		}
	case Exists, DoesNotExist:
		if raw.Values != nil {
			vs.errorf(raw.At, "operator %s takes no values: remove them", r.Operator)
		}
	default:
		oneOf(vs.report, raw.Operator, operators)
	}
	return r
}
