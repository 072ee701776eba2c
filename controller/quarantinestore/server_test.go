package quarantinestore

import (
	"context"
	"log/slog"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

const namespace = "lodestone-system"

var configMaps = schema.GroupResource{Resource: "configmaps"}

// server is an API server with at most one ConfigMap. It refuses writes that
// are based on an old version, and those that are too large, as a real one does.
type server struct {
	mu      sync.Mutex
	object  *corev1.ConfigMap
	version int
	writes  int
	// meddle, if set, is called before a request is served and may do it
	// harm: an error before it is served, or after.
	meddle func(verb string) (before, after error)
	// delay is how long a request takes.
	delay time.Duration
}

// client returns a client of the server.
func (s *server) client() *fake.Clientset {
	c := &fake.Clientset{}
	c.AddReactor("*", "configmaps", func(a k8stesting.Action) (bool, runtime.Object, error) {
		object, err := s.serve(a)
		return true, object, err
	})
	return c
}

// open returns a Store, as a controller that starts would have it.
func (s *server) open() *Store { return New(s.client(), namespace, slog.New(slog.DiscardHandler)) }

func (s *server) serve(a k8stesting.Action) (runtime.Object, error) {
	time.Sleep(s.delay)
	s.mu.Lock()
	meddle := s.meddle
	s.mu.Unlock()
	var after error
	if meddle != nil {
		var before error
		if before, after = meddle(a.GetVerb()); before != nil {
			return nil, before
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	object, err := s.apply(a)
	if err == nil && after != nil {
		return nil, after
	}
	return object, err
}

func (s *server) apply(a k8stesting.Action) (runtime.Object, error) {
	if a.GetNamespace() != namespace {
		return nil, apierrors.NewForbidden(configMaps, "", nil)
	}
	if create, ok := a.(k8stesting.CreateAction); ok && a.GetVerb() == "create" {
		if s.object != nil {
			return nil, apierrors.NewAlreadyExists(configMaps, ConfigMapName)
		}
		return s.store(create.GetObject().(*corev1.ConfigMap))
	}
	if s.object == nil {
		return nil, apierrors.NewNotFound(configMaps, ConfigMapName)
	}
	if update, ok := a.(k8stesting.UpdateAction); ok {
		object := update.GetObject().(*corev1.ConfigMap)
		if object.ResourceVersion != s.object.ResourceVersion {
			return nil, apierrors.NewConflict(configMaps, ConfigMapName, nil)
		}
		return s.store(object)
	}
	return s.object.DeepCopy(), nil
}

func (s *server) store(object *corev1.ConfigMap) (runtime.Object, error) {
	size := 0
	for _, value := range object.Data {
		size += len(value)
	}
	if object.Name != ConfigMapName || size > corev1.MaxSecretSize {
		return nil, apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, object.Name, nil)
	}
	s.version++
	s.writes++
	s.object = object.DeepCopy()
	s.object.ResourceVersion = strconv.Itoa(s.version)
	return s.object.DeepCopy(), nil
}

// edit lets somebody else change the text.
func (s *server) edit(change func(text string) string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.object == nil {
		s.object = &corev1.ConfigMap{}
		s.object.Namespace, s.object.Name = namespace, ConfigMapName
	}
	s.version++
	s.object.ResourceVersion = strconv.Itoa(s.version)
	s.object.Data = map[string]string{Key: change(s.object.Data[Key])}
}

// remove lets somebody else delete the ConfigMap.
func (s *server) remove() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.object = nil
}

func (s *server) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.object == nil {
		return ""
	}
	return s.object.Data[Key]
}

func (s *server) meddleWith(f func(verb string) (before, after error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.meddle = f
}

// answer makes the server answer the next requests so, and then as usual.
func (s *server) answer(errs ...error) {
	s.meddleWith(func(string) (before, after error) {
		if len(errs) == 0 {
			return nil, nil
		}
		before, errs = errs[0], errs[1:]
		return before, nil
	})
}

// release is a record of a release now.
func release(addr, service string, lasts time.Duration) Record {
	now := time.Now()
	return Record{Addr: netip.MustParseAddr(addr), Service: service, Since: now, Until: now.Add(lasts)}
}

// load starts a controller anew and returns what it knows.
func load(t *testing.T, s *server) []string {
	t.Helper()
	return loadInto(t, s.open())
}

func loadInto(t *testing.T, b *Store) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	records, err := b.Load(ctx)
	require.NoError(t, err)
	lines := make([]string, len(records))
	for i, r := range records {
		lines[i] = r.String()
	}
	return lines
}
