package scenarios

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// fetch returns what a URL answers with.
func (s *story) fetch(url, token string) (code int, body string, err error) {
	response, err := s.Get(s.ctx, url, token)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	return response.StatusCode, string(raw), err
}

// dashboards are where the replicas serve the dashboard.
func (s *story) dashboards() (all []string) {
	s.Helper()
	pods, err := s.Pods(s.ctx, "controller")
	require.NoError(s, err)
	for _, pod := range pods {
		all = append(all, lodestone.URL(&pod, "dashboard/"))
	}
	return all
}

// Every replica shows the dashboard to those who may see it, and nothing to others.
func TestDashboardIsForWhoMaySeeIt(t *testing.T) {
	s := begin(t)
	s.service("web")
	address := s.assigned("web")
	var anybody string
	s.eventually("the namespace has its default account", func() (err error) {
		anybody, err = s.Token(s.ctx, s.namespace, "default")
		return err
	})
	reader, err := s.Token(s.ctx, lodestone.Namespace, "lodestone-dashboard")
	require.NoError(t, err)
	s.hidesFromProxies()
	for _, url := range s.dashboards() {
		for _, path := range []string{"", "view", "events", "dashboard.js"} {
			assert.Equal(t, http.StatusUnauthorized, s.status(url+path, ""), "without a token: %s", url+path)
			assert.Equal(t, http.StatusForbidden, s.status(url+path, anybody), "with anybody's token: %s", url+path)
		}
		assert.Equal(t, http.StatusForbidden, s.status(strings.TrimSuffix(url, "dashboard/")+"metrics", reader),
			"it is no right to anything else")
		code, page, err := s.fetch(url, reader)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, code)
		require.Contains(t, page, "<title>Lodestone</title>")
		s.eventually("the dashboard has the Service and its address", func() error {
			_, view, err := s.fetch(url+"view?q="+s.namespace+"/web", reader)
			if err == nil && (!strings.Contains(view, address) || !strings.Contains(view, s.namespace+"/web")) {
				err = errors.New(view)
			}
			return err
		})
	}
}

// The API server's proxy, which kubectl proxy uses, removes the reader's credentials:
// nobody sees the dashboard that way.
func (s *story) hidesFromProxies() {
	s.Helper()
	pods, err := s.Pods(s.ctx, "controller")
	require.NoError(s, err)
	address, err := url.Parse(lodestone.MetricsURL(&pods[0]))
	require.NoError(s, err)
	err = s.Kube.CoreV1().RESTClient().Get().Namespace(lodestone.Namespace).Resource("pods").
		Name("https:" + pods[0].Name + ":" + address.Port()).SubResource("proxy").Suffix("dashboard/").Do(s.ctx).Error()
	require.True(s, apierrors.IsUnauthorized(err), "%v", err)
}

// lodestone dashboard brings the page to the operator's machine, through the API
// server.
func TestDashboardComesToTheOperator(t *testing.T) {
	s := begin(t)
	s.service("web")
	s.assigned("web")
	ctx, cancel := context.WithCancel(s.ctx)
	cmd := s.Lab.Command(ctx, lab.ControlPlane, filepath.Join(s.Lab.Root, "bin", "lodestone"), "dashboard", "--kubeconfig="+s.Lab.Kubeconfig())
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
	var page string
	for lines := bufio.NewScanner(output); page == "" && lines.Scan(); {
		if line := strings.TrimSpace(lines.Text()); strings.HasPrefix(line, "http://127.0.0.1:") {
			page = line
		}
	}
	require.NotEmpty(t, page, "it prints no address")
	code, body, err := s.fetch(page, "")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, code, body)
	s.eventually("the page has the Service", func() error {
		_, view, err := s.fetch(page+"view?q="+s.namespace+"/web", "")
		if err == nil && !strings.Contains(view, s.namespace+"/web") {
			err = errors.New(view)
		}
		return err
	})
	base, _, _ := strings.Cut(page[len("http://"):], "/")
	code, _, err = s.fetch("http://"+base+"/dashboard/", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusNotFound, code, "other users of the machine do not know the secret")
}

// A write of a broken configuration is refused at once, by whatever tool it is made. Writes
// succeed while no controller answers.
func brokenConfigurationIsRefusedAtOnce(t *testing.T) {
	s := begin(t)
	const broken = "apiVersion: lodestone.io/v1alpha1\nkind: Config\npools:\n- {name: a, addresses: [198.18.0.0/24]}\n- {name: b, " +
		"addresses: [198.18.0.128/25]}\n"
	s.eventually("kubectl apply is refused with the sentence", func() error {
		err := s.apply(broken)
		if err == nil || !strings.Contains(err.Error(), "config.lodestone.io") || !strings.Contains(err.Error(), "config.yaml:5:") ||
			!strings.Contains(err.Error(), "overlaps") {
			return fmt.Errorf("kubectl apply: %v", err)
		}
		return nil
	})
	require.NoError(t, s.apply(lodestone.Document(usualPools)), "a valid one is taken")

	// Every replica has a certificate that the API server knows.
	for refused := 0; refused < 20; {
		begin := time.Now()
		if err := s.apply(broken); err != nil {
			refused++
		} else { // the API server waits three seconds for the answer, and then goes on without
			require.Greater(t, time.Since(begin), 3*time.Second, "it was taken")
		}
	}
	s.stopController()
	require.NoError(t, s.apply(broken), "nobody is held up by a controller that is away")
	require.NoError(t, s.apply(lodestone.Document(usualPools)))
	s.startController()
	s.service("web")
	s.assigned("web")
}

// apply runs kubectl apply with a document.
func (s *story) apply(document string) error {
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + s.ConfigMapName + ", namespace: " + lodestone.Namespace +
		"}\ndata:\n  config.yaml: |\n"
	for line := range strings.SplitSeq(strings.TrimSuffix(document, "\n"), "\n") {
		manifest += "    " + line + "\n"
	}
	file := filepath.Join(s.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		return err
	}
	_, err := s.Lab.Kubectl(s.ctx, "apply", "--server-side", "--force-conflicts", "-f", file)
	return err
}
