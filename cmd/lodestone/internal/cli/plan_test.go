package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/inspect/explain"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	speakers "github.com/lodestone-lb/lodestone/speaker/plan"
)

// edited writes the configuration of newWorld with replacements, and returns the
// name of the file.
func edited(t *testing.T, replace ...string) string {
	name := filepath.Join(t.TempDir(), "new.yaml")
	require.NoError(t, os.WriteFile(name, []byte(strings.NewReplacer(replace...).Replace(configured)), 0o600))
	return name
}

// An edit of the advertisements moves no address, and the plan names the VIPs that it moves.
func TestPlanShowsWhichVIPsMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ask("plan-nothing.txt", ExitOK, "plan", "--config", edited(t))

	// The segment is n3's alone, which runs no endpoint of one Service; only one rack
	// announces the rest to routers.
	moves := edited(t, "segment, layer2: {}", "segment, layer2: {nodeSelector: {matchLabels: {rack: b}}}", "communities:",
		"nodeSelector: {matchLabels: {rack: b}}, communities:")
	w.ask("plan-moves.txt", ExitFound, "plan", "--config", moves)
	var e explain.Edit
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "plan", "--config", moves, "-o", "json")), &e))
	assert.Equal(t, map[simulation.Change]int{simulation.Kept: 3}, e.Counts)
	require.Len(t, e.Orphaned, 1)
	assert.Equal(t, "203.0.113.11", e.Orphaned[0].VIP.String())
	assert.Equal(t, speakers.NoLocalEndpoint, e.Orphaned[0].Reason)
	require.Len(t, e.Moved, 2)
	assert.Equal(t, simulation.Audience{Routers: []string{"n3"}}, e.Moved[0].After)
	assert.Equal(t, simulation.Audience{Owner: "n3"}, e.Moved[1].After)

	// It comes true.
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = read1(t, moves)
	w.client = nil
	var v explain.VIP
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitOK, "explain", "vip", "203.0.113.10", "-o", "json")), &v))
	assert.Equal(t, "n3", v.Owner)
	assert.Contains(t, w.ask("", ExitFound, "explain", "vip", "203.0.113.11"), "nobody announces it")
}

// The plan has what cannot be known of VIPs, and what is known of Services.
func TestPlanWithoutTheSpeakers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.refuse("list", "endpointslices")
	text := w.ask("", ExitFailed, "plan", "--config", edited(t))
	assert.Contains(t, text, "you need the right to list endpointslices.discovery.k8s.io in namespace default",
		"its addresses are not given to Services")

	w.refuse("list", "pods")
	text = w.ask("", ExitFailed, "plan", "--config", edited(t))
	assert.Contains(t, text, "Services: 3 unchanged\nVIPs: who would announce them is not known: you may not read the Pods of Lodestone")
	assert.Contains(t, text, "lodestone: the answer is not complete: 1 thing was not read")
}

// A plan is how an invalid configuration is repaired: it shows the addresses.
func TestPlanOfARepair(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cm := object[*corev1.ConfigMap](w, config.ConfigMapName)
	cm.Data[config.Key] = "pools: [{name: lan, addresses: [203.0.113.1/24]}]\n"
	text := w.ask("", ExitFailed, "plan", "--config", edited(t))
	assert.Contains(t, text, "Services: 3 unchanged\nVIPs: who would announce them is not known: ConfigMap "+
		"lodestone-system/lodestone-config is invalid, repair it: controllers and speakers that run go by the last valid one")
	text = w.ask("", ExitFailed, "plan", "--config", edited(t, "203.0.113.10-", "203.0.113.11-"))
	assert.Contains(t, text, "Services: 1 stranded, 2 unchanged")
	w.drop(config.ConfigMapName)
	w.client = nil
	text = w.ask("", ExitFailed, "plan", "--config", edited(t, "203.0.113.10-", "203.0.113.11-"))
	assert.Contains(t, text, "Services: 1 stranded, 2 unchanged\nVIPs: who would announce them is not known: there is no ConfigMap")
}

// A leased address that is given up is no VIP that nobody announces.
func TestPlanCountsALostAddressOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	leasing := strings.Replace(configured, "pools:\n", "pools:\n  - {name: office, dhcp: {interface: eth0}, advertise: [segment]}\n", 1)
	object[*corev1.ConfigMap](w, config.ConfigMapName).Data[config.Key] = leasing
	leased := service("leased", "203.0.113.99")
	leased.Annotations["lodestone.io/leases"] = "203.0.113.99=eth0"
	w.add(leased, endpoints("leased", "n1"))
	var e explain.Edit
	require.NoError(t, json.Unmarshal([]byte(w.ask("", ExitFound, "plan", "--config", edited(t), "-o", "json")), &e))
	assert.Equal(t, []explain.Outcome{{Service: "shop/leased", Change: simulation.Lost, Message: e.Services[0].Message}}, e.Services)
	assert.Empty(t, e.Orphaned)
	assert.Empty(t, e.Moved)
}

func read1(t *testing.T, name string) string {
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

func TestValidateWhatTheClusterHas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	assert.Equal(t, "ConfigMap lodestone-system/lodestone-config: valid: 2 pools, 24 addresses, 2 advertisements, 2 BGP peers\n",
		w.ask("", ExitOK, "validate", "--live"))
	assert.Contains(t, w.ask("", ExitFailed, "validate", "--live", "config.yaml"), "leave the file out")

	cm := object[*corev1.ConfigMap](w, config.ConfigMapName)
	cm.Data[config.Key] = strings.Replace(configured, "203.0.113.10-", "203.0.113.1-", 1)
	w.client = nil
	assert.Contains(t, w.ask("", ExitFound, "validate", "--live"), `warning: pool "lan" contains 203.0.113.1, the address of node n1`)
	w.refuse("list", "nodes")
	assert.Contains(t, w.ask("", ExitFailed, "validate", "--live"), "what the configuration means for the cluster: you may not read Nodes")

	cm.Data[config.Key] = header + "pools: [{name: lan, addresses: [203.0.113.1/24]}]\n"
	w.client = nil
	assert.Contains(t, w.ask("", ExitInvalid, "validate", "--live"), `config.yaml:3:33: pools[0] "lan": 203.0.113.1/24 has bits set`)
	w.drop(config.ConfigMapName)
	w.client = nil
	assert.Equal(t, "lodestone: there is no ConfigMap lodestone-system/lodestone-config: see --lodestone-namespace and --config-name\n",
		w.ask("", ExitFailed, "validate", "--live"))
	w.refuse("get", "configmaps")
	assert.Contains(t, w.ask("", ExitFailed, "validate", "--live"), "you may not read the configuration: you need the right to get configmaps")
}

func TestValidityForPrograms(t *testing.T) {
	t.Parallel()
	var v validity
	code, out, errs := run(t, header+"pools: [{name: lan, addresses: [203.0.113.1/24]}]\n", "validate", "-", "-o", "json")
	assert.Equal(t, ExitInvalid, code)
	assert.Empty(t, errs)
	require.NoError(t, json.Unmarshal([]byte(out), &v))
	assert.False(t, v.Valid)
	require.Len(t, v.Errors, 1)
	assert.Equal(t, `pools[0] "lan"`, v.Errors[0].Path)
	assert.Equal(t, 3, v.Errors[0].Line)

	code, out, _ = run(t, header+"pools: [{name: lan, addresses: [203.0.113.0/24]}]\n", "validate", "-", "-o", "yaml")
	assert.Equal(t, ExitOK, code)
	assert.Contains(t, out, "addresses: 254\n")
	assert.Contains(t, out, "errors: []\n")
}
