package cli

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/released"
	"github.com/lodestone-lb/lodestone/pkg/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/simulation"
)

// timeout bounds a command's whole conversation with the API server.
const timeout = time.Minute

// target says which cluster a command looks at, and where Lodestone is in it.
type target struct {
	rules      *clientcmd.ClientConfigLoadingRules
	overrides  clientcmd.ConfigOverrides
	lodestone  string
	configName string
	scope      servicelb.Scope
}

// targetFlags adds the flags of a command that looks at a cluster.
func targetFlags(cmd *cobra.Command) *target {
	t := &target{rules: clientcmd.NewDefaultClientConfigLoadingRules()}
	f := cmd.Flags()
	f.StringVar(&t.rules.ExplicitPath, "kubeconfig", "", "Path of the kubeconfig file.")
	f.StringVar(&t.overrides.CurrentContext, "context", "", "Name of the kubeconfig context to use.")
	f.StringVarP(&t.overrides.Context.Namespace, "namespace", "n", "", "Namespace of what the command is about. Default: that of the kubeconfig context.")
	f.StringVar(&t.lodestone, "lodestone-namespace", config.Namespace, "Namespace that Lodestone is installed in.")
	f.StringVar(&t.configName, "config-name", config.ConfigMapName, "Name of the ConfigMap with the configuration.")
	f.BoolVar(&t.scope.Classless, "handle-classless", true, "Whether Lodestone serves Services without a class, as the flag of the controller.")
	f.StringSliceVar(&t.scope.Classes, "load-balancer-classes", []string{annotation.DefaultClass}, "The classes that Lodestone serves, as the flag of the controller.")
	return t
}

// client returns a client of the cluster, and the namespace that its
// kubeconfig goes by.
func (t *target) client() (kubernetes.Interface, string, error) {
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(t.rules, &t.overrides)
	namespace, _, err := loader.Namespace()
	if err != nil {
		return nil, "", err
	}
	rest, err := loader.ClientConfig()
	if err != nil {
		return nil, "", err
	}
	rest.UserAgent = "lodestone-cli"
	rest.QPS, rest.Burst = -1, 0 // a handful of lists
	client, err := kubernetes.NewForConfig(rest)
	return client, namespace, err
}

// read reads everything that the controller decides by.
func (t *target) read(ctx context.Context, client kubernetes.Interface) (*simulation.Cluster, error) {
	c := &simulation.Cluster{Scope: t.scope, NamespaceLabels: map[string]map[string]string{}, Now: time.Now()}
	services, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list Services: %w", err)
	}
	namespaces, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list Namespaces: %w", err)
	}
	for _, ns := range namespaces.Items {
		c.NamespaceLabels[ns.Name] = ns.Labels
	}
	c.Services = pointers(services.Items)
	if c.Config, err = t.config(ctx, client); err != nil {
		return nil, err
	}
	if c.Facts, err = t.facts(ctx, client, c.Services); err != nil {
		return nil, err
	}
	c.Records, err = released.New(client, t.lodestone, slog.New(slog.DiscardHandler)).Load(ctx)
	return c, err
}

// config returns the configuration in the cluster, nil when there is none. An
// invalid one is an error: what the controller goes by then, nobody else knows.
func (t *target) config(ctx context.Context, client kubernetes.Interface) (*config.Config, error) {
	cm, err := client.CoreV1().ConfigMaps(t.lodestone).Get(ctx, t.configName, metav1.GetOptions{})
	name := "ConfigMap " + t.lodestone + "/" + t.configName
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get %s: %w", name, err)
	}
	cfg, err := config.Parse([]byte(cm.Data[config.Key]))
	if err != nil {
		return nil, fmt.Errorf("the configuration in the cluster is invalid; repair it first (%s):\n%w", name, err)
	}
	return cfg, nil
}

// facts returns what the cluster itself uses.
func (t *target) facts(ctx context.Context, client kubernetes.Interface, services []*corev1.Service) (*clusterfacts.Facts, error) {
	var o clusterfacts.Objects
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	leases, err := client.CoordinationV1().Leases(t.lodestone).List(ctx, metav1.ListOptions{LabelSelector: annotation.LabelComponent + "=" + annotation.ComponentSpeaker})
	if err != nil {
		return nil, fmt.Errorf("list the speakers' Leases: %w", err)
	}
	slices, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		return nil, fmt.Errorf("list the API server's EndpointSlices: %w", err)
	}
	cidrs, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) { // before Kubernetes v1.33
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}
	o.Nodes, o.Leases, o.APIServer, o.ServiceCIDRs = pointers(nodes.Items), pointers(leases.Items), pointers(slices.Items), pointers(cidrs.Items)
	for _, svc := range services {
		if svc.Namespace == metav1.NamespaceDefault && svc.Name == "kubernetes" {
			o.Kubernetes = svc
		}
	}
	return clusterfacts.Collect(o), nil
}

func pointers[T any](items []T) []*T {
	all := make([]*T, len(items))
	for i := range items {
		all[i] = &items[i]
	}
	return all
}
