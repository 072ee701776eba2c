// Package metallb runs MetalLB in the lab, so that Services can be moved away from
// it, and what it does can be compared.
//
// Its programs are built from its module and installed by the manifests in there,
// unchanged, for layer 2 and without FRR. Nothing is set that its manual does not
// set.
package metallb

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/lodestone-lb/lodestone/test/e2e/image"
	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// The names in MetalLB's manifests.
const (
	Namespace = "metallb-system"
	Speaker   = "speaker" // the DaemonSet

	webhook = "validatingwebhookconfiguration/metallb-webhook-configuration"
)

// MetalLB is one that a lab has the images of.
type MetalLB struct {
	// Version is its release, as in v0.16.2.
	Version string

	lab      *lab.Cluster
	manifest string
}

// New builds MetalLB, if that has not been done, and gives every node its images.
func New(ctx context.Context, cluster *lab.Cluster) (*MetalLB, error) {
	release, err := program.Builder{Root: cluster.Root, Progress: cluster.Progress}.MetalLB(ctx)
	if err != nil {
		return nil, err
	}
	var images []image.Image
	for name, binary := range map[string]string{"controller": release.Controller, "speaker": release.Speaker} {
		images = append(images, image.Image{Ref: "quay.io/metallb/" + name + ":" + release.Version, Binary: binary, User: "0:0"})
	}
	m := &MetalLB{Version: release.Version, lab: cluster, manifest: filepath.Join(release.Manifests, "metallb-native.yaml")}
	return m, cluster.Import(ctx, images...)
}

// Install applies the release's manifest and waits until all of MetalLB is ready.
func (m *MetalLB) Install(ctx context.Context) error {
	if _, err := m.lab.Kubectl(ctx, "apply", "-f", m.manifest); err != nil {
		return err
	}
	for _, workload := range []string{"deployment/controller", "daemonset/" + Speaker} {
		if _, err := m.lab.Kubectl(ctx, "-n", Namespace, "rollout", "status", "--timeout=2m", workload); err != nil {
			return fmt.Errorf("%w\n%s", err, m.Symptoms(ctx))
		}
	}
	return nil
}

// Symptoms collects what an installation that does not do its work can be understood by.
func (m *MetalLB) Symptoms(ctx context.Context) string {
	pods, _ := m.lab.Kubectl(ctx, "-n", Namespace, "get", "pods", "-o", "wide")
	events, _ := m.lab.Kubectl(ctx, "-n", Namespace, "get", "events", "--field-selector", "type=Warning")
	logs, _ := m.lab.Kubectl(ctx, "-n", Namespace, "logs", "--tail", "60", "--prefix", "-l", "app=metallb")
	return pods + events + logs
}

// Apply creates or changes objects of MetalLB, once its webhook answers.
func (m *MetalLB) Apply(ctx context.Context, objects string) error {
	return lodestone.Wait(ctx, "MetalLB takes its objects", func() error {
		cmd := m.lab.Command(ctx, lab.ControlPlane, "kubectl", "apply", "-f", "-")
		cmd.Stdin = strings.NewReader(objects)
		output, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, output)
		}
		return err
	})
}

// Remove deletes all that Install and Apply made, and waits until it is gone.
// What is not there is no error.
func (m *MetalLB) Remove(ctx context.Context) error {
	// Without its webhook, whose server goes with the rest, some objects could not
	// be deleted.
	if _, err := m.lab.Kubectl(ctx, "delete", "--ignore-not-found", webhook); err != nil {
		return err
	}
	_, err := m.lab.Kubectl(ctx, "delete", "--ignore-not-found", "--timeout=2m", "-f", m.manifest)
	return err
}

// Left lists what of MetalLB is in the cluster, its namespace as a whole.
func (m *MetalLB) Left(ctx context.Context) ([]string, error) {
	output, err := m.lab.Kubectl(ctx, "get", "-o", "name",
		"namespaces,customresourcedefinitions,clusterroles,clusterrolebindings,validatingwebhookconfigurations,mutatingwebhookconfigurations")
	if err != nil {
		return nil, err
	}
	var left []string
	for name := range strings.FieldsSeq(output) {
		if strings.Contains(name, "metallb-") || strings.HasSuffix(name, ".metallb.io") {
			left = append(left, name)
		}
	}
	return left, nil
}
