package scenarios

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// asSpeaker returns a client with the token that the kubelet gives to the speaker of
// the node, or with one that names no node if bound is false.
func (s *story) asSpeaker(node string, bound bool) *kubernetes.Clientset {
	s.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound {
		pod := s.speakerOf(node)
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	token, err := s.Kube.CoreV1().ServiceAccounts(lodestone.Namespace).CreateToken(s.ctx, lodestone.Speaker, request, metav1.CreateOptions{})
	require.NoError(s, err)
	config, err := s.Lab.RESTConfig()
	require.NoError(s, err)
	config = rest.AnonymousClientConfig(config)
	config.BearerToken, config.QPS = token.Status.Token, -1
	client, err := kubernetes.NewForConfig(config)
	require.NoError(s, err)
	return client
}

// The rights of one node's speaker are found by trying: every verb on every kind that the API
// server has, in three namespaces, with the speaker's token. What is allowed is listed here; the
// rest is 403.
func TestASpeakersTokenMayDoNothingBeyond(t *testing.T) {
	s := begin(t)
	speaker := s.asSpeaker(s.Lab.Nodes()[0], true)
	const read, ours = "get list watch", lodestone.Namespace
	may := map[string]string{ // verbs by resource, in the namespace if one is given
		"services": read, "nodes": read, "endpointslices.discovery.k8s.io": read,
		"leases.coordination.k8s.io in " + ours:                        read + " create update",
		"tokenreviews.authentication.k8s.io":                           "create",
		"subjectaccessreviews.authorization.k8s.io":                    "create",
		"selfsubjectreviews.authentication.k8s.io":                     "create", // everybody
		"selfsubjectaccessreviews.authorization.k8s.io":                "create",
		"selfsubjectrulesreviews.authorization.k8s.io":                 "create",
		"configmaps/" + lodestone.ConfigMap + " in " + ours:            read,
		"secrets/tor in " + ours:                                       "get", // by the chart's values
		"configmaps/" + lodestone.ConfigMap + " in " + s.namespace:     "",
		"secrets/lodestone-membership in " + ours:                      "",
		"configmaps/lodestone-quarantine in " + ours:                   "",
		"configmaps/lodestone-config-last-valid in " + ours:            "get",
		"configmaps/lodestone-status in " + ours:                       "",
		"configmaps/extension-apiserver-authentication in kube-system": "",
	}
	_, lists, err := s.Kube.Discovery().ServerGroupsAndResources()
	require.NoError(t, err)
	asked := 0
	for _, list := range lists {
		path := "/apis/" + list.GroupVersion
		group, _, grouped := strings.Cut(list.GroupVersion, "/")
		if !grouped {
			path, group = "/api/"+list.GroupVersion, ""
		}
		for _, r := range list.APIResources {
			resource, sub, _ := strings.Cut(r.Name, "/")
			kind := strings.TrimSuffix(resource+"."+group, ".")
			for _, namespace := range []string{ours, "kube-system", s.namespace} {
				at := path + "/" + resource
				if r.Namespaced {
					at = path + "/namespaces/" + namespace + "/" + resource
				}
				names := []string{"some"}
				for key := range may {
					if name, in, ok := strings.Cut(strings.TrimPrefix(key, kind+"/"), " in "); strings.HasPrefix(key, kind+"/") && ok &&
						in == namespace && sub == "" {
						names = append(names, name)
					}
				}
				for _, name := range names {
					for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"} {
						if name != "some" && !slices.Contains([]string{"get", "update", "patch", "delete"}, verb) {
							continue
						}
						want := sub == "" && (allows(may, kind, verb) || allows(may, kind+" in "+namespace, verb) ||
							allows(may, kind+"/"+name+" in "+namespace, verb))
						asked++
						got := s.try(speaker.RESTClient(), verb, at, name, sub)
						if forbidden := apierrors.IsForbidden(got); forbidden == want {
							t.Errorf("%s %s %s %s: %v", verb, at, name, sub, got)
						}
					}
				}
				if !r.Namespaced {
					break
				}
			}
		}
	}
	t.Logf("asked %d times", asked)
}

func allows(may map[string]string, what, verb string) bool {
	return slices.Contains(strings.Fields(may[what]), verb)
}

// try does it without an effect, and returns the API server's answer.
func (s *story) try(c rest.Interface, verb, path, name, sub string) error {
	method := map[string]string{"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE", "deletecollection": "DELETE"}[verb]
	if method == "" {
		method = "GET"
	}
	if !slices.Contains([]string{"list", "watch", "create", "deletecollection"}, verb) || sub != "" {
		path += "/" + name
	}
	if sub != "" {
		path += "/" + sub
	}
	r := c.Verb(method).AbsPath(path)
	switch verb {
	case "watch":
		r = r.Param("watch", "true").Param("timeoutSeconds", "1").Param("resourceVersion", "0").Param("limit", "1")
		stream, err := r.Stream(s.ctx)
		if err == nil {
			err = stream.Close()
		}
		return err
	case "list":
		r = r.Param("limit", "1")
	case "create", "update":
		r = r.Param("dryRun", "All").SetHeader("Content-Type", "application/json").Body([]byte("{}"))
	case "patch":
		r = r.Param("dryRun", "All").SetHeader("Content-Type", string(types.MergePatchType)).Body([]byte("{}"))
	case "delete", "deletecollection":
		r = r.Param("dryRun", "All")
	}
	_, err := r.DoRaw(s.ctx)
	return err
}

// A speaker's token writes the Lease of its node, and no other: neither the controllers',
// which would stop them, nor that of another speaker, which would draw its VIPs.
func TestASpeakersTokenWritesItsOwnLeaseAlone(t *testing.T) {
	s := begin(t)
	nodes := s.Lab.Nodes()
	leases := s.asSpeaker(nodes[0], true).CoordinationV1().Leases(lodestone.Namespace)
	nowhere := s.asSpeaker(nodes[0], false).CoordinationV1().Leases(lodestone.Namespace)
	dry := metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}}
	own, err := leases.Get(s.ctx, "lodestone-speaker-"+nodes[0], metav1.GetOptions{})
	require.NoError(t, err)
	victim, err := leases.Get(s.ctx, "lodestone-speaker-"+nodes[1], metav1.GetOptions{})
	require.NoError(t, err)
	write := func(as coordinationclient.LeaseInterface, name string, change func(*coordinationv1.Lease)) error {
		for {
			l, err := leases.Get(s.ctx, name, metav1.GetOptions{})
			require.NoError(t, err)
			change(l)
			if _, err = as.Update(s.ctx, l, dry); !apierrors.IsConflict(err) { // renewed meanwhile
				return err
			}
		}
	}
	require.NoError(t, write(leases, own.Name, func(*coordinationv1.Lease) {}), "its own")
	require.NoError(t, write(leases, own.Name, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil }), "its own, when it ends")

	forever, nobody := int32(math.MaxInt32), "nobody"
	for _, x := range []struct {
		what, lease string
		change      func(*coordinationv1.Lease)
	}{
		{"no controller leads (S4)", lodestone.Controller, func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = &nobody, &forever
		}},
		{"another node loses its segment (S5)", victim.Name, func(l *coordinationv1.Lease) {
			l.Annotations["lodestone.io/report"] = `{"segments": ["192.0.2.0/24 eth0"]}`
		}},
		{"another node as it is", victim.Name, func(*coordinationv1.Lease) {}},
		{"held by another", own.Name, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &nobody }},
		{"owned by another Node", own.Name, func(l *coordinationv1.Lease) { l.OwnerReferences = victim.OwnerReferences }},
		{"owned by nobody", own.Name, func(l *coordinationv1.Lease) { l.OwnerReferences = nil }},
		{"owned by two", own.Name, func(l *coordinationv1.Lease) {
			l.OwnerReferences = append(l.OwnerReferences, victim.OwnerReferences...)
		}},
		{"other labels", own.Name, func(l *coordinationv1.Lease) { l.Labels["example.com/a"] = "b" }},
		{"without its label", own.Name, func(l *coordinationv1.Lease) { l.Labels = nil }},
		{"with a finalizer", own.Name, func(l *coordinationv1.Lease) { l.Finalizers = []string{"example.com/keep"} }},
		{"another annotation", own.Name, func(l *coordinationv1.Lease) { l.Annotations["example.com/a"] = "b" }},
		{"longer than any report", own.Name, func(l *coordinationv1.Lease) { l.Annotations["lodestone.io/report"] = strings.Repeat("x", 65537) }},
	} {
		err := write(leases, x.lease, x.change)
		assert.True(t, apierrors.IsForbidden(err), "%s: %v", x.what, err)
	}
	// An API server without coordinated elections drops these; one with them refuses the Lease.
	strategy := coordinationv1.OldestEmulationVersion
	own.Spec.Strategy, own.Spec.PreferredHolder = &strategy, &nobody
	if written, err := leases.Update(s.ctx, own.DeepCopy(), dry); err == nil {
		assert.Nil(t, written.Spec.Strategy)
		assert.Nil(t, written.Spec.PreferredHolder)
	} else {
		assert.True(t, apierrors.IsForbidden(err) || apierrors.IsConflict(err), "a strategy: %v", err)
	}
	own.Spec.Strategy, own.Spec.PreferredHolder = nil, nil
	fresh := func(name string) *coordinationv1.Lease {
		l := own.DeepCopy()
		l.ObjectMeta = metav1.ObjectMeta{Name: name, Namespace: own.Namespace, Labels: own.Labels, Annotations: own.Annotations,
			OwnerReferences: own.OwnerReferences}
		return l
	}
	generated := fresh("")
	generated.GenerateName = "lodestone-speaker-"
	for what, l := range map[string]*coordinationv1.Lease{
		"of another node": fresh("lodestone-speaker-" + nodes[1]),
		"of no node":      fresh("lodestone-speaker-ghost"), // a Lease of no node must not forbid addresses
		"of nobody":       fresh("some-lock"),
		"of no name":      generated,
		"the leader's":    fresh(lodestone.Controller),
	} {
		_, err := leases.Create(s.ctx, l, metav1.CreateOptions{DryRun: dry.DryRun})
		assert.True(t, apierrors.IsForbidden(err), "%s: %v", what, err)
	}
	for _, name := range []string{own.Name, victim.Name, lodestone.Controller} {
		err := write(nowhere, name, func(*coordinationv1.Lease) {})
		assert.True(t, apierrors.IsForbidden(err), "a token that names no node writes %s: %v", name, err)
		_, err = leases.Patch(s.ctx, name, types.MergePatchType, []byte(`{"spec": {"leaseDurationSeconds": 1}}`),
			metav1.PatchOptions{DryRun: dry.DryRun})
		assert.True(t, apierrors.IsForbidden(err), "patch %s: %v", name, err)
		assert.True(t, apierrors.IsForbidden(leases.Delete(s.ctx, name, metav1.DeleteOptions{DryRun: dry.DryRun})), "delete %s", name)
	}
	assert.True(t, apierrors.IsForbidden(leases.DeleteCollection(s.ctx, metav1.DeleteOptions{DryRun: dry.DryRun}, metav1.ListOptions{})))
}
