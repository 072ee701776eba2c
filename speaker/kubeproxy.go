package speaker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/news"
)

// KubeProxyURL is where kube-proxy, and what replaces it, tells load balancers
// whether this node may get traffic. It is /healthz and not /livez: the former
// also says no once the autoscaler has decided to delete the node (KEP-3836).
const KubeProxyURL = "http://127.0.0.1:10256/healthz"

const (
	proxyInterval = time.Second
	// proxyPatience is how long a starting speaker waits for an answer before
	// it concludes that there is no kube-proxy.
	proxyPatience = 10 * time.Second
	// proxyRefusals is how many answers in a row say no before it is believed.
	proxyRefusals = 2
)

// KubeProxy watches the health of the node's data plane. Who does not answer
// is not there: a cluster may have no kube-proxy, and one that restarts leaves
// its rules in the kernel meanwhile. Only an answer that says no counts.
type KubeProxy struct {
	ask func(context.Context) (healthy bool, status string, err error) // nil: nobody is asked
	log *slog.Logger

	mu      sync.Mutex
	healthy bool
	status  string
	changed news.Signal
}

// NewKubeProxy returns a watcher of the URL that starts with Run. Without URL
// it always says yes.
func NewKubeProxy(url string, log *slog.Logger) *KubeProxy {
	p := &KubeProxy{log: log, status: "no answer yet"}
	if url == "" {
		p.healthy, p.status = true, "not asked"
		return p
	}
	client := &http.Client{Timeout: proxyInterval, Transport: &http.Transport{DisableKeepAlives: true}}
	p.ask = func(ctx context.Context) (bool, string, error) { return ask(ctx, client, url) }
	return p
}

// String names the task.
func (p *KubeProxy) String() string { return "kube-proxy" }

// Healthy tells whether the data plane takes traffic, and says it in words.
func (p *KubeProxy) Healthy() (bool, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy, p.status
}

// Changed returns a channel that is closed when Healthy has a new answer.
func (p *KubeProxy) Changed() <-chan struct{} { return p.changed.Next() }

// Run asks until ctx ends.
func (p *KubeProxy) Run(ctx context.Context) error {
	if p.ask == nil {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(proxyInterval)
	defer tick.Stop()
	start, refusals := time.Now(), 0
	for {
		healthy, status, err := p.ask(ctx)
		switch {
		case err != nil && time.Since(start) >= proxyPatience:
			p.set(true, "does not answer: taken as absent")
		case err != nil:
		case healthy:
			refusals = 0
			p.set(true, status)
		default:
			if refusals++; refusals >= proxyRefusals {
				p.set(false, status)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// proxyAnswer is what kube-proxy says of itself; others may say nothing.
type proxyAnswer struct {
	Healthy *bool `json:"healthy"`
	// Status has an entry per IP family whose rules were written.
	Status map[string]any `json:"status"`
}

func ask(ctx context.Context, client *http.Client, url string) (healthy bool, status string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, "", fmt.Errorf("ask %q: %w", url, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return false, "", err //nolint:wrapcheck // it names the URL
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return false, resp.Status, nil
	}
	var answer proxyAnswer
	err = json.NewDecoder(io.LimitReader(resp.Body, 4096)).Decode(&answer)
	if err == nil && answer.Healthy != nil && len(answer.Status) == 0 {
		return false, "has not written its rules yet", nil
	}
	return true, "healthy", nil
}

func (p *KubeProxy) set(healthy bool, status string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.healthy == healthy && p.status == status {
		return
	}
	p.log.Info("kube-proxy", "healthy", healthy, "status", status)
	p.healthy, p.status = healthy, status
	p.changed.Notify()
}
