package apiclient

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

const (
	// maxAnswer is how much of an API server's answer is read: a refusal, or a list of one object.
	maxAnswer = 8 << 20
	// metadataOnly asks for lists of what all objects have.
	metadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// rewound answers "410 Gone" to a watch or list from a resource version that the API server has not reached, because etcd was
// restored from a backup. The client then lists anew. The API server itself would accept the watch, and send nothing until it
// reaches that version, so that the changes before it would never be seen. It refuses the list, which client-go repeats ten times.
type rewound struct {
	http.RoundTripper
	detected func() // it is sure, and not only that an API server lags behind
}

// RoundTrip asks for a list of one object before a watch.
func (t rewound) RoundTrip(r *http.Request) (*http.Response, error) {
	query := r.URL.Query()
	from := query.Get("resourceVersion")
	if r.Method != http.MethodGet || from == "" || from == "0" {
		return t.RoundTripper.RoundTrip(r) //nolint:wrapcheck // it stands in its place
	}
	if query.Get("watch") == "" || query.Get("sendInitialEvents") != "" {
		return t.ask(r)
	}
	answer, err := t.ask(one(r, from))
	if err != nil || answer.StatusCode != http.StatusOK {
		return answer, err
	}
	if _, err := read(answer); err != nil {
		return nil, fmt.Errorf("list before a watch: %w", err)
	}
	return t.RoundTripper.RoundTrip(r) //nolint:wrapcheck // as above
}

// one asks for the metadata of one object of the kind that a request is about, not older than from. Empty: as etcd has it now.
// The selectors of the request do not count: an older API server would read in etcd until it finds an object that they select, and
// there may be none. A name does, as whoever asks may have a right to that object alone.
func one(r *http.Request, from string) *http.Request {
	query := r.URL.Query()
	for _, key := range []string{"watch", "allowWatchBookmarks", "timeoutSeconds", "resourceVersion", "resourceVersionMatch",
		"labelSelector"} {
		query.Del(key)
	}
	if !strings.HasPrefix(query.Get("fieldSelector"), metav1.ObjectNameField+"=") {
		query.Del("fieldSelector")
	}
	query.Set("limit", "1")
	if from != "" {
		query.Set("resourceVersion", from)
		query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
	}
	list := r.Clone(r.Context())
	list.URL.RawQuery = query.Encode()
	list.Header.Set("Accept", metadataOnly)
	return list
}

// ask returns the answer, which is another one if the version is refused.
func (t rewound) ask(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if err != nil || answer.StatusCode != http.StatusGatewayTimeout {
		return answer, err //nolint:wrapcheck // as above
	}
	body, err := read(answer)
	if err != nil {
		return nil, fmt.Errorf("read why the API server refuses: %w", err)
	}
	if bytes.Contains(body, []byte(metav1.CauseTypeResourceVersionTooLarge)) { // in JSON and protobuf alike
		if t.isBehind(r) {
			t.detected()
		}
		expired := apierrors.NewResourceExpired("the API server has not reached this version").Status()
		expired.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		if body, err = json.Marshal(expired); err != nil {
			return nil, fmt.Errorf("refuse a version: %w", err)
		}
		answer.StatusCode, answer.Status = http.StatusGone, "410 Gone"
		answer.Header = http.Header{"Content-Type": {"application/json"}}
	}
	answer.Body, answer.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return answer, nil
}

// isBehind reports whether etcd's own version is older than the one that was asked for.
func (t rewound) isBehind(r *http.Request) bool {
	answer, err := t.RoundTripper.RoundTrip(one(r, ""))
	if err != nil {
		return false
	}
	var all metav1.PartialObjectMetadataList
	if body, err := read(answer); err != nil || answer.StatusCode != http.StatusOK || json.Unmarshal(body, &all) != nil {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(all.ResourceVersion, r.URL.Query().Get("resourceVersion"))
	return err == nil && order < 0
}

func read(answer *http.Response) ([]byte, error) {
	defer answer.Body.Close()
	return io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
}
