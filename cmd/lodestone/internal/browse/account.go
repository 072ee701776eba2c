package browse

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// AccountName is the service account that may see the dashboard and nothing
	// else.
	AccountName = "lodestone-dashboard"
	// tokenLife is how long a token is valid. It is replaced renewal before its end.
	tokenLife = time.Hour
	renewal   = 10 * time.Minute
)

// Account gives tokens of the account that may see the dashboard. The user's own
// credentials stay between the API server and this program: a controller that
// somebody has taken over must not get those of an administrator.
type Account struct {
	Client    kubernetes.Interface
	Namespace string

	mu    sync.Mutex
	token string
	until time.Time
}

// Token implements Token.
func (a *Account) Token(ctx context.Context) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if time.Until(a.until) > renewal {
		return a.token, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenLife / time.Second))}}
	answer, err := a.Client.CoreV1().ServiceAccounts(a.Namespace).CreateToken(ctx, AccountName, request, metav1.CreateOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return "", fmt.Errorf("you may not see the dashboard: you need the right to create serviceaccounts/token of %s in namespace %s, "+
			"which the Role lodestone-dashboard-user has: %w", AccountName, a.Namespace, err)
	case apierrors.IsNotFound(err):
		return "", fmt.Errorf("there is no service account %s in namespace %s: the chart makes it with dashboard.enabled: %w", AccountName,
			a.Namespace, err)
	case errors.Is(err, context.DeadlineExceeded):
		return "", fmt.Errorf("get a token for the dashboard: the API server did not answer in time: %w", err)
	case err != nil:
		return "", fmt.Errorf("get a token for the dashboard: %w", err)
	}
	a.token, a.until = answer.Status.Token, answer.Status.ExpirationTimestamp.Time
	return a.token, nil
}
