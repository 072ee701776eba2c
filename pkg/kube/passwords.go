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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

const (
	// passwordsEvery is how often Secrets are read again, by every speaker: from the API
	// server's memory. They are not watched, because some tools replace a Secret by deleting
	// it first, which would end all sessions that need it.
	passwordsEvery   = 10 * time.Second
	passwordsTimeout = 5 * time.Second
	// forbiddenTime is how long the API server has to forbid reading a Secret before people are to see to it: while it
	// starts it forbids that, too.
	forbiddenTime = time.Minute
	// refusedTime is how long it has to refuse a Secret of which nothing is known yet.
	refusedTime = passwordsEvery / 2
)

// Passwords follows the Secrets that the configuration names for BGP peers.
// While the API server is down they stay as they are.
type Passwords struct {
	client    kubernetes.Interface
	namespace string
	config    *ConfigWatcher
	log       *slog.Logger

	changed notify.Signal
	mu      sync.Mutex
	known   map[config.SecretKey]password

	refused map[string]time.Time // since when the API server refuses Secrets of which nothing is known; of Run
}

// password is what came of reading one.
type password struct {
	value  string
	fault  string // why there is none
	missed bool   // the Secret was not there the last time

	forbidden time.Time // since when the API server forbids to read the Secret; zero: it does not
	outdated  string    // why the value may not be the Secret's any more
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
		return "", fmt.Errorf("Secret %s/%s: %w", p.namespace, key.Name, config.ErrNotRead)
	case known.fault != "":
		return "", errors.New(known.fault)
	}
	return known.value, nil
}

// Outdated returns why the password may not be the Secret's any more: the API server has forbidden to read the Secret for
// a while. Empty: it is the Secret's.
func (p *Passwords) Outdated(key config.SecretKey) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[key].outdated
}

// Changed returns a channel that is closed when the answers of Password and Outdated change. Take
// the channel first, then ask them: no change is missed.
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
	read, secrets, refused := map[config.SecretKey]password{}, map[string]secret{}, map[string]time.Time{}
	for i := range current.Peers {
		key := current.Peers[i].Password
		if key == nil {
			continue
		}
		if _, ok := secrets[key.Name]; !ok {
			secrets[key.Name] = p.get(ctx, key.Name)
		}
		if of, known := p.inForce(*key, secrets[key.Name]); known {
			read[*key] = of
		} else if refusal(secrets[key.Name].err) {
			refused[key.Name] = p.refusedSince(key.Name)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = refused
	if !maps.Equal(read, p.known) {
		p.known = read
		p.changed.Notify()
	}
}

// secret is what the API server answers.
type secret struct {
	*corev1.Secret
	err error
}

// get reads the Secret, from memory of an API server. That one may lag behind another one that was asked before, and have the
// password before the one that is known: so one that differs is read as etcd has it.
func (p *Passwords) get(ctx context.Context, name string) secret {
	ctx, cancel := context.WithTimeout(ctx, passwordsTimeout)
	defer cancel()
	secrets := p.client.CoreV1().Secrets(p.namespace)
	s, err := secrets.Get(ctx, name, metav1.GetOptions{ResourceVersion: "0"})
	if err == nil && p.differs(name, s) {
		s, err = secrets.Get(ctx, name, metav1.GetOptions{})
	}
	return secret{s, err}
}

// differs reports whether a password that is known is not the Secret's.
func (p *Passwords) differs(name string, s *corev1.Secret) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, of := range p.known {
		if key.Name == name && of.fault == "" && of.value != passwordOf(secret{s, nil}, name, key.Key).value {
			return true
		}
	}
	return false
}

// refusedSince returns since when the API server refuses the Secret: since now, if it has not before.
func (p *Passwords) refusedSince(name string) time.Time {
	if since, known := p.refused[name]; known {
		return since
	}
	return time.Now()
}

// refusal reports whether the API server has answered, and gives no Secret.
func refusal(err error) bool { return Missing(err) || apierrors.IsForbidden(err) }

// inForce returns what the Secret has. While it cannot be read, the last password that it had stays in force; if it is missing, until that
// is so twice in a row. It is not known before the API server has given an answer, and a refusal is one only if it lasts:
// Helm applies a document before the Role that allows to read what it names, and the API server answers from memory, where a Secret
// that was just made may not be yet.
func (p *Passwords) inForce(key config.SecretKey, s secret) (of password, is bool) {
	p.mu.Lock()
	known, ok := p.known[key]
	p.mu.Unlock()
	name := p.namespace + "/" + key.Name
	switch answered := s.err == nil || refusal(s.err) && time.Since(p.refusedSince(key.Name)) >= refusedTime; {
	case !ok && !answered:
		p.log.Warn("Secret not read yet", "secret", name, "err", s.err)
		return password{}, false
	case !ok, known.fault != "", s.err == nil, Missing(s.err) && known.missed:
		return passwordOf(s, name, key.Key), true
	}
	p.log.Warn("Secret not read, its last value stays", "secret", name, "err", s.err)
	return known.unread(s.err, name), true
}

// unread returns the password after its Secret could not be read. The API server forbids to read it while it starts, before it has read
// what its roles allow. The password counts as outdated when it goes on with that.
func (of password) unread(err error, name string) password {
	of.missed = Missing(err)
	switch forbidden := apierrors.IsForbidden(err); {
	case of.missed:
		of.forbidden, of.outdated = time.Time{}, ""
	case forbidden && of.forbidden.IsZero():
		of.forbidden = time.Now()
	case forbidden && time.Since(of.forbidden) >= forbiddenTime:
		of.outdated = "the last password stays: " + denied(err, name)
	}
	return of
}

// passwordOf returns the Secret's password, or why it has none.
func passwordOf(s secret, name, key string) password {
	switch {
	case Missing(s.err):
		return password{fault: "there is no Secret " + name}
	case apierrors.IsForbidden(s.err):
		return password{fault: denied(s.err, name)}
	case s.err != nil:
		return password{fault: fmt.Sprintf("Secret %s could not be read: %v", name, s.err)}
	}
	value, ok := s.Data[key]
	if !ok {
		return password{fault: fmt.Sprintf("Secret %s has no key %q", name, key)}
	}
	return password{value: strings.TrimRight(string(value), "\r\n")}
}

func denied(err error, name string) string {
	return fmt.Sprintf("Secret %s may not be read: list it in the value speaker.bgp.passwordSecrets of the chart: %v", name, err)
}
