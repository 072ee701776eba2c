package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/news"
)

const (
	// passwordsEvery is how often Secrets are read again. They are not watched:
	// that takes the right to read all that there are.
	passwordsEvery   = 10 * time.Second
	passwordsTimeout = 5 * time.Second
)

// errNotRead is why there is no password yet.
var errNotRead = errors.New("the API server has not been asked yet")

// Passwords follows the Secrets that the configuration names for BGP peers.
// While the API server is down they stay as they are.
type Passwords struct {
	client    kubernetes.Interface
	namespace string
	config    *ConfigWatcher
	log       *slog.Logger

	changed news.Signal
	mu      sync.Mutex
	known   map[config.SecretKey]password
}

// password is what came of reading one.
type password struct {
	value string
	fault string // why there is none
}

// NewPasswords returns Passwords from Secrets of the namespace that start with
// Run.
func NewPasswords(client kubernetes.Interface, namespace string, config *ConfigWatcher, log *slog.Logger) *Passwords {
	return &Passwords{client: client, namespace: namespace, config: config, log: log}
}

// String names the task.
func (p *Passwords) String() string { return "passwords" }

// Password returns the value without the line break at its end: a Secret made
// from a file has one, no router's password does.
func (p *Passwords) Password(key config.SecretKey) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known, ok := p.known[key]
	switch {
	case !ok:
		return "", fmt.Errorf("Secret %s/%s: %w", p.namespace, key.Name, errNotRead)
	case known.fault != "":
		return "", errors.New(known.fault)
	}
	return known.value, nil
}

// Changed returns a channel that is closed when Password's answers change. Take
// the channel first, then ask Password: no change is missed.
func (p *Passwords) Changed() <-chan struct{} { return p.changed.Next() }

// Run reads the Secrets until ctx ends.
func (p *Passwords) Run(ctx context.Context) error {
	for {
		changed := p.config.Changed()
		p.read(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(passwordsEvery):
		}
	}
}

// read brings the passwords up to date with the configuration and the Secrets.
func (p *Passwords) read(ctx context.Context) {
	current, _ := p.config.Current()
	if current == nil {
		return
	}
	read := map[config.SecretKey]password{}
	for i := range current.Peers {
		if key := current.Peers[i].Password; key != nil {
			read[*key] = p.readOne(ctx, *key)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !maps.Equal(read, p.known) {
		p.known = read
		p.changed.Notify()
	}
}

// readOne asks the API server. Without an answer, what was known stays.
func (p *Passwords) readOne(ctx context.Context, key config.SecretKey) password {
	ctx, cancel := context.WithTimeout(ctx, passwordsTimeout)
	defer cancel()
	name := p.namespace + "/" + key.Name
	secret, err := p.client.CoreV1().Secrets(p.namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return password{fault: fmt.Sprintf("there is no Secret %s", name)}
	case apierrors.IsForbidden(err):
		return password{fault: fmt.Sprintf("Secret %s may not be read: list it in the value speaker.bgp.passwordSecrets of the chart: %v", name, err)}
	case err != nil:
		p.mu.Lock()
		defer p.mu.Unlock()
		if known, ok := p.known[key]; ok && known.fault == "" {
			p.log.Warn("Secret not read, its last value stays", "secret", name, "err", err)
			return known
		}
		return password{fault: fmt.Sprintf("Secret %s could not be read: %v", name, err)}
	}
	value, ok := secret.Data[key.Key]
	if !ok {
		return password{fault: fmt.Sprintf("Secret %s has no key %q", name, key.Key)}
	}
	return password{value: strings.TrimRight(string(value), "\r\n")}
}
