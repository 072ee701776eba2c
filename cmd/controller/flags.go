package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// flags are the flags that the framework does not have.
type flags struct {
	handleClassless             bool
	classes                     []string
	configNamespace, configName string
	initialization              provider.Initialization
	dashboard, admission        bool
}

// flagSection is the section of our flags in --help.
const flagSection = "lodestone"

func (f *flags) sets() cliflag.NamedFlagSets {
	var sets cliflag.NamedFlagSets
	fs := sets.FlagSet(flagSection)
	fs.BoolVar(&f.handleClassless, "handle-classless", true, "Serve Services of type LoadBalancer that have no spec.loadBalancerClass.")
	fs.StringSliceVar(&f.classes, "load-balancer-classes", []string{annotation.DefaultClass}, "The values of spec.loadBalancerClass to serve.")
	fs.StringVar(&f.configNamespace, "config-namespace", config.Namespace, "Namespace of the ConfigMap that holds the configuration.")
	fs.StringVar(&f.configName, "config-name", config.ConfigMapName, "Name of the ConfigMap that holds the configuration.")
	f.initialization = provider.InitializeAuto
	fs.Var(&f.initialization, "node-initialization", "Which new nodes to initialize: auto leaves them to another cloud controller manager "+
		"while one is at work, always and never do what they are called.")
	fs.BoolVar(&f.dashboard, "dashboard", true, "Serve the dashboard on the secure port, under /dashboard/.")
	fs.BoolVar(&f.admission, "admission", false, "Answer the API server's questions about the ConfigMap, and keep the certificate for that.")
	return sets
}

// check refuses values by which a controller would work, and otherwise than is meant.
func (f *flags) check() error {
	return errors.Join(usage.Name("--config-namespace", f.configNamespace), usage.Name("--config-name", f.configName),
		usage.Classes(f.handleClassless, f.classes))
}

// checkSyncs refuses to work on no Service at a time.
func checkSyncs(concurrent int32) error {
	if concurrent < 1 {
		return fmt.Errorf("--concurrent-service-syncs is %d: no Service at all would be served, let it be 1 or more", concurrent)
	}
	return nil
}

// checkCredentials refuses clients with accounts of their own, which the framework makes before the fence of the lease is there.
func checkCredentials(ofControllers bool) error {
	if ofControllers {
		return errors.New("--use-service-account-credentials is not for this controller: a replica that does not lead any more could still " +
			"write by these accounts, leave it out")
	}
	return nil
}

// changedDefaults are the framework's flags whose default is another here.
var changedDefaults = []struct{ flag, value, why string }{
	{"cloud-provider", provider.Name, "There is no other provider in this binary."},
	{"configure-cloud-routes", "false", "Routes to pods are an option: true, with --cluster-cidr, where the configuration has them."},
	{"concurrent-service-syncs", "16", "The API server takes about three times as many status writes from 16 writers as from one."},
	{"kube-api-qps", "1000", "The API server's own fairness bounds the load; 20 a second would take minutes for a thousand Services."},
	{"kube-api-burst", "2000", "As kube-api-qps."},
	{"leader-elect-resource-name", "lodestone-controller", "The lease is Lodestone's."},
	{"leader-elect-resource-namespace", config.Namespace, "Lodestone needs no right to write in kube-system."},
	{"leader-elect-lease-duration", "10s", "A leader that dies without a word is followed 10 to 11 s later. VIPs do not depend on it."},
	{"leader-elect-renew-deadline", "7s", "Shorter than the lease, longer than any PATCH that is still on its way (5 s)."},
	{"leader-elect-retry-period", "500ms", "A leader that is asked to stop gives the lease back and is followed within 1.1 s."},
}

// applyDefaults changes the defaults of the framework's flags.
func applyDefaults(fs *pflag.FlagSet) error {
	for _, d := range changedDefaults {
		f := fs.Lookup(d.flag)
		if f == nil {
			return fmt.Errorf("the framework has no flag --%s", d.flag)
		}
		if err := f.Value.Set(d.value); err != nil {
			return fmt.Errorf("set default of --%s: %w", d.flag, err)
		}
		f.DefValue = d.value
	}
	return nil
}
