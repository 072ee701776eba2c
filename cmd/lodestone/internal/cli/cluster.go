package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// target is which cluster a command looks at, and where Lodestone is in it.
type target struct {
	rules     *clientcmd.ClientConfigLoadingRules
	overrides clientcmd.ConfigOverrides
	place     cluster.Place
	flags     *pflag.FlagSet
	// timeout bounds the reading of the cluster.
	timeout time.Duration
	// connect returns a client of the cluster, and the namespace that its
	// kubeconfig goes by.
	connect func() (kubernetes.Interface, string, error)
	// dynamic returns a client for resources of others.
	dynamic func() (dynamic.Interface, error)
}

// targetFlags adds the flags of a command that looks at a cluster.
func targetFlags(cmd *cobra.Command, s Streams) *target {
	t := &target{rules: clientcmd.NewDefaultClientConfigLoadingRules()}
	if t.connect = s.Connect; t.connect == nil {
		t.connect = t.client
	}
	if t.dynamic = s.Dynamic; t.dynamic == nil {
		t.dynamic = t.dynamicClient
	}
	f := cmd.Flags()
	t.flags = f
	f.StringVar(&t.rules.ExplicitPath, "kubeconfig", "", "Path of the kubeconfig file.")
	f.StringVar(&t.overrides.CurrentContext, "context", "", "Name of the kubeconfig context to use.")
	f.StringVarP(&t.overrides.Context.Namespace, "namespace", "n", "",
		"Namespace of what the command is about. Default: that of the kubeconfig context.")
	f.DurationVar(&t.timeout, "request-timeout", time.Minute,
		"How long the API server may take for all that the command reads of the cluster. 0: without a limit.")
	f.StringVar(&t.place.Namespace, "lodestone-namespace", config.Namespace, "Namespace that Lodestone is installed in.")
	f.StringVar(&t.place.ConfigName, "config-name", config.ConfigMapName, "Name of the ConfigMap with the configuration.")
	f.BoolVar(&t.place.Scope.Classless, "handle-classless", true,
		"Whether Lodestone serves Services without a class. Default: as the controller that runs.")
	f.StringSliceVar(&t.place.Scope.Classes, "load-balancer-classes", []string{annotation.DefaultClass},
		"The classes that Lodestone serves. Default: those of the controller that runs.")
	cmd.PreRunE = func(*cobra.Command, []string) error { return t.check() }
	return t
}

// check refuses values of flags that nothing can be read by.
func (t *target) check() error {
	if t.timeout < 0 {
		return fmt.Errorf("--request-timeout is %s: write a time above 0, or 0 to wait without a limit", t.timeout)
	}
	if t.overrides.Context.Namespace != "" {
		if err := usage.Name("--namespace", t.overrides.Context.Namespace); err != nil {
			return err
		}
	}
	return errors.Join(usage.Name("--lodestone-namespace", t.place.Namespace), usage.Name("--config-name", t.place.ConfigName),
		usage.Classes(t.place.Scope.Classless, t.place.Scope.Classes))
}

// refuse refuses these flags, because nothing follows from them beside what else is on the command line.
func refuse(flags *pflag.FlagSet, why string, names ...string) error {
	for _, name := range names {
		if flags.Changed(name) {
			return fmt.Errorf("--%s has no effect here, %s: leave it out", name, why)
		}
	}
	return nil
}

// within asks the API server, which has the time of --request-timeout.
func (t *target) within(ctx context.Context, ask func(context.Context) error) error {
	if t.timeout == 0 {
		return ask(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	err := ask(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("the API server did not answer within %s (--request-timeout): %w", t.timeout, err)
	}
	return err
}

// where returns the place, whose scope is that of the controller unless a flag names
// another one.
func (t *target) where() cluster.Place {
	p := t.place
	p.ScopeAsRunning = t.flags == nil || !t.flags.Changed("handle-classless") && !t.flags.Changed("load-balancer-classes")
	return p
}

// client returns a client of the cluster, and the namespace that its
// kubeconfig goes by.
func (t *target) client() (kubernetes.Interface, string, error) {
	c, err := t.restConfig()
	if err != nil {
		return nil, "", err
	}
	namespace, _, err := t.loader().Namespace()
	if err != nil {
		return nil, "", err
	}
	c.AcceptContentTypes, c.ContentType = runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON, runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(c)
	return client, namespace, err
}

// dynamicClient returns a client for resources of others.
func (t *target) dynamicClient() (dynamic.Interface, error) {
	c, err := t.restConfig()
	if err != nil {
		return nil, err
	}
	return dynamic.NewForConfig(c)
}

func (t *target) loader() clientcmd.ClientConfig {
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(t.rules, &t.overrides)
}

// restConfig is how to reach the API server, from the kubeconfig.
func (t *target) restConfig() (*rest.Config, error) {
	c, err := t.loader().ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("which cluster? There is no kubeconfig, or nothing in it: see --kubeconfig, or the variable KUBECONFIG")
	}
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	c.UserAgent = "lodestone-cli"
	c.QPS, c.Burst = -1, 0 // a handful of lists
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return noPages{next} })
	return c, nil
}

// noPages has a web page count as no answer: it comes from a login page, a proxy or another server, and client-go's
// error would be about a serializer. A page with a redirection or the
// time of the next attempt is not the last answer.
type noPages struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (n noPages) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := n.next.RoundTrip(r)
	if err != nil || !strings.HasPrefix(response.Header.Get("Content-Type"), "text/html") ||
		response.Header.Get("Location") != "" || response.Header.Get("Retry-After") != "" ||
		response.StatusCode == http.StatusUnauthorized || response.StatusCode == http.StatusForbidden {
		return response, err
	}
	_ = response.Body.Close()
	return nil, fmt.Errorf("the answer is a web page (%s), as of a proxy or a login page, and not that of a Kubernetes API server",
		response.Status)
}

// read reads everything that the controller decides by.
func (t *target) read(ctx context.Context, client kubernetes.Interface) (*simulation.Cluster, error) {
	o := cluster.Allocation(ctx, client, t.where())
	if err := o.Err(cluster.ForAddresses...); err != nil {
		return nil, err
	}
	return o.Cluster(), nil
}

// readAll reads everything that controller and speakers decide by. It fails
// if nothing could be read.
func (t *target) readAll(ctx context.Context) (*cluster.Objects, error) {
	client, _, err := t.connect()
	if err != nil {
		return nil, err
	}
	var o *cluster.Objects
	err = t.within(ctx, func(ctx context.Context) (err error) {
		o, err = cluster.All(ctx, client, t.where())
		return err
	})
	return o, err
}

// readWhole is readAll, but fails if one of these kinds (any, if none is named) could not be read, or if it is
// not known which configuration is in force. An answer from half of the facts would mislead.
func (t *target) readWhole(ctx context.Context, kinds ...string) (*cluster.Objects, error) {
	o, err := t.readAll(ctx)
	if err != nil {
		return nil, err
	}
	if err := o.Err(kinds...); err != nil {
		return nil, err
	}
	if o.ConfigErr != nil {
		return nil, fmt.Errorf("%w\n%w", o.Unclear(), o.ConfigErr)
	}
	return o, cmp.Or(o.Absent(), o.Unclear())
}
