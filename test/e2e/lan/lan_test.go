package lan

import (
	"net/netip"
	"strings"
	"testing"
)

func TestHardwareAddressesShowTheHost(t *testing.T) {
	host := Host{Name: "n1", Addresses: []netip.Prefix{netip.MustParsePrefix("198.18.0.11/24")}}
	if got := host.MAC().String(); got != "02:00:c6:12:00:0b" {
		t.Errorf("MAC = %s", got)
	}
}

func TestDestroyKnowsItsOwn(t *testing.T) {
	for name, want := range map[string]bool{
		"ls-lan": true, "ls-cp": true, "ls-client": true, "ls-router": true, "ls-router2": true, "ls-remote": true, "ls-router3": false,
		"ls-n1": true, "ls-n12": true,
		"ls2-n1": false, "ls-t-h1-29803": false, "ls-n": false, "ls-nx": false, "ls-ctl": false, "other": false,
	} {
		if got := New("ls").Owns(name); got != want {
			t.Errorf("%s is ours = %v", name, got)
		}
	}
}

func TestPartitionRulesCutBothWaysAndOnlyBetweenGroups(t *testing.T) {
	got := partitionRules([]string{"n1", "client"}, []string{"n2"})
	want := "iifname { p-n1, p-client } oifname { p-n2 } drop\niifname { p-n2 } oifname { p-n1, p-client } drop\n"
	if got != want {
		t.Errorf("rules:\n%swant:\n%s", got, want)
	}
}

func TestLossIsAPercentage(t *testing.T) {
	for _, percent := range []int{-1, 0, 101} {
		if err := New("ls").Lose(percent); err == nil || !strings.Contains(err.Error(), "want 1 to 100") {
			t.Errorf("Lose(%d) = %v", percent, err)
		}
	}
}
