package admission

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

const (
	valid  = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: lan, addresses: [203.0.113.0/26]}]\n"
	broken = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n- {name: a, addresses: [198.18.0.0/24]}\n- {name: b, addresses: " +
		"[198.18.0.128/25]}\n"
)

func reviewer() *Reviewer {
	return NewReviewer(ReviewerOptions{
		Namespace: "ls", Name: "lodestone-config", Log: slog.New(slog.DiscardHandler),
		Warnings: func(*config.Config) []string {
			all := []string{strings.Repeat("é", 500)}
			for i := range 20 {
				all = append(all, fmt.Sprint("warning ", i))
			}
			return all
		},
	})
}

// review is what the API server sends about a ConfigMap with that document.
func review(document string, change ...func(*admissionv1.AdmissionRequest)) []byte {
	object, _ := json.Marshal(&corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Namespace: "ls", Name: "lodestone-config"},
		Data: map[string]string{config.Key: document},
	})
	r := &admissionv1.AdmissionRequest{
		UID: "1-2-3", Namespace: "ls", Name: "lodestone-config", Operation: admissionv1.Update,
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"}, Object: runtime.RawExtension{Raw: object},
	}
	for _, f := range change {
		f(r)
	}
	body, _ := json.Marshal(&admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1",
		Kind: "AdmissionReview"}, Request: r})
	return body
}

func TestABrokenDocumentIsRefusedInTheWordsOfValidate(t *testing.T) {
	t.Parallel()
	answer, err := reviewer().Review(review(broken))
	require.NoError(t, err)
	r := answer.Response
	assert.Equal(t, "admission.k8s.io/v1", answer.APIVersion)
	assert.EqualValues(t, "1-2-3", r.UID)
	assert.False(t, r.Allowed)
	assert.EqualValues(t, 422, r.Result.Code)
	_, invalid := config.Parse([]byte(broken))
	assert.Equal(t, invalid.Error(), r.Result.Message)
	assert.Contains(t, r.Result.Message, "config.yaml:5:")
}

func TestAValidDocumentIsTakenWithWarnings(t *testing.T) {
	t.Parallel()
	answer, err := reviewer().Review(review(valid, func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Create }))
	require.NoError(t, err)
	assert.True(t, answer.Response.Allowed)
	require.Len(t, answer.Response.Warnings, maxWarnings)
	assert.LessOrEqual(t, len(answer.Response.Warnings[0]), 256, "the API server cuts longer ones")
	assert.True(t, strings.HasSuffix(answer.Response.Warnings[0], "é..."))
	assert.Equal(t, "warning 0", answer.Response.Warnings[1])
}

func TestWhatIsNotOursIsNotJudged(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*admissionv1.AdmissionRequest){
		"another namespace": func(r *admissionv1.AdmissionRequest) { r.Namespace = "default" },
		"another name":      func(r *admissionv1.AdmissionRequest) { r.Name = "lodestone-quarantine" },
		"a deletion":        func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Delete; r.Object.Raw = nil },
		"another resource":  func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "secrets" },
	} {
		answer, err := reviewer().Review(review(broken, change))
		require.NoError(t, err, name)
		assert.True(t, answer.Response.Allowed, name)
		assert.Empty(t, answer.Response.Warnings, name)
	}
	answer, err := reviewer().Review(review("", func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte(`{"data":{"other":"x"}}`) }))
	require.NoError(t, err)
	assert.True(t, answer.Response.Allowed, "no document is no broken one")
	assert.Contains(t, answer.Response.Warnings[0], `no key "config.yaml"`)
}

// Labels and finalizers of a ConfigMap whose document was broken before can be
// changed: it gets no worse.
func TestADocumentThatWasBrokenBeforeIsNotRefused(t *testing.T) {
	t.Parallel()
	before := func(document string) func(*admissionv1.AdmissionRequest) {
		return func(r *admissionv1.AdmissionRequest) {
			r.OldObject.Raw, _ = json.Marshal(&corev1.ConfigMap{Data: map[string]string{"config.yaml": document}})
		}
	}
	answer, err := reviewer().Review(review(broken, before(broken)))
	require.NoError(t, err)
	assert.True(t, answer.Response.Allowed)
	assert.Contains(t, answer.Response.Warnings[0], "the configuration is invalid, as it was before: config.yaml:5:")
	answer, err = reviewer().Review(review(broken, before(broken+"\n")))
	require.NoError(t, err)
	assert.False(t, answer.Response.Allowed, "it was touched")

	twice := broken + "no-such-key: 1\n"
	answer, err = reviewer().Review(review(twice, before(twice)))
	require.NoError(t, err)
	_, err = utilnet.NewWarningHeader(299, "-", answer.Response.Warnings[0])
	require.NoError(t, err, "the API server passes it on")
}

// Whoever sends half a review keeps nobody else from being answered for long.
func TestHalfAReviewIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		server := http.Server{Handler: reviewer()}
		ended := make(chan error)
		go func() { ended <- server.Serve(&listener{first: theirs, closed: make(chan struct{})}) }()
		start := time.Now()
		fmt.Fprintf(ours, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", Path)
		answer, err := http.ReadResponse(bufio.NewReader(ours), nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusBadRequest, answer.StatusCode)
		require.Equal(t, reviewTimeout, time.Since(start))
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
}

// Whoever takes no answer keeps nobody else from being answered for long either, and decides nothing about its length.
func TestAnAnswerThatIsNotTakenIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		v := reviewer()
		server := http.Server{Handler: v}
		ended := make(chan error)
		go func() { ended <- server.Serve(&listener{first: theirs, closed: make(chan struct{})}) }()
		body := review(broken)
		fmt.Fprintf(ours, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", Path, len(body), body)
		synctest.Wait()
		require.Len(t, v.busy, 1, "the answer waits")
		time.Sleep(reviewTimeout)
		synctest.Wait()
		require.Empty(t, v.busy)
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
	_, err := reviewer().Review(review(valid, func(r *admissionv1.AdmissionRequest) { r.UID = types.UID(strings.Repeat("x", maxUID+1)) }))
	require.EqualError(t, err, "no AdmissionReview: its uid has 129 bytes")
}

// listener accepts one connection.
type listener struct {
	net.Listener
	first  net.Conn
	closed chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	if c := l.first; c != nil {
		l.first = nil
		return c, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}
func (l *listener) Close() error { close(l.closed); return nil }

func TestBodiesThatAreNoReviews(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(reviewer())
	defer server.Close()
	post := func(body io.Reader) int {
		response, err := server.Client().Post(server.URL+Path, "application/json", body)
		require.NoError(t, err)
		defer response.Body.Close()
		return response.StatusCode
	}
	assert.Equal(t, 200, post(bytes.NewReader(review(broken))))
	for _, body := range []string{"", "{", "null", "[]", `{"kind":"AdmissionReview"}`,
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`,
		strings.Replace(string(review(valid)), "admission.k8s.io/v1", "admission.k8s.io/v1beta1", 1), strings.Repeat("[", 100_000)} {
		assert.Equal(t, 400, post(strings.NewReader(body)), "%.60s", body)
	}
	// Over a connection the client may get a reset instead, because the server reads no further.
	answer := httptest.NewRecorder()
	reviewer().ServeHTTP(answer, httptest.NewRequest(http.MethodPost, Path, io.LimitReader(zeros{}, maxBody+1)))
	assert.Equal(t, 400, answer.Code, "too large")
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// Whoever keeps reviews open keeps others from none that matters: the API server
// goes on without an answer.
func TestReviewsAtATimeAreBounded(t *testing.T) {
	t.Parallel()
	v := reviewer()
	for range maxAtOnce {
		v.busy <- struct{}{}
	}
	w := httptest.NewRecorder()
	v.ServeHTTP(w, httptest.NewRequest(http.MethodPost, Path, bytes.NewReader(review(valid))))
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	<-v.busy
	w = httptest.NewRecorder()
	v.ServeHTTP(w, httptest.NewRequest(http.MethodPost, Path, bytes.NewReader(review(valid))))
	assert.Equal(t, http.StatusOK, w.Code)
}

// Whoever reaches the port may send a review of 8 MiB. Two bytes of it can be a hundred in memory, if all of it is
// read: the controller would be killed. An eighth of that shows it, too.
func TestReviewsTakeLittleMemory(t *testing.T) { // not parallel: it measures what the process allocates
	const size = maxBody / 8
	name, v := `"namespace":"ls","name":"lodestone-config","operation":"UPDATE","resource":{"resource":"configmaps"}`, reviewer()
	for what, parts := range map[string][3]string{
		"managed fields":       {name + `,"object":{"metadata":{"managedFields":[`, "0,", `0]}}`},
		"empty managed fields": {name + `,"object":{"metadata":{"managedFields":[`, "{},", `{}]}}`},
		"owners":               {name + `,"object":{"metadata":{"ownerReferences":[`, "{},", `{}]}}`},
		"keys":                 {name + `,"object":{"data":{`, `"":"",`, `"a":""}}`},
		"the same key":         {name + `,"object":{"data":{`, `"config.yaml":"",`, `"a":""}}`},
		"groups":               {name + `,"object":{},"userInfo":{"groups":[`, `"",`, `""]}`},
		"objects":              {name + `,"object":{}`, `,"object":{}`, ``},
		"requests":             {name, `},"request":{` + name, ``},
		"an old object":        {name + `,"object":{"data":{"config.yaml":"x"}},"oldObject":{"metadata":{"managedFields":[`, "0,", `0]}}`},
	} {
		begin, end := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{`+parts[0], parts[2]+"}}"
		body := []byte(begin + strings.Repeat(parts[1], (size-len(begin)-len(end))/len(parts[1])) + end)
		var err error
		cost := testcost.Of(func() { _, err = v.Review(body) })
		assert.NoError(t, err, what)
		assert.Less(t, cost.Bytes, uint64(6*size), what)
	}
}

func FuzzReview(f *testing.F) {
	f.Add(review(valid))
	f.Add(review(broken))
	f.Add([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","namespace":"ls","name":"lodestone-config","operation":"UPDATE","resource":{"version":"v1","resource":"configmaps"},"object":{"data":{"config.yaml":1}}}}`))
	f.Add([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"object":null}}`))
	v := reviewer()
	f.Fuzz(func(t *testing.T, body []byte) {
		var answer *admissionv1.AdmissionReview
		var err error
		testcost.Within(t, "a review", len(body), func() { answer, err = v.Review(body) })
		if err != nil {
			return
		}
		require.NotNil(t, answer.Response)
		require.True(t, answer.Response.Allowed || answer.Response.Result.Message != "", "a refusal has a reason")
		_, err = json.Marshal(answer)
		require.NoError(t, err)
	})
}

// world is an API server with what the chart makes, a leader and a standby.
type world struct {
	*testing.T
	*fake.Clientset
	now             time.Time
	leader, standby *Keeper
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, now: time.Now(), Clientset: testapi.New(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ls", Name: SecretName}},
		&admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: WebhookName, ResourceVersion: "1"},
			Webhooks: []admissionregistrationv1.ValidatingWebhook{{Name: "config.lodestone.io"}}},
	)}
	w.leader, w.standby = w.keeper(true), w.keeper(false)
	return w
}

func (w *world) keeper(leads bool) *Keeper {
	k, err := NewKeeper(KeeperOptions{Client: w.Clientset, Namespace: "ls", Leads: func() bool { return leads },
		Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return w.now }})
	require.NoError(w, err)
	return k
}

func (w *world) keep(keepers ...*Keeper) {
	w.Helper()
	for _, k := range keepers {
		require.NoError(w, k.Keep(w.Context()))
	}
}

// trusted reports whether the API server would accept the replica's certificate now.
func (w *world) trusted(k *Keeper) bool {
	webhook, err := w.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(w.Context(), WebhookName, metav1.GetOptions{})
	require.NoError(w, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(webhook.Webhooks[0].ClientConfig.CABundle)
	pair, err := tls.X509KeyPair(k.CurrentCertKeyContent())
	require.NoError(w, err)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: "lodestone-admission.ls.svc", Roots: roots, CurrentTime: w.now})
	return err == nil
}

func TestEveryReplicaServesWhatTheAPIServerTrusts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	require.False(t, w.trusted(w.leader), "there is nothing yet")
	w.keep(w.standby)
	w.keep(w.leader, w.standby)
	require.True(t, w.trusted(w.leader))
	require.True(t, w.trusted(w.standby))
	writes := len(w.Actions())
	w.keep(w.leader, w.standby)
	for _, a := range w.Actions()[writes:] {
		require.Equal(t, "get", a.GetVerb(), "nothing is written when nothing has changed")
	}
	require.True(t, w.trusted(w.restarted()), "a replica that starts reads it")
}

// restarted is a replica that has just started and read the Secret.
func (w *world) restarted() *Keeper {
	k := w.keeper(false)
	w.keep(k)
	return k
}

func TestRotationLosesNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.keep(w.leader, w.standby)
	first, _ := w.leader.CurrentCertKeyContent()
	for range 5 { // years
		w.now = w.now.Add(life - renewal + time.Hour)
		w.keep(w.leader)
		next, _ := w.leader.CurrentCertKeyContent()
		require.NotEqual(t, first, next)
		first = next
		require.True(t, w.trusted(w.leader))
		require.True(t, w.trusted(w.standby), "who still serves the old one")
		w.keep(w.standby)
		require.True(t, w.trusted(w.standby))
		secret, err := w.CoreV1().Secrets("ls").Get(t.Context(), SecretName, metav1.GetOptions{})
		require.NoError(t, err)
		require.Equal(t, 2, bytes.Count(secret.Data["ca.crt"], []byte("BEGIN CERTIFICATE")), "old authorities go")
	}
}

func TestWhatIsWrongIsMended(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.keep(w.leader)
	for name, harm := range map[string]func(){
		"an expired certificate": func() { w.now = w.now.Add(2 * life) },
		"an emptied Secret":      func() { w.write(nil) },
		"a broken Secret": func() {
			w.write(map[string][]byte{"tls.crt": []byte("x"), "tls.key": []byte("y"), "ca.crt": []byte("z")})
		},
		"another name": func() {
			p, err := newPair("other.svc", nil, w.now)
			require.NoError(t, err)
			w.write(p.data())
		},
		"a forgotten caBundle": func() {
			webhook, err := w.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(), WebhookName, metav1.GetOptions{})
			require.NoError(t, err)
			webhook.Webhooks[0].ClientConfig.CABundle = nil
			_, err = w.AdmissionregistrationV1().ValidatingWebhookConfigurations().Update(t.Context(), webhook, metav1.UpdateOptions{})
			require.NoError(t, err)
		},
	} {
		harm()
		w.keep(w.standby)
		w.keep(w.leader, w.standby)
		assert.True(t, w.trusted(w.leader), name)
		assert.True(t, w.trusted(w.standby), name)
	}
}

func (w *world) write(data map[string][]byte) {
	_, err := w.CoreV1().Secrets("ls").Update(w.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ls", Name: SecretName}, Data: data}, metav1.UpdateOptions{})
	require.NoError(w, err)
}

// The secure port of the framework shows the certificate to who asks for the
// Service, the present one, and its own to others.
func TestSecurePortServesTheCertificate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	own, err := newPair("localhost", nil, w.now)
	require.NoError(t, err)
	cert, err := dynamiccertificates.NewStaticCertKeyContent("own", own.certificate, own.key)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	secure := &server.SecureServingInfo{Listener: listener, Cert: cert, SNICerts: []dynamiccertificates.SNICertKeyContentProvider{w.leader}}
	stop := make(chan struct{})
	_, stopped, err := secure.Serve(reviewer(), 0, stop)
	require.NoError(t, err)
	t.Cleanup(func() { close(stop); <-stopped })

	shown := func(name string) []byte {
		c, err := tls.Dial("tcp", listener.Addr().String(),
			&tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // it is looked at
		require.NoError(t, err)
		defer c.Close()
		return toPEM("CERTIFICATE", c.ConnectionState().PeerCertificates[0].Raw)
	}
	require.Equal(t, string(own.certificate), string(shown("localhost")))
	for range 2 { // the first one, and one that follows
		w.keep(w.leader)
		current, _ := w.leader.CurrentCertKeyContent()
		require.Eventually(t, func() bool { return bytes.Equal(shown("lodestone-admission.ls.svc"), current) }, 30*time.Second,
			10*time.Millisecond)
		w.now = w.now.Add(life - renewal + time.Hour)
	}
	require.Equal(t, string(own.certificate), string(shown("localhost")))
}

func TestKeeperSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	require.NoError(t, w.CoreV1().Secrets("ls").Delete(t.Context(), SecretName, metav1.DeleteOptions{}))
	require.ErrorContains(t, w.leader.Keep(t.Context()), "get Secret lodestone-admission")
	w = newWorld(t)
	require.NoError(t, w.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(t.Context(), WebhookName, metav1.DeleteOptions{}))
	require.ErrorContains(t, w.leader.Keep(t.Context()), "get ValidatingWebhookConfiguration lodestone-config")
	secret, err := w.CoreV1().Secrets("ls").Get(t.Context(), SecretName, metav1.GetOptions{})
	require.NoError(t, err)
	require.Empty(t, secret.Data, "nothing is served that the API server does not trust")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, w.leader.Run(ctx))
}
