package debughttp

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Why somebody may not read a path.
var (
	ErrUnauthenticated = errors.New("no bearer token that the API server knows")
	ErrForbidden       = errors.New("no permission to get this path: grant the nonResourceURL")
	ErrBusy            = errors.New("too many tokens that are not known: try again in a second")
)

const (
	// rememberYes is how long an acceptance is remembered. It must be longer than the interval
	// between two scrapes to spare questions. rememberNo is how long a refusal is remembered.
	// People who have just been given a right wait that long.
	rememberYes, rememberNo = time.Minute, 10 * time.Second
	// knownTime is how long after its acceptance a token has precedence over tokens that were
	// never accepted, and passes while the API server cannot be asked: monitoring goes on.
	knownTime = time.Hour
	// maxAccepted and maxRefused bound the answers that are remembered. There are no
	// more refusals than asksPerSecond in rememberNo.
	maxAccepted, maxRefused = 64, int(rememberNo/time.Second) * asksPerSecond
	askTimeout              = 5 * time.Second
	// renewWait is how long a request waits for the renewal of an acceptance. It is shorter than any
	// timeout of a scrape.
	renewWait = time.Second / 2
	// asksAtOnce bounds the questions to the API server at a time, separately for tokens that
	// were accepted before and for others.
	asksAtOnce = 4
)

// Delegate is an Authorizer that asks the API server: who is it
// (TokenReview), and may they get the path (SubjectAccessReview). It does so
// without k8s.io/apiserver's machinery, which would link 250 packages more.
//
// The questions about tokens of strangers are bounded. Tokens that were accepted before do not
// count for that bound.
type Delegate struct {
	client kubernetes.Interface
	budget budget
	known  chan struct{} // a slot for each question about a token that was accepted before
	new    chan struct{} // a slot for each question about another token
	// renewals are questions about tokens that were accepted before, one of each token and path at a time.
	renewals singleflight.Group

	mu       sync.Mutex
	accepted map[key]time.Time // when
	refused  map[key]refusal
}

// key is a token and a path.
type key [sha256.Size]byte

type refusal struct {
	err   error
	until time.Time
}

// NewDelegate returns an Authorizer that asks through the client.
func NewDelegate(client kubernetes.Interface) *Delegate {
	return &Delegate{client: client, known: make(chan struct{}, asksAtOnce), new: make(chan struct{}, asksAtOnce),
		accepted: map[key]time.Time{}, refused: map[key]refusal{}}
}

// Authorize implements Authorizer.
func (d *Delegate) Authorize(ctx context.Context, source netip.Addr, token, path string) error {
	k := key(sha256.Sum256([]byte(path + "\x00" + token)))
	answered, known, err := d.recall(k)
	if answered {
		return err
	}
	if known {
		return d.renew(ctx, k, token, path)
	}
	if !d.budget.take(source) {
		return ErrBusy
	}
	err = d.ask(ctx, d.new, token, path)
	d.remember(k, err)
	return err
}

// renew asks about a token that was accepted before. The token passes unless it is refused within
// renewWait, and the renewal goes on even if the request ends: an API server that does not answer
// must not hold up monitoring.
func (d *Delegate) renew(ctx context.Context, k key, token, path string) error {
	renewed := d.renewals.DoChan(string(k[:]), func() (any, error) {
		d.remember(k, d.ask(context.WithoutCancel(ctx), d.known, token, path))
		return nil, nil
	})
	select {
	case <-renewed:
	case <-time.After(renewWait):
	}
	_, _, err := d.recall(k)
	return err
}

// ask asks the API server when there is a slot.
func (d *Delegate) ask(ctx context.Context, slots chan struct{}, token, path string) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
	case <-ctx.Done():
		return fmt.Errorf("wait to ask the API server: %w", ctx.Err())
	}
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

// recall returns the answer if it is remembered, and otherwise whether the token was
// accepted before.
func (d *Delegate) recall(k key) (answered, known bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if r, ok := d.refused[k]; ok && now.Before(r.until) {
		return true, false, r.err
	}
	since, known := d.accepted[k]
	age := now.Sub(since)
	return known && age < rememberYes, known && age < knownTime, nil
}

// remember remembers the answer, if it is one.
func (d *Delegate) remember(k key, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
		keepAccepted(d.accepted, k)
	case errors.Is(err, ErrUnauthenticated), errors.Is(err, ErrForbidden):
		delete(d.accepted, k)
		if len(d.refused) >= maxRefused {
			delete(d.refused, first(d.refused, func(a, b refusal) int { return a.until.Compare(b.until) }))
		}
		d.refused[k] = refusal{err, time.Now().Add(rememberNo)}
	}
}

// keepAccepted notes that the key is accepted now, in place of the oldest one if there
// are too many.
func keepAccepted(accepted map[key]time.Time, k key) {
	if _, ok := accepted[k]; !ok && len(accepted) >= maxAccepted {
		delete(accepted, first(accepted, time.Time.Compare))
	}
	accepted[k] = time.Now()
}

// first returns the key of the least value.
func first[V any](of map[key]V, compare func(a, b V) int) key {
	return slices.MinFunc(slices.Collect(maps.Keys(of)), func(k, l key) int { return compare(of[k], of[l]) })
}
