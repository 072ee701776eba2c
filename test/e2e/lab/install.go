package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/image"
)

// LodestoneNamespace is where Lodestone is installed.
const LodestoneNamespace = "lodestone-system"

const uninitializedTaint = "node.cloudprovider.kubernetes.io/uninitialized"

// lodestoneImages builds the product and makes its images, as the Dockerfile
// does.
func (c *Cluster) lodestoneImages(ctx context.Context) ([]image.Image, error) {
	c.Progress("building lodestone")
	bin, err := c.builder.Lodestone(ctx)
	return imagesOf(bin, "dev"), err
}

// imagesOf returns the product's images, with the tag, of the binaries in the folder.
func imagesOf(bin, tag string) (all []image.Image) {
	for name, user := range map[string]string{"lodestone-controller": unprivileged, "lodestone-speaker": "0:0", "lodestone": unprivileged} {
		all = append(all, image.Image{Ref: registry + "/" + name + ":" + tag, Binary: filepath.Join(bin, name), User: user})
	}
	return all
}

// Release builds a release of Lodestone from its commit, and gives every node the images, with the version as
// their tag. It returns the folder of the release's sources, which has the binaries in bin.
func (c *Cluster) Release(ctx context.Context, version, commit string) (dir string, err error) {
	if dir, err = c.builder.Release(ctx, version, commit); err != nil {
		return "", err
	}
	return dir, c.Import(ctx, imagesOf(filepath.Join(dir, "bin"), version)...)
}

// values is what the lab sets of the chart's values.
func (c *Cluster) values() map[string]any {
	values := map[string]any{
		"image": map[string]any{"registry": registry, "tag": "dev", "pullPolicy": "Never"},
		// Replicas never share a node.
		"controller": map[string]any{"replicas": min(2, len(c.nodes))},
		// What stories of BGP need.
		"speaker": map[string]any{"bgp": map[string]any{"passwordSecrets": []string{"tor"}, "realTimeBFD": true}},
		"config": map[string]any{
			"pools": []any{map[string]any{"name": "lan", "addresses": c.vips()}},
		},
	}
	if c.Failover != "" {
		values["config"].(map[string]any)["failover"] = c.Failover
	}
	if c.OwnPodRoutes {
		values["controller"].(map[string]any)["clusterCIDR"] = join(c.clusterCIDRs())
		values["speaker"].(map[string]any)["podRoutes"] = true
		values["config"].(map[string]any)["routes"] = map[string]any{"mode": "kernel", "cidrs": c.clusterCIDRs()}
	}
	return values
}

// Chart returns the folder of Lodestone's chart.
func (c *Cluster) Chart() string { return filepath.Join(c.Root, "deploy", "chart") }

// Values returns the file with the chart's values that Install uses.
func (c *Cluster) Values() string { return c.path("values.yaml") }

// Install installs Lodestone with Helm, as a user would, and waits until it
// runs and has initialized every node. Up has imported the images.
func (c *Cluster) Install(ctx context.Context) error {
	raw, err := json.MarshalIndent(c.values(), "", "  ") // JSON is YAML
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.Values(), raw, 0o644); err != nil {
		return err
	}
	started := time.Now()
	c.Progress("installing lodestone with helm")
	_, err = c.Helm(ctx, "install", "lodestone", c.Chart(),
		"--namespace", LodestoneNamespace, "--create-namespace", "--values", c.Values(),
		"--wait", "--timeout", "5m")
	if err != nil {
		return fmt.Errorf("install lodestone: %w\n%s", err, c.symptoms(ctx))
	}
	if err := c.WaitInitialized(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, c.symptoms(ctx))
	}
	c.Progress("lodestone runs and has initialized every node after %s", since(started))
	return nil
}

// symptoms collects what a failed installation can be understood by.
func (c *Cluster) symptoms(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	pods, _ := c.Kubectl(ctx, "-n", LodestoneNamespace, "get", "pods", "-o", "wide")
	events, _ := c.Kubectl(ctx, "-n", LodestoneNamespace, "get", "events", "--field-selector", "type=Warning")
	logs, _ := c.Kubectl(ctx, "-n", LodestoneNamespace, "logs", "--tail", "15", "--prefix", "-l", "app.kubernetes.io/name=lodestone")
	return pods + events + logs
}

// WaitInitialized waits until every node has lost the taint that it registered
// with, which is Lodestone's work.
func (c *Cluster) WaitInitialized(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	client, err := c.Clientset()
	if err != nil {
		return err
	}
	err = poll(ctx, 200*time.Millisecond, func() error {
		nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, node := range nodes.Items {
			for _, taint := range node.Spec.Taints {
				if taint.Key == uninitializedTaint {
					return fmt.Errorf("node %s has the taint %s", node.Name, taint.Key)
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait for nodes to be initialized: %w", err)
	}
	return nil
}

// Load builds Lodestone again, gives every node the new images and restarts
// its pods.
func (c *Cluster) Load(ctx context.Context) error {
	images, err := c.lodestoneImages(ctx)
	if err != nil {
		return err
	}
	if err := c.Import(ctx, images...); err != nil {
		return err
	}
	workloads := []string{"deployment/lodestone-controller", "daemonset/lodestone-speaker"}
	if _, err := c.Kubectl(ctx, append([]string{"-n", LodestoneNamespace, "rollout", "restart"}, workloads...)...); err != nil {
		return err
	}
	for _, workload := range workloads {
		if _, err := c.Kubectl(ctx, "-n", LodestoneNamespace, "rollout", "status", "--timeout=2m", workload); err != nil {
			return fmt.Errorf("%w\n%s", err, c.symptoms(ctx))
		}
	}
	return nil
}
