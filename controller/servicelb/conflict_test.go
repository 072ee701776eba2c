package servicelb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/notify"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// few is a pool of three addresses, .10 to .12.
const few = "quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.12]}\n"

// foreign is what a node reports: "203.0.113.10 withheld" is what n1 does, and "203.0.113.10
// withheld by n2,n3" is what both do. The other host is always the same.
func foreign(said string) clusterfacts.Conflict {
	said, nodes, others := strings.Cut(said, " by ")
	if !others {
		nodes = "n1"
	}
	addr, state, _ := strings.Cut(said, " ")
	var c report.Conflict
	err := c.UnmarshalText([]byte(addr + " 02:00:00:00:00:0c " + state))
	if err != nil {
		panic(err)
	}
	return clusterfacts.Conflict{Conflict: c, Nodes: strings.Split(nodes, ",")}
}

// reports replaces what speakers report, and lets the controller work.
func (s *story) reports(reports ...string) {
	s.around.report(reports...)
	s.stale = true
	s.run()
}

func (s *surroundings) report(reports ...string) {
	facts := *s.facts
	facts.Conflicts = nil
	for _, r := range reports {
		facts.Conflicts = append(facts.Conflicts, foreign(r))
	}
	s.facts = &facts
}

// counts checks the counters of the pool's IPv4 addresses.
func (s *story) counts(t *testing.T, want ipam.PoolStats) {
	t.Helper()
	want.Pool, want.Family = "lan", ipam.IPv4
	assert.Equal(t, want, s.machine().Stats(s.clock).Pools[0])
}

// maxOfReport is how many conflicts a report has at most, and how many addresses are withheld
// because of one node.
const maxOfReport = report.MaxConflicts

func TestANewAddressThatAnotherHostHas(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(few)
	s.creates("web")
	s.wantEvents("Normal Allocated default/web: 203.0.113.10")
	s.reports("203.0.113.10 withheld")
	s.has("web", "203.0.113.11", "True Allocated")
	s.wantEvents(
		"Warning AddressConflict default/web: the host 02:00:00:00:00:0c (seen by node n1) has 203.0.113.10. The Service gets another address",
		"Normal Allocated default/web: 203.0.113.11")
	s.counts(t, ipam.PoolStats{Size: 3, Free: 1, Assigned: 1, Conflicted: 1})
	assert.Equal(t, 1., testutil.ToFloat64(s.metrics.conflicts))

	s.creates("next")
	s.has("next", "203.0.113.12", "True Allocated")
	s.creates("last")
	s.has("last", "", "False PoolExhausted")
	s.mentions("last", "0 of 3 IPv4 addresses free (1 in use by other hosts)")
	s.reports() // nobody asks for the address any more, so nobody hears of the host
	s.has("last", "", "False PoolExhausted")
	s.pass(withholding - time.Minute)
	s.has("last", "", "False PoolExhausted")
	s.pass(2 * time.Minute)
	s.has("last", "203.0.113.10", "True Allocated")
	s.reports("203.0.113.10 withheld") // it is still there
	s.has("last", "203.0.113.10", "False AddressConflict")
	s.mentions("last", "the host 02:00:00:00:00:0c (seen by node n1) has 203.0.113.10, which is therefore not announced; there is no other "+
		"address: pool \"lan\" has 0 of 3 IPv4 addresses free; keeps 203.0.113.10 from pool \"lan\"")
	s.pass(time.Hour)
	s.deletes("web")
	s.has("last", "203.0.113.11", "True Allocated")
}

// Some addresses cannot be replaced: the condition of the Service reports that.
func TestAServiceThatStaysOnAnAddressThatAnotherHostHas(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(few + "reservations: [{service: default/reserved, addresses: [203.0.113.12]}]\n")
	s.creates("named", annotated(annotation.Addresses, "203.0.113.11"))
	s.creates("reserved")
	s.creates("shared", shared("k"), ports(80))
	s.creates("sharer", shared("k"), ports(443))
	s.events.take()
	s.reports("203.0.113.10 withheld", "203.0.113.11 withheld", "203.0.113.12 withheld")
	for name, addr := range map[string]string{"named": "203.0.113.11", "reserved": "203.0.113.12", "shared": "203.0.113.10",
		"sharer": "203.0.113.10"} {
		s.has(name, addr, "False AddressConflict")
		s.mentions(name, "has "+addr+", which is therefore not announced: take it away from that host")
	}
	assert.Len(t, s.events.take(), 4)
	assert.Equal(t, 4., testutil.ToFloat64(s.metrics.refusals.WithLabelValues("AddressConflict")))
	s.counts(t, ipam.PoolStats{Size: 3, Assigned: 3})
	s.silent("nothing new", func() { notify.Wake(s.ledger.retry); s.run() })

	s.reports("203.0.113.10 withheld")
	s.has("named", "203.0.113.11", "True Allocated")
	s.changes("sharer", unannotated(annotation.SharingKey))
	s.has("sharer", "", "False PoolExhausted")
	s.deletes("named")
	s.has("shared", "203.0.113.11", "True Allocated") // it is alone now, and leaves as soon as it can
	s.mentions("sharer", "(1 in use by other hosts)")
	s.creates("bold", annotated(annotation.Addresses, "203.0.113.10")) // who names it has it, and hears of the host
	s.has("bold", "203.0.113.10", "False AddressConflict")
	s.reports()
	s.has("bold", "203.0.113.10", "True Allocated")
	s.deletes("bold") // the speakers asked, and nobody answered
	s.has("sharer", "203.0.113.10", "True Allocated")
}

// Whoever takes over a node can report what it likes for all nodes.
func TestAReportMovesNobodyWhoHasHadTheAddressForAWhile(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(few)
	s.creates("web")
	s.creates("other")
	s.pass(settling)
	s.events.take()
	s.reports("203.0.113.10 withheld", "203.0.113.11 announced")
	s.has("web", "203.0.113.10", "False AddressConflict")
	s.has("other", "203.0.113.11", "True AddressConflict")
	s.mentions("other", "the host 02:00:00:00:00:0c (seen by node n1) claims 203.0.113.11, too: the speakers defend it")
	s.wantEvents("Warning AddressConflict", "Warning AddressConflict")
	s.restart()
	s.run()
	s.silent("after a restart", func() { s.reports("203.0.113.10 withheld", "203.0.113.11 announced") })
	s.changes("web", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("web", "203.0.113.12", "True Allocated")
	s.wantEvents("Warning AddressConflict", "Normal Allocated")
	s.counts(t, ipam.PoolStats{Size: 3, Assigned: 2, Conflicted: 1})
	s.changes("other", annotated(annotation.Renumber, annotation.Renumbering))
	s.has("other", "203.0.113.11", "False PoolExhausted")
	s.changes("other", unannotated(annotation.Renumber))
	s.reports()
	s.has("other", "203.0.113.11", "True Allocated")
}

// A VIP that is announced works: also a young one does not move.
func TestALaterConflictMovesNobody(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(few)
	s.creates("web")
	s.reports("203.0.113.10 announced")
	s.has("web", "203.0.113.10", "True AddressConflict")
	s.reports()
	s.has("web", "203.0.113.10", "True Allocated")
}

func TestOnlyTheFamilyInConflictMoves(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("web", families(corev1.IPFamilyPolicyPreferDualStack, corev1.IPv6Protocol, corev1.IPv4Protocol))
	s.has("web", "2001:db8::10,203.0.113.10", "True Allocated")
	s.reports("2001:db8::10 withheld")
	s.has("web", "2001:db8::11,203.0.113.10", "True Allocated")
}

// After a restart the conflicts are known from the Leases and the Services.
func TestConflictsAfterARestart(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.creates("old")
	s.pass(time.Hour)
	s.creates("web")
	s.reports("203.0.113.11 withheld")
	s.has("web", "203.0.113.12", "True Allocated")
	s.pass(time.Minute) // the quarantine of .11 is over
	s.restart()
	s.run()
	s.creates("next")
	s.has("next", "203.0.113.13", "True Allocated")
	s.reports("203.0.113.10 withheld", "203.0.113.11 withheld", "203.0.113.12 withheld")
	s.has("old", "203.0.113.10", "False AddressConflict")
	s.has("web", "203.0.113.14", "True Allocated") // it is young enough
	s.counts(t, ipam.PoolStats{Size: 10, Free: 5, Assigned: 3, Conflicted: 1, Quarantined: 1})
}

// A host that was there when the Service was new, and comes back much later, moves nothing.
func TestAConflictThatEndsIsForgotten(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure(few)
	for _, name := range []string{"web", "other", "last"} {
		s.creates(name)
	}
	s.reports("203.0.113.10 withheld")
	s.has("web", "203.0.113.10", "False AddressConflict") // there is no other address
	s.reports()
	s.has("web", "203.0.113.10", "True Allocated")
	s.pass(time.Hour)
	s.deletes("other")
	s.reports("203.0.113.10 withheld")
	s.has("web", "203.0.113.10", "False AddressConflict")
}

// Lies must not exhaust a pool, nor keep the controller busy.
func TestAFloodOfConflicts(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools:\n  - {name: lan, addresses: [203.0.113.10-203.0.113.20]}\n  - {name: wide, addresses: [10.0.0.0/8]}\n")
	s.creates("web")
	s.pass(time.Hour)
	var all []string
	for i := range 20 {
		all = append(all, fmt.Sprintf("203.0.113.%d withheld by n%d", 5+i, i))
	}
	for i := range 20_000 {
		all = append(all, fmt.Sprintf("10.0.%d.%d withheld by n%d", i/250, i%250, 2+i%600))
	}
	s.reports(all...)
	s.has("web", "203.0.113.10", "False AddressConflict")
	s.counts(t, ipam.PoolStats{Size: 11, Free: 5, Assigned: 1, Conflicted: 5})
	wide := s.machine().Stats(s.clock).Pools[1]
	assert.Equal(t, 64., wide.Conflicted)
	s.tryAgain(allDue)
	require.Len(t, s.config.warnings, 2)
	assert.Contains(t, s.config.warnings[0],
		`pool "lan": speakers report more IPv4 addresses of it in use by other hosts than are withheld from Services, which is at most 5`)

	s.creates("new") // in conflict as well, and there is no room to withhold more
	s.has("new", "203.0.113.16", "False AddressConflict")
	s.reports()
	s.has("new", "203.0.113.16", "True Allocated")
	s.pass(withholding)
	s.counts(t, ipam.PoolStats{Size: 11, Free: 9, Assigned: 2})
}

// conflicted is how many addresses of all pools are withheld.
func (s *story) conflicted() (n float64) {
	for _, p := range s.machine().Stats(s.clock).Pools {
		n += p.Conflicted
	}
	return n
}

// What is withheld already needs no room. The operator is warned only when a report is about more than may be withheld.
func TestAWithheldAddressThatAServiceHasIsNoReasonToWarn(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.6/31]}\n") // one may be withheld
	s.reports("203.0.113.6 withheld")
	s.creates("web", annotated(annotation.Addresses, "203.0.113.6"))
	s.has("web", "203.0.113.6", "False AddressConflict")
	s.tryAgain(allDue)
	assert.Empty(t, s.config.warnings)
	s.changes("web", unannotated(annotation.Addresses))
	s.has("web", "203.0.113.7", "True Allocated") // it may leave the other one, which nobody else is given
	s.tryAgain(allDue)
	assert.Empty(t, s.config.warnings)

	s.reports("203.0.113.6 withheld", "203.0.113.7 withheld")
	s.has("web", "203.0.113.7", "False AddressConflict") // it stays, since there is no room for the second one
	s.tryAgain(allDue)
	assert.Len(t, s.config.warnings, 1)
}

// A node that lies leaves half of what may be withheld of a pool to what other nodes report.
func TestNodesShareWhatIsWithheldOfAPool(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pool          string
		liar, allowed int // what is withheld because of one node, and of all
	}{
		{"203.0.113.7/32", 0, 0},
		{"203.0.113.6/31", 1, 1}, // there is nothing to share
		{"203.0.113.8-203.0.113.11", 1, 2},
		{"203.0.113.8/29", 2, 3}, // 6 addresses: not the first and the last
		{"203.0.113.8-203.0.113.15", 2, 4},
		{"203.0.113.0/24", 32, 64},
		{"2001:db8::7/128", 0, 0},
		{"2001:db8::8-2001:db8::f", 2, 4},
		{"2001:db8::/64", 32, 64},
	} {
		t.Run(c.pool, func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.configure("quarantine: 0s\npools:\n  - {name: lan, addresses: ['" + c.pool + "']}\n")
			first, _, _ := strings.Cut(strings.ReplaceAll(c.pool, "/", "-"), "-")
			by := func(nodes string) (reports []string) {
				for addr := netip.MustParseAddr(first); len(reports) < 256; addr = addr.Next() {
					reports = append(reports, addr.String()+" withheld by "+nodes)
				}
				return reports
			}
			s.reports(by("liar")...)
			assert.EqualValues(t, c.liar, s.conflicted(), "because of one node")
			s.reports(by("liar,n2,n3")...)
			assert.EqualValues(t, c.allowed, s.conflicted(), "because of several")
			s.reports()
			assert.EqualValues(t, c.allowed, s.conflicted(), "what is withheld stays so")
			s.pass(withholding + time.Hour)
			assert.Zero(t, s.conflicted())
		})
	}
}

// A node that lies names other addresses each time, of all pools and families. What follows
// from its reports is bounded, and takes nothing from the reports of others.
func TestWhatOneNodeWithholds(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools:\n  - {name: lan, addresses: [203.0.113.0/24, '2001:db8::/120']}\n" +
		"  - {name: wide, addresses: [10.0.0.0/16]}\n")
	for round := range 40 {
		var lies []string
		for i := range maxOfReport / 4 {
			n := round*maxOfReport/4 + i
			lies = append(lies, fmt.Sprintf("203.0.113.%d withheld", n%256), fmt.Sprintf("2001:db8::%x announced", n%256),
				fmt.Sprintf("10.0.%d.%d withheld", n/256, n%256), fmt.Sprintf("10.0.128.%d withheld", n%256))
		}
		s.reports(lies...)
		assert.LessOrEqual(t, s.conflicted(), float64(maxOfReport))
		s.pass(time.Minute)
	}
	assert.EqualValues(t, maxOfReport, s.conflicted(), "nothing that is true was forgotten")
	s.tryAgain(allDue)
	require.Len(t, s.config.warnings, 1)
	assert.Contains(t, s.config.warnings[0], `the speaker of node "n1" reports more addresses in use by other hosts than are withheld`)
	s.creates("web", annotated(annotation.AddressPool, "wide"))
	first := kube.JoinAddrs(kube.VIPs(s.server.get("default/web")))
	s.reports(first + " withheld") // it moves nobody any more
	s.has("web", first, "False AddressConflict")

	s.reports(first + " withheld by n1,n2") // what an honest node reports counts, whoever else reports it
	moved := kube.JoinAddrs(kube.VIPs(s.server.get("default/web")))
	assert.NotEqual(t, first, moved)
	assert.EqualValues(t, maxOfReport+1, s.conflicted())

	// What n1 reported and another node goes on reporting counts for that one.
	var kept []string
	for i := range maxOfReport {
		kept = append(kept, fmt.Sprintf("10.0.7.%d withheld", i))
	}
	s.reports()
	s.pass(25 * time.Hour)
	s.reports(kept...)
	require.EqualValues(t, maxOfReport, s.conflicted())
	for i := range kept {
		kept[i] += " by n2"
	}
	s.reports(kept...)
	s.pass(25 * time.Hour)
	var others []string
	for i := range maxOfReport {
		others = append(others, fmt.Sprintf("10.0.8.%d withheld by n2", i))
	}
	s.reports(others...)
	assert.EqualValues(t, maxOfReport, s.conflicted(), "all because of n2")
	s.reports()
	s.pass(25 * time.Hour)

	s.around.report("203.0.113.7 withheld by n2", "203.0.113.8 withheld")
	for range 3 { // the next leader knows what is reported then
		s.restart()
		s.run()
		s.creates("next")
		s.deletes("next")
		assert.EqualValues(t, 2, s.conflicted(), "what is still seen is still withheld")
	}
}
