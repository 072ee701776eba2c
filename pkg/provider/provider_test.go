package provider_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/cloud-provider/api"
	servicecontroller "k8s.io/cloud-provider/controllers/service"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/provider"
	"github.com/lodestone-lb/lodestone/pkg/released"
	"github.com/lodestone-lb/lodestone/pkg/servicelb"
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

const lan = "clusterID: fra1\npools: [{name: lan, addresses: [203.0.113.10-203.0.113.11]}]\n"

// cluster is the provider in a cluster of Services.
func cluster(t *testing.T, g given, services ...*corev1.Service) (*provider.Cloud, *fake.Clientset, informers.SharedInformerFactory) {
	client := fake.NewClientset()
	for _, svc := range services {
		if _, err := client.CoreV1().Services(svc.Namespace).Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	cloud := provider.New(g, servicelb.NewLedger(servicelb.Scope{Classless: true}, servicelb.Sources{Config: g}),
		released.New(client, "lodestone-system", slog.New(slog.DiscardHandler)), provider.PodRoutes{Log: slog.New(slog.DiscardHandler)})
	cloud.Initialize(nil, nil)
	cloud.SetInformers(factory)
	return cloud, client, factory
}

func service(name string) *corev1.Service {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	return svc
}

func TestLoadBalancer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cloud, _, factory := cluster(t, parse(t, lan))
	lb, ok := cloud.LoadBalancer()
	if !ok {
		t.Fatal("no load balancer")
	}
	one, two, three := service("one"), service("two"), service("three")

	var retry *api.RetryError
	if _, err := lb.EnsureLoadBalancer(ctx, "", one, nil); !errors.As(err, &retry) {
		t.Fatalf("before Services are listed: %v", err)
	}
	if err := lb.EnsureLoadBalancerDeleted(ctx, "", one); !errors.As(err, &retry) {
		t.Fatalf("before Services are listed: %v", err)
	}
	if _, _, err := lb.GetLoadBalancer(ctx, "", one); !errors.As(err, &retry) {
		t.Fatalf("before Services are listed: %v", err)
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	if _, exists, err := lb.GetLoadBalancer(ctx, "", one); exists || err != nil {
		t.Errorf("exists %v, %v", exists, err)
	}
	status, err := lb.EnsureLoadBalancer(ctx, "", one, nil)
	if err != nil || fmt.Sprintf("%s %s", status.Ingress[0].IP, *status.Ingress[0].IPMode) != "203.0.113.10 VIP" {
		t.Errorf("one: %v, %v", status, err)
	}
	if again, err := lb.EnsureLoadBalancer(ctx, "", one, nil); err != nil || again.Ingress[0].IP != "203.0.113.10" {
		t.Errorf("one again: %v, %v", again, err)
	}
	if got, exists, err := lb.GetLoadBalancer(ctx, "", one); !exists || err != nil || got.Ingress[0].IP != "203.0.113.10" {
		t.Errorf("get one: %v, %v, %v", got, exists, err)
	}
	if _, err := lb.EnsureLoadBalancer(ctx, "", two, nil); err != nil {
		t.Error(err)
	}
	var refusal *ipam.Refusal
	if _, err := lb.EnsureLoadBalancer(ctx, "", three, nil); !errors.As(err, &refusal) || refusal.Reason != ipam.PoolExhausted {
		t.Errorf("three: %v", err)
	}
	if err := lb.UpdateLoadBalancer(ctx, "", one, nil); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := lb.EnsureLoadBalancerDeleted(ctx, "", one); err != nil {
			t.Error(err)
		}
	}
	if _, exists, _ := lb.GetLoadBalancer(ctx, "", one); exists {
		t.Error("one exists although it was deleted")
	}
	if name := lb.GetLoadBalancerName(ctx, "kubernetes", one); name != "fra1-default-one" {
		t.Errorf("name %q", name)
	}
}

func TestNameWithoutConfiguration(t *testing.T) {
	t.Parallel()
	lb, _ := provider.New(given{}, nil, nil, provider.PodRoutes{}).LoadBalancer()
	if name := lb.GetLoadBalancerName(t.Context(), "kubernetes", service("one")); name != "kubernetes-default-one" {
		t.Errorf("name %q", name)
	}
}

func TestCloud(t *testing.T) {
	t.Parallel()
	cloud := provider.New(given{}, nil, nil, provider.PodRoutes{Log: slog.New(slog.DiscardHandler)})
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

// The framework's own service controller works with the provider: it assigns,
// keeps what was assigned before it started, refuses and frees.
func TestUpstreamServiceController(t *testing.T) {
	old := service("old")
	old.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	cloud, client, factory := cluster(t, parse(t, strings.Replace(lan, "pools", "quarantine: 0s\npools", 1)), old)
	ctl, err := servicecontroller.New(cloud, client, factory.Core().V1().Services(), factory.Core().V1().Nodes(), "kubernetes", utilfeature.DefaultFeatureGate)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctl.Run(ctx, 1, controllersmetrics.NewControllerManagerMetrics("test"))
	}()
	t.Cleanup(func() { cancel(); <-done })
	factory.Start(ctx.Done())
	services := client.CoreV1().Services("default")
	address := func(name string) func() string {
		return func() string {
			svc, err := services.Get(ctx, name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				return "gone"
			case err != nil:
				return err.Error()
			case len(svc.Status.LoadBalancer.Ingress) == 0:
				return ""
			}
			return svc.Status.LoadBalancer.Ingress[0].IP
		}
	}
	if _, err := services.Create(ctx, service("next"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "203.0.113.11", address("next"))
	eventually(t, "203.0.113.10", address("old"))

	svc, _ := services.Get(ctx, "next", metav1.GetOptions{})
	svc.Spec.Type = corev1.ServiceTypeClusterIP
	if _, err := services.Update(ctx, svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "", address("next"))
	if _, err := services.Create(ctx, service("third"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "203.0.113.11", address("third"))
}

func eventually(t *testing.T, want string, got func() string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); got() != want; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %q, want %q", got(), want)
		}
	}
}
