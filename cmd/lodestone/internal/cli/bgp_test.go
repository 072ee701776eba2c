package cli

import (
	"encoding/json"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

func TestPeersOfAHealthyCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ask("peers-healthy.txt", ExitOK, "bgp", "peers")
	var s bgp.Sessions
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "bgp", "peers", "--node", "n3", "--peer", "tor-b", "-o", "json")), &s))
	require.Len(t, s.Sessions, 1)
	assert.Equal(t, "192.0.2.2", s.Sessions[0].Router.String())
}

// Every way in which a session can be missing, each with its reason.
func TestPeersSayWhyThereIsNoSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range []string{"n1", "n2", "n3"} {
		w.drop("lodestone-speaker-" + name)
	}
	torA := func(s report.Session) report.Session { s.Peer, s.Since = "tor-a", ago(10*time.Minute); return s }
	w.add(
		node("n4", "203.0.113.4", nil), node("n5", "203.0.113.5", nil), node("n6", "2001:db8::6", nil),
		pod("speaker", "n1", "v0.4.0", true), pod("speaker", "n2", "v0.4.0", true), pod("speaker", "n3", "v0.4.0", true),
		pod("speaker", "n4", "v0.4.0", false),
		lease("n1", nil, torA(report.Session{Message: "the router refused: wrong AS number", BFD: "Down"}),
			report.Session{Peer: "old", Established: true, Since: ago(time.Hour)}),
		lease("n2", nil),
		lease("n3", nil, torA(report.Session{Established: true, Router: netip.MustParseAddr("192.0.2.1")})),
		lease("n4", nil, torA(report.Session{Established: true})),
	)
	object[*corev1.Node](w, "n3").Annotations = map[string]string{annotation.BGPRouterID: "203.0.113.1"}
	w.ask("peers-down.txt", ExitFound, "bgp", "peers")
}

func TestPeersWithoutBGP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range []string{"n1", "n2", "n3"} {
		w.drop("lodestone-speaker-" + name)
	}
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = header
	assert.Equal(t, "There are no BGP sessions, and there should be none.\n", w.ask("", ExitOK, "bgp", "peers"))
	assert.Equal(t, "No node announces such a route by BGP.\n", w.ask("", ExitOK, "bgp", "routes"))
	assert.Equal(t, "lodestone: there is no BGP peer \"tor\", nor any other\n", w.ask("", ExitFailed, "bgp", "routes", "--peer", "tor"))
}

func TestRoutesInTheWordsOfANetworkEngineer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ask("routes.txt", ExitOK, "bgp", "routes")

	var all bgp.Routes
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "bgp", "routes", "-o", "json", "198.51.100.0/24", "--peer", "tor-b")), &all))
	require.Len(t, all.Routes, 1)
	r := all.Routes[0]
	assert.Equal(t, "n3 198.51.100.1/32", r.Node+" "+r.Prefix.String())
	assert.Equal(t, []string{"64512:100", "no-export"}, r.Communities)
	assert.EqualValues(t, 200, *r.LocalPreference, "an internal peer is told it")
	assert.Zero(t, r.Prepend, "an internal peer is told no longer path")

	assert.Equal(t, "No node announces such a route by BGP.\n", w.ask("", ExitOK, "bgp", "routes", "203.0.113.10"))
}

func TestRoutesSayWhyAVIPIsNotRouted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.drop("api-1")
	w.ask("routes-unrouted.txt", ExitFound, "bgp", "routes", "198.51.100.1")
	assert.NotContains(t, w.ask("", ExitOK, "bgp", "routes", "198.51.100.2"), "NOT ROUTED")
}

func TestBadNamesAndAddressesAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for want, args := range map[string][]string{
		`there is no node "n9"; there are: n1, n2, n3`:        {"bgp", "peers", "--node", "n9"},
		`there is no BGP peer "tor"; there are: tor-a, tor-b`: {"bgp", "routes", "--peer", "tor"},
		`"203.0.113" is not an address or a prefix, such as`:  {"bgp", "routes", "203.0.113"},
		`"fe80::1%eth0" is not an address or a prefix`:        {"bgp", "routes", "fe80::1%eth0"},
	} {
		assert.Contains(t, w.ask("", ExitFailed, args...), want)
	}
}
