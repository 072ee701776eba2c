package diagnose

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// A speaker answers whatever it likes about its node: the checks end, and what they find can be written.
func FuzzFacts(f *testing.F) {
	for _, facts := range healthy().Facts {
		text, err := json.Marshal(facts)
		require.NoError(f, err)
		f.Add(text)
	}
	f.Add([]byte(`{"interfaces":[{"addrs":["::/0"],"mtu":-1},{}],"vips":[{}],"members":[{}],"sysctls":{"":-1},"unread":{"":""}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var facts Facts
		if json.Unmarshal(text, &facts) != nil {
			return
		}
		c := healthy()
		facts.Node = "n2"
		c.Facts["n2"] = facts
		var r Report
		testcost.Within(t, "facts", len(text), func() { r = Check(c) })
		require.GreaterOrEqual(t, len(r.Findings), len(catalogue))
		for _, found := range r.Findings {
			require.NotEmpty(t, found.Message, found.Check)
		}
		_, err := json.Marshal(r)
		require.NoError(t, err)
	})
}
