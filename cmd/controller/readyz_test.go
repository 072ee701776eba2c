package main

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"

	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

// Everybody may read /readyz, and no error of a configuration, which quotes it, is there. The
// whole text stands here, so that whatever is added to it is looked at.
func TestReadyzQuotesNoConfiguration(t *testing.T) {
	p := newProcess(t.Context())
	p.log = slog.New(slog.DiscardHandler)
	const wrong = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools: [{name: tenant-7, addresses: [203.0.113.77/33]}]\n"
	p.client = testapi.New(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ls", Name: "lodestone-config"},
		Data: map[string]string{"config.yaml": wrong}})
	p.config = kube.NewConfigWatcher(p.client, kube.ConfigOptions{Namespace: "ls", Name: "lodestone-config", Log: p.log})
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: p.client, Namespace: "ls", Log: p.log})
	var err error
	p.services, err = servicelb.New(servicelb.Options{Services: informers.NewSharedInformerFactory(p.client, 0).Core().V1().Services()})
	require.NoError(t, err)
	p.election = &election{won: make(chan struct{}), ended: make(chan struct{})}
	t.Cleanup(func() { p.cancel(); _ = p.tasks.Wait() })
	readyz := func() string {
		w := httptest.NewRecorder()
		debughttp.Readyz(p.checks).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return w.Body.String()
	}
	assert.Equal(t, "[+] lease: standby, another process leads or is about to\n", readyz())
	close(p.election.won)
	p.start(p.config.Run)
	require.Eventually(t, func() bool { _, state := p.config.Current(); return state.Err != nil }, 20*time.Second, time.Millisecond)
	_, state := p.config.Current()
	require.ErrorContains(t, state.Err, "203.0.113.77/33", "the error quotes the document")
	assert.Equal(t, "[+] lease: this process leads\n"+
		"[-] configuration: nothing is allocated until there is a valid one: the log and the ConfigMap's Events have the reason\n"+
		"[-] services: what Services hold is being read; nothing is allocated before; still missing: "+missing(p)+"\n", readyz())
	apply := func(document string) {
		maps := p.client.CoreV1().ConfigMaps("ls")
		cm, err := maps.Get(t.Context(), "lodestone-config", metav1.GetOptions{})
		require.NoError(t, err)
		cm.Data["config.yaml"] = document
		_, err = maps.Update(t.Context(), cm, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	for _, document := range []string{"apiVersion: lodestone.io/v1alpha1\nkind: Config\n", wrong} {
		apply(document)
		require.Eventually(t, func() bool {
			cfg, state := p.config.Current()
			return cfg != nil && (state.Err != nil) == (document == wrong)
		}, 20*time.Second, time.Millisecond)
	}
	assert.Contains(t, readyz(),
		"[+] configuration: the last good one is in force, the latest is not: the log and the ConfigMap's Events have the reason\n")
	close(p.election.ended)
	assert.Equal(t, "[-] lease: lost; this process ends as soon as the API server answers\n", readyz())
}

// missing are the kinds of objects that are not read yet.
func missing(p *process) (names string) {
	for i, name := range p.facts.Waiting() {
		if i > 0 {
			names += ", "
		}
		names += name
	}
	return names
}
