package kube

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

const (
	// copyRetry is the time between attempts to read or write the copy of the last
	// valid document.
	copyRetry = 5 * time.Second
	// copyInterval is how often the copy is compared with the document, because somebody may
	// have deleted or changed it.
	copyInterval = time.Minute
)

// Keep has the document in force in the ConfigMap config.LastValidName, until
// the context ends. The leading controller does this; speakers only read.
func (w *ConfigWatcher) Keep(ctx context.Context) error {
	w.onChange(ctx, "last valid configuration not kept", func() (done bool, err error) {
		if document, ok := w.toKeep(); ok {
			return false, WriteConfigMap(ctx, w.client, w.opts.Namespace, config.LastValidName, config.Key, document)
		}
		return false, nil
	})
	return nil
}

// onChange calls the step at once, after each change and now and then, until it is done or the context
// ends. It calls a step that failed again soon, and logs the same error once.
func (w *ConfigWatcher) onChange(ctx context.Context, failure string, step func() (done bool, err error)) {
	failed := ""
	for {
		changed := w.Changed()
		done, err := step()
		if done {
			return
		}
		again := time.After(copyInterval)
		if err == nil {
			failed = ""
		} else {
			if ctx.Err() == nil && failed != err.Error() {
				w.opts.Log.Error(failure, "err", err)
			}
			failed, again = err.Error(), time.After(copyRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
	}
}

// toKeep returns the document in force. While the ConfigMap is missing there is none to keep: who uninstalls
// the chart removes the copy, too.
func (w *ConfigWatcher) toKeep() (document string, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.document, w.object != nil && w.current != nil
}

// WriteConfigMap makes the text all that the ConfigMap contains, under the key. It creates one that is
// missing, and writes nothing if the text is there.
func WriteConfigMap(ctx context.Context, client kubernetes.Interface, namespace, name, key, text string) error {
	maps := client.CoreV1().ConfigMaps(namespace)
	data := map[string]string{key: text}
	cm, err := maps.Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		cm = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: data}
		_, err = maps.Create(ctx, cm, metav1.CreateOptions{})
	case err == nil && cm.Data[key] != text:
		cm.Data, cm.BinaryData = data, nil
		_, err = maps.Update(ctx, cm, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write ConfigMap %s/%s: %w", namespace, name, err)
	}
	return nil
}

// restore puts the copy of the last valid document in force, if there is no
// valid one when the watcher starts. It ends as soon as a configuration is in
// force.
func (w *ConfigWatcher) restore(ctx context.Context) {
	w.onChange(ctx, "no configuration in force", func() (done bool, err error) {
		current, state := w.Current()
		if current != nil || state.Err == nil {
			return current != nil, nil
		}
		err = w.readCopy(ctx)
		return err == nil, err
	})
}

// readCopy puts the copy in force, unless there is a valid document by now.
func (w *ConfigWatcher) readCopy(ctx context.Context) error {
	cm, err := w.client.CoreV1().ConfigMaps(w.opts.Namespace).Get(ctx, config.LastValidName, metav1.GetOptions{})
	if err == nil || refusal(err) {
		defer w.settle()
	}
	if err != nil {
		return fmt.Errorf("get the copy of the last valid document: %w", err)
	}
	document, ok := cm.Data[config.Key]
	if !ok {
		return fmt.Errorf("%w: ConfigMap %s/%s has no copy of a valid document", ErrNoConfig, w.opts.Namespace, config.LastValidName)
	}
	parsed, err := config.Parse([]byte(document))
	if err != nil {
		return fmt.Errorf("read ConfigMap %s/%s: %w", w.opts.Namespace, config.LastValidName, err)
	}
	if why := w.takeCopy(document, parsed); why != nil {
		w.opts.Log.Error("configuration restored from the copy of the last valid document", "configmap", w.opts.Namespace+"/"+
			config.LastValidName, "digest", parsed.Digest, "err", why)
		w.event(corev1.EventTypeWarning, ReasonConfigRestored,
			"Started without a valid document: the copy in ConfigMap "+config.LastValidName+" is in force until there is one.")
	}
	return nil
}

// settle notes that it is known what is in force, be it nothing.
func (w *ConfigWatcher) settle() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.state.Read {
		w.state.Read = true
		w.changed.Notify()
	}
}

// takeCopy puts the copy in force and returns what is wrong with the document. It returns nil,
// and changes nothing, if there is a valid document by now.
func (w *ConfigWatcher) takeCopy(document string, parsed *config.Config) (why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current != nil || w.state.Err == nil {
		return nil
	}
	w.document, w.current, w.state.Since, w.state.Restored = document, parsed, time.Now(), true
	w.changed.Notify()
	return w.state.Err
}
