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

// KubeProxyURL is where kube-proxy, or its replacement, reports whether this node may get traffic.
// It is /healthz and not /livez, because only /healthz fails once the autoscaler has decided to
// delete the node (KEP-3836).
const KubeProxyURL = "http://127.0.0.1:10256/healthz"

const (
	proxyInterval = time.Second
	// proxyTimeout is how long a starting speaker waits for the first answer. After that it
	// concludes that the node has no kube-proxy, unless most others have one.
	proxyTimeout = 10 * time.Second
	// proxyAbsence is how long a kube-proxy that has answered may be silent before this speaker
	// reports to the others that the node has none.
	proxyAbsence = time.Minute
	// proxyRefusals is how many unhealthy answers in a row it takes until one is believed.
	proxyRefusals = 2
)

// KubeProxy watches the health of the node's data plane:
//   - If kube-proxy was healthy and is silent, it restarts, and its rules are in the kernel: the
//     node takes traffic.
//   - If it never was healthy and most other nodes have none, the cluster has none: the node takes traffic, from
//     then on. If most of them have one, the node takes no traffic before its own kube-proxy has answered.
//   - If it answers that it is not healthy, its rules in the kernel become outdated: the node is the
//     last choice.
type KubeProxy struct {
	ask      func(context.Context) (healthy bool, status string, err error) // nil: not at all
	node     string
	networks Networks
	log      *slog.Logger

	mu      sync.Mutex
	healthy bool
	sick    bool // it reports that itself
	status  string
	answers bool
	known   bool // whether there is a kube-proxy
	changed notify.Signal
}

// NewKubeProxy returns a watcher of the URL that starts with Run. networks has which nodes have a
// kube-proxy. Without a URL the data plane is always healthy.
func NewKubeProxy(url, node string, networks Networks, log *slog.Logger) *KubeProxy {
	p := &KubeProxy{node: node, networks: networks, log: log, status: "no answer yet"}
	if url == "" {
		p.healthy, p.status, p.known = true, "not asked", true
		return p
	}
	client := &http.Client{Timeout: proxyInterval, Transport: &http.Transport{DisableKeepAlives: true}}
	p.ask = func(ctx context.Context) (bool, string, error) { return ask(ctx, client, url) }
	return p
}

// String names the task.
func (p *KubeProxy) String() string { return "kube-proxy" }

// Health reports whether the data plane takes traffic, with a text for people. It is sick if it
// answers that it is not healthy: the rules that it has written before may still work.
func (p *KubeProxy) Health() (healthy, sick bool, status string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy, p.sick, p.status
}

// Answers reports whether there is a kube-proxy, healthy or not, and whether that is known: it may still start.
func (p *KubeProxy) Answers() (answers, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.answers, p.known
}

// Changed returns a channel that is closed when Health or Answers returns something else.
func (p *KubeProxy) Changed() <-chan struct{} { return p.changed.Next() }

// Run asks until ctx ends.
func (p *KubeProxy) Run(ctx context.Context) error {
	if p.ask == nil {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(proxyInterval)
	defer tick.Stop()
	answers := proxyAnswers{start: time.Now()}
	for {
		healthy, status, err := p.ask(ctx)
		p.conclude(&answers, healthy, status, err)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// proxyAnswers is what Run remembers of the answers so far.
type proxyAnswers struct {
	start, heard time.Time // when Run began, and when the last answer came
	refusals     int       // unhealthy answers in a row
	written      bool      // kube-proxy has written its rules
	served       bool      // the node has taken traffic
}

// conclude decides by an answer, or its absence, whether the node takes traffic.
func (p *KubeProxy) conclude(a *proxyAnswers, healthy bool, status string, err error) {
	now := time.Now()
	if err == nil {
		a.heard = now
	}
	starting := now.Sub(a.start) < proxyTimeout
	absent := err != nil && !starting && (a.served || !p.elsewhere())
	p.setAnswers(now.Sub(a.heard) < proxyAbsence, err == nil || absent)
	switch {
	case absent:
		a.served = true // what others report later does not take traffic away from this node
		p.set(true, false, "does not answer: taken as absent")
	case err != nil && starting:
	case err != nil:
		p.set(false, false, "does not answer, as it does on other nodes: no traffic before it has written its rules")
	case healthy:
		a.refusals, a.written, a.served = 0, true, true
		p.set(true, false, status)
	case a.written && status == unwritten: // it was replaced, and its rules are in the kernel
	default:
		if a.refusals++; a.refusals >= proxyRefusals {
			a.written = false
			p.set(false, true, status)
		}
	}
}

// elsewhere reports whether more than half of the other nodes have a kube-proxy. A single node proves nothing: its kube-proxy
// may be unneeded, or its report false.
func (p *KubeProxy) elsewhere() bool {
	have, others := 0, 0
	for node, n := range p.networks.Networks() {
		if node == p.node {
			continue
		}
		if others++; n.KubeProxy {
			have++
		}
	}
	return 2*have > others
}

// unwritten is the status of a kube-proxy that has just started.
const unwritten = "has not written its rules yet"

// proxyAnswer is the body of kube-proxy's answer. The answer of a replacement may have none.
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

// setAnswers sets what Answers returns. What is known stays known.
func (p *KubeProxy) setAnswers(answers, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known = known || p.known; p.answers != answers || p.known != known {
		p.answers, p.known = answers, known
		p.changed.Notify()
	}
}
