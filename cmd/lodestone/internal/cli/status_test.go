package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

func TestStatusOfAHealthyCluster(t *testing.T) {
	t.Parallel()
	newWorld(t).ask("status-healthy.txt", ExitOK, "status")
}

// Everything goes wrong at once: what is wrong comes first.
func TestStatusOfABadNight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// n2's speaker is old and not ready, n3 has none; n1's session is down, and
	// another machine has its VIP.
	w.drop("lodestone-speaker-n2")
	w.drop("lodestone-speaker-n3")
	w.drop("lodestone-speaker-n1")
	down := report.Session{Peer: "tor-a", Router: netip.MustParseAddr("192.0.2.1"), Since: ago(90 * time.Second), BFD: "Down",
		Message: "hold timer expired: the router was not heard for 1m30s"}
	w.add(pod("speaker", "n1", "v0.4.0", true), pod("speaker", "n2", "v0.3.0", false),
		lease("n1", map[string]string{annotation.Report: `{"segments": ["203.0.113.0/24 eth0"], "conflicts": ["203.0.113.10 02:00:00:00:00:0c announced"]}`}, down))
	crashed := object[*corev1.Pod](w, "lodestone-speaker-n2")
	crashed.Status.ContainerStatuses = []corev1.ContainerStatus{
		{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
	// The controller does not lead, Services wait.
	w.drop(cluster.ElectionLease)
	asks := service("asks", "")
	asks.Annotations = map[string]string{annotation.AddressPool: "nowhere"}
	w.add(asks, service("new", ""), service("gone", "192.0.2.99"))
	w.ask("status-bad-night.txt", ExitFound, "status")
}

// A speaker that reports that it was late is shown for an hour. That is over, and no warning.
func TestStatusOfALateSpeaker(t *testing.T) {
	t.Parallel()
	for age, shown := range map[time.Duration]bool{50 * time.Minute: true, 65 * time.Minute: false} {
		w := newWorld(t)
		l := object[*coordinationv1.Lease](w, annotation.SpeakerLeasePrefix+"n2")
		r := report.Of(l.Annotations)
		r.Late = report.Late{Milliseconds: 412, At: time.Now().Add(-age), Times: 4}
		l.Annotations = r.Annotations()
		assert.Equal(t, shown, strings.Contains(w.ask("", ExitOK, "status"),
			"with a heartbeat each 25 ms; n2 "+r.Late.String()+" (4 or more times in the hour)\n"))
		assert.Equal(t, shown, strings.Contains(w.ask("", ExitOK, "explain", "node", "n2"),
			"Late        its heartbeats, "+r.Late.String()+", 4 or more times in the hour\n"))
	}
}

func TestStatusOfAnEmptyCluster(t *testing.T) {
	t.Parallel()
	w := &world{t: t}
	w.ask("status-empty.txt", ExitFound, "status")
}

func TestStatusReportsWhatIsWrongWithTheConfiguration(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = header +
		"pool: []\npools: [{name: lan, addresses: [203.0.113.1/24]}]\n"
	w.ask("status-invalid.txt", ExitInvalid, "status")
}

// refuse makes the API server refuse to give the resource.
func (w *world) refuse(verb, resource string) {
	w.client = testapi.New(w.objects...)
	w.client.PrependReactor(verb, resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
	})
}

func TestStatusReportsWhichRightIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.refuse("list", "pods")
	w.ask("status-forbidden.txt", ExitFailed, "status")

	w.refuse("get", "configmaps")
	text := w.ask("", ExitFailed, "status")
	assert.Contains(t, text, "you may not read the configuration: you need the right to get configmaps in namespace lodestone-system")
	assert.Contains(t, text,
		"you may not read the addresses in quarantine: you need the right to get configmaps in namespace lodestone-system")
	assert.Contains(t, text, "CONFIGURATION  not read")
	assert.NotContains(t, text, "All is well")

	w.refuse("*", "*")
	text = w.ask("", ExitFailed, "status")
	assert.Equal(t, 1, strings.Count(text, "\n"), "nothing could be read: one sentence is enough: %s", text)
	assert.Contains(t, text, "you need the right to ")

	w.client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewUnauthorized("Unauthorized")
	})
	assert.Equal(t, "lodestone: the API server does not accept your credentials, or they have expired: log in again, or see --context "+
		"and --kubeconfig\n", w.ask("", ExitFailed, "status"))

	w.refuse("list", "services")
	text = w.ask("", ExitFailed, "explain", "service", "web")
	assert.Contains(t, text, "you may not read Services: you need the right to list services in the whole cluster")
}

// Speakers that are meant to run on some nodes only are not missed on others.
func TestSpeakersAreMissedWhereTheyAreMeantToBe(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.add(node("gateway", "203.0.113.9", nil))
	assert.Contains(t, w.ask("", ExitFound, "status"), "node gateway: no speaker pod")
	w.client = nil
	for _, name := range []string{"n1", "n2", "n3"} {
		object[*corev1.Pod](w, "lodestone-speaker-"+name).Spec.NodeSelector = map[string]string{"rack": "a"}
	}
	text := w.ask("", ExitFound, "status")
	assert.NotContains(t, text, "node gateway: no speaker pod")
	assert.Contains(t, text, "3 of 3 nodes ready")
}

func TestAdvertisementsThatMatchNoInterfaceAreReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	l := object[*coordinationv1.Lease](w, annotation.SpeakerLeasePrefix+"n2")
	said := report.Of(l.Annotations)
	said.Unmatched = []string{"storage"}
	l.Annotations = said.Annotations()
	assert.Contains(t, w.ask("", ExitFound, "status"), "node n2: advertisement storage matches no interface of it")
}

// Who rotates the membership key sees which speakers have read the new one, and that
// all use it in the end. A speaker that has left does not count.
func TestMembershipKeyIsReported(t *testing.T) {
	t.Parallel()
	const before, after, evil = "8201839b0c01ff82", "a95c0da7beab4b13", "a95c0da7beab4b13\x1b[31m"
	for name, x := range map[string]struct {
		has  []string
		says string
		code int
	}{
		"one key":          {[]string{after, after, after}, "3 of 3 nodes ready, version v0.4.0, membership key " + after, ExitOK},
		"one does not say": {[]string{after, after, evil}, "3 of 3 nodes ready, version v0.4.0, membership key " + after, ExitOK},
		"one has not read it": {[]string{before + "," + after, before, before + "," + after}, ": " + before + " on n2; " + before + ", " +
			after + " on n1, n3\n", ExitFound},
		"one has nothing else": {[]string{before + "," + after, after, ""}, ": " + before + ", " + after + " on n1; " + after +
			" on n2\n", ExitFound},
		"all understand both": {[]string{before + "," + after, before + "," + after, before + "," + after}, ": " + before + ", " + after +
			" on n1, n2, n3\n", ExitFound},
		"nobody says anything": {[]string{"", "", ""}, "3 of 3 nodes ready, version v0.4.0\n", ExitOK},
	} {
		w := newWorld(t)
		for i, has := range x.has {
			node := fmt.Sprint("n", i+1)
			l := object[*coordinationv1.Lease](w, annotation.SpeakerLeasePrefix+node)
			said := report.Of(l.Annotations)
			said.Keys = strings.FieldsFunc(has, func(c rune) bool { return c == ',' })
			l.Annotations, l.Spec.HolderIdentity = said.Annotations(), &node
		}
		w.add(lease("n4", report.Report{Keys: []string{before}}.Annotations()))
		assert.Contains(t, w.ask("", x.code, "status"), x.says, name)
	}
}

// A version is the image's tag; a registry's port is none. An image without one, as a release's chart has it, is compared with the
// others of its component: those of two components always differ.
func TestVersionSkewIsOfTags(t *testing.T) {
	t.Parallel()
	for image, skew := range map[string]bool{"r:5000/s:v0.5.0": true, "r:5000/s:v0.4.0": false, "r:5000/s": true, "r/s@sha256:00": true,
		"r/s:v0.3.0@sha256:00": true} {
		w := newWorld(t)
		object[*corev1.Pod](w, "lodestone-speaker-n2").Spec.Containers[0].Image = image
		want := ExitOK
		if skew {
			want = ExitFound
		}
		assert.Equal(t, skew, strings.Contains(w.ask("", want, "status"), "an upgrade is under way"), image)
	}
}

// A release's chart names both images by their digests alone.
func TestVersionSkewOfARelease(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, o := range w.objects {
		if p, ok := o.(*corev1.Pod); ok {
			p.Spec.Containers[0].Image = "r/" + p.Labels["app.kubernetes.io/component"] + "@sha256:" + p.Labels["app.kubernetes.io/component"]
		}
	}
	assert.NotContains(t, w.ask("", ExitOK, "status"), "an upgrade is under way")
	object[*corev1.Pod](w, "lodestone-speaker-n2").Spec.Containers[0].Image = "r/s@sha256:22"
	w.client = nil // another one, with the objects as they are now
	assert.Contains(t, w.ask("", ExitFound, "status"), "an upgrade is under way")
}

// The leader's clock is not this one's; a leader that is gone is reported.
func TestLeaderThatIsGoneIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	object[*coordinationv1.Lease](w, cluster.ElectionLease).Spec.RenewTime = new(metav1.NewMicroTime(ago(10 * time.Minute)))
	assert.Contains(t, w.ask("", ExitFound, "status"),
		"the leader lodestone-controller-n1 has not renewed its Lease for 10m, by the clock of this machine")
	object[*coordinationv1.Lease](w, cluster.ElectionLease).Spec.HolderIdentity = new("")
	w.client = nil
	assert.Contains(t, w.ask("", ExitFound, "status"), "no replica leads")
}

func TestStatusForPrograms(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var s, same status.Status
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "status", "-o", "json")), &s))
	require.NoError(t, yaml.Unmarshal([]byte(w.ask("", ExitOK, "status", "--output=yaml")), &same))
	same.Time = s.Time
	assert.Equal(t, s, same)
	assert.Equal(t, 3, s.Services.Served)
	assert.Equal(t, 3, s.VIPs.Total)
	assert.Equal(t, "lodestone-controller-n1", s.Controller.Leader)
	assert.NotNil(t, s.Warnings, "programs count them")
	assert.Contains(t, w.ask("", ExitFailed, "status", "-o", "xml"), "the formats are table, json or yaml")
}

func TestStatusHasColoursOnlyOnATerminal(t *testing.T) {
	t.Parallel()
	assert.NotContains(t, newWorld(t).ask("", ExitOK, "status"), "\x1b")

	w, evil := newWorld(t), report.Session{Peer: "tor-a", Message: "\x1b]0;owned\x07", Since: time.Now()}
	w.drop("lodestone-speaker-n1")
	w.add(pod("speaker", "n1", "v0.4.0", true), lease("n1", nil, evil))
	client := testapi.New(w.objects...)
	var out bytes.Buffer
	code := Run([]string{"status"}, Streams{Out: &out, Err: &out, Color: true,
		Connect: func() (kubernetes.Interface, string, error) { return client, "", nil }})
	assert.Equal(t, ExitFound, code)
	assert.Contains(t, out.String(), string(output.Bad))
	assert.Contains(t, out.String(), " ]0;owned ", "what a Lease says does not steer the terminal")
}

// unreached is what the user reads while the cluster is away.
const unreached = "lodestone: Get \"/version\": no route?[2J to host: " +
	"is it the right cluster (--context, --kubeconfig), and does its API server run?\n"

// watched is what status --watch writes while the cluster is there, away, and back.
func watched(t *testing.T, format output.Format) (out, errs string) {
	ctx, cancel := context.WithCancel(t.Context())
	w := newWorld(t)
	client, calls := testapi.New(w.objects...), 0
	var o, e bytes.Buffer
	cl := &target{timeout: time.Minute, place: cluster.Place{Namespace: config.Namespace, ConfigName: config.ConfigMapName},
		connect: func() (kubernetes.Interface, string, error) {
			switch calls++; calls {
			case 2:
				return nil, "", &url.Error{Op: "Get", URL: "/version", Err: errors.New("no route\x1b[2J to host")}
			case 3:
				cancel()
			}
			return client, "", nil
		}}
	require.NoError(t, watchStatus(ctx, cl, &answer{format: format}, watching{&o, &e, format == output.Table, time.Millisecond}))
	return o.String(), e.String()
}

// A cluster that goes away and comes back is watched on.
func TestWatchedStatusIsDrawnAgain(t *testing.T) {
	t.Parallel()
	out, errs := watched(t, output.Table)
	screens := strings.Split(out, clearScreen)
	require.Len(t, screens, 4, "three screens after nothing: %q", screens)
	assert.Contains(t, screens[1], "CONTROLLER")
	assert.Equal(t, unreached, screens[2])
	assert.Empty(t, errs)
}

// Programs that watch get nothing but statuses.
func TestWatchedStatusForPrograms(t *testing.T) {
	t.Parallel()
	out, errs := watched(t, output.JSON)
	assert.Equal(t, unreached, errs)
	all := json.NewDecoder(strings.NewReader(out))
	for range 2 {
		var s status.Status
		require.NoError(t, all.Decode(&s))
		assert.Equal(t, "lodestone-controller-n1", s.Controller.Leader)
	}
	require.ErrorIs(t, all.Decode(&struct{}{}), io.EOF)
	out, _ = watched(t, output.YAML)
	assert.Equal(t, 2, strings.Count(out, "---\n"), "a document for each")
}

// BenchmarkStatus is all but the conversation with the API server, with VIPs by
// layer 2 or BGP on 20 nodes.
func BenchmarkStatus(b *testing.B) {
	for pool, name := range map[string]string{"edge": "bgp", "lan": "layer2"} {
		b.Run(name, func(b *testing.B) {
			w := &world{}
			text := strings.NewReplacer("203.0.113.10-203.0.113.19", "10.0.0.0/16", "198.51.100.0/28", "10.1.0.0/16").Replace(configured)
			w.add(configMap(config.ConfigMapName, config.Key, text))
			var nodes []string
			for i := range 20 {
				name := fmt.Sprint("n", i)
				nodes = append(nodes, name)
				w.add(node(name, fmt.Sprint("203.0.113.", i+1), map[string]string{"rack": "b"}), lease(name, nil), pod("speaker", name, "v1", true))
			}
			second := map[string]byte{"lan": 0, "edge": 1}[pool]
			for i := range 10_000 {
				name := fmt.Sprint("s", i)
				s := service(name, netip.AddrFrom4([4]byte{10, second, byte((i + 1) >> 8), byte(i + 1)}).String())
				s.Annotations[annotation.AddressPool] = pool
				w.add(s, endpoints(name, nodes[i%20], nodes[(i+7)%20]))
			}
			o, err := cluster.All(b.Context(), testapi.New(w.objects...), cluster.Place{
				Namespace: config.Namespace, ConfigName: config.ConfigMapName, Scope: kube.Scope{Classless: true}})
			require.NoError(b, err)
			b.ResetTimer()
			for b.Loop() {
				require.Equal(b, 10_000, status.Of(o).VIPs.Total)
			}
		})
	}
}
