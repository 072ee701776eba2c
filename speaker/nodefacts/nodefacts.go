// Package nodefacts gathers the facts of this node that package diagnose checks, when a client asks. Facts
// that the node does not report are unknown; none is guessed.
//
// The network is probed only on demand, one diagnosis at a time and within seconds. A client cannot choose
// freely where the node sends packets: neighbours are other speakers by their Leases, and VIPs are tried only
// if the plan has them.
//
// The files, from the outside in:
//
//	nodefacts.go       the handler, and what it gathers
//	kernel.go          settings, routes, capabilities and sockets, from /proc
//	neighbourprobe.go  a question to a neighbour and to a VIP, by ARP and NDP
//	synprobe.go        the first packet of a connection to a VIP's port
package nodefacts

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

// ProxyModeURL is where kube-proxy reports its mode, on its metrics port.
const ProxyModeURL = "http://127.0.0.1:10249/proxyMode"

const (
	// timeout bounds a diagnosis; the server writes an answer for longer.
	timeout        = 20 * time.Second
	membersTimeout = 10 * time.Second
	proxyTimeout   = time.Second
)

// Members are the other speakers; membership.Task is one.
type Members interface {
	Speakers() map[string]bool
	Detection() *diagnose.Detection
	// Probe asks all other speakers that have a Lease.
	Probe(ctx context.Context) (answers []membership.Reach, unasked int)
}

// Options are what a Gatherer needs.
type Options struct {
	Node       string
	Interfaces netstate.Interfaces
	Members    Members
	// Status returns the speaker's last decision.
	Status func() speaker.Status
	// Forwarding returns what keeps the node from direct forwarding. Nil: not known.
	Forwarding func() diagnose.Forwarding
	Log        *slog.Logger
	// Proc is where the kernel reports about itself. Empty: /proc.
	Proc string
	// ProxyModeURL is asked for kube-proxy's mode. Empty: the mode is unknown.
	ProxyModeURL string
}

// Gatherer answers requests for diagnose.Path.
type Gatherer struct {
	options Options
	kernel  kernel
	running sync.Mutex
}

// New returns a Gatherer.
func New(o Options) *Gatherer {
	g := &Gatherer{options: o, kernel: "/proc"}
	if o.Proc != "" {
		g.kernel = kernel(o.Proc)
	}
	return g
}

// question is what somebody asks.
type question struct {
	active bool
	vips   []netip.AddrPort
}

func parse(q url.Values) (question, error) {
	asked := question{active: q.Get(diagnose.ParamActive) == "true"}
	texts := q[diagnose.ParamVIP]
	if len(texts) > diagnose.MaxVIPs {
		return question{}, fmt.Errorf("%d VIPs to try, at most %d", len(texts), diagnose.MaxVIPs)
	}
	for _, text := range texts {
		vip, err := netip.ParseAddrPort(text)
		if err != nil || vip.Addr().Zone() != "" {
			return question{}, fmt.Errorf("%.60q is not an address and a port", text)
		}
		asked.vips = append(asked.vips, netip.AddrPortFrom(vip.Addr().Unmap(), vip.Port()))
	}
	return asked, nil
}

// ServeHTTP answers with diagnose.Facts.
func (g *Gatherer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	received := time.Now()
	asked, err := parse(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if !g.running.TryLock() {
		http.Error(w, "another diagnosis is under way: ask again in some seconds", http.StatusTooManyRequests)
		return
	}
	defer g.running.Unlock()
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	facts := g.facts(ctx, asked)
	facts.Received, facts.Sent = received, time.Now()
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(facts); err != nil {
		g.options.Log.Debug("diagnosis not sent", "err", err)
	}
}

// facts gathers them.
func (g *Gatherer) facts(ctx context.Context, asked question) diagnose.Facts {
	status := g.options.Status()
	f := diagnose.Facts{
		Node: g.options.Node, Version: buildinfo.Get().Version, Unread: map[string]string{}, Sysctls: map[string]int{},
		Alive: slices.Sorted(maps.Keys(g.options.Members.Speakers())), Conditions: status.Checks,
		Detection: g.options.Members.Detection(),
	}
	f.Interfaces = interfaces(g.options.Interfaces.Interfaces())
	names := []string{"all"}
	for _, i := range f.Interfaces {
		if len(i.Addrs) > 0 && i.HardwareAddr != "" {
			names = append(names, i.Name)
		}
	}
	g.kernel.addTo(&f, names)
	g.proxyMode(ctx, &f)
	if g.options.Forwarding != nil {
		f.Forwarding = new(g.options.Forwarding())
	}
	if asked.active {
		g.probe(ctx, &f, asked.vips, status)
	}
	return f
}

// interfaces returns the interfaces with addresses, and the ports of bonds and bridges that have addresses,
// because a port's hardware address may answer. Ports that lead to pods are left out.
func interfaces(all []netstate.Interface) (facts []diagnose.Interface) {
	addressed := map[int]bool{}
	for _, i := range all {
		addressed[i.Index] = slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return !p.Addr().IsLinkLocalUnicast() })
	}
	for _, i := range all {
		if addressed[i.Index] || addressed[i.Master] && i.Kind != "veth" && i.Kind != "tuntap" {
			facts = append(facts, diagnose.Interface{Name: i.Name, HardwareAddr: i.HardwareAddr.String(), Up: i.Up, MTU: i.MTU, Addrs: i.Addrs})
		}
	}
	return facts
}

// proxyMode asks kube-proxy for its mode. If there is no answer, there may be no kube-proxy.
func (g *Gatherer) proxyMode(ctx context.Context, f *diagnose.Facts) {
	if g.options.ProxyModeURL == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, proxyTimeout)
	defer cancel()
	text, err := fetch(ctx, g.options.ProxyModeURL)
	if err != nil {
		f.Unread["proxy mode"] = err.Error()
		return
	}
	f.ProxyMode = text
}

// fetch returns the short text that is at the URL.
func fetch(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", fmt.Errorf("ask %q: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", err //nolint:wrapcheck // it names the URL
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return strings.TrimSpace(string(text)), nil
}

// maxNeighbours is for how many other nodes this node asks by ARP or NDP, which everybody on the segment
// hears. It asks for the nodes that follow it by name, so that every node is asked for by others.
const maxNeighbours = 8

// probe asks the others. The requests for hardware addresses have the node's own address as sender, like those
// of any neighbour. A speaker that is probing the VIP would take a request from 0.0.0.0 for another machine
// that wants the address.
func (g *Gatherer) probe(ctx context.Context, f *diagnose.Facts, vips []netip.AddrPort, status speaker.Status) {
	f.Active = true
	others, links := g.members(ctx, f), g.links()
	for _, r := range others[:min(len(others), maxNeighbours)] {
		if link := links.to(r.Address.Addr()); link != nil {
			link.ask(r.Node, r.Address.Addr())
		}
	}
	owners := map[netip.Addr]string{}
	for _, s := range status.Silent {
		owners[s.VIP] = s.Owner
	}
	for _, vip := range vips {
		if why := links.try(owners[vip.Addr()], vip); why != "" {
			f.VIPs = append(f.VIPs, diagnose.Trial{Neighbour: diagnose.Neighbour{Address: vip.Addr(), Error: why}, Port: vip.Port()})
		}
	}
	for _, link := range links {
		neighbours, trials := link.run(ctx)
		f.Neighbours, f.VIPs = append(f.Neighbours, neighbours...), append(f.VIPs, trials...)
	}
}

// members asks all other speakers, and returns those that were asked. Those whose nodes follow this one by
// name come first.
func (g *Gatherer) members(ctx context.Context, f *diagnose.Facts) []membership.Reach {
	ctx, cancel := context.WithTimeout(ctx, membersTimeout)
	defer cancel()
	answers, unasked := g.options.Members.Probe(ctx)
	if unasked > 0 {
		f.Unread["members"] = fmt.Sprintf("%d of %d speakers were not asked within %s: so many do not answer", unasked, unasked+len(answers),
			membersTimeout)
	}
	var following, before []membership.Reach
	for _, r := range answers {
		f.Members = append(f.Members, diagnose.Member{Node: r.Node, Address: r.Address, UDP: text(r.UDP), TCP: text(r.TCP)})
		if r.Node > g.options.Node {
			following = append(following, r)
		} else {
			before = append(before, r)
		}
	}
	return append(following, before...)
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
