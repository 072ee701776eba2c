package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/controller-manager/pkg/clientbuilder"

	"github.com/lodestone-lb/lodestone/controller/dhcp/pools"
	"github.com/lodestone-lb/lodestone/controller/leader"
	"github.com/lodestone-lb/lodestone/controller/poolstatus"
	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/apiclient"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// A controller that starts while the API server is away waits for it, and can be stopped meanwhile. If it ended, the kubelet would start it
// anew later and later.
func TestStartWaitsForTheAPIServer(t *testing.T) {
	for _, comes := range []bool{true, false} {
		var up atomic.Bool
		asked := make(chan struct{}, 1)
		api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !up.Load() {
				notify.Wake(asked)
				panic(http.ErrAbortHandler)
			}
			http.Error(w, "no", http.StatusForbidden)
		}))
		t.Cleanup(api.Close)
		ctx, stop := context.WithCancel(t.Context())
		t.Cleanup(stop)
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, []string{"--master=" + api.URL, "--authentication-kubeconfig=" + kubeconfig(t, api.URL), "--cert-dir=" + t.TempDir()},
				io.Discard)
		}()
		for range 2 {
			<-asked
		}
		if comes {
			up.Store(true)
			require.Equal(t, 1, <-ended, "the framework has asked, and may not read the certificates of clients")
		} else {
			stop()
			require.Equal(t, 0, <-ended)
		}
	}
}

// kubeconfig returns a file that names an API server.
func kubeconfig(t *testing.T, server string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: server}}, Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c"}},
		CurrentContext: "c"}, file))
	return file
}

// The informers of the factory, which the framework's controllers and ours share, keep projections of Services, because
// whole Services of a few tenants would need more memory than the controller has. Our client and those of the framework's
// controllers write only while this process certainly leads, but for the election itself. The first list of Services is read
// from etcd and not from the cache of an API server that may lag: the previous leader may just have given addresses.
func TestProcessIsBoundedAndFenced(t *testing.T) {
	var list bytes.Buffer
	codec := scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), corev1.SchemeGroupVersion)
	require.NoError(t, codec.Encode(&corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: []corev1.Service{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Annotations: map[string]string{"example.com/note": "x"}}},
	}}, &list))
	var age atomic.Pointer[string]
	stood := make(chan struct{}, 1)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/namespaces/ls/leases"):
			notify.Wake(stood)
			http.NotFound(w, r)
		case r.URL.Path != "/api/v1/services":
			http.NotFound(w, r)
		case r.URL.Query().Get("sendInitialEvents") == "true":
			http.Error(w, "no streaming lists", http.StatusBadRequest)
		case r.URL.Query().Get("watch") != "":
			<-r.Context().Done()
		default:
			if version := r.URL.Query().Get("resourceVersion"); r.URL.Query().Get("limit") == "" {
				age.Store(&version)
			}
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_, _ = w.Write(list.Bytes())
		}
	}))
	t.Cleanup(api.Close)
	p := newProcess(t.Context())
	p.flags.handleClassless, p.flags.configNamespace, p.flags.configName = true, "ls", "lodestone-config"
	c := (&config.Config{Kubeconfig: &rest.Config{Host: api.URL}}).Complete()
	c.ComponentConfig.Generic.Controllers = []string{"*"}
	c.ComponentConfig.KubeCloudShared.CloudProvider.Name = provider.Name
	elected := &c.ComponentConfig.Generic.LeaderElection
	elected.LeaderElect, elected.ResourceLock, elected.ResourceNamespace, elected.ResourceName = true, "leases", "ls", "lodestone-controller"
	elected.LeaseDuration.Duration, elected.RenewDeadline.Duration, elected.RetryPeriod.Duration = 10*time.Second, 7*time.Second, time.Second
	p.cloud(c)

	nodes := clientbuilder.SimpleControllerClientBuilder{ClientConfig: c.Kubeconfig}.ClientOrDie("node-controller")
	for _, client := range []kubernetes.Interface{p.client, nodes} {
		short, cancel := context.WithTimeout(t.Context(), 3*leader.Look)
		defer cancel()
		_, err := client.CoreV1().ConfigMaps("ls").Create(short, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
			metav1.CreateOptions{})
		require.ErrorIs(t, err, leader.ErrFenced)
	}
	p.stand()
	<-stood
	p.election.resign()

	informer := c.SharedInformers.Core().V1().Services().Informer()
	ctx, end := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); informer.RunWithContext(ctx) }()
	defer func() { end(); <-done }()
	require.True(t, cache.WaitForCacheSync(ctx.Done(), informer.HasSynced))
	require.Empty(t, *age.Load(), "a list of any age")
	obj, exists, err := informer.GetStore().GetByKey("shop/web")
	require.NoError(t, err)
	require.True(t, exists)
	require.Empty(t, obj.(*corev1.Service).Annotations)
}

// The leader keeps a copy of each valid document, with which programs start when there is no valid one.
func TestTheLeaderKeepsTheLastValidDocument(t *testing.T) {
	p := newProcess(t.Context())
	p.log = slog.New(slog.DiscardHandler)
	const document = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"
	client := testapi.New(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ls", Name: "lodestone-config"},
		Data: map[string]string{"config.yaml": document}})
	core := informers.NewSharedInformerFactory(client, 0).Core().V1()
	var err error
	p.api, err = apiclient.Use(&rest.Config{Host: "http://127.0.0.1:1"})
	require.NoError(t, err)
	p.config = kube.NewConfigWatcher(client, kube.ConfigOptions{Namespace: "ls", Name: "lodestone-config", Log: p.log})
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: client, Namespace: "ls", Log: p.log})
	namespaces, err := kube.NewNamespaces(core.Namespaces())
	require.NoError(t, err)
	p.services, err = servicelb.New(servicelb.Options{Services: core.Services(), Namespaces: namespaces, Config: p.config, Facts: p.facts,
		Quarantine: quarantinestore.New(client, "ls", p.log), Leases: pools.New(p.log), Workers: 1, Log: p.log})
	require.NoError(t, err)
	p.poolStatus = poolstatus.New(poolstatus.Options{Client: client, Namespace: "ls", Pools: p.services, Log: p.log})
	t.Cleanup(func() { p.cancel(); _ = p.tasks.Wait() })
	p.start(p.config.Run)
	p.startLeading()
	require.Eventually(t, func() bool {
		kept, err := client.CoreV1().ConfigMaps("ls").Get(t.Context(), "lodestone-config-last-valid", metav1.GetOptions{})
		return err == nil && kept.Data["config.yaml"] == document
	}, 20*time.Second, time.Millisecond)
}

// A leader ends when etcd is restored from a backup, as it would take Services that are back for new ones. It does not if that
// was before it led, which its dashboard may have found out.
func TestALeaderEndsAfterARestore(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("resourceVersion") == "" {
			_, _ = io.WriteString(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"50"}}`)
			return
		}
		w.WriteHeader(http.StatusGatewayTimeout)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","details":{"causes":[{"reason":"ResourceVersionTooLarge"}]}}`)
	}))
	t.Cleanup(api.Close)
	settings := &rest.Config{Host: api.URL}
	transport, err := apiclient.Use(settings)
	require.NoError(t, err)
	client, err := kubernetes.NewForConfig(settings)
	require.NoError(t, err)
	restore := func() {
		_, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{ResourceVersion: "100"})
		require.True(t, apierrors.IsResourceExpired(err), err)
	}
	lead := func() *process {
		p := newProcess(t.Context())
		p.api, p.log = transport, slog.New(slog.DiscardHandler)
		p.endAfterARestore()
		return p
	}
	restore()
	for range 20 {
		p := lead()
		p.cancel()
		require.NoError(t, p.tasks.Wait())
		require.NoError(t, p.stopped.Err())
	}
	p := lead()
	restore()
	<-p.stopped.Done()
	require.NoError(t, p.tasks.Wait())
}
