package scenarios

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// The names that users of Lodestone rely on.
const (
	poolAnnotation = "lodestone.io/address-pool"
	addrAnnotation = "lodestone.io/addresses"
	ourClass       = "lodestone.io/lodestone"
	allocated      = "lodestone.io/Allocated"
)

// story is one scenario in a Kubernetes namespace of its own.
type story struct {
	*testing.T
	*lodestone.Installation
	ctx       context.Context
	namespace string
}

// begin starts a story with the usual configuration, in a lab that it shares with no other one. When the
// test ends, everything that it made goes, and its addresses with it.
func begin(t *testing.T) *story {
	t.Helper()
	installation := take(t)
	s := &story{T: t, Installation: installation, ctx: t.Context(), namespace: namespaceFor(t)}
	s.config(usualPools)
	s.eventually("the story has its namespace", func() error { // -count=2: the last one's may be going
		_, err := s.Kube.CoreV1().Namespaces().Create(s.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}},
			metav1.CreateOptions{})
		return err
	})
	t.Cleanup(s.end)
	s.eventually("speakers are as all stories find them", func() error { return s.speakersReady(true) }) // the last one may have ended some
	return s
}

// take waits for an installation, until the test ends. A story within a story has that of the one around it.
func take(t *testing.T) *lodestone.Installation {
	around, _, within := strings.Cut(t.Name(), "/")
	if has, ok := taken.Load(around); ok && within {
		return has.(*lodestone.Installation)
	}
	t.Parallel()
	installation := <-free
	taken.Store(t.Name(), installation)
	t.Cleanup(func() {
		taken.Delete(t.Name())
		free <- installation
	})
	return installation
}

// part is a part of the story that is a test of its own.
func (s *story) part(t *testing.T) *story {
	return &story{T: t, Installation: s.Installation, ctx: t.Context(), namespace: s.namespace}
}

func namespaceFor(t *testing.T) string {
	name := strings.ToLower(strings.TrimPrefix(t.Name(), "Test"))
	name = strings.NewReplacer("_", "-", "/", "-").Replace(name)
	return strings.Trim(name[:min(len(name), 55)], "-")
}

// end deletes the namespace and waits until its Services have let go of their
// addresses.
func (s *story) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if s.Failed() {
		s.dump(ctx)
	}
	s.ctx = ctx
	services := s.Kube.CoreV1().Services(s.namespace)
	list, err := services.List(ctx, metav1.ListOptions{})
	require.NoError(s, err)
	for _, svc := range list.Items {
		if err := services.Delete(ctx, svc.Name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			require.NoError(s, err)
		}
	}
	s.eventually("the story's Services are gone", func() error {
		list, err := services.List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d are left, the first with finalizers %q", len(list.Items), list.Items[0].Finalizers)
		}
		return err
	})
	s.eventually("the nodes forget the connections to VIPs", s.ForgetConnections)
	require.NoError(s, s.Kube.CoreV1().Namespaces().Delete(ctx, s.namespace, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
}

// dump prints what a person would look at first.
func (s *story) dump(ctx context.Context) {
	for _, component := range []string{"controller", "speaker"} {
		s.Logf("last lines of the %s:\n%s", component, last(s.logs(ctx, component), 80))
	}
	for _, daemon := range []string{"bgpd-router", "bfdd-router", "bird-router2"} {
		if p, err := s.Lab.Process(daemon); err == nil {
			raw, err := os.ReadFile(p.LogFile())
			s.Logf("last lines of %s (%v):\n%s", daemon, err, last(string(raw), 40))
		}
	}
}

func last(text string, lines int) string {
	all := strings.Split(text, "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// eventually waits until check finds nothing wrong.
func (s *story) eventually(what string, check func() error) {
	s.Helper()
	require.NoError(s, lodestone.Wait(s.ctx, what, check))
}

// always checks for a while that nothing is wrong.
func (s *story) always(d time.Duration, what string, check func() error) {
	s.Helper()
	for deadline := time.Now().Add(d); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		require.NoError(s, check(), "it must stay true that %s", what)
	}
}

// mostly checks for a while that nothing is wrong for more than a moment: a program that got no processor
// time for a second was away for that second.
func (s *story) mostly(d time.Duration, what string, check func() error) {
	s.Helper()
	var wrong time.Time // when the first look ended that found something; zero: the last one found nothing
	for deadline := time.Now().Add(d); time.Now().Before(deadline) || !wrong.IsZero(); time.Sleep(50 * time.Millisecond) {
		switch err := check(); {
		case err == nil:
			wrong = time.Time{}
		case wrong.IsZero():
			wrong = time.Now()
		case time.Since(wrong) > 5*time.Second:
			require.NoError(s, err, "it must stay true that %s", what)
		}
	}
}

// option changes a Service before it is created or updated.
type option func(*corev1.Service)

func annotated(key, value string) option {
	return func(svc *corev1.Service) { metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value) }
}

func class(name string) option {
	return func(svc *corev1.Service) { svc.Spec.LoadBalancerClass = &name }
}

func ofType(kind corev1.ServiceType) option {
	return func(svc *corev1.Service) { svc.Spec.Type = kind }
}

func port(name string, protocol corev1.Protocol, number int32) option {
	return func(svc *corev1.Service) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: name, Protocol: protocol, Port: number, TargetPort: intstr.FromInt32(lodestone.EchoPort),
		})
	}
}

// service creates a LoadBalancer Service for the story's echo pods, on port
// 80 by TCP unless the options name ports.
func (s *story) service(name string, options ...option) *corev1.Service {
	s.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: s.namespace},
		Spec: corev1.ServiceSpec{
			Type:                          corev1.ServiceTypeLoadBalancer,
			Selector:                      map[string]string{"app": "echo"},
			AllocateLoadBalancerNodePorts: new(false),
		},
	}
	for _, o := range options {
		o(svc)
	}
	if svc.Spec.Ports == nil {
		port("http", corev1.ProtocolTCP, 80)(svc)
	}
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		svc.Spec.AllocateLoadBalancerNodePorts = nil
	}
	svc, err := s.Kube.CoreV1().Services(s.namespace).Create(s.ctx, svc, metav1.CreateOptions{})
	require.NoError(s, err)
	return svc
}

func (s *story) get(name string) *corev1.Service {
	s.Helper()
	svc, err := s.Kube.CoreV1().Services(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
	require.NoError(s, err)
	return svc
}

// change applies options to the Service as it is now, again if somebody else
// changed it meanwhile.
func (s *story) change(name string, options ...option) {
	s.Helper()
	s.eventually("Service "+name+" takes a change", func() error {
		svc, err := s.Kube.CoreV1().Services(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, o := range options {
			o(svc)
		}
		_, err = s.Kube.CoreV1().Services(s.namespace).Update(s.ctx, svc, metav1.UpdateOptions{})
		return err
	})
}

func (s *story) delete(name string) {
	s.Helper()
	require.NoError(s, s.Kube.CoreV1().Services(s.namespace).Delete(s.ctx, name, metav1.DeleteOptions{}))
}

// deleted waits until the object is gone: nothing holds it any more.
func (s *story) deleted(name string) {
	s.Helper()
	s.eventually("Service "+name+" is gone", func() error {
		svc, err := s.Kube.CoreV1().Services(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("still there, finalizers %q, %w", svc.Finalizers, err)
	})
}

// addresses are the external addresses that users of the Service see.
func addresses(svc *corev1.Service) []string {
	var all []string
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		all = append(all, ingress.IP)
	}
	return all
}

// assigned waits for the Service's address.
func (s *story) assigned(name string) string {
	s.Helper()
	var got []string
	s.eventually("Service "+name+" has an address", func() error {
		svc := s.get(name)
		if got = addresses(svc); len(got) == 0 {
			return fmt.Errorf("it has none: %s", conditionText(svc))
		}
		return nil
	})
	require.Len(s, got, 1, "addresses of Service %s", name)
	require.Equal(s, corev1.LoadBalancerIPModeVIP, *s.get(name).Status.LoadBalancer.Ingress[0].IPMode)
	return netip.MustParseAddr(got[0]).String()
}

// holds waits until the Service's address is the one given.
func (s *story) holds(name, address string) {
	s.Helper()
	s.eventually("Service "+name+" has address "+address, func() error {
		svc := s.get(name)
		if got := addresses(svc); len(got) != 1 || got[0] != address {
			return fmt.Errorf("it has %q: %s", got, conditionText(svc))
		}
		return nil
	})
}

// refused waits until the Service's condition gives the reason, and returns
// the sentence that its owner reads.
func (s *story) refused(name, reason string) string {
	s.Helper()
	var text string
	s.eventually("Service "+name+" is refused with "+reason, func() error {
		svc := s.get(name)
		c := meta.FindStatusCondition(svc.Status.Conditions, allocated)
		if c == nil || c.Status != metav1.ConditionFalse || c.Reason != reason {
			return fmt.Errorf("its condition is %s", conditionText(svc))
		}
		text = c.Message
		return nil
	})
	return text
}

// untouched checks that nothing about the Services was written by us.
func (s *story) untouched(services ...*corev1.Service) {
	s.Helper()
	s.always(2*time.Second, "nobody touches the Services", func() error {
		for _, svc := range services {
			if now := s.get(svc.Name); now.ResourceVersion != svc.ResourceVersion {
				return fmt.Errorf("%s changed: finalizers %q, annotations %v, status %+v", svc.Name, now.Finalizers, now.Annotations, now.Status)
			}
		}
		return nil
	})
}

// event waits for an Event about the object with the reason, and returns its
// message.
func (s *story) event(namespace, kind, name, reason string) string {
	s.Helper()
	all := s.events(namespace, kind, name, reason)
	return all[len(all)-1]
}

// events waits for Events about the object with the reason, and returns their messages.
func (s *story) events(namespace, kind, name, reason string) (texts []string) {
	s.Helper()
	s.eventually(fmt.Sprintf("an Event %s about %s %s", reason, kind, name), func() error {
		list, err := s.Kube.CoreV1().Events(namespace).List(s.ctx, metav1.ListOptions{
			FieldSelector: fmt.Sprintf("involvedObject.kind=%s,involvedObject.name=%s,reason=%s", kind, name, reason),
		})
		if err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return fmt.Errorf("there is none")
		}
		texts = nil
		for _, e := range list.Items {
			texts = append(texts, e.Message)
		}
		return nil
	})
	return texts
}

// wipeStatus empties the Service's load balancer status, as a careless script
// would.
func (s *story) wipeStatus(name string) {
	s.Helper()
	_, err := s.Kube.CoreV1().Services(s.namespace).Patch(s.ctx, name, types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":null}}}`), metav1.PatchOptions{}, "status")
	require.NoError(s, err)
}

func conditionText(svc *corev1.Service) string {
	c := meta.FindStatusCondition(svc.Status.Conditions, allocated)
	if c == nil {
		return "no condition " + allocated
	}
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}
