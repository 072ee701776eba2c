package provider_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	servicecontroller "k8s.io/cloud-provider/controllers/service"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

var services = corev1.SchemeGroupVersion.WithResource("services")

// apiServer is a fake client whose Services are treated as the API server treats
// them: it honours resourceVersion and UID of a patch, finalizers hold a
// deletion up, and a Service that is no load balancer any more has no such status.
type apiServer struct {
	*fake.Clientset
	version, uids int
}

func newAPIServer() *apiServer {
	s := &apiServer{Clientset: testapi.New()}
	s.PrependReactor("create", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
		svc := a.(clienttesting.CreateAction).GetObject().(*corev1.Service)
		s.uids++
		svc.UID = types.UID(fmt.Sprint("uid-", s.uids))
		svc.ResourceVersion = s.next()
		return true, svc, s.Tracker().Create(services, svc, svc.Namespace)
	})
	s.PrependReactor("update", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
		svc := a.(clienttesting.UpdateAction).GetObject().(*corev1.Service)
		return true, svc, s.store(svc)
	})
	s.PrependReactor("delete", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
		svc, err := s.get(a.GetNamespace(), a.(clienttesting.DeleteAction).GetName())
		if err != nil {
			return true, nil, err
		}
		svc.DeletionTimestamp = &metav1.Time{Time: time.Unix(1e9, 0)}
		return true, svc, s.store(svc)
	})
	s.PrependReactor("patch", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
		svc, err := s.patched(a.(clienttesting.PatchAction))
		if err != nil {
			return true, nil, err
		}
		return true, svc, s.store(svc)
	})
	return s
}

func (s *apiServer) next() string { s.version++; return strconv.Itoa(s.version) }

func (s *apiServer) get(namespace, name string) (*corev1.Service, error) {
	obj, err := s.Tracker().Get(services, namespace, name)
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Service).DeepCopy(), nil
}

func (s *apiServer) store(svc *corev1.Service) error {
	if svc.DeletionTimestamp != nil && len(svc.Finalizers) == 0 {
		return s.Tracker().Delete(services, svc.Namespace, svc.Name)
	}
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		svc.Status.LoadBalancer = corev1.LoadBalancerStatus{}
	}
	svc.ResourceVersion = s.next()
	return s.Tracker().Update(services, svc, svc.Namespace)
}

func (s *apiServer) patched(a clienttesting.PatchAction) (*corev1.Service, error) {
	old, err := s.get(a.GetNamespace(), a.GetName())
	if err != nil {
		return nil, err
	}
	before, _ := json.Marshal(old)
	apply := jsonpatch.MergePatch
	if a.GetPatchType() == types.StrategicMergePatchType {
		apply = func(doc, patch []byte) ([]byte, error) {
			return strategicpatch.StrategicMergePatch(doc, patch, corev1.Service{})
		}
	}
	after, err := apply(before, a.GetPatch())
	if err != nil {
		return nil, err
	}
	svc := &corev1.Service{}
	if err := json.Unmarshal(after, svc); err != nil {
		return nil, err
	}
	group := schema.GroupResource{Resource: "services"}
	switch {
	case svc.ResourceVersion != old.ResourceVersion:
		return nil, apierrors.NewConflict(group, svc.Name, errors.New("the object has been modified"))
	case svc.UID != old.UID:
		return nil, apierrors.NewConflict(group, svc.Name, errors.New("uid mismatch"))
	case svc.Spec.Type != corev1.ServiceTypeLoadBalancer && len(svc.Status.LoadBalancer.Ingress) > 0:
		return nil, apierrors.NewBadRequest("status.loadBalancer.ingress may only be used when spec.type is LoadBalancer")
	}
	svc.Spec = old.Spec
	return svc, nil
}

// PatchStatus implements servicelb.API.
func (s *apiServer) PatchStatus(ctx context.Context, namespace, name string, patch []byte) error {
	_, err := s.CoreV1().Services(namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// document is a configuration that stories edit.
type document struct {
	mu      sync.Mutex
	given   given
	changed chan struct{}
}

func (d *document) set(g given) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.given = g
	if d.changed != nil {
		close(d.changed)
	}
	d.changed = make(chan struct{})
}

func (d *document) Current() (*config.Config, kube.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.given.Current()
}

func (d *document) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

func (d *document) Warn(string)     {}
func (d *document) WarnOver(string) {}

// quiet is the rest of a cluster, in which nothing changes.
type quiet struct{}

func (quiet) Labels(string) map[string]string                     { return nil }
func (quiet) Known(string) bool                                   { return true }
func (quiet) Current() (*clusterfacts.Facts, bool)                { return &clusterfacts.Facts{}, true }
func (quiet) Changed() <-chan struct{}                            { return nil }
func (quiet) Wait(context.Context) bool                           { return true }
func (quiet) Event(runtime.Object, string, string, string)        {}
func (quiet) Once(runtime.Object, string, string, string, string) {}

// story is a cluster in which Kubernetes' own service controller drives the provider.
type story struct {
	*testing.T
	api    *apiServer
	config *document
	scope  kube.Scope
	// Of the process that runs.
	cloud      *provider.Cloud
	controller *servicelb.Controller
	stop       func()
}

func newStory(t *testing.T, pools string) *story {
	s := &story{T: t, api: newAPIServer(), config: &document{}, scope: kube.Scope{Classless: true, Classes: []string{"lodestone.io/lb"}}}
	s.config.set(parse(t, pools))
	t.Cleanup(func() {
		if s.stop != nil {
			s.stop()
		}
	})
	return s
}

// start starts the process: Kubernetes' service controller, with the provider, and ours.
func (s *story) start() {
	s.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	factory := informers.NewSharedInformerFactory(s.api, 0)
	log := slog.New(slog.DiscardHandler)
	ctl, err := servicelb.New(servicelb.Options{
		Scope:    s.scope,
		Services: factory.Core().V1().Services(), Namespaces: quiet{}, Config: s.config, Facts: quiet{},
		Quarantine: quarantinestore.New(s.api, "lodestone-system", log), API: s.api, Events: quiet{}, Workers: 2, Upstream: true, Log: log,
	})
	if err != nil {
		s.Fatal(err)
	}
	s.controller = ctl
	s.cloud = provider.New(provider.Options{Config: s.config, Services: ctl, Log: log})
	s.cloud.Initialize(nil, nil)
	s.cloud.SetInformers(factory)
	upstream, err := servicecontroller.New(s.cloud, s.api, factory.Core().V1().Services(), factory.Core().V1().Nodes(), "kubernetes",
		utilfeature.DefaultFeatureGate)
	if err != nil {
		s.Fatal(err)
	}
	var tasks sync.WaitGroup
	tasks.Go(func() { upstream.Run(ctx, 2, controllersmetrics.NewControllerManagerMetrics("test")) })
	tasks.Go(func() {
		if err := ctl.Run(ctx); err != nil {
			s.Error(err)
		}
	})
	factory.Start(ctx.Done())
	s.stop = func() { cancel(); tasks.Wait(); factory.Shutdown(); s.stop = nil }
}

func (s *story) restart() { s.Helper(); s.stop(); s.start() }

func (s *story) creates(name string, changes ...func(*corev1.Service)) {
	s.Helper()
	svc := service(name)
	for _, change := range changes {
		change(svc)
	}
	if _, err := s.api.CoreV1().Services("default").Create(s.Context(), svc, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
}

func (s *story) changes(name string, change func(*corev1.Service)) {
	s.Helper()
	svc := s.get(name)
	change(svc)
	if _, err := s.api.CoreV1().Services("default").Update(s.Context(), svc, metav1.UpdateOptions{}); err != nil {
		s.Fatal(err)
	}
}

func (s *story) deletes(name string) {
	s.Helper()
	if err := s.api.CoreV1().Services("default").Delete(s.Context(), name, metav1.DeleteOptions{}); err != nil {
		s.Fatal(err)
	}
}

// vanishes takes a Service away with its finalizers, as a person can.
func (s *story) vanishes(name string) {
	s.Helper()
	if err := s.api.Tracker().Delete(services, "default", name); err != nil {
		s.Fatal(err)
	}
}

func (s *story) get(name string) *corev1.Service {
	s.Helper()
	svc, err := s.api.CoreV1().Services("default").Get(s.Context(), name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return svc
}

// announced is what speakers announce of the Service, with the reason of its condition
// and its finalizers.
func (s *story) announced(name string) string {
	svc, err := s.api.CoreV1().Services("default").Get(s.Context(), name, metav1.GetOptions{})
	if err != nil {
		return "gone"
	}
	var parts []string
	for _, vip := range kube.VIPs(svc) {
		parts = append(parts, vip.String())
	}
	for _, c := range svc.Status.Conditions {
		parts = append(parts, c.Reason)
	}
	if len(kube.VIPs(svc)) != len(svc.Status.LoadBalancer.Ingress) {
		parts = append(parts, "status has other addresses")
	}
	if len(kube.VIPs(svc)) != len(kube.Assigned(svc)) {
		parts = append(parts, "annotation has other addresses")
	}
	return strings.Join(append(parts, svc.Finalizers...), " ")
}

// has waits until the object of the Service shows what is wanted, and nothing else.
func (s *story) has(name, want string) {
	s.Helper()
	eventually(s.T, want, func() string { return s.announced(name) })
}

// held waits until so many addresses are held in all: nothing has leaked.
func (s *story) held(want int) {
	s.Helper()
	eventually(s.T, fmt.Sprint(want, " held"), func() string {
		assigned := 0.0
		registry := prometheus.NewRegistry()
		registry.MustRegister(s.controller)
		families, err := registry.Gather()
		require.NoError(s.T, err)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == servicelb.MetricPoolAddresses && slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
					return l.GetValue() == "assigned"
				}) {
					assigned += m.GetGauge().GetValue()
				}
			}
		}
		return fmt.Sprint(assigned, " held")
	})
}
