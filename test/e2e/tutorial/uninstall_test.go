package tutorial_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

// services are Services that an operator forgets: one with each kind of
// finalizer, also with both of ours and with a finalizer of another program.
const services = `
apiVersion: v1
kind: Service
metadata: {name: forgotten, finalizers: [example.com/other, lodestone.io/load-balancer-cleanup]}
spec: {type: LoadBalancer, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: classed}
spec: {type: LoadBalancer, loadBalancerClass: lodestone.io/lodestone, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: others, annotations: {a: b}, finalizers: [service.kubernetes.io/load-balancer-cleanup]}
spec: {type: LoadBalancer, loadBalancerClass: example.com/other, ports: [{port: 80}]}
`

// uninstall follows the guide for an operator who has forgotten to delete the
// Services.
func uninstall(t *testing.T, c *lab.Cluster) {
	t.Helper()
	_, section, _ := strings.Cut(document(t, c, "guides/installation.md"), "\n## Uninstalling\n")
	commands := commandsOf(section)
	require.Len(t, commands, 2)
	kubectl := func(args ...string) string { return kubectl(t, c, args...) }
	finalizers := func(name string) string {
		t.Helper()
		return kubectl("get", "service", name, "--ignore-not-found", "--output", "jsonpath={.metadata.finalizers}")
	}

	command{text: "kubectl apply --filename - <<'END'" + services + "END\n", host: lab.ControlPlane}.run(t, c, "")
	for _, name := range []string{"forgotten", "classed"} {
		kubectl("wait", "service/"+name, "--for=jsonpath={.status.loadBalancer.ingress}", "--timeout=30s")
	}
	whole := commands[0]
	before, last, found := strings.Cut(whole.text, "kubectl delete namespace")
	require.True(t, found)
	whole.text = before
	whole.run(t, c, "")
	kinds := strings.Fields(kubectl("api-resources", "--namespaced", "--verbs=list,get,delete", "--output=name"))
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		left := strings.Fields(kubectl("--namespace=lodestone-system", "get", strings.Join(kinds, ","), "--output=name"))
		left = slices.DeleteFunc(left, func(name string) bool { return strings.HasPrefix(name, "event") }) // Events are of the past
		assert.Equal(t, []string{"configmap/kube-root-ca.crt", "serviceaccount/default"}, left)
	}, time.Minute, time.Second, "in a namespace that others use")
	whole.text = "kubectl delete namespace" + last
	whole.run(t, c, "")
	kubectl("delete", "service", "forgotten", "classed", "others", "--wait=false")
	assert.Equal(t, `["lodestone.io/load-balancer-cleanup"]`, finalizers("classed"))

	commands[1].run(t, c, "")
	assert.Empty(t, finalizers("classed"), "it is gone")
	assert.Equal(t, `["example.com/other"]`, finalizers("forgotten"))
	assert.Equal(t, `["service.kubernetes.io/load-balancer-cleanup"]`, finalizers("others"))
	for _, name := range []string{"forgotten", "others"} {
		kubectl("patch", "service", name, "--type=merge", `--patch={"metadata":{"finalizers":null}}`)
	}
	nothingLeft(t, c)
}

// kubectl returns what kubectl prints, without warnings.
func kubectl(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Command(t.Context(), lab.ControlPlane, append([]string{"kubectl"}, args...)...).Output()
	require.NoError(t, err)
	return string(out)
}

// nothingLeft checks that no object of any kind mentions us.
func nothingLeft(t *testing.T, c *lab.Cluster) {
	t.Helper()
	kinds := strings.Fields(kubectl(t, c, "api-resources", "--verbs=list,get", "--output=name"))
	var list struct{ Items []json.RawMessage }
	require.NoError(t, json.Unmarshal([]byte(kubectl(t, c, "get", strings.Join(kinds, ","), "--all-namespaces", "--output=json")), &list))
	require.Greater(t, len(list.Items), 50, "of %d kinds", len(kinds))
	for _, raw := range list.Items {
		var about metav1.PartialObjectMetadata
		require.NoError(t, json.Unmarshal(raw, &about))
		text := string(raw)
		switch about.Kind {
		case "Event": // of the past
			continue
		case "Node": // knows its images, and its provider for good
			var node corev1.Node
			require.NoError(t, json.Unmarshal(raw, &node))
			node.Spec.ProviderID, node.Status.Images = "", nil
			kept, err := json.Marshal(node)
			require.NoError(t, err)
			text = string(kept)
		}
		assert.NotContains(t, text, "lodestone", "%s %s", about.Kind, about.Name)
	}
}
