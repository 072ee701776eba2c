package debughttp

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Why somebody may not read a path.
var (
	ErrUnauthenticated = errors.New("no bearer token that the API server knows")
	ErrForbidden       = errors.New("no permission to get this path: grant the nonResourceURL")
)

const (
	// remember is how long a yes holds: shorter than the interval between two
	// scrapes would spare nothing.
	remember   = time.Minute
	remembered = 64
	askTimeout = 5 * time.Second
	// asksAtOnce bounds what strangers can make us ask of the API server.
	asksAtOnce = 4
)

// Delegate is an Authorizer that asks the API server: who is it
// (TokenReview), and may they get the path (SubjectAccessReview). It does so
// without k8s.io/apiserver's machinery, which would link 250 packages more.
type Delegate struct {
	client kubernetes.Interface
	asking chan struct{}

	mu  sync.Mutex
	yes map[[sha256.Size]byte]time.Time // until when, by token and path
}

// NewDelegate returns an Authorizer that asks through the client.
func NewDelegate(client kubernetes.Interface) *Delegate {
	return &Delegate{client: client, asking: make(chan struct{}, asksAtOnce), yes: map[[sha256.Size]byte]time.Time{}}
}

// Authorize implements Authorizer.
func (d *Delegate) Authorize(ctx context.Context, token, path string) error {
	key := sha256.Sum256([]byte(path + "\x00" + token))
	if d.known(key) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	select {
	case d.asking <- struct{}{}:
		defer func() { <-d.asking }()
	case <-ctx.Done():
		return fmt.Errorf("wait to ask the API server: %w", ctx.Err())
	}
	if err := d.ask(ctx, token, path); err != nil {
		return err
	}
	d.keep(key)
	return nil
}

func (d *Delegate) ask(ctx context.Context, token, path string) error {
	review, err := d.client.AuthenticationV1().TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("review token: %w", err)
	}
	if !review.Status.Authenticated {
		return ErrUnauthenticated
	}
	user, extra := review.Status.User, map[string]authorizationv1.ExtraValue{}
	for k, v := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	access, err := d.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("review access: %w", err)
	}
	if !access.Status.Allowed {
		return fmt.Errorf("%w: user %q", ErrForbidden, user.Username)
	}
	return nil
}

func (d *Delegate) known(key [sha256.Size]byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return time.Now().Before(d.yes[key])
}

func (d *Delegate) keep(key [sha256.Size]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.yes) >= remembered {
		clear(d.yes)
	}
	d.yes[key] = time.Now().Add(remember)
}
