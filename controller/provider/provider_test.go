package provider_test

import (
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// given is a configuration that does not change.
type given struct {
	config *config.Config
	state  kube.State
}

func (g given) Current() (*config.Config, kube.State) { return g.config, g.state }

func parse(t *testing.T, doc string) given {
	t.Helper()
	cfg, err := config.Parse([]byte("apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + doc))
	if err != nil {
		t.Fatal(err)
	}
	return given{cfg, kube.State{Read: true}}
}

// lan has two addresses, which do not rest.
const lan = "clusterID: fra1\nquarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.11]}]\n"

func TestNameWithoutConfiguration(t *testing.T) {
	t.Parallel()
	lb, _ := provider.New(provider.Options{Config: given{}}).LoadBalancer()
	if name := lb.GetLoadBalancerName(t.Context(), "kubernetes", service("one")); name != "kubernetes-default-one" {
		t.Errorf("name %q", name)
	}
}

func TestCloud(t *testing.T) {
	t.Parallel()
	cloud := provider.New(provider.Options{Config: given{}, Log: slog.New(slog.DiscardHandler)})
	if cloud.ProviderName() != "lodestone" || !cloud.HasClusterID() {
		t.Error("wrong name or no cluster ID")
	}
	for what, ok := range map[string]bool{
		"Routes":    second(cloud.Routes()),
		"Zones":     second(cloud.Zones()),
		"Clusters":  second(cloud.Clusters()),
		"Instances": second(cloud.Instances()),
	} {
		if ok {
			t.Errorf("%s is implemented", what)
		}
	}
}

func second[T any](_ T, ok bool) bool { return ok }

func service(name string) *corev1.Service {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	return svc
}

func eventually(t *testing.T, want string, got func() string) {
	t.Helper()
	for deadline := time.Now().Add(90 * time.Second); got() != want; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %q, want %q", got(), want)
		}
	}
}
