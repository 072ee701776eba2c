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

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// KubeProxyURL is where kube-proxy, and what replaces it, reports to load balancers
// whether this node may get traffic. It is /healthz and not /livez: the former
// also says no once the autoscaler has decided to delete the node (KEP-3836).
const KubeProxyURL = "http://127.0.0.1:10256/healthz"

const (
	proxyInterval = time.Second
	// proxyPatience is how long a starting speaker waits for an answer before
	// it concludes that there is no kube-proxy, if no other node has one.
	proxyPatience = 10 * time.Second
	// proxyAbsence is how long one that has answered may be silent before this
	// node counts as one without, for those on other nodes.
	proxyAbsence = time.Minute
	// proxyRefusals is how many answers in a row say no before it is believed.
	proxyRefusals = 2
)

// KubeProxy watches the health of the node's data plane. One that has been well and
// is silent leaves its rules in the kernel: it restarts. One that was never well is
// not there if no other node has one, as a cluster may have none; otherwise it is
// still to come, and the node takes no traffic before it has. One that says that it is not
// healthy has rules in the kernel that age: the node is the last choice.
type KubeProxy struct {
	ask      func(context.Context) (healthy bool, status string, err error) // nil: nobody is asked
	node     string
	networks Networks
	log      *slog.Logger

	mu      sync.Mutex
	healthy bool
	sick    bool // it says so itself
	status  string
	answers bool
	changed notify.Signal
}

// NewKubeProxy returns a watcher of the URL on the node that starts with Run. What
// other nodes have is in their networks. Without URL it always says yes.
func NewKubeProxy(url, node string, networks Networks, log *slog.Logger) *KubeProxy {
	p := &KubeProxy{node: node, networks: networks, log: log, status: "no answer yet"}
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

// Health reports whether the data plane takes traffic, with a sentence for people. It is sick
// if it is there and says that it is not healthy: what it has written before may serve.
func (p *KubeProxy) Health() (healthy, sick bool, status string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy, p.sick, p.status
}

// Answers reports whether there is a kube-proxy, well or not.
func (p *KubeProxy) Answers() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.answers
}

// Changed returns a channel that is closed when Health or Answers has a new answer.
func (p *KubeProxy) Changed() <-chan struct{} { return p.changed.Next() }

// Run asks until ctx ends.
func (p *KubeProxy) Run(ctx context.Context) error {
	if p.ask == nil {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(proxyInterval)
	defer tick.Stop()
	start, heard, refusals, written, served := time.Now(), time.Time{}, 0, false, false
	for {
		healthy, status, err := p.ask(ctx)
		if err == nil {
			heard = time.Now()
		}
		p.setAnswers(time.Since(heard) < proxyAbsence)
		switch {
		case err != nil && time.Since(start) < proxyPatience:
		case err != nil && !served && p.elsewhere():
			p.set(false, false, "does not answer, as it does on other nodes: no traffic before it has written its rules")
		case err != nil:
			p.set(true, false, "does not answer: taken as absent")
		case healthy:
			refusals, written, served = 0, true, true
			p.set(true, false, status)
		case written && status == unwritten: // it was replaced, and its rules are in the kernel
		default:
			if refusals++; refusals >= proxyRefusals {
				written = false
				p.set(false, true, status)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// elsewhere reports whether another node has a kube-proxy.
func (p *KubeProxy) elsewhere() bool {
	for node, n := range p.networks.Networks() {
		if node != p.node && n.KubeProxy {
			return true
		}
	}
	return false
}

// unwritten is the status of a kube-proxy that has just started.
const unwritten = "has not written its rules yet"

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
		return false, unwritten, nil
	}
	return true, "healthy", nil
}

func (p *KubeProxy) set(healthy, sick bool, status string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.healthy == healthy && p.sick == sick && p.status == status {
		return
	}
	p.log.Info("kube-proxy", "healthy", healthy, "status", status)
	p.healthy, p.sick, p.status = healthy, sick, status
	p.changed.Notify()
}

func (p *KubeProxy) setAnswers(answers bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answers != answers {
		p.answers = answers
		p.changed.Notify()
	}
}
