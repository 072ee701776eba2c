package lodestone_test

import (
	"encoding/json"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// manifests returns the objects of a kind in the manifests, which are what the chart renders.
func manifests[T any](t *testing.T, kind string) (found []T) {
	t.Helper()
	f, err := os.Open("deploy/manifests/lodestone.yaml")
	require.NoError(t, err)
	defer f.Close()
	for d := yaml.NewYAMLOrJSONDecoder(f, 4096); ; {
		var raw runtime.RawExtension
		err := d.Decode(&raw)
		if err == io.EOF {
			return found
		}
		require.NoError(t, err)
		var object metav1.TypeMeta
		if len(raw.Raw) == 0 { // a comment
			continue
		}
		require.NoError(t, json.Unmarshal(raw.Raw, &object))
		if object.Kind == kind {
			found = append(found, *new(T))
			require.NoError(t, json.Unmarshal(raw.Raw, &found[len(found)-1]))
		}
	}
}

// evaluator returns what expressions are; it compiles each once. The API server has more functions, and the policy
// of speakers does without them.
func evaluator(t *testing.T) func(expression string, input map[string]any) any {
	t.Helper()
	env, err := cel.NewEnv(cel.OptionalTypes(), cel.Variable("request", cel.DynType), cel.Variable("object", cel.DynType),
		cel.Variable("oldObject", cel.DynType), cel.Variable("variables", cel.DynType))
	require.NoError(t, err)
	programs := map[string]cel.Program{}
	return func(expression string, input map[string]any) any {
		t.Helper()
		if programs[expression] == nil {
			ast, issues := env.Compile(expression)
			require.NoError(t, issues.Err(), expression)
			programs[expression], err = env.Program(ast)
			require.NoError(t, err)
		}
		value, _, err := programs[expression].Eval(input)
		require.NoError(t, err, expression)
		return value.Value()
	}
}

// TestPolicyOfSpeakers asks the policy's expressions which Leases a speaker may write. That an
// API server holds it to them is asked in test/e2e/scenarios.
func TestPolicyOfSpeakers(t *testing.T) {
	t.Parallel()
	all, evaluate := manifests[admissionv1.ValidatingAdmissionPolicy](t, "ValidatingAdmissionPolicy"), evaluator(t)
	require.Len(t, all, 1)
	spec := all[0].Spec
	require.Equal(t, admissionv1.Fail, *spec.FailurePolicy)
	require.Equal(t, []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
		Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete},
		Rule:       admissionv1.Rule{APIGroups: []string{"coordination.k8s.io"}, APIVersions: []string{"*"}, Resources: []string{"leases"}},
	}}}, spec.MatchConstraints.ResourceRules)
	type object = map[string]any
	owner := object{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"}
	other := object{"apiVersion": "v1", "kind": "Node", "name": "n2", "uid": "1"}
	endless := object{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": strings.Repeat("x", 1<<20)}
	lease := func(change func(meta, spec object)) object {
		meta := object{"name": "lodestone-speaker-n1", "labels": object{"lodestone.io/component": "speaker"},
			"annotations": object{"lodestone.io/report": "{}"}, "ownerReferences": []any{owner}}
		spec := object{"holderIdentity": "n1"}
		change(meta, spec)
		return object{"metadata": meta, "spec": spec}
	}
	set := func(key string, value any) func(meta, _ object) {
		return func(meta, _ object) { meta[key] = value }
	}
	setSpec := func(key string, value any) func(_, spec object) {
		return func(_, spec object) { spec[key] = value }
	}
	as := func(node string) object {
		user := object{"username": "system:serviceaccount:lodestone-system:lodestone-speaker"}
		if node != "" {
			user["extra"] = object{"authentication.kubernetes.io/node-name": []any{node}}
		}
		return object{"operation": "UPDATE", "userInfo": user}
	}
	deletes := func(node string) object {
		r := as(node)
		r["operation"] = "DELETE"
		return r
	}
	for what, c := range map[string]struct {
		request object
		object  any // nil: it is deleted
		denied  string
	}{
		"its own":                {as("n1"), lease(func(object, object) {}), ""},
		"its own, when it ends":  {as("n1"), lease(func(_, spec object) { delete(spec, "holderIdentity") }), ""},
		"a report of 64 KiB":     {as("n1"), lease(set("annotations", object{"lodestone.io/report": strings.Repeat("x", 65536)})), ""},
		"deletes its own":        {deletes("n1"), nil, ""},
		"deletes another's":      {deletes("n2"), nil, "alone"},
		"another node's":         {as("n2"), lease(func(object, object) {}), "alone"},
		"by no node":             {as(""), lease(func(object, object) {}), "the token names no node"},
		"the controllers'":       {as("n1"), lease(set("name", "lodestone-controller")), "alone"},
		"no label":               {as("n1"), lease(func(meta, _ object) { delete(meta, "labels") }), "label"},
		"another label, too":     {as("n1"), lease(set("labels", object{"lodestone.io/component": "speaker", "a": "b"})), "label"},
		"held by another":        {as("n1"), lease(setSpec("holderIdentity", "n2")), "held"},
		"owned by nobody":        {as("n1"), lease(func(meta, _ object) { delete(meta, "ownerReferences") }), "owned"},
		"owned by two":           {as("n1"), lease(set("ownerReferences", []any{owner, owner})), "owned"},
		"owned by a long UID":    {as("n1"), lease(set("ownerReferences", []any{endless})), "owned"},
		"owned by another":       {as("n1"), lease(set("ownerReferences", []any{other})), "owned"},
		"a finalizer":            {as("n1"), lease(set("finalizers", []any{"example.com/keep"})), "finalizers"},
		"a strategy":             {as("n1"), lease(setSpec("strategy", "OldestEmulationVersion")), "strategy"},
		"a preferred holder":     {as("n1"), lease(setSpec("preferredHolder", "n2")), "preferred holder"},
		"another annotation":     {as("n1"), lease(set("annotations", object{"a": "b"})), "annotation"},
		"longer than any report": {as("n1"), lease(set("annotations", object{"lodestone.io/report": strings.Repeat("x", 65537)})), "annotation"},
		"longer, in bytes":       {as("n1"), lease(set("annotations", object{"lodestone.io/report": strings.Repeat("𝟙", 16385)})), "annotation"},
	} {
		input := object{"request": c.request, "object": c.object, "oldObject": lease(func(object, object) {}), "variables": object{}}
		require.Equal(t, true, evaluate(spec.MatchConditions[0].Expression, input), what)
		variables := object{}
		for _, v := range spec.Variables {
			input["variables"] = maps.Clone(variables)
			variables[v.Name] = evaluate(v.Expression, input)
		}
		input["variables"] = variables
		var denied []string
		for _, v := range spec.Validations {
			if evaluate(v.Expression, input) == false {
				denied = append(denied, v.Message+v.MessageExpression)
			}
		}
		switch c.denied {
		case "":
			require.Empty(t, denied, what)
		default:
			require.True(t, slices.ContainsFunc(denied, func(m string) bool { return strings.Contains(m, c.denied) }), "%s: %q", what, denied)
		}
	}
}

// TestTheTableOfRightsIsComplete looks for each verb and resource of a role in one clause of the row of security.md that
// has the rights of the component, for each namespace of others in that row, and for a row of each account of the chart.
func TestTheTableOfRightsIsComplete(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/explanation/security.md")
	require.NoError(t, err)
	rows := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			rows[strings.TrimSpace(cells[1])] = cells[2]
		}
	}
	_, both, _ := strings.Cut(string(text), "\nBoth components may also ")
	both, _, _ = strings.Cut(both, ".")
	words := map[string]string{"get": "read", "list": "read", "watch": "read", "create": "write", "update": "write", "patch": "write"}
	whose := map[string]string{"lodestone-controller": "controller", "lodestone-controller-apiserver": "controller",
		"lodestone-controller-others": "controller", "lodestone-controller-dashboard": "controller, with `dashboard.enabled`",
		"lodestone-speaker": "speaker"}
	roles := manifests[rbacv1.Role](t, "Role")
	for _, r := range manifests[rbacv1.ClusterRole](t, "ClusterRole") {
		roles = append(roles, rbacv1.Role{ObjectMeta: r.ObjectMeta, Rules: r.Rules})
	}
	checked := 0
	for _, role := range roles {
		who, ok := whose[role.Name]
		if !ok { // of people and of accounts for them
			continue
		}
		row := rows[who]
		if n := role.Namespace; n != "" && n != "lodestone-system" {
			require.Contains(t, row, "`"+n+"`", "role %s", role.Name)
		}
		for _, rule := range role.Rules {
			for _, resource := range rule.Resources {
				kind, _, _ := strings.Cut(resource, "/")
				for _, verb := range rule.Verbs {
					require.True(t, slices.ContainsFunc(strings.Split(strings.ToLower(row)+";"+both, ";"), func(clause string) bool {
						return strings.Contains(clause, strings.TrimSuffix(kind, "s")) &&
							(strings.Contains(clause, verb) || words[verb] != "" && strings.Contains(clause, words[verb]))
					}), "role %s: %s %s", role.Name, verb, resource)
					checked++
				}
			}
		}
	}
	require.Greater(t, checked, 40)

	subjects, accounts := slices.Collect(maps.Keys(rows)), 0
	require.NoError(t, fs.WalkDir(os.DirFS("deploy/chart/templates"), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		template, err := os.ReadFile("deploy/chart/templates/" + path)
		for _, m := range regexp.MustCompile(`kind: ServiceAccount\nmetadata:\n  name: (\S+)`).FindAllStringSubmatch(string(template), -1) {
			require.True(t, whose[m[1]] != "" || slices.ContainsFunc(subjects, func(s string) bool {
				return strings.Contains(s, "`"+m[1]+"`")
			}), "account %s", m[1])
			accounts++
		}
		return err
	}))
	require.Equal(t, 6, accounts)
}
