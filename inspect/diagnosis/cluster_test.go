package diagnosis

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

func read(t *testing.T, c *example.Cluster) *cluster.Objects {
	t.Helper()
	o, err := cluster.All(t.Context(), c, example.Place)
	require.NoError(t, err)
	return o
}

// A check whose objects cannot be read is unknown, and never fine.
func TestWhatCannotBeReadIsUnknown(t *testing.T) {
	t.Parallel()
	needs := map[string][]diagnose.ID{
		cluster.ConfigMaps: {diagnose.Configuration, diagnose.BGP, diagnose.BFD, diagnose.Announced, diagnose.OnSegment},
		cluster.Election:   {diagnose.Controller},
		cluster.Leases:     {diagnose.Conflict, diagnose.BGP, diagnose.BFD, diagnose.Announced, diagnose.OnSegment},
		cluster.Services:   {diagnose.Implementations, diagnose.Announced, diagnose.OnSegment},
		cluster.Slices:     {diagnose.Announced, diagnose.OnSegment},
		cluster.Pods: {diagnose.Controller, diagnose.Speakers, diagnose.Versions, diagnose.BGP, diagnose.BFD, diagnose.Announced,
			diagnose.OnSegment},
		cluster.Nodes: {diagnose.Controller, diagnose.Speakers, diagnose.Versions, diagnose.BGP, diagnose.BFD, diagnose.Announced,
			diagnose.OnSegment},
	}
	c := example.New(example.Size{Nodes: 3, Services: 6})
	whole := diagnose.Check(clusterOf(read(t, c)))
	for kind, checks := range needs {
		o := read(t, c)
		o.Omit(kind, errors.New("you may not read it"))
		without := diagnose.Check(clusterOf(o))
		for _, id := range checks {
			assert.Equal(t, diagnose.OK, severity(whole, id), "%s, when all is read", id)
			assert.Equal(t, diagnose.Unknown, severity(without, id), "%s, without %s", id, kind)
		}
		assert.Equal(t, diagnose.Unknown, severity(without, diagnose.Complete), kind)
	}
}

// severity is that of a check's first finding.
func severity(r diagnose.Report, id diagnose.ID) diagnose.Severity {
	i := slices.IndexFunc(r.Findings, func(f diagnose.Finding) bool { return f.Check == id })
	if i < 0 {
		return ""
	}
	return r.Findings[i].Severity
}

// The status has a warning of each name that a check looks for.
func TestChecksKnowTheWarningsOfTheStatus(t *testing.T) {
	t.Parallel()
	emitted := map[string]bool{}
	for _, file := range []string{"status.go", "announce.go", "keys.go"} {
		text, err := os.ReadFile("../status/" + file)
		require.NoError(t, err)
		for _, call := range regexp.MustCompile(`s\.warn\("([^"]+)"`).FindAllSubmatch(text, -1) {
			emitted[string(call[1])] = true
		}
	}
	require.NotEmpty(t, emitted)
	for name := range maps.Keys(about) {
		assert.True(t, emitted[name], "the status has no warning about %q", name)
	}
	// The others are checks of their own, or are about no failure of the installation.
	for _, name := range []string{"VIPs", "BGP", "Services", "pool"} {
		delete(emitted, name)
	}
	assert.ElementsMatch(t, slices.Collect(maps.Keys(about)), slices.Collect(maps.Keys(emitted)))
}

// mutePods are pods of which nothing can be had.
type mutePods struct{}

func (mutePods) Get(context.Context, *corev1.Pod, string, url.Values) ([]byte, error) {
	return nil, errors.New("no answer")
}

func (mutePods) Log(context.Context, *corev1.Pod, bool) ([]byte, error) {
	return nil, errors.New("no log")
}

// A bundle names what is missing in it, and why.
func TestBundleNamesEachGap(t *testing.T) {
	t.Parallel()
	c := example.New(example.Size{Nodes: 2, Services: 2})
	o := read(t, c)
	o.Omit(cluster.Slices, errors.New("no EndpointSlices"))
	for resource, verb := range map[string]string{"configmaps": "get", "events": "list"} {
		c.PrependReactor(verb, resource, func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("no " + resource)
		})
	}
	d := Of(t.Context(), o, Options{Client: c,
		Ask: func(context.Context, kubernetes.Interface, string) (Pods, *diagnose.Clock, error) {
			return mutePods{}, nil, nil
		}})
	d.facts = map[string]diagnose.Facts{example.NodeName(0): {}}
	var archive bytes.Buffer
	require.NoError(t, d.Bundle(t.Context(), &archive))
	files := unpack(t, &archive)
	missing := files["missing.txt"]
	for _, gap := range append([]string{"config.yaml: no configmaps", "events.json: no events", "no EndpointSlices",
		"speakers/" + example.NodeName(0) + ".json: no answer"}, logsOf(o)...) {
		assert.Contains(t, missing, gap)
	}
	for _, name := range []string{"config.yaml", "speakers/" + example.NodeName(0) + ".json"} {
		assert.NotContains(t, files, name)
	}
	assert.Contains(t, files, "facts/"+example.NodeName(0)+".json")
}

// slowPods are pods of which the one never answers.
type slowPods struct{ one string }

func (p slowPods) Get(ctx context.Context, pod *corev1.Pod, _ string, _ url.Values) ([]byte, error) {
	if pod.Spec.NodeName == p.one {
		<-ctx.Done()
	}
	return []byte("{}"), ctx.Err()
}

func (p slowPods) Log(ctx context.Context, pod *corev1.Pod, _ bool) ([]byte, error) {
	return p.Get(ctx, pod, "", nil)
}

// A node that never answers keeps no log of another one out of a bundle.
func TestBundleDoesNotWaitForANode(t *testing.T) {
	t.Parallel()
	c := example.New(example.Size{Nodes: 2, Services: 2})
	o := read(t, c)
	d := Of(t.Context(), o, Options{Client: c,
		Ask: func(context.Context, kubernetes.Interface, string) (Pods, *diagnose.Clock, error) {
			return mutePods{}, nil, nil
		}})
	d.pods = slowPods{example.NodeName(0)}
	d.facts = map[string]diagnose.Facts{example.NodeName(0): {}, example.NodeName(1): {}}
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var archive bytes.Buffer
		require.NoError(t, d.Bundle(t.Context(), &archive))
		require.Less(t, time.Since(began), time.Minute)
		files := unpack(t, &archive)
		assert.Contains(t, files["missing.txt"], "speakers/"+example.NodeName(0)+".json: "+context.DeadlineExceeded.Error())
		for _, p := range slices.Concat(o.Controllers, o.Speakers) {
			if p.Spec.NodeName != example.NodeName(0) {
				assert.Contains(t, files, "logs/"+p.Name+".log")
			}
		}
		assert.Contains(t, files, "speakers/"+example.NodeName(1)+".json")
	})
}

// logsOf are the gaps where no log can be had.
func logsOf(o *cluster.Objects) (gaps []string) {
	for _, p := range slices.Concat(o.Controllers, o.Speakers) {
		gaps = append(gaps, "logs/"+p.Name+".log: no log")
	}
	return gaps
}

// unpack returns the files of a bundle, by name.
func unpack(t *testing.T, archive io.Reader) map[string]string {
	t.Helper()
	plain, err := gzip.NewReader(archive)
	require.NoError(t, err)
	files := map[string]string{}
	for from := tar.NewReader(plain); ; {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		text, err := io.ReadAll(from)
		require.NoError(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		files[name] = string(text)
	}
}
