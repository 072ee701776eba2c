package config

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const docs = "../../docs"

var inSelector = regexp.MustCompile(`^.*Selector\.`)

// documented are the keys as the reference has them: those of label selectors
// only once.
func documented(paths []string) []string {
	var all []string
	for _, path := range paths {
		if path = inSelector.ReplaceAllString(path, "*Selector."); !slices.Contains(all, path) {
			all = append(all, path)
		}
	}
	return all
}

// The reference configuration is valid and shows every key.
func TestReferenceConfigIsComplete(t *testing.T) {
	text := read(t, docs+"/reference/config.yaml")
	_, err := ParseFile("docs/reference/config.yaml", text)
	require.NoError(t, err)

	var root yaml.Node
	require.NoError(t, yaml.Unmarshal(text, &root))
	shown := map[string]bool{}
	collect(root.Content[0], "", shown)
	assert.Subset(t, documented(slices.Collect(maps.Keys(shown))), documented(knownKeys()))
}

// collect gathers the paths of all keys below a node.
func collect(n *yaml.Node, prefix string, into map[string]bool) {
	for i, c := range n.Content {
		switch {
		case n.Kind == yaml.SequenceNode:
			collect(c, prefix+"[]", into)
		case i%2 == 1:
			path := strings.TrimPrefix(prefix+"."+n.Content[i-1].Value, ".")
			into[path] = true
			collect(c, path, into)
		}
	}
}

// The reference has exactly one row for each key there is, and nothing in it
// is left open.
func TestReferenceHasEveryKey(t *testing.T) {
	text := string(read(t, docs+"/reference/configuration.md"))
	rows := map[string][]string{}
	for _, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		path := strings.Trim(cells[0], "`")
		require.NotContains(t, rows, path, "two rows")
		rows[path] = cells[1:]
	}
	assert.ElementsMatch(t, documented(knownKeys()), slices.Collect(maps.Keys(rows)))
	for path, cells := range rows {
		require.Len(t, cells, 4, "%s: type, default, bounds, example", path)
		assert.NotContains(t, cells, "", path)
		var example map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(strings.Trim(cells[3], "`")), &example), path)
		assert.Contains(t, example, path[strings.LastIndex(path, ".")+1:], "the example of %s is of the key", path)
	}
}

// Of the rows' claims: which keys are required, what is the default.
func TestReferenceShowsRequiredKeys(t *testing.T) {
	text := string(read(t, docs+"/reference/configuration.md"))
	rows := regexp.MustCompile("(?m)^\\| `(\\S+)` \\| [^|]+ \\| required \\|").FindAllStringSubmatch(text, -1)
	var required []string
	for _, m := range rows {
		required = append(required, m[1])
	}
	assert.ElementsMatch(t, documented(requiredKeys()), required)
}

// requiredKeys finds out which keys are required by leaving each one out of
// the reference configuration.
func requiredKeys() []string {
	text, err := os.ReadFile(docs + "/reference/config.yaml")
	if err != nil {
		panic(err)
	}
	var required []string
	for _, path := range knownKeys() {
		var root yaml.Node
		if err := yaml.Unmarshal(text, &root); err != nil {
			panic(err)
		}
		remove(root.Content[0], strings.Split(strings.ReplaceAll(path, "[]", ".[]"), "."))
		out, _ := yaml.Marshal(&root)
		_, err := Parse(out)
		if err != nil && strings.Contains(err.Error(), `key "`+path[strings.LastIndex(path, ".")+1:]+`" is missing`) {
			required = append(required, path)
		}
	}
	return required
}

// remove takes every value at the path out of a node.
func remove(n *yaml.Node, path []string) {
	if path[0] == "[]" {
		for _, item := range n.Content {
			remove(item, path[1:])
		}
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		switch {
		case n.Content[i].Value != path[0]:
		case len(path) > 1:
			remove(n.Content[i+1], path[1:])
		default:
			n.Content = slices.Delete(n.Content, i, i+2)
			return
		}
	}
}

var fence = regexp.MustCompile("(?ms)^( *)```yaml\n(.*?)^ *```$")

// Every example of a configuration that the documentation shows is valid.
func TestExamplesInDocs(t *testing.T) {
	files := []string{"../../README.md"}
	require.NoError(t, filepath.WalkDir(docs, func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			files = append(files, path)
		}
		return err
	}))
	examples := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // no README yet
		}
		require.NoError(t, err)
		for _, block := range fence.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(block[2], "apiVersion: lodestone.io/") {
				continue
			}
			_, err := ParseFile(file, []byte(regexp.MustCompile("(?m)^"+block[1]).ReplaceAllString(block[2], "")))
			assert.NoError(t, err, block[2])
			examples++
		}
	}
	assert.Positive(t, examples)
}
