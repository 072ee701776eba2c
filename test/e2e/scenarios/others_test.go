package scenarios

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// nodesBIRD is the configuration of a network plugin on its nodes: a session with the router, by
// which it announces the addresses of Services.
const nodesBIRD = `router id %s;
protocol device {}
protocol static { ipv4; route %s/32 blackhole; }
protocol bgp { local %[1]s as 64512; neighbor 198.18.0.254 as 64513; ipv4 { import none; export all; next hop self; }; }
`

// Something else announces the addresses that Lodestone gives: BIRD on a node, then only a route
// made by hand. No owner is reported missing, and the first advertisement takes effect at once.
func TestSomethingElseAnnounces(t *testing.T) {
	s := begin(t)
	s.config("\npools:\n  - {name: routed, addresses: [198.18.16.0/24]}\nadvertisements: []\n")
	s.echo(2)
	s.service("web")
	vip, node := s.assigned("web"), s.Lab.Nodes()[1]
	s.prints(0, []string{"explain", "vip", vip}, s.namespace+"/web", "others: the configuration has advertisements: []")
	s.isSilent("web", node, "AnnouncedByOthers")
	s.prints(0, []string{"explain", "pool", "routed"}, "others: the configuration has advertisements: []")
	s.prints(0, []string{"status"}, "0 announced by nobody")
	fromRouter := func() error {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
		defer cancel()
		_, err := probe.Get(ctx, s.Lab.Namespace(lab.Remote), target(vip))
		return err
	}
	require.Error(t, fromRouter(), "nobody announces it yet")

	dir := t.TempDir()
	conf := filepath.Join(dir, "bird.conf")
	address := s.Lab.Addresses(node)[0].String()
	require.NoError(t, os.WriteFile(conf, fmt.Appendf(nil, nodesBIRD, address, vip), 0o600))
	bird, err := s.Lab.Start(node, "bird", "bird", "-f", "-c", conf, "-s", filepath.Join(dir, "bird.ctl"))
	require.NoError(t, err)
	end := sync.OnceFunc(func() { require.NoError(t, bird.Kill(s.ctx)) })
	s.afterwards(end)
	s.learnt(lab.Router, vip, node)
	s.eventually("a client behind the router is answered", fromRouter)
	end()
	s.learnt(lab.Router, vip)

	route := []string{"ip", "route", "replace", vip + "/32", "via", address}
	s.on(s.ctx, lab.Router, route...)
	remove := sync.OnceFunc(func() { s.on(s.ctx, lab.Router, "ip", "route", "delete", vip+"/32") })
	s.afterwards(remove)
	s.eventually("by a route made by hand, too", fromRouter)
	remove() // the router prefers it

	s.config("\npools:\n  - {name: routed, addresses: [198.18.16.0/24]}\nadvertisements: [{name: routers, bgp: {}}]" + peers)
	s.learnt(lab.Router, vip, s.Lab.Nodes()...)
}
