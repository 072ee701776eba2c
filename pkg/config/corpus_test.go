package config

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares got with the file, or writes the file with -update.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, string(want), got)
}

func corpus(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", dir, "*.yaml"))
	require.NoError(t, err)
	return files
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return text
}

// Every document of testdata/invalid is refused with the text that the paged
// operator reads.
func TestInvalid(t *testing.T) {
	files := corpus(t, "invalid")
	assert.GreaterOrEqual(t, len(files), 130)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := Parse(read(t, file))
			require.Error(t, err)
			assert.Nil(t, c)
			golden(t, strings.TrimSuffix(file, ".yaml")+".golden", err.Error()+"\n")
			inOrder(t, err)
		})
	}
}

// inOrder checks what every refusal has: positions that exist, in order.
func inOrder(t *testing.T, err error) {
	t.Helper()
	var errs Errors
	require.ErrorAs(t, err, &errs)
	last := 1
	for _, e := range errs { // hundreds of thousands of a hostile document
		if e.Line < last || e.Column < 1 || strings.Contains(e.Message, "\n") {
			t.Fatalf("after line %d comes %+v", last, e)
		}
		last = e.Line
	}
}

// Every document of testdata/valid has the meaning that is in its golden file.
func TestValid(t *testing.T) {
	for _, file := range corpus(t, "valid") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := ParseFile(file, read(t, file))
			require.NoError(t, err)
			golden(t, strings.TrimSuffix(file, ".yaml")+".golden", dump(c))
		})
	}
}

// dump prints a Config for people to compare.
func dump(c *Config) string {
	var b strings.Builder
	fmt.Fprintf(&b, "clusterID %s, quarantine %s, digest %.8s...\n", c.ClusterID, c.Quarantine, c.Digest)
	if c.Membership != FailoverNormal.Membership() {
		fmt.Fprintf(&b, "membership %+v\n", c.Membership)
	}
	for _, p := range c.Pools {
		fmt.Fprintf(&b, "pool %s: autoAssign %t, priority %d, namespaces %q, advertise %q\n",
			p.Name, p.AutoAssign, p.Priority, p.Namespaces, p.Advertise)
		if p.DHCP != nil {
			fmt.Fprintf(&b, "  leases   on %s\n", p.DHCP.Interface)
		}
		fmt.Fprintf(&b, "  free     %v\n  withheld %v\n", p.Free.Ranges(), p.Withheld.Ranges())
		fmt.Fprintf(&b, "  tenants  namespaces %s, services %s, quota %d, requesters %#v, keepFor %s, draining %t\n",
			selectorText(p.NamespaceSelector), selectorText(p.ServiceSelector), p.NamespaceQuota, p.Requesters, p.KeepFor, p.Draining)
	}
	for _, r := range c.Reservations {
		fmt.Fprintf(&b, "reserved for %s: %v\n", r.Service, r.Addresses)
	}
	for _, a := range c.Advertisements {
		dumpAdvertisement(&b, a)
	}
	for _, p := range c.Peers {
		fmt.Fprintf(&b, "peer %s: address %v%s port %d, AS %d to %+v, nodes %v\n", p.Name, p.Address, p.Interface, p.Port, p.LocalASN,
			p.PeerASN, p.NodeSelector)
		fmt.Fprintf(&b, "  source   %v, router ID %v, passive %t, multihop %d, TTL security %d, password %+v\n", p.SourceAddress,
			p.RouterID, p.Passive, p.Multihop, p.TTLSecurity, p.Password)
		fmt.Fprintf(&b, "  timers   hold %s, keepalive %s, retry %s, restart %s, BFD %+v\n", p.HoldTime, p.KeepaliveInterval,
			p.ConnectRetry, p.GracefulRestart, p.BFD)
	}
	if c.Permit != nil {
		fmt.Fprintf(&b, "permitted by BGP: %v\n", c.Permit.Prefixes())
	}
	if r := c.Routes; r != nil {
		fmt.Fprintf(&b, "routes to pods: mode %s, CIDRs %v, peers %q\n", r.Mode, r.CIDRs, r.Peers)
	}
	if c.IgnoreExcludeLabel || c.ExcludeTaints != nil {
		fmt.Fprintf(&b, "exclude label ignored %t, taints %q\n", c.IgnoreExcludeLabel, c.ExcludeTaints)
	}
	for _, n := range c.Nodes {
		fmt.Fprintf(&b, "nodes %q: region %q, zone %q, gone %t %s\n", n.Names, n.Region, n.Zone, n.Gone, n.SystemUUID)
	}
	return b.String()
}

func dumpAdvertisement(b *strings.Builder, a Advertisement) {
	fmt.Fprintf(b, "advertisement %s:", a.Name)
	if a.Layer2 != nil {
		fmt.Fprintf(b, " interfaces %q, nodes %v", a.Layer2.Interfaces, a.Layer2.NodeSelector)
	}
	fmt.Fprintln(b)
	if a.ServiceSelector != nil {
		fmt.Fprintf(b, "  services %v\n", a.ServiceSelector)
	}
	if a.Layer2 != nil && a.Layer2.AnySegment {
		fmt.Fprint(b, "  any segment\n")
	}
	if a.Layer2 != nil && a.Layer2.KeepOwner {
		fmt.Fprint(b, "  keeps owners\n")
	}
	if a.Layer2 != nil && a.Layer2.Direct {
		fmt.Fprint(b, "  forwards directly\n")
	}
	if a.Layer2 != nil && a.Layer2.Refresh > 0 {
		fmt.Fprintf(b, "  refreshed each %s\n", a.Layer2.Refresh)
	}
	if a.Layer2 != nil {
		for _, p := range a.Layer2.PreferredNodes {
			fmt.Fprintf(b, "  prefers  %v by %d\n", p.NodeSelector, p.Weight)
		}
	}
	if g := a.BGP; g != nil {
		preference, _ := pointee(g.LocalPreference)
		med, _ := pointee(g.MED)
		fmt.Fprintf(b, "  BGP      peers %q, nodes %v, communities %v %v, preference %d (%t), MED %d (%t), prepend %d, /%d "+
			"/%d partly %t\n", g.Peers, g.NodeSelector,
			g.Communities, g.LargeCommunities, preference, g.LocalPreference != nil, med, g.MED != nil, g.Prepend, g.AggregationLength,
			g.AggregationLengthV6, g.AggregatePartly)
	}
}

func selectorText(s Selector) string { return cmp.Or(s.String(), "not set") }

const header = "apiVersion: lodestone.io/v1alpha1\nkind: Config\n"

// Documents too large or too strange to keep in files.
func TestInvalidGenerated(t *testing.T) {
	tests := map[string]struct{ doc, want string }{
		"empty": {"", "config.yaml:1:1: the document is empty: it needs at least apiVersion: lodestone.io/v1alpha1 and kind: Config"},
		"one byte more than a ConfigMap holds": {
			header + strings.Repeat("#", MaxSize+1-len(header)),
			"config.yaml:1:1: the document is larger than 1048576 bytes (1 MiB), the most that a ConfigMap holds",
		},
		"a program": {"\x7fELF\x02\x01\x01\x00", "config.yaml:1:1: byte 0x7f is not text: write the document in UTF-8, without " +
			"control characters"},
		"NUL": {header + "clusterID: a\x00b\n", "config.yaml:3:13: byte 0x00 is not text: write the document in UTF-8, without " +
			"control characters"},
		"Latin-1": {header + "# für\n# f\xfcr\n", "config.yaml:4:4: byte 0xfc is not text: write the document in UTF-8, without " +
			"control characters"},
		"UTF-16": {"\xff\xfea\x00", "config.yaml:1:1: byte 0xff is not text: write the document in UTF-8, without control characters"},
		"deep brackets": {
			header + "pools: " + strings.Repeat("[", 100_000),
			"config.yaml:3:1: this is not YAML: exceeded max depth of 10000",
		},
		"deep lists": {
			header + "pools: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
			"config.yaml:3:9: pools[0]: must be a map, not a list",
		},
		"a pool name of 1000 letters": {
			header + "pools: [{name: " + strings.Repeat("a", 1000) + ", addresses: [192.0.2.1]}]",
			`config.yaml:3:16: pools[0] "` + strings.Repeat("a", 64) + `..." name: "` + strings.Repeat("a", 64) +
				`..." is not a valid name: use 1 to 63 of a-z, 0-9 and '-', with a letter or digit first and last`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tt.doc))
			require.Error(t, err)
			assert.Contains(t, err.Error(), tt.want)
			inOrder(t, err)
		})
	}
}

func TestAliasBomb(t *testing.T) {
	names := strings.Repeat("a,", 2000)
	doc := header + "pools:\n- {name: p0, addresses: [192.0.2.0], namespaces: &n [" + names + "]}\n"
	for i := range 200 {
		doc += fmt.Sprintf("- {name: p%d, addresses: [192.0.2.%d], namespaces: *n}\n", i+1, i+1)
	}
	_, err := Parse([]byte(doc))
	require.ErrorContains(t, err, "aliases (*) repeat more than 10000 values or 1048576 bytes of the document: write them out")
}

func TestManyErrorsArePrintedUpToAHundred(t *testing.T) {
	_, err := Parse([]byte(header + "pools: [" + strings.Repeat("{},", 1000) + "]"))
	require.Error(t, err)
	lines := strings.Split(err.Error(), "\n")
	assert.Len(t, lines, 101)
	assert.Equal(t, "and at least 900 more errors", lines[100])
	var errs Errors
	require.True(t, errors.As(err, &errs))
	assert.Len(t, errs, maxKept)
}

// The admission webhook reads what anybody sends: an unknown key costs little.
func TestUnknownKeysAreAdvisedOnFromWhatIsKnown(t *testing.T) {
	homeOf("once")
	assert.Less(t, testing.AllocsPerRun(10, func() { homeOf("unknown") }), 10.0)
}

// The most of what refers to each other: with the race detector, minutes once.
func TestLargeDocumentsDoNotHang(t *testing.T) {
	many := func(n int, item string) string {
		var text strings.Builder
		for i := range n {
			text.WriteString(strings.ReplaceAll(item, "%", strconv.Itoa(i)))
		}
		return text.String()
	}
	const peer = "- {name: p%, address: '2001:db8::%', localASN: 64512, peerASN: internal}\n"
	_, err := Parse([]byte(header + "peers:\n" + many(2000, peer) + "advertisements:\n" + many(2000, "- {name: a%, bgp: {}}\n")))
	require.ErrorContains(t, err, "is one too many")
	_, err = Parse([]byte(header + "peers:\n" + many(1, peer) + "advertisements:\n- {name: z, layer2: {}}\n" + many(1000,
		"- {name: a%, bgp: {localPreference: %}}\n") +
		"pools:\n" + many(4000, "- {name: p%, dhcp: {interface: eth%}, advertise: [z]}\n")))
	require.NoError(t, err)
}

// Documents that took YAML parsers long in the past. TestLargestHostileDocumentsDoNotHang, which is long, has them as large
// as they can be.
func TestHostileDocumentsDoNotHang(t *testing.T) {
	parseHostile(t, MaxSize/4)
}

func parseHostile(t *testing.T, size int) {
	t.Helper()
	for _, unit := range []string{"[", "{", "- ", "? ", "'", "\"", "a: ", "a:\n", "*a ", "&a ", "!!str ", "#\n", "|\n", "a,", "\t",
		"%", "---\n", "a: &a [*a]\n"} {
		for _, text := range [][]byte{
			bytes.Repeat([]byte(unit), (size-len(header))/len(unit)),
			slices.Concat([]byte(header), bytes.Repeat([]byte(unit), 60_000/len(unit))),
		} {
			_, err := Parse(text)
			if err != nil {
				inOrder(t, err)
			}
		}
	}
}
