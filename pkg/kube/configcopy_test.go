package kube_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// keep runs what the leading controller runs, until the test ends.
func (c *cluster) keep() {
	done := make(chan error)
	go func() { done <- c.watcher.Keep(c.Context()) }()
	c.Cleanup(func() {
		if err := <-done; err != nil {
			c.Error(err)
		}
	})
}

// keeping returns a cluster whose leading controller has kept a copy of twoPools, and its ConfigMaps.
func keeping(t *testing.T) (*cluster, corev1client.ConfigMapInterface) {
	t.Helper()
	c := newCluster(t)
	c.write(map[string]string{config.Key: twoPools})
	c.start()
	c.keep()
	c.kept(twoPools)
	return c, c.client.CoreV1().ConfigMaps(config.Namespace)
}

// restart replaces the watcher by one that knows nothing yet.
func (c *cluster) restart() *cluster {
	next := newCluster(c.T)
	next.client = c.client
	next.watcher = kube.NewConfigWatcher(c.client, kube.ConfigOptions{Events: next.events, Log: slog.New(slog.DiscardHandler)})
	return next
}

// kept waits until the copy is the document.
func (c *cluster) kept(document string) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), 30*time.Second)
	defer cancel()
	watch, err := c.client.CoreV1().ConfigMaps(config.Namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	defer watch.Stop()
	for {
		cm, err := c.client.CoreV1().ConfigMaps(config.Namespace).Get(ctx, config.LastValidName, metav1.GetOptions{})
		if err == nil && cm.Data[config.Key] == document {
			return
		}
		select {
		case <-watch.ResultChan():
		case <-ctx.Done():
			c.Fatalf("the copy is %v, want %q", cm, document)
		}
	}
}

func (c *cluster) wantRestored(value string) {
	c.Helper()
	want := "# HELP lodestone_config_restored Whether the configuration in force is the copy of the last valid document, because there " +
		"was no valid document since the start.\n" +
		"# TYPE lodestone_config_restored gauge\nlodestone_config_restored " + value + "\n"
	if err := testutil.CollectAndCompare(c.watcher, strings.NewReader(want), kube.MetricConfigRestored); err != nil {
		c.Error(err)
	}
}

func restored(n int) func(*config.Config, kube.State) bool {
	return func(cfg *config.Config, s kube.State) bool {
		return cfg != nil && len(cfg.Pools) == n && s.Restored && s.Err != nil
	}
}

// An invalid edit is no outage, however many programs start before it is
// mended: they take the copy, log that, and leave it for the first valid document.
func TestProgramsThatStartTakeTheLastValidDocument(t *testing.T) {
	t.Parallel()
	c, _ := keeping(t)
	c.write(map[string]string{config.Key: broken})
	c.until("the mistake is seen", func(_ *config.Config, s kube.State) bool { return s.Err != nil })
	c.kept(twoPools)
	late := c.restart()
	late.start()
	late.until("the copy is in force", restored(2))
	late.wantEvent("Warning ConfigInvalid")
	late.wantEvent("Warning ConfigRestored")
	late.wantRestored("1")
	step, end := context.WithCancel(t.Context())
	end() // Keep takes one step all the same
	if err := late.watcher.Keep(step); err != nil {
		t.Fatal(err)
	}
	c.kept(twoPools) // and not the mistake

	c.write(map[string]string{config.Key: oneAddress})
	late.until("the corrected document is in force", func(cfg *config.Config, s kube.State) bool {
		return s.Err == nil && !s.Restored && len(cfg.Pools) == 1
	})
	late.wantRestored("0")
	c.kept(oneAddress)
}

// A document that is missing is a mistake like any other, until the copy goes,
// too, as it does when the chart is uninstalled.
func TestProgramsThatStartWithoutDocument(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, maps := keeping(t)
		require.NoError(t, maps.Delete(t.Context(), config.ConfigMapName, metav1.DeleteOptions{}))
		synctest.Wait() // for the controller, which could keep what it has just read
		late := c.restart()
		late.start()
		late.until("the copy is in force", restored(2))

		require.NoError(t, maps.Delete(t.Context(), config.LastValidName, metav1.DeleteOptions{}))
		last := c.restart()
		last.start()
		last.until("it is known that there is none", func(_ *config.Config, s kube.State) bool { return s.Read })
		synctest.Wait() // for a copy, if there is one
		if cfg, _ := last.watcher.Current(); cfg != nil {
			t.Errorf("without document and copy there is a configuration: %+v", cfg)
		}
	})
}

// Somebody who deletes the copy, or takes its data away, loses nothing either, if a mistake in the document comes later.
func TestTheCopyComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, maps := keeping(t)
		require.NoError(t, maps.Delete(t.Context(), config.LastValidName, metav1.DeleteOptions{}))
		time.Sleep(time.Minute)
		c.kept(twoPools)

		empty := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: config.LastValidName}}
		_, err := maps.Update(t.Context(), empty, metav1.UpdateOptions{})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		c.kept(twoPools)

		c.write(map[string]string{config.Key: broken})
		synctest.Wait()
		require.NoError(t, maps.Delete(t.Context(), config.LastValidName, metav1.DeleteOptions{})) // when it is needed
		time.Sleep(time.Minute)
		late := c.restart()
		late.start()
		late.until("the copy is in force", restored(2))
	})
}

// A document that is in force everywhere, and could not be copied before the next one, which is invalid, came.
func TestACopyThatCouldNotBeWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := keeping(t)
		c.client.PrependReactor("update", "configmaps", func(action clienttesting.Action) (bool, runtime.Object, error) {
			copied := action.(clienttesting.UpdateAction).GetObject().(*corev1.ConfigMap).Name == config.LastValidName
			_, state := c.watcher.Current()
			return copied && state.Err == nil, nil, errors.New("a moment")
		})
		c.write(map[string]string{config.Key: oneAddress})
		c.until("the document is in force", pools(1))
		c.write(map[string]string{config.Key: broken})
		c.kept(oneAddress)
	})
}

// slowCopy is an API server that takes its time with the copy.
type slowCopy struct {
	*fake.Clientset
	wait func()
}

func (s slowCopy) CoreV1() corev1client.CoreV1Interface {
	return slowCore{s.Clientset.CoreV1(), s.wait}
}

type slowCore struct {
	corev1client.CoreV1Interface
	wait func()
}

func (s slowCore) ConfigMaps(namespace string) corev1client.ConfigMapInterface {
	return slowMaps{s.CoreV1Interface.ConfigMaps(namespace), s.wait}
}

type slowMaps struct {
	corev1client.ConfigMapInterface
	wait func()
}

func (s slowMaps) Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.ConfigMap, error) {
	if name == config.LastValidName {
		defer s.wait()
	}
	return s.ConfigMapInterface.Get(ctx, name, o)
}

// A valid document that comes while the copy is read stays in force: nothing would replace the copy before the next
// edit.
func TestADocumentThatComesWhileTheCopyIsRead(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: config.LastValidName},
		Data: map[string]string{config.Key: twoPools}}
	if _, err := c.client.CoreV1().ConfigMaps(config.Namespace).Create(t.Context(), cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.write(map[string]string{config.Key: broken})
	asked, answer := make(chan struct{}), make(chan struct{})
	c.watcher = kube.NewConfigWatcher(slowCopy{c.client, func() { close(asked); <-answer }}, kube.ConfigOptions{
		Log: slog.New(slog.DiscardHandler)})
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.watcher.Run(ctx) }()
	<-asked
	if _, state := c.watcher.Current(); state.Read {
		t.Errorf("it is known what is in force before the copy is read: %+v", state)
	}
	c.write(map[string]string{config.Key: oneAddress})
	c.until("the document is in force", pools(1))
	close(answer)
	end()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if cfg, state := c.watcher.Current(); len(cfg.Pools) != 1 || state.Restored {
		t.Errorf("the copy has replaced it: %+v, %+v", cfg, state)
	}
}

// A valid document is never replaced by the copy, not even at the start; a copy
// that cannot be read is none.
func TestTheCopyIsNotBelievedOverADocument(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	write := func(document string) {
		maps := c.client.CoreV1().ConfigMaps(config.Namespace)
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: config.LastValidName},
			Data: map[string]string{config.Key: document}}
		if _, err := maps.Update(t.Context(), cm, metav1.UpdateOptions{}); err == nil {
			return
		}
		if _, err := maps.Create(t.Context(), cm, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	write(twoPools)
	c.write(map[string]string{config.Key: oneAddress})
	c.start()
	c.until("the document is in force", pools(1))
	if _, state := c.watcher.Current(); state.Restored {
		t.Error("the copy is in force")
	}

	write(broken)
	c.write(map[string]string{config.Key: broken})
	late := c.restart()
	late.start()
	late.until("neither can be read", func(cfg *config.Config, s kube.State) bool { return cfg == nil && s.Err != nil })
}
