package speaker

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Everybody may read /readyz: the public text of a check quotes nothing of the configuration,
// whose errors do. The whole text stands here, so that whatever is added to it is looked at.
func TestReadyzQuotesNoConfiguration(t *testing.T) {
	_, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: tenant-7, addresses: " +
		"[203.0.113.77/33]}]\n"))
	require.ErrorContains(t, err, "203.0.113.77/33", "the error quotes the document")
	for want, before := range map[string]*config.Config{
		"none that is valid: /status and the log say why":                       nil,
		"in force, but the latest document is not: /status and the log say why": {Digest: "d1"},
	} {
		t.Run(want, func(t *testing.T) {
			s := newStory(t)
			s.config.config, s.config.state = before, kube.State{Read: true, Err: err}
			s.start()
			var public []string
			_, checks := s.speaker.health(s.config.Current())
			for _, c := range checks {
				public = append(public, c.Name+": "+c.Public())
				if c.Name == "configuration" {
					assert.Contains(t, c.Message, "203.0.113.77/33", "who may read /status is told")
				}
			}
			assert.Equal(t, []string{"configuration: " + want, "membership: joining"}, public[1:3])
			assert.Len(t, public, 4)
		})
	}
}
