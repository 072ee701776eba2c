// Package kuberouter runs kube-router in the lab to enforce NetworkPolicies, and for nothing
// else. Its rules are iptables and ipsets in the kernel, for IPv4.
package kuberouter

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// KubeRouter is one that runs on every node.
type KubeRouter struct {
	lab       *lab.Cluster
	processes map[string]*process.Process // by node
}

// Start builds kube-router, if that has not been done, and runs it.
func Start(ctx context.Context, cluster *lab.Cluster) (*KubeRouter, error) {
	binary, err := program.Builder{Root: cluster.Root, Progress: cluster.Progress}.KubeRouter(ctx)
	if err != nil {
		return nil, err
	}
	k := &KubeRouter{lab: cluster, processes: map[string]*process.Process{}}
	for _, node := range cluster.Nodes() {
		k.processes[node], err = cluster.Start(node, "kube-router", binary, "--run-firewall", "--run-router=false", "--run-service-proxy=false",
			"--kubeconfig="+cluster.Kubeconfig(), "--hostname-override="+node,
			"--health-port=0", "--metrics-port=0")
		if err != nil {
			return nil, errors.Join(err, k.Stop(ctx))
		}
	}
	return k, nil
}

// Stop ends it and removes its rules, by the command in its manual.
func (k *KubeRouter) Stop(ctx context.Context) (err error) {
	const clean = `iptables-save --table filter | grep -vE 'KUBE-(ROUTER|POD-FW|NWPLCY)' | iptables-restore --table filter && ipset destroy`
	for node, p := range k.processes {
		err = errors.Join(err, p.Kill(ctx))
		if output, failed := k.lab.Command(ctx, node, "bash", "-c", clean).CombinedOutput(); failed != nil {
			err = errors.Join(err, fmt.Errorf("remove what kube-router left on %s: %w: %s", node, failed, strings.TrimSpace(string(output))))
		}
	}
	return err
}
