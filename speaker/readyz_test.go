package speaker

import (
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// Everybody may read /readyz: it shows the public text of a check, which quotes nothing of
// the configuration. Errors of the configuration do. The whole text stands here, so that whatever is added to it is looked at.
func TestReadyzQuotesNoConfiguration(t *testing.T) {
	_, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: tenant-7, addresses: " +
		"[203.0.113.77/33]}]\n"))
	require.ErrorContains(t, err, "203.0.113.77/33", "the error quotes the document")
	for want, before := range map[string]*config.Config{
		"none that is valid: /status and the log have the reason":                       nil,
		"in force, but the latest document is not: /status and the log have the reason": {Digest: "d1"},
	} {
		t.Run(want, func(t *testing.T) {
			s := newStory(t)
			s.config.config, s.config.state = before, kube.State{Read: true, Err: err}
			s.start()
			_, checks := s.speaker.health(s.config.Current())
			assert.Contains(t, checks[1].Message, "203.0.113.77/33", "readers of /status see it")
			w := httptest.NewRecorder()
			debughttp.Readyz(func() []diagnose.Condition { return checks }).ServeHTTP(w, httptest.NewRequest("GET", "/readyz", nil))
			assert.Contains(t, w.Body.String(), "configuration: "+want+"\n")
			assert.NotContains(t, w.Body.String(), "203.0.113.77")
			assert.Len(t, checks, 5)
		})
	}
}
