// Package admission refuses a broken configuration when somebody writes it: the
// API server asks the controller about our ConfigMap, and the answer has the
// lines that lodestone validate prints.
//
// It is a courtesy, not a safeguard: a cluster without it, or whose controller
// does not answer, takes the ConfigMap, and an invalid document changes nothing.
package admission

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	kjson "sigs.k8s.io/json"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Path is where the Reviewer is to be served.
const Path = "/admission/config"

const (
	// maxBody bounds a review, in bytes: a ConfigMap is at most 1 MiB, here
	// twice, and JSON may escape it.
	maxBody = 8 << 20
	// maxAtOnce is how many reviews are read at a time, because anybody who reaches the port
	// may send some. The API server sends one for each write of the ConfigMap.
	maxAtOnce = 2
	// reviewTimeout is how long a review may take to arrive, and its answer to be taken: the API server waits no
	// longer for the answer.
	reviewTimeout = 3 * time.Second
	// maxUID bounds what is sent back as it came. The API server's have 36 bytes.
	maxUID = 128
	// maxWarnings bounds the number of warnings, and maxWarning each of them in bytes: the API
	// server cuts longer ones.
	maxWarnings = 10
	maxWarning  = 250
)

// Reviewer answers reviews of ConfigMaps. It answers anybody, because the answer reveals
// nothing that is not in the review, and leaves nothing behind. It implements http.Handler.
type Reviewer struct {
	namespace, name string
	warnings        func(*config.Config) []string
	log             *slog.Logger
	busy            chan struct{}
}

// ReviewerOptions are what a Reviewer needs.
type ReviewerOptions struct {
	// Namespace and Name are those of the ConfigMap.
	Namespace, Name string
	// Warnings returns warnings about settings in a valid document that make no sense beside others
	// in it. They must reveal nothing of the cluster.
	Warnings func(*config.Config) []string
	Log      *slog.Logger
}

// NewReviewer returns a Reviewer.
func NewReviewer(o ReviewerOptions) *Reviewer {
	return &Reviewer{o.Namespace, o.Name, o.Warnings, o.Log, make(chan struct{}, maxAtOnce)}
}

// ServeHTTP implements http.Handler.
func (v *Reviewer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case v.busy <- struct{}{}:
		defer func() { <-v.busy }()
	default:
		http.Error(w, "busy with other reviews", http.StatusServiceUnavailable)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(reviewTimeout)) // the writers of some tests have none
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, "the review could not be read", http.StatusBadRequest)
		return
	}
	answer, err := v.Review(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	c := http.NewResponseController(w)
	_ = c.SetWriteDeadline(time.Now().Add(reviewTimeout)) // the writers of some tests have none
	defer c.SetWriteDeadline(time.Time{})                 //nolint:errcheck // of the next review on the connection
	if err := cmp.Or(json.NewEncoder(w).Encode(answer), c.Flush()); err != nil {
		v.log.Debug("review not answered", "err", err)
	}
}

// question is what is read of an AdmissionReview. What is not read costs no memory: a whole ConfigMap could have
// millions of managed fields, of two bytes each on their way and a hundred in memory.
type question struct {
	metav1.TypeMeta
	Request *request `json:"request"`
}

// request is what is read of an AdmissionRequest.
type request struct {
	UID         types.UID             `json:"uid"`
	Namespace   string                `json:"namespace"`
	Name        string                `json:"name"`
	SubResource string                `json:"subResource"`
	Operation   admissionv1.Operation `json:"operation"`
	Resource    struct {
		Group    string `json:"group"`
		Resource string `json:"resource"`
	} `json:"resource"`
	Object    runtime.RawExtension `json:"object"`
	OldObject runtime.RawExtension `json:"oldObject"`
}

// Review answers an AdmissionReview of version v1. The error is why the body is no such
// review.
func (v *Reviewer) Review(body []byte) (*admissionv1.AdmissionReview, error) {
	var asked question
	if err := kjson.UnmarshalCaseSensitivePreserveInts(body, &asked); err != nil {
		return nil, errors.New("no AdmissionReview: " + err.Error())
	}
	if want := admissionv1.SchemeGroupVersion.String(); asked.APIVersion != want || asked.Kind != "AdmissionReview" ||
		asked.Request == nil {
		return nil, fmt.Errorf("no AdmissionReview of %s with a request", want)
	}
	if len(asked.Request.UID) > maxUID {
		return nil, fmt.Errorf("no AdmissionReview: its uid has %d bytes", len(asked.Request.UID))
	}
	response := v.decide(asked.Request)
	response.UID = asked.Request.UID
	return &admissionv1.AdmissionReview{TypeMeta: asked.TypeMeta, Response: response}, nil
}

// decide refuses our ConfigMap if its document is invalid, and nothing else.
func (v *Reviewer) decide(r *request) *admissionv1.AdmissionResponse {
	allowed := &admissionv1.AdmissionResponse{Allowed: true}
	if r.Namespace != v.namespace || r.Name != v.name || r.Resource.Resource != "configmaps" || r.Resource.Group != "" ||
		r.SubResource != "" ||
		r.Operation != admissionv1.Create && r.Operation != admissionv1.Update {
		return allowed
	}
	document, ok, err := documentOf(r.Object)
	if err != nil {
		return refuse("no ConfigMap: " + err.Error())
	}
	if !ok {
		allowed.Warnings = []string{clip(fmt.Sprintf("the ConfigMap has no key %q, and so no configuration: the last valid one stays in "+
			"force; to give up all addresses, write a document without pools", config.Key))}
		return allowed
	}
	parsed, err := config.Parse([]byte(document))
	if before, had, _ := documentOf(r.OldObject); err != nil && had && before == document {
		allowed.Warnings = []string{clip("the configuration is invalid, as it was before: " + err.Error())}
		return allowed
	}
	if err != nil {
		return refuse(err.Error()) // not logged: anybody may send reviews, as many as he likes
	}
	for _, w := range v.warnings(parsed) {
		if len(allowed.Warnings) == maxWarnings {
			break
		}
		allowed.Warnings = append(allowed.Warnings, clip(w))
	}
	return allowed
}

// documentOf returns the document of a ConfigMap, and whether it has one.
func documentOf(object runtime.RawExtension) (document string, ok bool, err error) {
	var read struct {
		Data struct {
			Document *string `json:"config.yaml"` // config.Key
		} `json:"data"`
	}
	err = kjson.UnmarshalCaseSensitivePreserveInts(object.Raw, &read)
	if read.Data.Document == nil {
		return "", false, err
	}
	return *read.Data.Document, true, err
}

func refuse(message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid, Message: message,
	}}
}

// clip cuts a warning where it becomes too long. The API server passes on none with a line break.
func clip(text string) string {
	text = strings.ReplaceAll(text, "\n", "; ")
	if len(text) <= maxWarning {
		return text
	}
	return strings.ToValidUTF8(text[:maxWarning-len("...")], "") + "..."
}
