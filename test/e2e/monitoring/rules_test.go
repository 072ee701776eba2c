package monitoring_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// story is how an alert comes to fire and ends. Series have a value a minute.
type story struct {
	alert  string
	series map[string]string
	// fires and ends are when it does and does not any more; silent is when it
	// does not yet.
	silent, fires, ends string
	labels              map[string]string
	description         string
}

type of = map[string]string

const (
	controller = `{job="lodestone-controller",node="n1"}`
	standby    = `{job="lodestone-controller",node="n2"}`
	one, two   = `{job="lodestone-speaker",node="n1"}`, `{job="lodestone-speaker",node="n2"}`
)

// on returns the labels of a speaker's series.
func on(node, labels string) string {
	return `{job="lodestone-speaker",node="` + node + `",` + labels + `}`
}

// drained are series of a pool that is to be emptied: that it has no free addresses is no trouble.
func drained(series of) of {
	maps.Copy(series, of{`lodestone_pool_size{pool="old",family="IPv4"}`: "50x60",
		`lodestone_pool_addresses{pool="old",family="IPv4",state="free"}`: "0x30 2x30",
		`lodestone_pool_draining{pool="old",family="IPv4"}`:               "1x60", `lodestone_pool_draining{pool="lan",family="IPv4"}`: "0x60"})
	return series
}

var stories = []story{
	{"ControllerDown", of{"up" + controller: "1 1 0x9 1x50", "up" + standby: "0x60"}, "3m", "5m", "15m", nil,
		"No pod of lodestone-controller has answered Prometheus for 2 minutes: Services get no addresses, VIPs stay where they are."},
	{"ControllerWithoutLeader", of{`leader_election_master_status{name="lodestone-controller",node="n1"}`: "1 0x9 1x50",
		`leader_election_master_status{name="lodestone-controller",node="n2"}`: "0x60"}, "0m", "5m", "15m", nil,
		"2 controllers run and none of them leads: Services get no addresses, VIPs stay where they are."},
	{"ControllerNotPrimed", of{"lodestone_primed" + controller: "0x10 1x50"}, "3m", "8m", "15m", nil,
		"A controller leads and has not found out for 5 minutes what the Services of the cluster hold: it gives no addresses before."},
	{"ConfigurationRefused", of{"lodestone_config_valid" + one: "1 0x10 1x50", "lodestone_config_valid" + two: "1 0x10 1x50",
		"lodestone_config_valid" + controller: "1x60"}, "0m", "5m", "15m", of{"job": "lodestone-speaker"},
		"2 pods of lodestone-speaker have refused the present configuration, or have none: the last good one stays in force."},
	{"ConfigurationsDiffer", of{"lodestone_config_info" + on("n1", `digest="aa"`): "1x60", "lodestone_config_info" +
		on("n2", `digest="bb"`): "1x10 stale", "lodestone_config_info" + on("n2", `digest="aa"`): "_x11 1x50"}, "3m", "8m", "15m", nil,
		"2 different configurations have been in force for 5 minutes: some component does not follow the ConfigMap."},
	{"ConfigurationWarnings", of{"lodestone_config_warnings" + controller: "3x20 0x40"}, "5m", "15m", "30m", nil,
		"3 warnings about the configuration in force stand in the Events of the ConfigMap."},
	{"PoolNearlyExhausted", drained(of{`lodestone_pool_size{pool="lan",family="IPv4"}`: "50x60",
		`lodestone_pool_addresses{pool="lan",family="IPv4",state="free"}`:     "4x20 10x40",
		`lodestone_pool_addresses{pool="lan",family="IPv4",state="assigned"}`: "46x60"}), "5m", "15m", "30m", of{"pool": "lan", "family": "IPv4"},
		"Pool lan has 8% of its IPv4 addresses free."},
	{"PoolExhausted", drained(of{`lodestone_pool_size{pool="lan",family="IPv4"}`: "50x60",
		`lodestone_pool_addresses{pool="lan",family="IPv4",state="free"}`: "0x20 10x40"}), "3m", "15m", "30m",
		of{"pool": "lan", "family": "IPv4"},
		"None of the 50 IPv4 addresses of pool lan is free: the next Service that needs one waits."},
	{"ServicesPending", of{`lodestone_services_refused{reason="PoolExhausted"}`: "2x20 0x40"}, "3m", "10m", "30m",
		of{"reason": "PoolExhausted"},
		"2 Services have no address from a pool, keep another one than they ask for, or have one that is not announced: PoolExhausted."},
	{"ServicesStranded", of{`lodestone_services{state="stranded"}`: "7x40 0x60", `lodestone_services{state="allocated"}`: "9x100"}, "20m",
		"35m", "50m", nil,
		"7 Services keep addresses that have left their pools."},
	{"AllocationSlow", of{`lodestone_allocation_duration_seconds_bucket{le="4.096"}`: "0x60",
		`lodestone_allocation_duration_seconds_bucket{le="8.192"}`: "0+10x30 300x30",
		`lodestone_allocation_duration_seconds_bucket{le="+Inf"}`:  "0+10x30 300x30"}, "5m", "20m", "50m", nil,
		"One Service in a hundred has waited 8.151s or longer for its address to stand in the API."},
	{"APIWritesFailing", of{`rest_client_requests_total{job="lodestone-controller",method="PATCH",code="500"}`: "0+60x30 1800x30",
		`rest_client_requests_total{job="lodestone-controller",method="PATCH",code="409"}`: "0+60x60",
		`rest_client_requests_total{job="lodestone-controller",method="GET",code="500"}`:   "0+60x60"}, "5m", "20m", "50m",
		of{"method": "PATCH", "code": "500"},
		"1 PATCH requests of the controller fail each second with 500."},
	{"ReleasesNotRecorded", of{"lodestone_quarantine_writes_total" + `{result="failed"}`: "0+1x30 30x30", "lodestone_quarantine_writes_total" +
		`{result="saved"}`: "0+1x60"}, "3m", "20m", "50m", of{"result": "failed"},
		"10 attempts to put released addresses on record have failed within 10 minutes, or as many records are lost: deleted Services wait, " +
			"or a restart would give their addresses away too early."},
	{"LeaseOverdue", of{`lodestone_leases{pool="lan",state="overdue"}`: "1x20 0x40"}, "3m", "10m", "30m", of{"pool": "lan"},
		"1 leases of pool lan should have been extended and are not: their VIPs are withdrawn when they end."},
	{"LeaseUnconfirmed", of{`lodestone_leases{pool="lan",state="unconfirmed"}`: "4x20 0x40"}, "5m", "15m", "30m", of{"pool": "lan"},
		"4 VIPs of pool lan are announced by leases that no server has confirmed since the controller started."},
	{"LeaseLost", of{`lodestone_leases_lost_total{pool="lan"}`: "0x20 3x60"}, "15m", "28m", "50m", of{"pool": "lan"},
		"3 Services have lost leased addresses of pool lan within 15 minutes."},
	{"NoSpeakerReady", of{"lodestone_speaker_ready" + one: "1 0x10 1x50", "lodestone_speaker_ready" + two: "0x60"}, "1m", "5m", "15m", nil,
		"No speaker of the cluster is ready to own VIPs: no address of a Service is announced, or Prometheus reads no speaker."},
	{"SpeakerDown", of{"up" + one: "1 0x10 1x50", "up" + two: "1x60"}, "2m", "5m", "15m", of{"job": "lodestone-speaker", "node": "n1"},
		"The speaker on n1 has not answered Prometheus for 2 minutes. Other nodes announce its VIPs by layer 2."},
	{"SpeakerNotReady", of{"lodestone_speaker_ready" + one: "1 0x10 1x50", "lodestone_speaker_ready" + two: "1x60"}, "4m", "8m", "15m",
		of{"job": "lodestone-speaker", "node": "n1"},
		"The speaker on n1 has not been ready for 5 minutes: the node announces nothing."},
	{"SpeakersDisagree", of{"lodestone_membership_speakers" + one: "3 2x10 3x50", "lodestone_membership_speakers" + two: "3x60"}, "2m",
		"5m", "15m", nil,
		"Some speakers do not see 1 of the others: a VIP may be announced by two nodes."},
	{"MembershipKeyRefused", of{"lodestone_membership_key_refused" + one: "0 1x20 0x50", "lodestone_membership_key_refused" +
		two: "0 1x20 0x50"}, "4m", "10m", "30m", nil,
		"2 speakers go on with the membership key that they had, because what the Secret has now is none: no speaker can start."},
	{"MembershipKeyHeldUp", of{"lodestone_membership_keys" + one: "1 2x40 1x50", "lodestone_membership_keys" + two: "1x100"}, "25m",
		"35m", "50m", nil,
		"Speakers have understood 2 membership keys for 30 minutes: the old one stays valid, and speakers that start may have to wait."},
	{"SplitBrain", of{"lodestone_layer2_withheld_vips" + on("n1", `interface="eth0",family="IPv4",reason="Yielded"`): "0 4x10 0x50",
		"lodestone_layer2_withheld_vips" + on("n1", `interface="eth0",family="IPv6",reason="Yielded"`): "0 1x10 0x50"}, "2m", "5m", "15m",
		of{"node": "n1", "interface": "eth0"},
		"n1 holds 5 VIPs back on eth0 because another speaker announces them, which it does not see as a member."},
	{"VIPWithoutOwner", of{"lodestone_speaker_vips_unowned" + on("n1", `reason="SpeakerNotReady"`): "2x10 0x50",
		"lodestone_speaker_vips_unowned" + on("n1", `reason="NodeNotSelected"`): "1x10 0x50", "lodestone_speaker_vips_unowned" +
			on("n1", `reason="NoServingEndpoint"`): "9x60"}, "0m", "5m", "15m", nil,
		"3 VIPs with endpoints that take traffic are announced by no node."},
	{"VIPWithoutEndpoint", of{"lodestone_speaker_vips_silent" + on("n1", `reason="NoServingEndpoint"`): "2x20 0x50",
		"lodestone_speaker_vips_silent" + on("n2", `reason="NoServingEndpoint"`): "2x20 0x50", "lodestone_speaker_vips_silent" +
			on("n2", `reason="NotOwner"`): "5x60"}, "10m", "18m", "30m", nil,
		"2 VIPs are not announced because their Services have had no endpoint that takes traffic for 15 minutes."},
	{"VIPNotAnnounced", of{"lodestone_layer2_unannounced_vips" + on("n1", `reason="NoInterface"`): "3x10 0x50"}, "0m", "5m", "15m",
		of{"job": "lodestone-speaker", "node": "n1", "reason": "NoInterface"},
		"n1 owns 3 VIPs and announces them on no interface: NoInterface."},
	{"AddressConflict", of{"lodestone_layer2_withheld_vips" + on("n1", `interface="eth0",family="IPv4",reason="AddressConflict"`): "1x10 0x50",
		"lodestone_layer2_withheld_vips" + on("n1", `interface="eth0",family="IPv4",reason="Probing"`): "7x60"}, "0m", "5m", "15m",
		of{"node": "n1", "interface": "eth0"},
		"n1 does not announce 1 VIPs on eth0: other machines have their addresses."},
	{"VIPClaimedByOthers", of{"lodestone_layer2_conflicts_total" + on("n1", `interface="eth0",family="IPv4"`): "0x5 0+1x20 20x40"}, "3m",
		"20m", "50m", of{"node": "n1", "interface": "eth0", "family": "IPv4"},
		"n1 has heard 10 foreign claims (IPv4) to its VIPs on eth0 within 10 minutes: some clients reach the other machine."},
	{"OwnershipFlapping", of{"lodestone_speaker_ownership_transitions_total" + on("n1", `transition="gained"`): "0+2x40 80x39 81x20",
		"lodestone_speaker_vips_owned" + one: "4x82 0x20"}, "4m", "30m", "93m", nil, // a Service came, and all went
		"Each VIP has changed its owner 7.5 times on average within 15 minutes."},
	{"BGPWithoutSession", of{"lodestone_bgp_session_established" + on("n1", `peer="tor-a"`): "1 0x10 1x50",
		"lodestone_bgp_session_established" + on("n2", `peer="tor-a"`): "1 0x10 1x50"}, "1m", "5m", "15m", nil,
		"None of 2 BGP sessions of the cluster is established: no router knows a way to the VIPs."},
	{"BGPSessionDown", of{"lodestone_bgp_session_established" + on("n1", `peer="tor-a"`): "1 0x10 1x50", "lodestone_bgp_session_established" +
		on("n1", `peer="tor-b"`): "1x60"}, "2m", "5m", "15m", of{"job": "lodestone-speaker", "node": "n1", "peer": "tor-a"},
		"n1 has had no BGP session with tor-a for 2 minutes: that router sends it no traffic."},
	{"BGPSessionFlapping", of{"lodestone_bgp_session_transitions_total" + on("n1", `peer="tor-a",cause="established"`): "1+1x20 21x140",
		"lodestone_bgp_session_transitions_total" + on("n1", `peer="tor-b",cause="established"`): "1x160"}, "2m", "60m", "100m",
		of{"node": "n1", "peer": "tor-a"},
		"The BGP session of n1 with tor-a has come up 19 times within an hour."},
	{"BGPPrefixesWithheld", of{"lodestone_bgp_withheld_prefixes" + on("n1", `peer="tor-a",reason="no_next_hop"`): "3x20 0x40"}, "3m", "10m",
		"30m", of{"node": "n1", "peer": "tor-a", "reason": "no_next_hop"},
		"n1 cannot send tor-a 3 prefixes: no_next_hop."},
	{"BFDSessionDown", of{"lodestone_bfd_session_up" + on("n1", `peer="tor-a"`): "1 0x10 1x50"}, "4m", "8m", "15m",
		of{"job": "lodestone-speaker", "node": "n1", "peer": "tor-a"},
		"The BFD session of n1 with tor-a has not been Up for 5 minutes: a failure is noticed by the hold time only."},
	{"BFDFlapping", of{"lodestone_bfd_transitions_total" + on("n1", `peer="tor-a",reason="detection_time_expired"`): "0+1x20 20x140",
		"lodestone_bfd_transitions_total" + on("n1", `peer="tor-a",reason="up"`): "0+9x160"}, "1m", "60m", "100m",
		of{"node": "n1", "peer": "tor-a"},
		"The BFD session of n1 with tor-a has gone down 19 times within an hour."},
	{"BFDPacketsFromAfar", of{"lodestone_bfd_discarded_packets_total" + on("n1", `reason="hops"`): "0+60x30 1800x30",
		"lodestone_bfd_discarded_packets_total" + on("n1", `reason="state"`): "0+60x60"}, "3m", "20m", "50m", of{"node": "n1"},
		"n1 has discarded 300 BFD packets within 5 minutes that came over too many hops."},
	{"LimitNotInForce", of{"lodestone_limit_wanted" + one: "5x60", "lodestone_limit_active" + one: "3x20 5x40"}, "3m", "10m", "30m",
		of{"job": "lodestone-speaker", "node": "n1"},
		"2 connection rate limits are missing in the kernel of n1: these Services work without."},
	{"ConnectionsDropped", of{"lodestone_limit_dropped_connections_total" +
		on("n1", `service="team/web",vip="203.0.113.7"`): "0+600x30 18000x30"}, "5m", "20m", "50m",
		of{"service": "team/web", "vip": "203.0.113.7"},
		"10 connections a second to team/web at 203.0.113.7 are dropped."},
	{"DirectForwardingImpaired", of{"lodestone_direct_failing" + one: "0x60", "lodestone_direct_conntrack_full" + one: "0x60",
		"lodestone_direct_services" + on("n1", `state="forwarded"`):     "9x60",
		"lodestone_direct_services" + on("n1", `state="without_table"`): "2x20 0x40"}, "3m", "10m", "30m",
		of{"job": "lodestone-speaker", "node": "n1"},
		"Connections through n1 may not outlive a move of their VIP: direct forwarding there does not do all that it should."},
	{"PodRoutesMissing", of{"lodestone_route_wanted" + one: "9x60", "lodestone_route_in_force" + one: "7x20 9x40"}, "3m", "10m", "30m",
		of{"job": "lodestone-speaker", "node": "n1"},
		"n1 has no route to 2 pod CIDRs of other nodes."},
}

// TestAlertsFireAndEnd has promtool evaluate the rules on the stories. Each
// alert has one.
func TestAlertsFireAndEnd(t *testing.T) {
	promtool, err := builder.Promtool(t.Context())
	require.NoError(t, err)
	rules := map[string]rule{}
	for _, a := range alerts(t) {
		rules[a.Alert] = a
	}
	type any = map[string]interface{}
	var tests []any
	for _, s := range stories {
		name := "Lodestone" + s.alert
		r, ok := rules[name]
		if !assert.True(t, ok, "%s: there is no such alert", name) {
			continue
		}
		delete(rules, name)
		labels, annotations := of{"severity": r.Labels["severity"]},
			of{"description": s.description, "summary": r.Annotations["summary"], "runbook_url": r.Annotations["runbook_url"]}
		for k, v := range s.labels {
			labels[k] = v
		}
		var series []any
		for name, values := range s.series {
			series = append(series, any{"series": name, "values": values})
		}
		firing := []any{{"exp_labels": labels, "exp_annotations": annotations}}
		tests = append(tests, any{"name": name, "interval": "1m", "input_series": series, "alert_rule_test": []any{
			{"alertname": name, "eval_time": s.silent},
			{"alertname": name, "eval_time": s.fires, "exp_alerts": firing},
			{"alertname": name, "eval_time": s.ends},
		}})
	}
	for name := range rules {
		t.Errorf("%s: no story in which it fires", name)
	}
	file := filepath.Join(t.TempDir(), "test.json")
	content, err := json.Marshal(any{"rule_files": []string{absolute(rulesFile)}, "evaluation_interval": "1m", "tests": tests})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	out, err := run(t, "", promtool, "test", "rules", file)
	require.NoError(t, err, out)
	require.Contains(t, out, "SUCCESS")

	out, err = run(t, "", promtool, "check", "rules", "--lint=all", "--lint-fatal", rulesFile)
	require.NoError(t, err, out)
	require.True(t, strings.Contains(out, "SUCCESS"), out)
}

// TestScrapeExample: the guide's configuration is one that Prometheus takes.
func TestScrapeExample(t *testing.T) {
	promtool, err := builder.Promtool(t.Context())
	require.NoError(t, err)
	_, text, ok := strings.Cut(read(t, root+"/docs/guides/monitoring.md"), "```yaml\nscrape_configs:")
	require.True(t, ok)
	text, _, _ = strings.Cut(text, "```")
	file := filepath.Join(t.TempDir(), "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte("scrape_configs:"+text), 0o600))
	out, err := run(t, "", promtool, "check", "config", "--syntax-only", file)
	require.NoError(t, err, out)
}
