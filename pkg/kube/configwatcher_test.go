package kube_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

const (
	oneAddress = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n  - name: lan\n    addresses: [203.0.113.4/32]\n"
	twoPools   = oneAddress + "  - name: dmz\n    addresses: [198.51.100.0/28]\n"
	broken     = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n  - name: lan\n    addresses: [203.0.113.400]\n"
)

// cluster is a fake API server with a watcher on its ConfigMap.
type cluster struct {
	*testing.T
	client  *fake.Clientset
	watcher *kube.ConfigWatcher
	events  *record.FakeRecorder
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{T: t, client: testapi.New(), events: record.NewFakeRecorder(10)}
	c.watcher = kube.NewConfigWatcher(c.client, kube.ConfigOptions{Events: c.events, Log: slog.New(slog.DiscardHandler)})
	return c
}

func (c *cluster) start() {
	done := make(chan error)
	go func() { done <- c.watcher.Run(c.Context()) }()
	c.Cleanup(func() {
		if err := <-done; err != nil {
			c.Error(err)
		}
	})
}

// write makes the ConfigMap hold the data, creating it when there is none.
func (c *cluster) write(data map[string]string) {
	c.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: config.ConfigMapName}, Data: data}
	maps := c.client.CoreV1().ConfigMaps(config.Namespace)
	if _, err := maps.Update(c.Context(), cm, metav1.UpdateOptions{}); err == nil {
		return
	}
	if _, err := maps.Create(c.Context(), cm, metav1.CreateOptions{}); err != nil {
		c.Fatal(err)
	}
}

// until waits for a state.
func (c *cluster) until(what string, holds func(*config.Config, kube.State) bool) {
	c.Helper()
	deadline := time.After(30 * time.Second)
	for {
		changed := c.watcher.Changed()
		if cfg, state := c.watcher.Current(); holds(cfg, state) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			cfg, state := c.watcher.Current()
			c.Fatalf("waited in vain until %s: %+v, %+v", what, cfg, state)
		}
	}
}

func (c *cluster) wantEvent(prefix string) {
	c.Helper()
	select {
	case e := <-c.events.Events:
		if !strings.HasPrefix(e, prefix) {
			c.Errorf("event %q, want %q", e, prefix)
		}
	case <-time.After(30 * time.Second):
		c.Errorf("no event %q", prefix)
	}
}

func pools(n int) func(*config.Config, kube.State) bool {
	return func(cfg *config.Config, s kube.State) bool { return s.Err == nil && cfg != nil && len(cfg.Pools) == n }
}

func TestLastGoodConfigStaysInForce(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.write(map[string]string{config.Key: oneAddress})
	c.start()
	c.until("the first document is in force", pools(1))
	cfg, _ := c.watcher.Current()

	c.write(map[string]string{config.Key: broken})
	c.until("the broken one is noticed", func(_ *config.Config, s kube.State) bool { return s.Err != nil })
	if now, _ := c.watcher.Current(); now != cfg {
		t.Errorf("a broken document replaced the configuration in force")
	}
	c.wantEvent("Warning ConfigInvalid")

	c.write(map[string]string{config.Key: oneAddress})
	c.until("the rollback clears the alarm", pools(1))
	c.wantEvent("Normal ConfigValid")
	if now, _ := c.watcher.Current(); now != cfg {
		t.Errorf("a rollback to the document in force made another configuration")
	}

	c.write(map[string]string{config.Key: twoPools})
	c.until("the next good one is in force", pools(2))

	if err := c.client.CoreV1().ConfigMaps(config.Namespace).Delete(t.Context(), config.ConfigMapName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.until("the ConfigMap's absence is noticed", func(cfg *config.Config, s kube.State) bool {
		return errors.Is(s.Err, kube.ErrNoConfig) && len(cfg.Pools) == 2
	})
	c.wantEvent("Warning ConfigInvalid no configuration: ConfigMap lodestone-system/lodestone-config does not exist")
	c.write(map[string]string{config.Key: twoPools})
	c.wantEvent("Normal ConfigValid")
	if len(c.events.Events) > 0 {
		t.Errorf("unasked event %q", <-c.events.Events)
	}
}

func TestConfigMissingAtStart(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	if _, state := c.watcher.Current(); state.Read {
		t.Error("the state is known before the API server was asked")
	}
	c.start()
	c.until("the absence is known", func(cfg *config.Config, s kube.State) bool {
		return cfg == nil && s.Read && errors.Is(s.Err, kube.ErrNoConfig)
	})
	c.write(map[string]string{"config.yml": oneAddress})
	c.until("the wrong key is named", func(cfg *config.Config, s kube.State) bool {
		return cfg == nil && s.Err != nil && strings.Contains(s.Err.Error(), `no key "config.yaml"`)
	})
	c.write(map[string]string{config.Key: oneAddress})
	c.until("the document is in force", pools(1))
}

func TestConfigMetrics(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c.watcher)
	expect := func(valid string) {
		t.Helper()
		want := "# HELP lodestone_config_valid Whether the latest document is valid and in force.\n# TYPE lodestone_config_valid " +
			"gauge\nlodestone_config_valid " + valid + "\n"
		if err := testutil.GatherAndCompare(reg, strings.NewReader(want), kube.MetricConfigValid); err != nil {
			t.Error(err)
		}
	}
	expect("0")
	c.write(map[string]string{config.Key: oneAddress})
	c.start()
	c.until("the document is in force", pools(1))
	expect("1")
	if n, err := testutil.GatherAndCount(reg); err != nil || n != 4 {
		t.Errorf("%d metrics, %v", n, err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
	c.write(map[string]string{config.Key: broken})
	c.until("the broken one is noticed", func(_ *config.Config, s kube.State) bool { return s.Err != nil })
	expect("0")
}
