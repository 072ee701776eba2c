package report_test

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// again returns the report as others read it.
func again(t testing.TB, r report.Report) report.Report {
	t.Helper()
	read, err := report.Parse(r.String())
	require.NoError(t, err)
	return read
}

func segment(subnet, name string) report.Segment {
	return report.Segment{Subnet: netip.MustParsePrefix(subnet), Interface: name}
}

// full is a report with everything, in order.
func full() report.Report {
	named := segment("198.18.1.0/24", "docker0")
	named.IfNamed = true
	return report.Report{
		Address: netip.MustParseAddrPort("198.18.0.11:9744"),
		Keys:    []string{"8201839b0c01ff82", "a95c0da7beab4b13"},
		Network: report.Network{
			Segments: []report.Segment{segment("198.18.0.0/24", "eth0"), named, segment("2001:db8::/64", "eth0")},
			Gateways: []netip.Addr{netip.MustParseAddr("198.18.0.1")},
			Conflicts: []report.Conflict{
				{VIP: netip.MustParseAddr("198.18.0.7"), HardwareAddr: [6]byte{2, 0, 0, 0, 0, 0xc}},
				{VIP: netip.MustParseAddr("2001:db8::7"), HardwareAddr: [6]byte{2, 0, 0, 0, 0, 0xd}, Announced: true},
			},
			KubeProxy: true,
			NoRules:   report.RulesWithIPVS,
		},
		PodRoutes:      "kernel",
		RoutedPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		Unmatched:      []string{"lan"},
		Sessions: []report.Session{
			{Peer: "tor-a", Router: netip.MustParseAddr("203.0.113.254"), Established: true, Since: morning, BFD: "Up"},
			{Peer: "tor-b", Router: netip.MustParseAddr("fe80::1%eth0"), Since: morning, Message: `refused: "no", <so>`},
		},
		Late:  report.Late{Milliseconds: 412, At: morning, Times: 4},
		Moves: []report.Move{{At: morning, From: "n1", Why: "LinkDown", To: map[string][]netip.Addr{"n2": {a}}}},
	}
}

// What `kubectl get lease -o yaml` shows.
const asText = `{"address":"198.18.0.11:9744",
 "membershipKeys":["8201839b0c01ff82","a95c0da7beab4b13"],
 "segments":["198.18.0.0/24 eth0","198.18.1.0/24 docker0 if-named","2001:db8::/64 eth0"],
 "gateways":["198.18.0.1"],
 "conflicts":["198.18.0.7 02:00:00:00:00:0c withheld","2001:db8::7 02:00:00:00:00:0d announced"],
 "kubeProxy":true,
 "noRules":"IPVS",
 "podRoutes":"kernel",
 "routedPodCIDRs":["10.244.1.0/24"],
 "unmatchedAdvertisements":["lan"],
 "bgpSessions":[{"peer":"tor-a","router":"203.0.113.254","established":true,"since":"2026-11-21T08:00:00Z","bfd":"Up"},` +
	`{"peer":"tor-b","router":"fe80::1%eth0","since":"2026-11-21T08:00:00Z","message":"refused: \"no\", <so>"}],
 "late":{"milliseconds":412,"at":"2026-11-21T08:00:00Z","times":4},
 "moves":[{"at":"2026-11-21T08:00:00Z","from":"n1","why":"LinkDown","to":{"n2":["203.0.113.1"]}}]}`

func TestAReportIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	assert.Equal(t, map[string]string{annotation.Report: asText}, full().Annotations())
	assert.Equal(t, full(), report.Of(full().Annotations()))
	assert.Equal(t, full(), again(t, full()))
	assert.Equal(t, report.Report{}, report.Of(nil), "a Lease without a report")
	assert.Equal(t, "{}", report.Report{}.String())
	none := report.Report{Network: report.Network{Segments: []report.Segment{}, Gateways: []netip.Addr{}}, RoutedPodCIDRs: []netip.Prefix{},
		Unmatched: []string{}}
	assert.Equal(t, none, again(t, none), "none is not the same as not known")
}

func TestWhatIsNotKnownStays(t *testing.T) {
	t.Parallel()
	assert.Equal(t, full().Segments, report.Report{}.Over(full()).Segments)
	assert.Equal(t, full().Gateways, report.Report{}.Over(full()).Gateways)
	assert.Equal(t, full().RoutedPodCIDRs, report.Report{}.Over(full()).RoutedPodCIDRs)
	assert.Equal(t, "kernel", report.Report{}.Over(full()).PodRoutes)
	assert.Equal(t, "bgp", report.Report{PodRoutes: "bgp"}.Over(full()).PodRoutes)
	assert.Empty(t, report.Report{RoutedPodCIDRs: []netip.Prefix{}}.Over(full()).PodRoutes)
	assert.Equal(t, full().Unmatched, report.Report{}.Over(full()).Unmatched)
	assert.Empty(t, report.Report{}.Over(full()).Conflicts, "they are over")
	assert.True(t, report.Report{}.Over(full()).KubeProxy)
	assert.Equal(t, report.RulesWithIPVS, report.Report{}.Over(full()).NoRules)
	assert.True(t, report.Report{}.Over(report.Report{Network: report.Network{Forwards: true}}).Forwards)
	none := report.Report{Network: report.Network{Segments: []report.Segment{}}}
	assert.Empty(t, none.Over(full()).Segments)
	assert.False(t, none.Over(full()).KubeProxy, "who knows the segments knows this, too")
	none.KubeProxyUnknown = true
	assert.True(t, none.Over(full()).KubeProxy, "unless it reports that it does not")
	assert.True(t, report.Report{}.Over(none).Over(full()).KubeProxy, "until somebody knows")
}

func TestWhatIsOutOfBoundsIsLeftOut(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{"segments": ["2001:db8::/64 eth0", "198.18.0.0/24 eth0", "198.18.0.0/24 eth0", "198.18.0.9/24 eth0", "198.18.0.9/32 eth0", "fe80::/64 eth0", "0.0.0.0/0 eth0"]}`: "{\"segments\":[\"198.18.0.0/24 eth0\",\"2001:db8::/64 eth0\"]}",
		`{"segments": ["198.18.0.0/24 longer-than-linux", "198.18.0.0/24 \u0007", "198.18.0.0/24 é"]}`:                                                                     `{"segments":[]}`,
		`{"gateways": ["fe80::1", "127.0.0.1", "0.0.0.0", "224.0.0.1", "::ffff:10.0.0.1", "10.0.0.1"]}`:                                                                    `{"gateways":["10.0.0.1"]}`,
		`{"conflicts": ["fe80::1 02:00:00:00:00:0c withheld"]}`:                                                                                                            `{}`,
		`{"membershipKeys": ["8201839b0c01ff82", "8201839B0C01FF82"]}`:                                                                                                     `{}`,
		`{"membershipKeys": ["8201839b0c01ff8"]}`:                                                                                                                          `{}`,
		`{"routedPodCIDRs": ["10.244.1.7/24", "10.244.2.0/24"]}`:                                                                                                           `{"routedPodCIDRs":["10.244.2.0/24"]}`,
		`{"podRoutes": "\u001b[2J", "unmatchedAdvertisements": ["", "b", "a", "a\n"]}`:                                                                                     `{"unmatchedAdvertisements":["a","b"]}`,
		`{"bgpSessions": [{"peer": "b", "since": "2026-11-21T08:00:00Z", "message": "a\u001b[2Jb"}, {"peer": "b\n", "since": "2026-11-21T08:00:00Z"}, {"peer": "c", "since": "9999-12-31T23:59:59-01:00"}]}`: `{"bgpSessions":[{"peer":"b","since":"2026-11-21T08:00:00Z","message":"a [2Jb"}]}`,
		`{"moves": [{"at": "2026-11-21T08:00:00Z", "why": "Because", "to": {"n1": ["203.0.113.1"]}}, {"at": "2026-11-21T08:00:00Z", "to": {"\u0007": ["203.0.113.1"], "n1": ["fe80::1%eth0"]}}]}`:            `{}`,
		`{"late": {"milliseconds": -1, "at": "2026-11-21T08:00:00Z", "times": 1}}`: `{}`,
		`{"late": {"milliseconds": 1, "at": "9999-12-31T23:59:59-01:00"}}`:         `{}`,
		`{"address": "[fe80::1%eth0]:9744", "later": {"versions": ["know more"]}}`: `{}`,
		`{"segments": ["198.18.0.0/24 eth0 if-named added-by-a-later-version"]}`:   `{"segments":["198.18.0.0/24 eth0 if-named"]}`,
	} {
		r, err := report.Parse(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, r.String(), text)
	}
}

func TestWhatIsNotUnderstoodIsIgnored(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"null null", "[]", "x", "{", `{"segments": "198.18.0.0/24 eth0"}`, `{"segments": ["eth0"]}`, `{"segments": ["198.18.0.0 eth0"]}`,
		`{"gateways": ["x"]}`,
		`{"conflicts": ["203.0.113.7 02:00:00:00:00:0c"]}`, `{"bgpSessions": [{"since": "2026"}]}`, `{"moves": {"at": 1}}`,
		`{"kubeProxy": "answers"}`,
		strings.Repeat("[", report.MaxBytes), strings.Repeat(" ", report.MaxBytes) + "{}",
	} {
		_, err := report.Parse(text)
		require.Error(t, err, "%.50s", text)
		assert.Less(t, len(err.Error()), 300)
		assert.Equal(t, report.Report{}, report.Of(map[string]string{annotation.Report: text}))
	}
}

// longest is a report that has more of everything than fits, and everything as long as
// it may be.
func longest() report.Report {
	var r report.Report
	r.Address = netip.MustParseAddrPort("[2001:db8:1111:2222:3333:4444:5555:6666]:65535")
	r.Late = report.Late{Milliseconds: math.MaxInt64, At: morning.Add(1), Times: math.MaxInt64}
	r.KubeProxy, r.PodRoutes, r.Forwards, r.NoRules = true, "kernel", true, report.NoRules(strings.Repeat("n", 63))
	for i := range 1000 {
		six := netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0x11, 0x11, 0x22, 0x22, 0x33, 0x33, 0x44, 0x44, 0x55, 0x55,
			byte(i/256 + 16), byte(i)})
		label := fmt.Sprintf("%063d", i)
		r.Segments = append(r.Segments, report.Segment{Subnet: netip.PrefixFrom(six, 127).Masked(), Interface: fmt.Sprintf("%015d", i),
			IfNamed: true})
		r.Gateways = append(r.Gateways, six)
		r.Conflicts = append(r.Conflicts, report.Conflict{VIP: six, HardwareAddr: [6]byte{2}})
		r.RoutedPodCIDRs = append(r.RoutedPodCIDRs, netip.PrefixFrom(six, 128))
		r.Unmatched = append(r.Unmatched, label)
		r.Sessions = append(r.Sessions, report.Session{Peer: label, Router: six.WithZone("fifteen-letters"), Since: morning,
			Message: strings.Repeat(`"\`, 500) + "\n", BFD: "AdministrativelyDown"[:16]})
		r.Moves = append(r.Moves, report.Move{At: morning.Add(time.Duration(i) * time.Second), From: strings.Repeat("n", 253),
			Why: report.SpeakerLost, To: map[string][]netip.Addr{strings.Repeat("m", 253): {six}}})
	}
	for i := range report.MaxKeys {
		r.Keys = append(r.Keys, fmt.Sprintf("%016x", i))
	}
	return r
}

// All but the moves fit, and the moves get the rest, the latest ones.
func TestTheLongestReport(t *testing.T) {
	t.Parallel()
	r := longest()
	text := r.String()
	require.LessOrEqual(t, len(text), report.MaxBytes)
	read := again(t, r)
	assert.Len(t, read.Segments, report.MaxSegments)
	assert.Len(t, read.Gateways, report.MaxGateways)
	assert.Len(t, read.Conflicts, report.MaxConflicts)
	assert.Len(t, read.RoutedPodCIDRs, report.MaxPodCIDRs)
	assert.Len(t, read.Unmatched, report.MaxUnmatched)
	assert.Len(t, read.Keys, report.MaxKeys)
	assert.Len(t, read.Sessions, report.MaxSessions)
	require.NotEmpty(t, read.Moves)
	assert.True(t, read.Moves[len(read.Moves)-1].At.Equal(morning.Add(999*time.Second)), "the latest")
	r.Moves = nil
	t.Logf("%d bytes, of which %d are of no moves; %d moves", len(text), len(r.String()), len(read.Moves))
	assert.Less(t, len(r.String()), report.MaxBytes)
	assert.True(t, strings.HasSuffix(read.Sessions[0].Message, "..."))
	r.Keys = append(r.Keys, "8201839b0c01ff82")
	assert.Empty(t, again(t, r).Keys, "one key too many")
}

func TestNodeOf(t *testing.T) {
	t.Parallel()
	node, ok := report.NodeOf(annotation.SpeakerLeasePrefix + "n1")
	assert.True(t, ok)
	assert.Equal(t, "n1", node)
	for _, name := range []string{"", "n1", annotation.SpeakerLeasePrefix, "lodestone-controller"} {
		_, ok := report.NodeOf(name)
		assert.False(t, ok, name)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "null", "{}", "[]", asText, `{"segments":["\u0000"]}`,
		`{"moves":[{"at":"9999-12-31T23:59:59.9999-23:59","to":{"n":["::1%eth0"]}}]}`,
		`{"bgpSessions":[{"peer":"a","since":"0000-01-01T00:00:00+23:59"},{"peer":"a"}]}`, longest().String()} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var r report.Report
		var err error
		testcost.Within(t, "a report", len(text), func() { r, err = report.Parse(text) })
		if err != nil {
			return
		}
		written := r.String()
		if len(written) > report.MaxBytes || written == "" {
			t.Fatalf("%d bytes", len(written))
		}
		read, err := report.Parse(written)
		require.NoError(t, err)
		require.Equal(t, written, read.String(), "reading changes it")
	})
}

// A look at the worst text that somebody can write.
func BenchmarkParse(b *testing.B) {
	text := longest().String()
	for b.Loop() {
		_, _ = report.Parse(text)
	}
}
