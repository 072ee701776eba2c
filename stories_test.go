package lodestone_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// notInStories are reasons and checks that no story on the lab can show, and why.
var notInStories = map[string]string{
	"LinkDown":       "which interfaces are down is not on the Lease, so that lodestone explain does not show it",
	"ReleasePending": "the API server has to take no write of a Service that is edited again and again (TestWhoMovesWithoutBeingWritten)",
	"NodeUnknown":    "lodestone explain shows existing nodes only",
}

// storyCalls calls f with the name of each function that the stories of the lab
// call, and the words of the texts among its arguments.
func storyCalls(t *testing.T, f func(name string, words []string)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("test", "e2e", "scenarios", "*_test.go"))
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files of stories: %v", len(files), err)
	}
	word := regexp.MustCompile(`[\w-]+`)
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			called := ""
			switch fun := call.Fun.(type) {
			case *ast.Ident:
				called = fun.Name
			case *ast.SelectorExpr:
				called = fun.Sel.Name
			}
			var words []string
			for _, arg := range call.Args {
				ast.Inspect(arg, func(n ast.Node) bool {
					if e, ok := n.(ast.Expr); ok {
						if text, ok := stringOf(e); ok {
							words = append(words, word.FindAllString(text, -1)...)
						}
					}
					return true
				})
			}
			f(called, words)
			return true
		})
	}
}

// TestEveryExplainedReasonIsInAStory: what lodestone explain may answer, it answers
// in some story on the lab.
func TestEveryExplainedReasonIsInAStory(t *testing.T) {
	t.Parallel()
	// A word counts where a story asserts it, not in the text of another call.
	asserting := []string{"DeepEqual", "Equal", "event", "isSilent", "prints", "refused"}
	var asserted []string
	storyCalls(t, func(name string, words []string) {
		if slices.Contains(asserting, name) {
			asserted = append(asserted, words...)
		}
	})
	for _, kind := range reasonTypes {
		if !strings.Contains(kind.where, "lodestone explain") {
			continue
		}
		for reason := range kind.texts {
			is, excused := slices.Contains(asserted, reason), notInStories[reason] != ""
			switch {
			case !is && !excused:
				t.Errorf("%s %s: no story in test/e2e/scenarios produces it", kind.name, reason)
			case is && excused:
				t.Errorf("%s %s is in a story: notInStories need not excuse it", kind.name, reason)
			}
		}
	}
}

// TestEveryCheckIsFoundInAStory: lodestone diagnose finds each of its faults when
// a story plants it.
func TestEveryCheckIsFoundInAStory(t *testing.T) {
	t.Parallel()
	var found []string
	storyCalls(t, func(name string, words []string) {
		if name == "finds" || name == "findsAll" {
			found = append(found, words...)
		}
	})
	for _, check := range diagnose.Catalogue() {
		is, excused := slices.Contains(found, string(check.ID)), notInStories[string(check.ID)] != ""
		switch {
		case !is && !excused:
			t.Errorf("check %s: no story in test/e2e/scenarios plants its fault", check.ID)
		case is && excused:
			t.Errorf("check %s is in a story: notInStories need not excuse it", check.ID)
		}
	}
}
