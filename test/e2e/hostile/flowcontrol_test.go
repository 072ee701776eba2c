package hostile

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

// installed returns an API server with the chart in it, and nothing that runs. It ends with the test.
func installed(t *testing.T, flags ...string) *cluster {
	t.Helper()
	g, err := prepare(t.Context(), t.Logf)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.end()) })
	require.NoError(t, g.serveAPI(t.Context(), flags...))
	config, err := g.config()
	require.NoError(t, err)
	c := &cluster{ground: g, result: &Result{}}
	c.kube, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	require.NoError(t, c.install(t.Context()))
	return c
}

// classified asks for a path, and returns the FlowSchema and the priority level that the API server found for it.
func (c *cluster) classified(ctx context.Context, config *rest.Config, path string) (schema, level string, err error) {
	transport, err := rest.TransportFor(config)
	if err != nil {
		return "", "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+path, nil)
	if err != nil {
		return "", "", err
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return "", "", err
	}
	defer answer.Body.Close()
	schemas, err := c.kube.FlowcontrolV1().FlowSchemas().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", "", err
	}
	for _, s := range schemas.Items {
		if string(s.UID) == answer.Header.Get("X-Kubernetes-Pf-Flowschema-Uid") {
			return s.Name, s.Spec.PriorityLevelConfiguration.Name, nil
		}
	}
	return "", "", fmt.Errorf("%s: no FlowSchema for %s", answer.Status, path)
}

// A real API server gives the requests of controller and speakers the priority levels that the chart's FlowSchemas name.
func TestOursDoNotWaitBehindTenants(t *testing.T) {
	c := installed(t)
	const leases = "/apis/coordination.k8s.io/v1/namespaces/" + lab.LodestoneNamespace + "/leases"
	for _, test := range []struct{ component, path, schema, level string }{
		{controller, leases + "/" + controller, "lodestone-leader-election", "leader-election"},
		{controller, leases, "lodestone", "workload-high"},
		{controller, "/api/v1/services", "lodestone", "workload-high"},
		{controller, "/version", "lodestone", "workload-high"},
		{speaker, "/version", "lodestone", "workload-high"},
		{speaker, leases + "/" + controller, "lodestone", "workload-high"},
		{speaker, "/apis/discovery.k8s.io/v1/endpointslices?watch=true&timeoutSeconds=1", "lodestone", "workload-high"},
	} {
		config, err := c.as(t.Context(), test.component, c.nodes[0])
		require.NoError(t, err)
		require.NoError(t, wait(t.Context(), "the API server has taken the FlowSchemas over", func() error {
			schema, level, err := c.classified(t.Context(), config, test.path)
			if err == nil && (schema != test.schema || level != test.level) {
				err = fmt.Errorf("%s asks for %s: %s, %s", test.component, test.path, schema, level)
			}
			return err
		}))
	}
}
