package change

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// Two documents differ in sentences, or not at all.
func FuzzDiff(f *testing.F) {
	files, err := filepath.Glob("../testdata/valid/*.yaml")
	require.NoError(f, err)
	before := []byte(nil)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(before, text)
		before = text
	}
	f.Fuzz(func(t *testing.T, before, after []byte) {
		old, err := config.Parse(before)
		if err != nil {
			return
		}
		require.Empty(t, Diff(old, old))
		edited, err := config.Parse(after)
		if err != nil {
			return
		}
		var changes []Change
		testcost.Within(t, "an edit", len(before)+len(after), func() { changes = Diff(old, edited) })
		for _, c := range changes {
			require.True(t, c.Pool != "" && c.Message != "" && !strings.Contains(c.Message, "\n"), "%+v", c)
		}
	})
}
