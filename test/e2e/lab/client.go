package lab

import (
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// Kubeconfig is the administrator's kubeconfig; it works inside ls-cp.
func (c *Cluster) Kubeconfig() string { return c.path("kubeconfig") }

// RESTConfig is the administrator's configuration for client-go. It works in
// every namespace: its connections are made inside ls-cp.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig of the lab: %w", err)
	}
	config.Dial = netns.Dialer(c.namespace(ControlPlane))
	config.QPS = -1 // no limit: what is measured is not the client
	return config, nil
}

// Clientset is the administrator's client.
func (c *Cluster) Clientset() (*kubernetes.Clientset, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}
