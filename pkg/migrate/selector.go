package migrate

import (
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// selector is a label selector as the document has it.
type selector struct {
	MatchLabels      map[string]string `yaml:"matchLabels,omitempty"`
	MatchExpressions []requirement     `yaml:"matchExpressions,omitempty"`
}

type requirement struct {
	Key      string   `yaml:"key"`
	Operator string   `yaml:"operator"`
	Values   []string `yaml:"values,omitempty,flow"`
}

// selectorOf returns the selector in our form.
func selectorOf(s metav1.LabelSelector) *selector {
	out := &selector{MatchLabels: s.MatchLabels}
	for _, r := range s.MatchExpressions {
		out.MatchExpressions = append(out.MatchExpressions, requirement{r.Key, string(r.Operator), r.Values})
	}
	return out
}

// anyOf returns selectors that together select what at least one of the given ones does. Ours
// are alternatives only in separate advertisements or peers, so that there should be few. A
// selector of everything makes the others superfluous, and selectors that list values of one
// label become one. A nil selector selects everything.
func anyOf(selectors []metav1.LabelSelector) []*selector {
	everything := []*selector{nil}
	if len(selectors) == 0 {
		return everything
	}
	var all []*selector
	for _, s := range selectors {
		if len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			return everything
		}
		all = append(all, selectorOf(s))
	}
	if one := inOne(all); one != nil {
		return []*selector{one}
	}
	return all
}

// inOne returns the one selector that stands for those which all list values of
// the same label, if they do.
func inOne(selectors []*selector) *selector {
	if len(selectors) == 1 {
		return selectors[0]
	}
	var key string
	var values []string
	for i, s := range selectors {
		k, v, ok := s.listed()
		if !ok || i > 0 && k != key {
			return nil
		}
		key, values = k, append(values, v...)
	}
	slices.Sort(values)
	return &selector{MatchExpressions: []requirement{{key, string(metav1.LabelSelectorOpIn), slices.Compact(values)}}}
}

// listed returns the values that the selector lists for the only label that it
// is about.
func (s *selector) listed() (key string, values []string, ok bool) {
	switch {
	case len(s.MatchLabels) == 1 && len(s.MatchExpressions) == 0:
		key = slices.Collect(maps.Keys(s.MatchLabels))[0]
		return key, []string{s.MatchLabels[key]}, true
	case len(s.MatchLabels) == 0 && len(s.MatchExpressions) == 1 && s.MatchExpressions[0].Operator == string(metav1.LabelSelectorOpIn):
		return s.MatchExpressions[0].Key, s.MatchExpressions[0].Values, true
	}
	return "", nil, false
}

// only returns one selector that stands for several, and nil for everything. If there is no
// such selector, it takes the first and notes that somebody has to decide.
func (m *migration) only(o *Object, field string, selectors []metav1.LabelSelector) *selector {
	all := anyOf(selectors)
	if len(all) > 1 {
		m.decidef(o, field, "has %d selectors of which one has to match, and Lodestone takes one: only the first is written; give what the "+
			"others select a label in common, and select by that", len(all))
	}
	return all[0]
}

// numbered returns the name of one of several parts of what was one object.
func numbered(name string, i, of int) string {
	if of < 2 {
		return name
	}
	return fmt.Sprintf("%s-%d", name, i+1)
}
