package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

// Names of the objects that the chart makes.
const (
	// ServiceName is the Service by which the API server finds the replicas.
	ServiceName = "lodestone-admission"
	// SecretName is the Secret that the certificate is kept in.
	SecretName = "lodestone-admission"
	// WebhookName is the ValidatingWebhookConfiguration.
	WebhookName = "lodestone-config"
)

// interval is the time between two looks at the Secret and the webhook.
const interval = 20 * time.Second

// timeout bounds a request to the API server.
const timeout = 5 * time.Second

// KeeperOptions are what a Keeper needs.
type KeeperOptions struct {
	Client kubernetes.Interface
	// Namespace is where the Secret and the Service are.
	Namespace string
	// Leads reports whether this replica is the one that makes certificates.
	Leads func() bool
	Log   *slog.Logger
	// Now is the clock. Nil: time.Now.
	Now func() time.Time
}

// Keeper is the task that keeps the webhook's certificate. Every replica serves the
// certificate in the Secret. The leader makes it, and gives its authority to the API server.
// It implements dynamiccertificates.SNICertKeyContentProvider for the name of the Service, so
// that the secure port serves it to the API server and to nobody else.
type Keeper struct {
	KeeperOptions
	name string

	mu        sync.Mutex
	current   *pair
	listeners []dynamiccertificates.Listener
	// failed is what was logged last.
	failed string
}

// NewKeeper returns a Keeper that starts with Run. Until it has read the Secret it
// serves a certificate that nobody trusts.
func NewKeeper(o KeeperOptions) (*Keeper, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	k := &Keeper{KeeperOptions: o, name: ServiceName + "." + o.Namespace + ".svc"}
	var err error
	if k.current, err = newPair(k.name, nil, o.Now()); err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return k, nil
}

// Run keeps the certificate until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		k.report(k.Keep(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// report logs an error once.
func (k *Keeper) report(err error) {
	text := fmt.Sprint(err)
	if err != nil && text != k.failed {
		k.Log.Warn("the configuration is not checked when it is written, or soon will not be", "err", err, "retry", interval)
	}
	k.failed = text
}

// Keep reads the Secret once, and serves the certificate in it. The leader makes another one
// if that is bad or ends soon.
func (k *Keeper) Keep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	secret, err := k.Client.CoreV1().Secrets(k.Namespace).Get(ctx, SecretName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get Secret %s: %w", SecretName, err)
	}
	kept, bad := pairOf(secret, k.name, k.Now())
	if bad == nil {
		k.serve(kept)
	}
	if !k.Leads() {
		return nil // the leader mends it
	}
	if bad == nil && k.Now().Add(renewal).Before(kept.until) {
		return k.trust(ctx, kept.authorities)
	}
	k.Log.Info("making a certificate for admission", "secret", SecretName, "why", reason(bad, kept))
	next, err := newPair(k.name, kept, k.Now())
	if err != nil {
		return fmt.Errorf("make a certificate: %w", err)
	}
	// The API server must know the authority before any replica serves the certificate.
	if err := k.trust(ctx, next.authorities); err != nil {
		return err
	}
	secret.Data = next.data()
	if _, err := k.Client.CoreV1().Secrets(k.Namespace).Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update Secret %s: %w", SecretName, err)
	}
	k.serve(next)
	return nil
}

func reason(bad error, kept *pair) string {
	if bad != nil {
		return bad.Error()
	}
	return "the present one ends on " + kept.until.UTC().Format(time.DateOnly)
}

// trust makes the API server accept certificates that these authorities have signed.
func (k *Keeper) trust(ctx context.Context, authorities []byte) error {
	webhooks := k.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	present, err := webhooks.Get(ctx, WebhookName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get ValidatingWebhookConfiguration %s: %w", WebhookName, err)
	}
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value any    `json:"value"`
	}
	patch := []operation{{"test", "/metadata/resourceVersion", present.ResourceVersion}}
	for i, w := range present.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, authorities) {
			patch = append(patch, operation{"add", fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), authorities})
		}
	}
	if len(patch) == 1 {
		return nil
	}
	text, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	if _, err := webhooks.Patch(ctx, WebhookName, types.JSONPatchType, text, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("patch ValidatingWebhookConfiguration %s: %w", WebhookName, err)
	}
	return nil
}

// serve serves the pair from now on.
func (k *Keeper) serve(p *pair) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.equal(k.current) {
		return
	}
	k.current = p
	for _, l := range k.listeners {
		l.Enqueue()
	}
}

// Name implements dynamiccertificates.CertKeyContentProvider.
func (k *Keeper) Name() string { return "admission certificate" }

// CurrentCertKeyContent implements dynamiccertificates.CertKeyContentProvider.
func (k *Keeper) CurrentCertKeyContent() (certificate, key []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.current.certificate, k.current.key
}

// SNINames implements dynamiccertificates.SNICertKeyContentProvider.
func (k *Keeper) SNINames() []string { return []string{k.name} }

// AddListener implements dynamiccertificates.Notifier.
func (k *Keeper) AddListener(l dynamiccertificates.Listener) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listeners = append(k.listeners, l)
}
