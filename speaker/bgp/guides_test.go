package bgp

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/plan"
)

// guides has the examples from which people copy both sides of a session.
const guides = "../../docs/guides"

// examples returns a guide's fenced blocks in a language.
func examples(t *testing.T, file, language string) (all []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
	}
	return all
}

// FRR and BIRD accept every example for them.
func TestRoutersReadTheGuides(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(guides + "/*.md")
	require.NoError(t, err)
	for language, check := range map[string][]string{
		"frr":  {"vtysh", "--dryrun", "--inputfile"},
		"bird": {"bird", "-p", "-c"},
	} {
		found := 0
		for _, file := range files {
			for _, example := range examples(t, file, language) {
				found++
				conf := filepath.Join(t.TempDir(), "conf")
				require.NoError(t, os.WriteFile(conf, []byte(example), 0o600))
				out, err := exec.Command(check[0], append(check[1:], conf)...).CombinedOutput()
				assert.NoError(t, err, "%s: %s", file, out)
			}
		}
		assert.NotZero(t, found, "examples for %s", language)
	}
}

// The guides' examples for both sides give a session with the password and TTL security, in
// which the router accepts the addresses of the pool and no others.
func TestExampleOfTheGuides(t *testing.T) {
	t.Parallel()
	cfg, err := config.ParseFile("bgp.md", []byte(examples(t, guides+"/bgp.md", "yaml")[0]))
	require.NoError(t, err)
	peer := cfg.Peers[slices.IndexFunc(cfg.Peers, func(p config.Peer) bool { return p.Name == "tor-a" })]
	require.NotNil(t, peer.Password)
	require.NotZero(t, peer.TTLSecurity)
	attributes := plan.Attributes{Communities: cfg.Advertisements[0].BGP.Communities}
	pool := []netip.Prefix{netip.MustParsePrefix("203.0.113.7/32"), netip.MustParsePrefix("2001:db8:1::7/128")}
	for _, p := range pool {
		require.True(t, cfg.Pools[0].Free.Contains(p.Addr()), "%s is in the example's pool", p)
	}
	others := []netip.Prefix{netip.MustParsePrefix("203.0.113.77/32"), netip.MustParsePrefix("2001:db8:1::1:7/128")}
	// start starts the router with the guide's text and returns a question to it.
	for name, start := range map[string]func(t *testing.T, w *world, text string) (has func(netip.Prefix) bool){
		"frr": func(t *testing.T, w *world, text string) func(netip.Prefix) bool {
			f := router.NewFRR(t, w.tor, text, "zebra", "bfdd", "bgpd")
			return func(p netip.Prefix) bool { found := path(f, p); return found != nil && found.Valid }
		},
		"bird": func(t *testing.T, w *world, text string) func(netip.Prefix) bool {
			b := router.NewBIRD(t, w.tor, text)
			return func(p netip.Prefix) bool { return strings.Contains(b.Ask("show route"), p.String()+" ") }
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			w.node, w.tor = w.tor, w.node // the guides' router has the segment's first address
			has := start(t, w, examples(t, guides+"/routers.md", name)[0])
			w.passwords.set(*peer.Password, "...")
			w.want.Sessions[peer.Name] = plan.Session{Peer: &peer, LocalASN: peer.LocalASN, RouterID: netip.MustParseAddr("198.18.0.2")}
			for _, p := range others {
				w.route(p, peer.Name, attributes)
			}
			w.start()
			w.up(peer.Name)
			w.until("routes of others", func() bool { return w.status(peer.Name).Advertised == len(others) },
				func() any { return w.status(peer.Name) })
			for _, p := range pool { // announced last, so that the others have arrived
				w.route(p, peer.Name, attributes)
			}
			w.set()
			for _, p := range pool {
				w.until(p.String()+" at the router", func() bool { return has(p) }, func() any { return w.status(peer.Name) })
			}
			for _, p := range others {
				assert.False(t, has(p), "the router takes %s", p)
			}
		})
	}
}
