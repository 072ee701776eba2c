package lodestone_test

import (
	"go/ast"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// documents are the Markdown files of the project, by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	found, err := markdown()
	if err != nil {
		t.Fatal(err)
	}
	return found
}

var markdown = sync.OnceValues(func() (map[string]string, error) {
	found := map[string]string{}
	return found, filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && p != "." && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case filepath.Ext(p) != ".md":
			return nil
		}
		text, err := os.ReadFile(p)
		found[p] = string(text)
		return err
	})
})

// constants calls f with each string constant of production code, its type
// ("" if it is not written) and the file that declares it.
func constants(t *testing.T, f func(s source, typeName, value string)) {
	t.Helper()
	for _, s := range parseSources(t) {
		for _, d := range s.file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, spec := range g.Specs {
				v := spec.(*ast.ValueSpec)
				for _, e := range v.Values {
					if value, ok := stringOf(e); ok {
						f(s, typeOf(v.Type), value)
					}
				}
			}
		}
	}
}

func stringOf(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	value, err := strconv.Unquote(lit.Value)
	return value, err == nil
}

func typeOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// TestTroubleshootingKnowsTheReasons of Services and VIPs, and no others.
func TestTroubleshootingKnowsTheReasons(t *testing.T) {
	t.Parallel()
	const guide = "docs/guides/troubleshooting.md"
	text := documents(t)[guide]
	headings := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^### (\w+)$`).FindAllStringSubmatch(text, -1) {
		headings[m[1]] = true
	}
	known := map[string]bool{}
	constants(t, func(s source, typeName, value string) {
		if typeName != "Reason" || strings.HasPrefix(s.path, "test") {
			return
		}
		known[value] = true
		if !headings[value] {
			t.Errorf("%s: reason %s has no section in %s", s.path, value, guide)
		}
	})
	for h := range headings {
		if !known[h] {
			t.Errorf("%s: no code gives the reason %s", guide, h)
		}
	}
}

// TestEveryAnnotationIsDocumented, and no document names one that is not.
func TestEveryAnnotationIsDocumented(t *testing.T) {
	t.Parallel()
	const reference = "docs/reference/annotations.md"
	docs := documents(t)
	known := []string{config.APIVersion}
	constants(t, func(s source, _, value string) {
		if s.folder() != "pkg/annotation" {
			return
		}
		known = append(known, value)
		if !strings.Contains(docs[reference], "`"+value+"`") && !strings.Contains(docs[reference], ": "+value+"`") {
			t.Errorf("%s is not in %s", value, reference)
		}
	})
	for path, text := range docs {
		for _, name := range regexp.MustCompile(`lodestone\.io/[\w-]+`).FindAllString(text, -1) {
			if !slices.Contains(known, name) {
				t.Errorf("%s names %s, which does not exist", path, name)
			}
		}
	}
}

// TestEveryFieldOfTheReportIsDocumented: people read the reports of speakers, too.
func TestEveryFieldOfTheReportIsDocumented(t *testing.T) {
	t.Parallel()
	const reference = "docs/reference/annotations.md"
	text := documents(t)[reference]
	for _, f := range reflect.VisibleFields(reflect.TypeFor[report.Report]()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" && !strings.Contains(text, "| `"+name+"` |") {
			t.Errorf("%s is not in %s", name, reference)
		}
	}
}

// TestConfigurationExamplesAreValid parses what readers will copy.
func TestConfigurationExamplesAreValid(t *testing.T) {
	t.Parallel()
	examples := 0
	for path, text := range documents(t) {
		for _, block := range blocks(text, "yaml") {
			body := block.text
			if strings.HasPrefix(body, "config:\n") || strings.Contains(body, "\nconfig:\n") {
				body = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + valueOfConfig(body)
			}
			if !strings.Contains(body, "kind: Config") {
				continue
			}
			examples++
			if _, err := config.ParseFile(path, []byte(body)); err != nil {
				t.Errorf("%s:%d: %v", path, block.line, err)
			}
		}
	}
	if examples < 4 {
		t.Errorf("only %d examples were found", examples)
	}
}

// valueOfConfig returns the document in values of the chart, up to the next
// value.
func valueOfConfig(values string) string {
	_, rest, _ := strings.Cut("\n"+values, "\nconfig:\n")
	var lines []string
	for line := range strings.Lines(rest) {
		if !strings.HasPrefix(line, "  ") {
			break
		}
		lines = append(lines, strings.TrimPrefix(line, "  "))
	}
	return strings.Join(lines, "")
}

// block is a fenced block that begins in a line.
type block struct {
	line int
	text string
}

func blocks(markdown, language string) []block {
	var found []block
	open := -1
	lines := strings.Split(markdown, "\n")
	for i, line := range lines {
		switch {
		case open < 0 && strings.HasPrefix(line, "```"):
			open = i
		case open >= 0 && line == "```":
			if lines[open] == "```"+language {
				found = append(found, block{open + 2, strings.Join(lines[open+1:i], "\n") + "\n"})
			}
			open = -1
		}
	}
	return found
}

// TestLinksLead: a link into the repository ends at a file, and at a heading of
// it if it names one.
func TestLinksLead(t *testing.T) {
	t.Parallel()
	docs := documents(t)
	anchors := map[string]map[string]bool{}
	for path, text := range docs {
		anchors[path] = anchorsOf(text)
	}
	code := regexp.MustCompile("`[^`\n]*`")
	for path, text := range docs {
		text = code.ReplaceAllString(text, "")
		for _, m := range regexp.MustCompile(`\]\(([^)#:\s]*)(#[^)\s]*)?\)`).FindAllStringSubmatch(text, -1) {
			target := path
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(path), m[1])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: broken link: %v", path, err)
			}
			if anchor := strings.TrimPrefix(m[2], "#"); anchor != "" && !anchors[target][anchor] {
				t.Errorf("%s: broken link: %s has no heading #%s", path, target, anchor)
			}
		}
	}
}

// anchorsOf returns the anchors of a document's headings, as GitHub makes them.
func anchorsOf(markdown string) map[string]bool {
	anchors, count, fenced := map[string]bool{}, map[string]int{}, false
	link, mark := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`), regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
	for line := range strings.Lines(markdown) {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		text := strings.TrimLeft(line, "#")
		if fenced || text == line || !strings.HasPrefix(text, " ") {
			continue
		}
		anchor := mark.ReplaceAllString(strings.ToLower(link.ReplaceAllString(strings.TrimSpace(text), "$1")), "")
		anchor = strings.ReplaceAll(anchor, " ", "-")
		if n := count[anchor]; n > 0 {
			anchors[anchor+"-"+strconv.Itoa(n)] = true
		} else {
			anchors[anchor] = true
		}
		count[anchor]++
	}
	return anchors
}

// TestTestsThatAreNamedExist: a document that names a test as its proof names one that
// there is.
func TestTestsThatAreNamedExist(t *testing.T) {
	t.Parallel()
	defined := map[string]bool{}
	for _, s := range parseFiles(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && s.isTest() && f.Recv == nil {
				defined[f.Name.Name] = true
			}
		}
	}
	named := regexp.MustCompile("[`\\[, ]((?:Test|Fuzz|Benchmark)[A-Z]\\w+)")
	for path, text := range documents(t) {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !defined[m[1]] {
				t.Errorf("%s names %s, which does not exist", path, m[1])
			}
		}
	}
}

// TestMakeTargetsExist checks that the Makefile has every target that a document names.
func TestMakeTargetsExist(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range documents(t) {
		for _, m := range regexp.MustCompile("(?:^|`|\n)make ([a-z0-9-]+)").FindAllStringSubmatch(text, -1) {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s: there is no target %q", path, m[1])
			}
		}
	}
}

// TestArchitectureNamesEveryPackage holds the table of packages to the tree.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/explanation/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| \\S").FindAllStringSubmatch(string(text), -1) {
		named[row[1]] = true
	}
	packages := listPackages(t)
	for pkg := range packages {
		if pkg != module && !named[pkg] {
			t.Errorf("architecture.md has no line for %s", pkg)
		}
	}
	for pkg := range named {
		if _, ok := packages[pkg]; !ok {
			t.Errorf("architecture.md has a line for %s, which is no package", pkg)
		}
	}
}
