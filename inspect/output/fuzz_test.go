package output

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// Whatever names and messages contain, no output has control characters, and JSON and YAML decode to the same text.
func FuzzPrint(f *testing.F) {
	for _, text := range []string{"web", "", "\x1b[2Jboo\u009b\x07\xff\r\u202e", "a\nb", "\u2028\u0085\ufeff",
		"- a: {b", "0x1f", "\U000e0001", "\x7f", "'\"\\"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p := page{Name: text, draw: func(c *Canvas) {
			c.Line(Bad, "%s", text)
			c.Rows([]string{"NAME"}, [][]any{{text, Cell{text, Good}}})
		}}
		var want, read page
		meant, err := json.Marshal(p)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(meant, &want))
		for _, format := range []Format{Table, JSON, YAML} {
			var out bytes.Buffer
			require.NoError(t, Print(&out, format, false, p))
			require.True(t, utf8.Valid(out.Bytes()))
			require.False(t, strings.ContainsFunc(out.String(), func(r rune) bool { return steers(r) && r != '\n' }), "%s: %q", format, out.String())
			switch format {
			case JSON:
				require.NoError(t, json.Unmarshal(out.Bytes(), &read))
				require.Equal(t, want.Name, read.Name)
			case YAML:
				require.NoError(t, yaml.Unmarshal(out.Bytes(), &read))
				require.Equal(t, want.Name, read.Name, "%q", out.String())
			default:
				require.Equal(t, 3, strings.Count(out.String(), "\n"), "%q", out.String())
			}
		}
	})
}
