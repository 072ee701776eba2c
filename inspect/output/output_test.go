package output

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// page is a page for tests.
type page struct {
	Name string `json:"name"`
	draw func(*Canvas)
}

func (p page) Show(c *Canvas) { p.draw(c) }

func drawn(t *testing.T, color bool, draw func(*Canvas)) string {
	var out bytes.Buffer
	require.NoError(t, Print(&out, Table, color, page{draw: draw}))
	return out.String()
}

func TestColumnsAreAligned(t *testing.T) {
	t.Parallel()
	table := func(c *Canvas) {
		c.Rows([]string{"NODE", "STATE", ""}, [][]any{{"n1", Cell{"up", Good}, ""}, {"größer", 12, "sent"}})
	}
	assert.Equal(t, "NODE    STATE\nn1      up\ngrößer  12     sent\n", drawn(t, false, table))
	colored := drawn(t, true, table)
	assert.Contains(t, colored, string(Good)+"up"+reset)
	for _, tone := range []Tone{Heading, Good, reset} {
		colored = strings.ReplaceAll(colored, string(tone), "")
	}
	assert.Equal(t, drawn(t, false, table), colored, "colours take no room")
	assert.Empty(t, drawn(t, true, func(c *Canvas) { c.Rows([]string{"NODE"}, nil); c.Blank() }), "no header without rows")
}

func TestNobodySteersTheTerminal(t *testing.T) {
	t.Parallel()
	const evil = "\x1b[2Jboo\u009b\x07\xff\r\u202e"
	for _, text := range []string{
		drawn(t, true, func(c *Canvas) { c.Line(Plain, "%s", evil) }),
		drawn(t, true, func(c *Canvas) { c.Rows(nil, [][]any{{evil}}) }),
	} {
		assert.Equal(t, "?[2Jboo?????\n", text)
	}
	assert.Equal(t, "a?ERROR  b\n", drawn(t, false, func(c *Canvas) { c.Line(Plain, "%s", "a\nERROR  b") }), "nobody forges a line")
}

func TestBarsAreFullOnlyWhenAllIsUsed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		used, whole float64
		want        int
	}{{0, 100, 0}, {1, 1e9, 1}, {50, 100, 10}, {99.9, 100, 19}, {100, 100, 20}, {3, 2, 20}, {0, 0, 0}} {
		assert.Equal(t, test.want, strings.Count(Bar(test.used, test.whole), "#"), "%v of %v", test.used, test.whole)
		assert.Len(t, Bar(test.used, test.whole), barWidth+2)
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 119 * time.Second: "119s", 2 * time.Minute: "2m", 119 * time.Minute: "119m", 47 * time.Hour: "47h",
		49 * time.Hour: "2d",
	} {
		assert.Equal(t, want, Age(d))
	}
	assert.Equal(t, "a, b and 2 more", List([]string{"a", "b", "c", "d"}, 2))
	assert.Equal(t, "a, b", List([]string{"a", "b"}, 2))
	assert.Equal(t, "1 node", Count(1, "node", "nodes"))
	assert.Equal(t, "0 nodes", Count(0, "node", "nodes"))
	assert.Equal(t, "about 1.8e+19", Number(1<<64))
}

func TestFormats(t *testing.T) {
	t.Parallel()
	f := Table
	require.Error(t, f.Set("xml"))
	for _, test := range []struct{ format, want string }{{"json", "{\n  \"name\": \"n1\"\n}\n"}, {"yaml", "name: n1\n"}} {
		require.NoError(t, f.Set(test.format))
		var out bytes.Buffer
		require.NoError(t, Print(&out, f, true, page{Name: "n1"}))
		assert.Equal(t, test.want, out.String())
	}
	// Programs read what was written, and it steers no terminal either.
	const evil = "\x1b[2J\u009b\u007f\u202eboo"
	for _, format := range []Format{JSON, YAML} {
		var out bytes.Buffer
		require.NoError(t, Print(&out, format, true, page{Name: evil}))
		assert.NotRegexp(t, `[\x00-\x09\x0b-\x1f\x{7f}-\x{9f}]`, out.String(), format)
		var back page
		require.NoError(t, yaml.Unmarshal(out.Bytes(), &back))
		assert.Equal(t, evil, back.Name, format)
	}
	require.EqualError(t, Print(closed{}, JSON, false, page{}), "closed")
}

// closed cannot be written to.
type closed struct{}

func (closed) Write([]byte) (int, error) { return 0, errors.New("closed") }
