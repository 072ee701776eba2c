package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// flow is a host that asks a VIP by UDP, again and again.
type flow struct {
	*probe.Probe
	host, vip string
	home      string // the node that it sends to
}

func (f *flow) String() string { return f.host + " to " + f.vip }

// askFrom has each host ask each VIP until it has had answers for a while.
func (s *story) askFrom(hosts, vips []string) (flows []*flow) {
	s.Helper()
	for _, host := range hosts {
		for _, vip := range vips {
			// Not every 5 ms: two pods answer eight flows.
			f := &flow{Probe: probe.UDP(s.ctx, probe.Options{Namespace: "ls-" + host, Target: target(vip), Interval: 20 * time.Millisecond}),
				host: host, vip: vip}
			s.answered(f)
			home, err := s.SendsTo(host, vip)
			require.NoError(s, err)
			f.home, flows = home, append(flows, f)
		}
	}
	return flows
}

// answered waits until the flow has had answers for a while.
func (s *story) answered(f *flow) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, lodestone.Patience)
	defer cancel()
	require.NoError(s, f.WaitAnswers(ctx, 20))
}

// With shareLoad the hosts of a segment are spread over the nodes, in both
// families. The hosts of a node that loses its power hear at once of another one,
// the rest of nothing; when it is back it has its hosts again.
func TestNodesShareAVIP(t *testing.T) {
	s := begin(t)
	s.config(dualPools + "advertisements:\n  - {name: spread, layer2: {shareLoad: true}}\n")
	lost := s.Lab.Nodes()[0]
	require.NoError(t, s.RunEcho(s.ctx, s.namespace, 2, lost)) // its pods would be lost with it
	vips := []string{"198.18.0.247", "2001:db8:0:1::248"}
	s.service("web", dualStack, annotated(addrAnnotation, strings.Join(vips, ",")), port("udp", corev1.ProtocolUDP, 80))
	s.have("web", vips...)
	for _, vip := range vips {
		s.oneAnswerer(vip)
	}
	flows := s.askFrom([]string{lab.Client, lab.ControlPlane, lab.Router, lab.Router2}, vips)
	homes := map[string][]string{}
	for _, f := range flows {
		homes[f.home] = append(homes[f.home], f.String())
	}
	require.Len(t, homes, len(s.Lab.Nodes()), "each node has hosts, by the addresses that the story asks for: %v", homes)

	s.afterwards(func() { require.NoError(s, lan.PlugIn(lost)) })
	require.NoError(t, lan.Unplug(lost))
	for _, f := range flows {
		s.answered(f)
	}
	for _, f := range flows {
		record, err := f.Finish()
		require.NoError(t, err)
		now, err := s.SendsTo(f.host, f.vip)
		require.NoError(t, err)
		if f.home == lost {
			t.Logf("%s: from %s to %s, %s", f, f.home, now, record.Outage())
			assert.NotEqual(t, lost, now, f)
			assert.Less(t, record.Outage().Duration(), 5*time.Second, "%s: it would have found out by itself", f)
		} else {
			assert.Equal(t, f.home, now, f)
			assert.Less(t, record.Outage().Duration(), time.Second, "%s: %s", f, record.Losses())
		}
	}

	require.NoError(t, lan.PlugIn(lost))
	s.eventually("every host has its node again", func() error {
		for _, f := range flows {
			if now, err := s.SendsTo(f.host, f.vip); err != nil || now != f.home {
				return fmt.Errorf("%s goes to %q, not to %s, %w", f, now, f.home, err)
			}
		}
		return nil
	})
}
