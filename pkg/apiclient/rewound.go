package apiclient

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxStatus is how much of an API server's refusal is read.
const maxStatus = 64 << 10

// rewound refuses watches from a version that the API server has not reached: etcd was restored from a backup. The API server
// itself takes them, and sends nothing until it gets there, so that whatever changes meanwhile would never be seen. Who watches
// lists anew instead, as after any other refusal of its version.
type rewound struct{ http.RoundTripper }

// RoundTrip asks for a list of one object before a watch, because an API server refuses to list from such a version.
func (t rewound) RoundTrip(r *http.Request) (*http.Response, error) {
	query := r.URL.Query()
	from := query.Get("resourceVersion")
	if query.Get("watch") == "" || from == "" || from == "0" || query.Get("sendInitialEvents") != "" {
		return t.RoundTripper.RoundTrip(r) //nolint:wrapcheck // it stands in its place
	}
	for _, key := range []string{"watch", "allowWatchBookmarks", "timeoutSeconds"} {
		query.Del(key)
	}
	query.Set("limit", "1")
	query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
	list := r.Clone(r.Context())
	list.URL.RawQuery = query.Encode()
	list.Header.Set("Accept", "application/json")
	answer, err := t.RoundTripper.RoundTrip(list)
	if err != nil {
		return nil, err //nolint:wrapcheck // as above
	}
	defer answer.Body.Close()
	var refusal apierrors.StatusError
	if answer.StatusCode < http.StatusBadRequest ||
		json.NewDecoder(io.LimitReader(answer.Body, maxStatus)).Decode(&refusal.ErrStatus) != nil ||
		!apierrors.HasStatusCause(&refusal, metav1.CauseTypeResourceVersionTooLarge) {
		return t.RoundTripper.RoundTrip(r) //nolint:wrapcheck // as above
	}
	expired := apierrors.NewResourceExpired(refusal.ErrStatus.Message).Status()
	expired.TypeMeta = refusal.ErrStatus.TypeMeta
	body, err := json.Marshal(expired)
	if err != nil {
		return nil, fmt.Errorf("refuse a watch from version %s: %w", from, err)
	}
	return &http.Response{
		Status: "410 Gone", StatusCode: http.StatusGone, Proto: answer.Proto, ProtoMajor: answer.ProtoMajor, ProtoMinor: answer.ProtoMinor,
		Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: int64(len(body)),
		Body: io.NopCloser(bytes.NewReader(body)), Request: r,
	}, nil
}
