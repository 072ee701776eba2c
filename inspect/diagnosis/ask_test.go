package diagnosis

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// apiServer is one that proxies to a speaker at n1, and whose clock is ahead.
func apiServer(t *testing.T, ahead time.Duration) kubernetes.Interface {
	const in = "/api/v1/namespaces/lodestone-system/"
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+in+"serviceaccounts/lodestone-diagnose/token", func(w http.ResponseWriter, r *http.Request) {
		var asked authenticationv1.TokenRequest
		assert.NoError(t, json.NewDecoder(r.Body).Decode(&asked))
		assert.EqualValues(t, 600, *asked.Spec.ExpirationSeconds)
		asked.Spec.ExpirationSeconds = new(int64(300)) // it may be given for a shorter time
		asked.Status = authenticationv1.TokenRequestStatus{Token: "small",
			ExpirationTimestamp: metav1.NewTime(time.Now().Add(ahead + 300*time.Second))}
		w.Header().Set("Content-Type", "application/json")
		assert.NoError(t, json.NewEncoder(w).Encode(asked))
	})
	mux.HandleFunc("POST /api/v1/namespaces/empty/serviceaccounts/",
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	mux.HandleFunc("POST /api/v1/namespaces/forbidden/serviceaccounts/",
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	mux.HandleFunc("GET "+in+"pods/https:lodestone-speaker-n1:9999/proxy/diagnose", func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "small", r.Header.Get(diagnose.TokenHeader))
		assert.Equal(t, url.Values{"active": {"true"}, "vip": {"203.0.113.7:80", "203.0.113.8:0"}}, r.URL.Query())
		fmt.Fprintf(w, `{"node":"somebody else","received":%q,"sent":%q,"alive":["n1"],"news":"of another version"}`,
			time.Now().Add(time.Minute).Format(time.RFC3339Nano), time.Now().Add(time.Minute).Format(time.RFC3339Nano))
	})
	mux.HandleFunc("GET "+in+"pods/https:lodestone-speaker-n2:9743/proxy/diagnose", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "another diagnosis is under way", http.StatusTooManyRequests)
	})
	mux.HandleFunc("GET "+in+"pods/https:lodestone-speaker-n3:9743/proxy/diagnose", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "<html>")
	})
	mux.HandleFunc("GET "+in+"pods/https:lodestone-speaker-n5:9743/proxy/diagnose", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		assert.NoError(t, json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden}))
	})
	for node, code := range map[string]int{"n6": http.StatusOK, "n7": http.StatusInternalServerError} {
		mux.HandleFunc("GET "+in+"pods/https:lodestone-speaker-"+node+":9743/proxy/diagnose", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			sent := 0
			for n, err := 0, error(nil); err == nil && sent < 4*maxAnswer; sent += n {
				n, err = w.Write([]byte(strings.Repeat(" ", 1<<20)))
			}
			// What is read, and what the kernel takes for both sides: 36 MiB at most by Linux' defaults (tcp_rmem, tcp_wmem).
			assert.Less(t, sent, maxAnswer+40<<20, "the rest of the answer of %s is not read", node)
		})
	}
	mux.HandleFunc("GET "+in+"pods/lodestone-speaker-n1/log", func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, url.Values{"container": {"speaker"}, "tailLines": {"2000"}, "limitBytes": {"1048576"}, "previous": {"true"}},
			r.URL.Query())
		fmt.Fprint(w, "the end")
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, BearerToken: "mine",
		ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	require.NoError(t, err)
	return client
}

func speakerAt(node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "lodestone-system", Name: "lodestone-speaker-" + node,
		Labels: map[string]string{"app.kubernetes.io/component": "speaker"}},
		Spec: corev1.PodSpec{NodeName: node}}
}

func TestSpeakersAreAskedThroughTheAPIServer(t *testing.T) {
	t.Parallel()
	pods, clock, err := Ask(t.Context(), apiServer(t, 42*time.Second), "lodestone-system")
	require.NoError(t, err)
	assert.InDelta(t, 42, clock.Offset.Seconds(), 1+clock.Uncertainty.Seconds())

	n1 := speakerAt("n1")
	n1.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "https", ContainerPort: 9999}}}}
	a := askAll(t.Context(), pods, map[string]*corev1.Pod{"n1": n1}, map[string][]string{"n1": {"203.0.113.7:80", "203.0.113.8:0"}}, true)
	require.Empty(t, a.mute)
	assert.Equal(t, "n1", a.facts["n1"].Node, "whatever it claims to be")
	assert.Equal(t, []string{"n1"}, a.facts["n1"].Alive)
	assert.InDelta(t, 60, a.clocks["n1"].Offset.Seconds(), 1)

	log, err := pods.Log(t.Context(), n1, true)
	require.NoError(t, err)
	assert.Equal(t, "the end", string(log))

	a = askAll(t.Context(), pods, map[string]*corev1.Pod{"n2": speakerAt("n2"), "n3": speakerAt("n3"), "n4": speakerAt("n4"),
		"n5": speakerAt("n5")}, nil, false)
	assert.Empty(t, a.facts)
	assert.Equal(t, "pod lodestone-speaker-n2 does not answer: another diagnosis is under way", a.mute["n2"])
	assert.Equal(t, "pod lodestone-speaker-n5 does not answer: you need the right to get pods/proxy in namespace "+
		"lodestone-system", a.mute["n5"])
	assert.Contains(t, a.mute["n3"], "invalid character '<'")
	assert.Contains(t, a.mute["n4"], "older version")
}

// A speaker of a node that was taken over sends more than anybody has memory for.
func TestAnswersThatDoNotEnd(t *testing.T) {
	t.Parallel()
	pods, _, err := Ask(t.Context(), apiServer(t, 0), "lodestone-system")
	require.NoError(t, err)
	a := askAll(t.Context(), pods, map[string]*corev1.Pod{"n6": speakerAt("n6"), "n7": speakerAt("n7")}, nil, false)
	assert.Empty(t, a.facts)
	assert.Equal(t, "pod lodestone-speaker-n6 does not answer: what it sends is longer than 16 MiB", a.mute["n6"])
	assert.Contains(t, a.mute["n7"], "an error on the server")
	assert.Less(t, len(a.mute["n7"]), 4<<10)
}

func TestDiagnosisNamesTheMissingRight(t *testing.T) {
	t.Parallel()
	_, _, err := Ask(t.Context(), apiServer(t, 0), "forbidden")
	assert.EqualError(t, err, "you may not ask the speakers: you need the right to create serviceaccounts/token of lodestone-diagnose, "+
		"and to get pods/proxy, in namespace forbidden")
	_, _, err = Ask(t.Context(), apiServer(t, 0), "empty")
	assert.ErrorContains(t, err, "there is no ServiceAccount empty/lodestone-diagnose")
}

func TestClocksAreComparedByTheMiddleOfTheWay(t *testing.T) {
	t.Parallel()
	at := func(seconds float64) time.Time { return time.Unix(0, int64(seconds*1e9)) }
	// 2 s on the way, 3 s of work, a clock that is 100 s ahead.
	got := compare(at(0), at(5), at(101), at(104))
	assert.Equal(t, &diagnose.Clock{Offset: 100 * time.Second, Uncertainty: time.Second}, got)
}

// What looks like a secret goes, what does not stays.
func TestRedact(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`password: hunter2`:                        `password: REDACTED`,
		`msg="x" token="a \"b\" c" n=1`:            `msg="x" token="REDACTED" n=1`,
		`{"apiKey":"abc","n":1}`:                   `{"apiKey":"REDACTED","n":1}`,
		`{"token":null,"secret":{"name":"tor-a"}}`: `{"token":"REDACTED","secret":{"name":"tor-a"}}`,
		`{"message":"password=\"a b\" is wrong"}`:  `{"message":"password=\"REDACTED\" is wrong"}`,
		`Authorization: Bearer abcdefghijkl`:       `Authorization: REDACTED REDACTED`,
		`bearer abcdefghijkl`:                      `bearer REDACTED`,
		`https://u:p@h/x`:                          `https://u:REDACTED@h/x`,
		`passwordSecretRef: {name: a, key: b}`:     `passwordSecretRef: {name: a, key: b}`,
		`no bearer token that it knows`:            `no bearer token that it knows`,
		`sharing-key: web`:                         `sharing-key: web`,
		`vip=203.0.113.7 peer=tor-a`:               `vip=203.0.113.7 peer=tor-a`,
		"-----BEGIN EC PRIVATE KEY-----\nabc\n":    `REDACTED`,
		`{"m":"a\neyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln\nBearer abcdefghi"}`: `{"m":"a\nREDACTED\nBearer REDACTED"}`,
		`{"m":"token='abc","n":"d'"}`:                                            `{"m":"token=REDACTED","n":"d'"}`,
		`{"m":"-----BEGIN PRIVATE KEY-----\nMII","n":1}`:                         `{"m":"REDACTED","n":1}`,
		`token='a b' n`: `token=REDACTED n`,
	} {
		assert.Equal(t, want, string(Redact([]byte(text))))
	}
}

func TestRedactedYAMLHidesWholeValues(t *testing.T) {
	t.Parallel()
	out, err := redactYAML([]byte("# secret: no\npools: []\npassword: |\n  two\n  lines\ncredentials: {user: a, pass: b}\npeers:\n- " +
		"{name: x, token: [1, 2], passwordSecretRef: {name: tor}, otherSecretRef: hunter2222}\n"))
	require.NoError(t, err)
	assert.Equal(t, "# secret: REDACTED\npools: []\npassword: REDACTED\ncredentials: {REDACTED: REDACTED, REDACTED: REDACTED}\n"+
		"peers:\n    - {name: x, token: [REDACTED, REDACTED], "+
		"passwordSecretRef: {name: tor}, otherSecretRef: REDACTED}\n", string(out))
	_, err = redactYAML([]byte("a: [\n"))
	assert.Error(t, err)
}

// However a text is mangled, JSON stays JSON.
func FuzzRedactKeepsJSON(f *testing.F) {
	f.Add(`{"password":"x","token":12,"a":{"secret":[1,true,null]},"m":"token=\"q\" api_key: v, https://a:b@c"}`)
	f.Fuzz(func(t *testing.T, text string) {
		if json.Valid([]byte(text)) && !json.Valid(Redact([]byte(text))) {
			t.Errorf("%s\nbecame\n%s", text, Redact([]byte(text)))
		}
	})
}

// secretsOf returns the texts of which the values of secret keys consist.
func secretsOf(n *yaml.Node, secret bool, seen map[*yaml.Node]bool) (texts []string) {
	switch {
	case secret && seen[n]:
		return nil
	case secret && n.Kind == yaml.ScalarNode:
		texts = append(texts, n.Value)
	case secret && n.Kind == yaml.AliasNode:
		seen[n] = true
		return secretsOf(n.Alias, true, seen)
	}
	seen[n] = secret
	for i, child := range n.Content {
		secret := secret || n.Kind == yaml.MappingNode && i%2 == 1 && secretKey.MatchString(n.Content[i-1].Value)
		texts = append(texts, secretsOf(child, secret, seen)...)
	}
	return texts
}

// No secret that stands once in a document is left in it, however it is written.
func FuzzRedactYAML(f *testing.F) {
	f.Add("password: hunter2222\ntoken: |\n  aaaaaaaaa\n  b\n# secret: c\nbgp: {peers: [{name: a, passwordSecretRef: {name: b}}]}\n")
	f.Add("a: &secret hunter2222\npassword: *secret\n")
	f.Add("api-key: &x [&y aaaaaaaaaa, {bbbbbbbbbb: 2}]\nelsewhere: [*x, *y]\n")
	f.Add("password: &a [*a]\n")
	f.Add("? {password: aaaaaaaaaa}\n: !!binary aGk=\n---\npassword: b\n")
	f.Fuzz(func(t *testing.T, text string) {
		var out []byte
		var err error
		testcost.Within(t, "a document", len(text), func() { out, err = redactYAML([]byte(text)) })
		if err != nil {
			return
		}
		var document yaml.Node
		require.NoError(t, yaml.Unmarshal([]byte(text), &document))
		for _, secret := range secretsOf(&document, false, map[*yaml.Node]bool{}) {
			if len(secret) >= 8 && secret != redacted && strings.Count(text, secret) == 1 {
				require.NotContains(t, string(out), secret)
			}
		}
	})
}
