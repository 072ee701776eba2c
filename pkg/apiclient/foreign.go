package apiclient

import (
	"fmt"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
)

// isAnswer reports whether a status is an API server's answer to who asks for its version. A refusal is one. Others are what a load
// balancer answers in place of API servers that are away.
func isAnswer(code int) bool {
	return code >= 200 && code < 300 || code == http.StatusUnauthorized || code == http.StatusForbidden || code == http.StatusTooManyRequests
}

// writes refuses answers by which the client would take a write for done, although no API server has seen it: after such a redirect
// the client reads in place of writing (RFC 9110, section 15.4), and of a page it looks at the status alone.
type writes struct{ http.RoundTripper }

func (t writes) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if err != nil || r.Method == http.MethodGet {
		return answer, err //nolint:wrapcheck // it stands in its place
	}
	kind, code := answer.Header.Get("Content-Type"), answer.StatusCode
	redirects := code >= http.StatusMultipleChoices && code <= http.StatusSeeOther
	ours := strings.HasPrefix(kind, runtime.ContentTypeJSON) || strings.HasPrefix(kind, runtime.ContentTypeProtobuf)
	if redirects || code < http.StatusMultipleChoices && !ours {
		answer.Body.Close()
		return nil, fmt.Errorf("not written: %q, of type %q and with location %q, is no answer of an API server: is something else before it?",
			answer.Status, kind, answer.Header.Get("Location"))
	}
	return answer, nil
}
