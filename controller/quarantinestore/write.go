package quarantinestore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/lodestone-lb/lodestone/pkg/kube"
)

const (
	// attemptTimeout bounds one attempt. It is shorter than the leader election's renew
	// deadline, so that no write of a former leader arrives after it has lost the lead.
	attemptTimeout = 5 * time.Second
	// A write is followed by a pause that grows with its size: etcd stores the
	// whole text each time. A full store is written about 4 times a second, a
	// small one up to 40 times.
	shortestPause = 25 * time.Millisecond
	pausePerByte  = 200 * time.Nanosecond
)

// retries are the pauses between attempts.
var retries = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: math.MaxInt, Cap: 5 * time.Second}

// insist repeats the attempt until it succeeds, ctx ends, or its error is permanent.
func (s *Store) insist(ctx context.Context, attempt func(context.Context) error) error {
	err := retries.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		limited, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		err := attempt(limited)
		if err != nil && ctx.Err() != nil {
			return false, err // ctx has ended, which is no fault of the ConfigMap
		}
		s.mu.Lock()
		s.fault = err
		s.mu.Unlock()
		if isTransient(err) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil && ctx.Err() != nil {
		return s.because(ctx.Err())
	}
	return err
}

// isTransient reports whether another attempt may succeed, after reading the
// ConfigMap again: somebody else wrote, created or deleted it (409, 404), the
// API server is overloaded or ill, or cannot be reached.
func isTransient(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return err != nil && !errors.Is(err, errVersion)
	}
	switch code := status.Status().Code; code {
	case http.StatusConflict, http.StatusNotFound, http.StatusTooManyRequests:
		return true
	default:
		return code >= http.StatusInternalServerError
	}
}

// read takes over the records of the ConfigMap, which may not exist.
func (s *Store) read(ctx context.Context) error {
	object, err := s.client.Get(ctx, ConfigMapName, metav1.GetOptions{})
	switch {
	case kube.Missing(err):
		object = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: ConfigMapName}}
	case err != nil:
		return fmt.Errorf("get ConfigMap %s: %w", s, err)
	}
	text := object.Data[Key]
	page, err := parse(text)
	if err != nil {
		return fmt.Errorf("read ConfigMap %s: %w", s, err)
	}
	if page.unreadable > 0 && object.ResourceVersion != s.unreadable {
		s.unreadable = object.ResourceVersion
		s.metrics.dropped.WithLabelValues(string(LostUnreadable)).Add(float64(page.unreadable))
		s.log.Warn("released addresses: lines skipped, the next write removes them", "configmap", s.String(),
			"lines", page.unreadable, "records", len(page.records), "first", page.first)
	}
	s.merge(page.records, len(text), time.Now())
	s.object = object
	return nil
}

// write writes the records to the ConfigMap.
func (s *Store) write(ctx context.Context) error {
	if err := s.pause(ctx); err != nil {
		return err
	}
	if s.object == nil {
		if err := s.read(ctx); err != nil {
			return err
		}
	}
	d := s.draft(time.Now())
	object, err := s.put(ctx, d.text)
	s.object, s.next = object, time.Now().Add(shortestPause+time.Duration(len(d.text))*pausePerByte)
	s.metrics.writes.WithLabelValues(resultOf(err)).Inc()
	if err != nil {
		s.object = nil // whether it was written or not
		return fmt.Errorf("write ConfigMap %s: %w", s, err)
	}
	s.settle(d)
	s.reportFull(d.full)
	return nil
}

func (s *Store) pause(ctx context.Context) error {
	select {
	case <-time.After(time.Until(s.next)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// put creates or updates the ConfigMap. The resourceVersion that it was read
// with lets it fail if somebody else has written since.
func (s *Store) put(ctx context.Context, text string) (*corev1.ConfigMap, error) {
	object := s.object.DeepCopy()
	if object.Data == nil {
		object.Data = map[string]string{}
	}
	object.Data[Key] = text
	if object.ResourceVersion == "" {
		return s.client.Create(ctx, object, metav1.CreateOptions{})
	}
	return s.client.Update(ctx, object, metav1.UpdateOptions{})
}

// reportFull logs the records that had no room, once until there is room again.
func (s *Store) reportFull(dropped []Record) {
	s.metrics.dropped.WithLabelValues(string(LostFull)).Add(float64(len(dropped)))
	if len(dropped) > 0 && !s.full {
		s.log.Warn("too many released addresses: of namespaces with most some are not on record, a restart of the controller forgets them",
			"configmap", s.String(), "dropped", len(dropped), "limitBytes", maxText, "endsFirst", dropped[len(dropped)-1].String())
	}
	s.full = len(dropped) > 0
}
