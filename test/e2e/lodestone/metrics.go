package lodestone

import (
	"context"
	"fmt"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Labels select one time series of a metric. Labels that are not named may
// have any value.
type Labels map[string]string

// The ports on which the components serve their metrics.
var metricsPort = map[string]int{"controller": 10258, "speaker": 9743}

// reader is the account that the lab scrapes with.
const reader = "metrics-reader"

// URL is where the pod serves the path, beside its metrics.
func URL(pod *corev1.Pod, path string) string {
	return fmt.Sprintf("https://%s:%d/%s", pod.Status.HostIP, metricsPort[pod.Labels["app.kubernetes.io/component"]], path)
}

// MetricsURL is where the pod serves its metrics.
func MetricsURL(pod *corev1.Pod) string { return URL(pod, "metrics") }

// Token returns a token of a service account that exists.
func (i *Installation) Token(ctx context.Context, namespace, account string) (string, error) {
	request, err := i.Kube.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{},
		metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("get token of account %s: %w", account, err)
	}
	return request.Status.Token, nil
}

// MetricsToken returns a token of an account that the chart's role for
// monitoring systems is bound to.
func (i *Installation) MetricsToken(ctx context.Context) (string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: reader, Namespace: "default"}}
	if _, err := i.Kube.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		return "", err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: reader},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "lodestone-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: reader, Namespace: "default"}},
	}
	if _, err := i.Kube.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		return "", err
	}
	return i.Token(ctx, "default", reader)
}

// cachedMetricsToken spares the API server a request for each scrape. Tokens expire after an hour.
func (i *Installation) cachedMetricsToken(ctx context.Context) (token string, err error) {
	i.tokenLock.Lock()
	defer i.tokenLock.Unlock()
	if i.token == "" || time.Since(i.tokenAt) > 30*time.Minute {
		if token, err = i.MetricsToken(ctx); err != nil {
			return "", err
		}
		i.token, i.tokenAt = token, time.Now()
	}
	return i.token, nil
}

// Get fetches a URL as the cluster's monitoring would. Without a token it
// goes unauthenticated.
func (i *Installation) Get(ctx context.Context, url, token string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	return i.web.Do(request)
}

// Metric returns the value of the series in the pod's metrics.
func (i *Installation) Metric(ctx context.Context, pod *corev1.Pod, name string, labels Labels) (float64, error) {
	families, err := i.scrape(ctx, pod)
	if err != nil {
		return 0, err
	}
	v, ok := value(families, name, labels)
	if !ok {
		return 0, fmt.Errorf("metrics of %s have no %s%v", pod.Name, name, labels)
	}
	return v, nil
}

// leaderHas checks the value of a series of the leading controller.
func (i *Installation) leaderHas(ctx context.Context, name string, labels Labels, want float64) error {
	leader, err := i.Leader(ctx)
	if err != nil {
		return err
	}
	got, err := i.Metric(ctx, leader, name, labels)
	if err == nil && got != want {
		err = fmt.Errorf("%s%v is %v, want %v", name, labels, got, want)
	}
	return err
}

// LeaderMetricBecomes waits until a series of the leading controller has the
// value.
func (i *Installation) LeaderMetricBecomes(ctx context.Context, name string, labels Labels, want float64) error {
	return Wait(ctx, "the metric has its value", func() error { return i.leaderHas(ctx, name, labels, want) })
}

func (i *Installation) scrape(ctx context.Context, pod *corev1.Pod) (map[string]*dto.MetricFamily, error) {
	token, err := i.cachedMetricsToken(ctx)
	if err != nil {
		return nil, err
	}
	response, err := i.Get(ctx, MetricsURL(pod), token)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scrape %s: %s", pod.Name, response.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	return parser.TextToMetricFamilies(response.Body)
}

// value finds the first series that has the labels.
func value(families map[string]*dto.MetricFamily, name string, labels Labels) (float64, bool) {
	for _, metric := range families[name].GetMetric() {
		if has(metric, labels) {
			return metric.GetGauge().GetValue() + metric.GetCounter().GetValue() + metric.GetUntyped().GetValue(), true
		}
	}
	return 0, false
}

func has(metric *dto.Metric, labels Labels) bool {
	found := 0
	for _, pair := range metric.Label {
		if v, ok := labels[pair.GetName()]; ok && v == pair.GetValue() {
			found++
		}
	}
	return found == len(labels)
}
