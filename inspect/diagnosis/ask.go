package diagnosis

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// Account is the ServiceAccount whose token speakers take. It may only read Path and /status of speakers.
// Speakers are sent its token, never a user's own.
const Account = "lodestone-diagnose"

const (
	// tokenLife is the shortest that the API server gives.
	tokenLife = 10 * time.Minute
	// lookTimeout and probeTimeout are longer than a speaker takes to look at its
	// node, and to probe the network, too.
	lookTimeout  = 10 * time.Second
	probeTimeout = 30 * time.Second
	// asksAtOnce is how many speakers are asked at a time.
	asksAtOnce = 16
	// defaultPort is the speakers' HTTPS port when the pod does not name one.
	defaultPort = 9743
	// logLines and logBytes bound what is read of a log.
	logLines = 2000
	logBytes = 1 << 20
	// maxAnswer bounds an answer of a pod. Its node may have been taken over.
	maxAnswer = 16 << 20
)

// Pods are where speakers are asked, and logs are read.
type Pods interface {
	// Get asks a speaker.
	Get(ctx context.Context, pod *corev1.Pod, path string, query url.Values) ([]byte, error)
	// Log returns the end of the log of the pod, or of its container before.
	Log(ctx context.Context, pod *corev1.Pod, previous bool) ([]byte, error)
}

// throughAPI asks by way of the API server, which alone need be reachable.
type throughAPI struct {
	client rest.Interface
	token  string
}

// boundedClient returns a client that reads no answer further than a byte beyond maxAnswer. The API server passes on what pods
// and kubelets send, as much as that is, and client-go reads all of it.
func boundedClient(client kubernetes.Interface) rest.Interface {
	all, _ := client.CoreV1().RESTClient().(*rest.RESTClient)
	if all == nil { // a fake one
		return client.CoreV1().RESTClient()
	}
	transport := *all.Client
	transport.Transport = boundedTransport{cmp.Or(transport.Transport, http.DefaultTransport)}
	bounded, err := rest.NewRESTClient(all.Get().URL(), "", rest.ClientContentConfig{
		ContentType: runtime.ContentTypeJSON, GroupVersion: corev1.SchemeGroupVersion,
		Negotiator: runtime.NewClientNegotiator(scheme.Codecs.WithoutConversion(), corev1.SchemeGroupVersion),
	}, all.GetRateLimiter(), &transport)
	if err != nil {
		return all // there is no such error
	}
	return bounded
}

type boundedTransport struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t boundedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.next.RoundTrip(r)
	if err != nil {
		return nil, err //nolint:wrapcheck // client-go does
	}
	answer.Body = struct {
		io.Reader
		io.Closer
	}{io.LimitReader(answer.Body, maxAnswer+1), answer.Body}
	return answer, nil
}

func (p throughAPI) Get(ctx context.Context, pod *corev1.Pod, path string, query url.Values) ([]byte, error) {
	port := cmp.Or(cluster.HTTPSPort(pod), defaultPort)
	r := p.client.Get().Namespace(pod.Namespace).Resource("pods").
		Name("https:"+pod.Name+":"+strconv.Itoa(port)).SubResource("proxy").Suffix(path).SetHeader(diagnose.TokenHeader, p.token)
	for name, values := range query {
		for _, value := range values {
			r.Param(name, value)
		}
	}
	result := r.Do(ctx) // DoRaw would not read the API server's error
	if err := result.Error(); err != nil {
		return nil, err //nolint:wrapcheck // the caller does
	}
	raw, err := result.Raw()
	if len(raw) > maxAnswer {
		return nil, fmt.Errorf("what it sends is longer than %d MiB", maxAnswer>>20)
	}
	return raw, err //nolint:wrapcheck // the caller does
}

func (p throughAPI) Log(ctx context.Context, pod *corev1.Pod, previous bool) ([]byte, error) {
	o := &corev1.PodLogOptions{Container: cluster.ContainerOf(pod), TailLines: new(int64(logLines)), LimitBytes: new(int64(logBytes)),
		Previous: previous}
	return p.client.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("log").
		VersionedParams(o, scheme.ParameterCodec).DoRaw(ctx) //nolint:wrapcheck // the caller does
}

// Ask returns how pods are asked, and how far the clock of the API server is
// ahead of ours: a token has the time when it was made.
func Ask(ctx context.Context, client kubernetes.Interface, namespace string) (Pods, *diagnose.Clock, error) {
	pods := throughAPI{client: boundedClient(client)}
	before := time.Now()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenLife / time.Second))}}
	made, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, Account, request, metav1.CreateOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return pods, nil,
			fmt.Errorf("you may not ask the speakers: you need the right to create serviceaccounts/token of %s, and to get pods/proxy, in "+
				"namespace %s", Account, namespace)
	case apierrors.IsNotFound(err):
		return pods, nil,
			fmt.Errorf("the speakers cannot be asked: there is no ServiceAccount %s/%s; the chart of this version makes it", namespace, Account)
	case err != nil:
		return pods, nil, fmt.Errorf("get a token for the speakers: %w", err)
	}
	var clock *diagnose.Clock
	if life := made.Spec.ExpirationSeconds; life != nil && !made.Status.ExpirationTimestamp.IsZero() {
		// In whole seconds, cut off.
		at := made.Status.ExpirationTimestamp.Add(time.Second/2 - time.Duration(*life)*time.Second)
		clock = compare(before, time.Now(), at, at)
		clock.Uncertainty += time.Second / 2
	}
	pods.token = made.Status.Token
	return pods, clock, nil
}

// compare returns how far another clock is ahead of ours. It read received and sent when its machine answered a
// question of ours (RFC 5905 section 8).
func compare(asked, heard, received, sent time.Time) *diagnose.Clock {
	return &diagnose.Clock{
		Offset:      (received.Sub(asked) + sent.Sub(heard)) / 2,
		Uncertainty: max(0, heard.Sub(asked)-sent.Sub(received)) / 2,
	}
}

// answers are those of the speakers, by node.
type answers struct {
	mu     sync.Mutex
	facts  map[string]diagnose.Facts
	clocks map[string]diagnose.Clock
	mute   map[string]string
}

// askAll asks the speakers, by node, for their facts. Plan is what each is to
// try; nil: nothing is probed.
func askAll(ctx context.Context, pods Pods, speakers map[string]*corev1.Pod, plan map[string][]string, active bool) *answers {
	a := &answers{facts: map[string]diagnose.Facts{}, clocks: map[string]diagnose.Clock{}, mute: map[string]string{}}
	var group errgroup.Group
	group.SetLimit(asksAtOnce)
	for node, pod := range speakers {
		query, timeout := url.Values{}, lookTimeout
		if active {
			timeout = probeTimeout
			query.Set(diagnose.ParamActive, "true")
			query[diagnose.ParamVIP] = plan[node]
		}
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			a.ask(ctx, pods, pod, query)
			return nil
		})
	}
	group.Wait() //nolint:errcheck // they return nil
	return a
}

func (a *answers) ask(ctx context.Context, pods Pods, pod *corev1.Pod, query url.Values) {
	asked := time.Now()
	raw, err := pods.Get(ctx, pod, diagnose.Path, query)
	heard := time.Now()
	var f diagnose.Facts
	if err == nil {
		err = json.Unmarshal(raw, &f)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	node := pod.Spec.NodeName
	if err != nil {
		a.mute[node] = fmt.Sprintf("pod %s does not answer: %s", pod.Name, why(err, pod.Namespace))
		return
	}
	f.Node = node // who else it may take itself for
	f.Conditions = slices.DeleteFunc(f.Conditions, func(c diagnose.Condition) bool { return c.Name == "" })
	a.facts[node] = f
	a.clocks[node] = *compare(asked, heard, f.Received, f.Sent)
}

// why puts an error into words of ours. It is the API server's, or a speaker's that came by way of it: the text
// of that is no object of Kubernetes.
func why(err error, namespace string) string {
	var answer string
	if status := apierrors.APIStatus(nil); errors.As(err, &status) && status.Status().Details != nil {
		for _, c := range status.Status().Details.Causes {
			if c.Type == metav1.CauseTypeUnexpectedServerResponse {
				answer = strings.TrimSpace(c.Message)
			}
		}
	}
	switch {
	case apierrors.IsNotFound(err) && answer != "":
		return "a speaker of an older version cannot be diagnosed"
	case apierrors.IsForbidden(err) && answer == "":
		return "you need the right to get pods/proxy in namespace " + namespace
	}
	return cmp.Or(answer, err.Error())
}
