package provider

import (
	"context"
	"errors"
	"net/netip"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

var (
	errNotRead  = errors.New("the configuration has not been read yet, which may name the node's zone")
	errNoConfig = errors.New("there is no valid configuration, which may name the node's zone and region: see the Events of the ConfigMap")
)

// instances implements cloudprovider.InstancesV2. What it knows of a machine is
// in its Node, and in the configuration's rule for it.
type instances struct{ *Cloud }

// InstanceExists is false if the configuration marks the machine as gone. The
// framework then deletes the Node.
func (i instances) InstanceExists(_ context.Context, node *corev1.Node) (bool, error) {
	return !i.rule(node).Gone, nil
}

// InstanceShutdown is always false, because Lodestone cannot know it.
func (i instances) InstanceShutdown(context.Context, *corev1.Node) (bool, error) { return false, nil }

// InstanceMetadata returns the Node's provider ID, addresses, zone and region. The framework's
// controller of nodes asks for it, and then takes the taint uninitialized away. It does so once,
// so that all has to be known by then. Nil: the framework leaves the node alone.
func (i instances) InstanceMetadata(ctx context.Context, node *corev1.Node) (*cloudprovider.InstanceMetadata, error) {
	cfg, state := i.Config.Current()
	if !state.Read {
		return nil, errNotRead
	}
	if uninitialized(node) {
		if wait, err := i.waits(ctx, node, cfg); wait || err != nil {
			return nil, err
		}
	}
	rule := i.rule(node)
	id := node.Spec.ProviderID
	if id == "" {
		id = Name + "://" + node.Name
	}
	return &cloudprovider.InstanceMetadata{
		ProviderID:    id,
		NodeAddresses: addressesOf(node),
		Zone:          rule.Zone,
		Region:        rule.Region,
	}, nil
}

// rule returns the first rule of the configuration that is for the node.
func (i instances) rule(node *corev1.Node) config.NodeRule {
	cfg, _ := i.Config.Current()
	if cfg == nil {
		return config.NodeRule{}
	}
	for _, r := range cfg.Nodes {
		if r.SystemUUID != "" && !strings.EqualFold(r.SystemUUID, node.Status.NodeInfo.SystemUUID) {
			continue
		}
		if slices.ContainsFunc(r.Names, func(pattern string) bool {
			ok, _ := path.Match(pattern, node.Name)
			return ok
		}) {
			return r
		}
	}
	return config.NodeRule{}
}

// maxProvided is how many addresses a kubelet can be configured with, one of each family. The framework ignores an
// annotation with more.
const maxProvided = 2

// addressesOf returns the addresses that the Node has, and those that its
// kubelet was configured with: the framework insists on each of them.
func addressesOf(node *corev1.Node) []corev1.NodeAddress {
	addresses := slices.Clone(node.Status.Addresses)
	provided := strings.SplitN(node.Annotations[cloudproviderapi.AnnotationAlphaProvidedIPAddr], ",", maxProvided+1)
	for _, text := range provided[:min(len(provided), maxProvided)] {
		ip, err := netip.ParseAddr(strings.TrimSpace(text))
		if err == nil && !slices.ContainsFunc(addresses, func(a corev1.NodeAddress) bool { return sameIP(a.Address, ip) }) {
			addresses = append(addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
		}
	}
	if !slices.ContainsFunc(addresses, func(a corev1.NodeAddress) bool { return a.Type == corev1.NodeHostName }) {
		addresses = append(addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: node.Name})
	}
	return addresses
}

func sameIP(text string, ip netip.Addr) bool {
	a, err := netip.ParseAddr(text)
	return err == nil && a == ip
}
