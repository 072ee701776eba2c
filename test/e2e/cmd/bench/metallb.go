package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/metallb"
)

// contender is one of the load balancers that are compared, with its measurements.
type contender struct {
	*lodestone.Installation // the lab, where Lodestone may be or not
	name                    string

	install, remove func(context.Context) error
	// configure configures it to give Services the addresses, and to announce these by layer 2.
	configure func(ctx context.Context, addresses string) error
	// namespace and speaker are those of the DaemonSet of its speakers, and speakers selects their pods.
	namespace, speaker, speakers string
	// resident is the memory of its controller and of its largest speaker, in bytes.
	resident func(context.Context) (controller, speaker int64, err error)

	outages, waits           []time.Duration
	moved, updated           tally
	controllerMB, speakersMB float64
	idle                     []time.Duration // time on processors of each speaker in idleTime
}

const (
	// idleTime is for how long idle speakers are measured.
	idleTime = time.Minute
	// settling is the time that a cluster is given after something has happened.
	settling = 30 * time.Second
)

// besideMetalLB measures MetalLB and Lodestone, each with its defaults and without
// the other, by turns in one lab.
func besideMetalLB(ctx context.Context, installation *lodestone.Installation) error {
	const turns = 2
	only, err := regexp.Compile(*cases)
	if err != nil {
		return fmt.Errorf("-cases: %w", err)
	}
	m, err := metallb.New(ctx, installation.Lab)
	if err != nil {
		return err
	}
	theirs, ours := metalLBContender(installation, m), lodestoneContender(installation)
	if err := ours.remove(ctx); err != nil {
		return err
	}
	for turn := range turns {
		for _, c := range []*contender{theirs, ours} {
			began := time.Now()
			if err := c.turn(ctx, only); err != nil {
				return fmt.Errorf("turn %d, of %s: %w", turn+1, c.name, err)
			}
			fmt.Fprintf(os.Stderr, "turn %d, of %s, took %s; so far:\n", turn+1, c.name, time.Since(began).Round(time.Second))
			for _, f := range figures {
				if only.MatchString(f.part) {
					fmt.Fprintf(os.Stderr, "  %s %s\n", f.name, f.of(c))
				}
			}
		}
	}
	for _, f := range figures {
		if !only.MatchString(f.part) {
			continue
		}
		result("metallb", "case=%s metallb=%s lodestone=%s", f.name, f.of(theirs), f.of(ours))
	}
	return installation.Lab.Install(ctx) // as it was
}

// figures are what is reported, and in which part of a turn it is measured.
var figures = []struct {
	part, name string
	of         func(c *contender) string
}{
	{"traffic", "node_loss_p50_ms", func(c *contender) string { return milliseconds(c.outages, 0.5) }},
	{"traffic", "node_loss_max_ms", func(c *contender) string { return milliseconds(c.outages, 1) }},
	{"traffic", "label_lost_probes", func(c *contender) string { return c.moved.String() }},
	{"traffic", "rolling_restart_lost_probes", func(c *contender) string { return c.updated.String() }},
	{"services", "burst_500_p50_ms", func(c *contender) string { return milliseconds(c.waits, 0.5) }},
	{"services", "burst_500_p99_ms", func(c *contender) string { return milliseconds(c.waits, 0.99) }},
	{"services", "controller_mb", func(c *contender) string { return fmt.Sprintf("%.0f", c.controllerMB) }},
	{"idle", "idle_speaker_percent", func(c *contender) string {
		return fmt.Sprintf("%.2f", 100*quantile(c.idle, 0.5).Seconds()/idleTime.Seconds())
	}},
	{"services", "speaker_mb", func(c *contender) string { return fmt.Sprintf("%.0f", c.speakersMB) }},
}

func milliseconds(values []time.Duration, q float64) string {
	return fmt.Sprintf("%.0f", ms(quantile(values, q)))
}

// String is how many were lost, of how many.
func (t tally) String() string { return fmt.Sprintf("%d/%d", t.lost, t.sent) }

func (t *tally) add(more tally) {
	t.sent, t.lost = t.sent+more.sent, t.lost+more.lost
}

func metalLBContender(installation *lodestone.Installation, m *metallb.MetalLB) *contender {
	const objects = `
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: bench, namespace: metallb-system}
spec: {addresses: [%s]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: bench, namespace: metallb-system}
`
	l := load{installation, 0}
	return &contender{
		Installation: installation, name: "MetalLB " + m.Version,
		install: m.Install, remove: m.Remove, namespace: metallb.Namespace, speaker: metallb.Speaker, speakers: "component=speaker",
		configure: func(ctx context.Context, addresses string) error {
			return m.Apply(ctx, fmt.Sprintf(objects, addresses))
		},
		resident: func(ctx context.Context) (controller, speaker int64, err error) {
			if controller, err = l.largestOf(ctx, metallb.Namespace, "component=controller"); err != nil {
				return 0, 0, err
			}
			speaker, err = l.largestOf(ctx, metallb.Namespace, "component=speaker")
			return controller, speaker, err
		},
	}
}

// largestOf is the largest resident size among the pods with the label.
func (l load) largestOf(ctx context.Context, namespace, label string) (int64, error) {
	list, err := l.Kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: label})
	if err != nil {
		return 0, err
	}
	return l.largest(list.Items)
}

func lodestoneContender(installation *lodestone.Installation) *contender {
	helm := func(ctx context.Context, args ...string) error {
		_, err := installation.Lab.Helm(ctx, append(args, "--namespace", lodestone.Namespace, "--wait", "--timeout", "2m")...)
		return err
	}
	return &contender{
		Installation: installation, name: "Lodestone", namespace: lodestone.Namespace, speaker: lodestone.Speaker,
		speakers: "app.kubernetes.io/component=speaker",
		install: func(ctx context.Context) error {
			return helm(ctx, "install", "lodestone", filepath.Join(installation.Lab.Root, "deploy", "chart"),
				"--create-namespace", "--set", "image.registry=lab.local,image.tag=dev,image.pullPolicy=Never")
		},
		remove: func(ctx context.Context) error { return helm(ctx, "uninstall", "lodestone") },
		configure: func(ctx context.Context, addresses string) error {
			return installation.Configure(ctx, lodestone.Document(fmt.Sprintf("pools: [{name: bench, addresses: [%s]}]\n", addresses)))
		},
		resident: load{installation, 0}.resident,
	}
}

// turn measures once what is wanted.
func (c *contender) turn(ctx context.Context, only *regexp.Regexp) (err error) {
	if err := c.install(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.remove(context.WithoutCancel(ctx))) }()
	for _, part := range []struct {
		name    string
		measure func(context.Context) error
	}{{"traffic", c.traffic}, {"idle", c.rest}, {"services", c.services}} {
		if !only.MatchString(part.name) {
			continue
		}
		if err := part.measure(ctx); err != nil {
			return err
		}
	}
	return nil
}

// traffic measures what a client of one Service sees.
func (c *contender) traffic(ctx context.Context) error {
	const losses, moves, updates = 3, 5, 1
	if err := c.configure(ctx, "198.18.0.200-198.18.0.250"); err != nil {
		return err
	}
	l := load{c.Installation, 1}
	vip, err := l.serveEcho(ctx)
	if err != nil {
		return err
	}
	for range losses {
		if err := c.loseOwner(ctx, vip); err != nil {
			return err
		}
	}
	owner, err := l.Owner(ctx, vip.String())
	if err != nil {
		return err
	}
	for _, what := range []struct {
		name  string
		times int
		do    func() error
		all   *tally
	}{
		{"label", moves, func() error { return l.moveAwayAndBack(ctx, owner, vip) }, &c.moved},
		{"rolling restart", updates, func() error { return c.restartSpeakers(ctx) }, &c.updated},
	} {
		seen, err := l.lost(ctx, l.FromClient(), c.name+", "+what.name, what.times, vip, what.do, nil)
		if err != nil {
			return err
		}
		what.all.add(seen)
	}
	return l.delete(ctx)
}

// loseOwner measures one loss of the node that owns the VIP.
func (c *contender) loseOwner(ctx context.Context, vip netip.Addr) error {
	if err := lodestone.Wait(ctx, "one speaker answers", func() error { return c.OneAnswerer(ctx, vip.String()) }); err != nil {
		return err
	}
	loss, err := c.CutOwner(ctx, netip.AddrPortFrom(vip, 80))
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%s: %s lost, %s took over: %s without answers\n", c.name, loss.Old, loss.New, loss.Outage.Round(time.Millisecond))
	c.outages = append(c.outages, loss.Outage)
	// MetalLB's speakers look for lost speakers once a minute, or when a label of
	// their node changes. That time is not measured.
	const label = "bench.example.com/is-back"
	return errors.Join(
		c.Label(ctx, loss.Old, label, "true"), c.Label(ctx, loss.Old, label, ""),
		c.Moved(ctx, vip.String(), loss.Old, true),
		pause(ctx, settling), // while speakers of MetalLB find each other again, nobody may answer for seconds
	)
}

// restartSpeakers replaces the speakers one after the other, as an operator does.
func (c *contender) restartSpeakers(ctx context.Context) error {
	for _, verb := range [][]string{{"restart"}, {"status", "--timeout=5m"}} {
		if _, err := c.Lab.Kubectl(ctx, append(append([]string{"-n", c.namespace, "rollout"}, verb...), "daemonset/"+c.speaker)...); err != nil {
			return err
		}
	}
	return nil
}

// rest measures what the speakers take of a processor while 100 VIPs are there and nothing happens.
func (c *contender) rest(ctx context.Context) error {
	if err := c.configure(ctx, "198.19.0.0/18"); err != nil {
		return err
	}
	l := load{c.Installation, 100}
	if err := errors.Join(l.populate(ctx), pause(ctx, settling)); err != nil {
		return err
	}
	before, err := c.taken(ctx)
	if err != nil {
		return err
	}
	if err := pause(ctx, idleTime); err != nil {
		return err
	}
	after, err := c.taken(ctx)
	for name, taken := range after {
		c.idle = append(c.idle, taken-before[name])
	}
	return errors.Join(err, l.delete(ctx))
}

// taken is how much time on processors each of its speakers has taken, by pod.
func (c *contender) taken(ctx context.Context) (map[string]time.Duration, error) {
	list, err := c.Kube.CoreV1().Pods(c.namespace).List(ctx, metav1.ListOptions{LabelSelector: c.speakers})
	if err != nil {
		return nil, err
	}
	taken := map[string]time.Duration{}
	for i := range list.Items {
		if taken[list.Items[i].Name], err = c.CPU(&list.Items[i]); err != nil {
			return nil, err
		}
	}
	return taken, nil
}

// services measures how 500 Services get their addresses, and what memory they
// take.
func (c *contender) services(ctx context.Context) error {
	if err := c.configure(ctx, "198.19.0.0/18"); err != nil {
		return err
	}
	l := load{c.Installation, 500}
	waits, err := l.burst(ctx)
	if err != nil {
		return err
	}
	c.waits = append(c.waits, waits...)
	controller, speaker, err := c.resident(ctx)
	if err != nil {
		return err
	}
	c.controllerMB, c.speakersMB = max(c.controllerMB, megabytes(controller)), max(c.speakersMB, megabytes(speaker))
	return l.delete(ctx)
}
