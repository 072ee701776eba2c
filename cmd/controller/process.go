package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	"k8s.io/component-base/metrics/legacyregistry"
	framework "k8s.io/controller-manager/app"
	"k8s.io/controller-manager/controller"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/controller/dhcp/pools"
	"github.com/lodestone-lb/lodestone/controller/leaseevents"
	"github.com/lodestone-lb/lodestone/controller/poolstatus"
	"github.com/lodestone-lb/lodestone/controller/provider"
	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/apiclient"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/objects"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// process has what lives as long as the process: the tasks that are not the framework's, and
// the leader lease.
type process struct {
	flags flags
	// ran is set once the command line was read and what the command does has begun.
	ran bool
	// stopped ends when the process is to stop. working ends then, too, and when the lease is
	// lost.
	stopped, working context.Context
	stop, cancel     context.CancelFunc
	// mu guards what is running; end keeps it.
	mu    sync.Mutex
	tasks errgroup.Group
	// running is the election that was started.
	running *election

	election    *election
	log         *slog.Logger
	api         *apiclient.Transport
	client      kubernetes.Interface
	config      *kube.ConfigWatcher
	facts       *clusterfacts.Watcher
	namespaces  *kube.Namespaces
	quarantine  *quarantinestore.Store
	leases      *pools.Keeper
	leaseEvents *leaseevents.Emitter
	events      *kube.Recorder
	services    *servicelb.Controller
	poolStatus  *poolstatus.Writer
	serve       sync.Once // starts services
	scope       kube.Scope
}

func newProcess(stopped context.Context) *process {
	p := &process{}
	p.stopped, p.stop = context.WithCancel(stopped)
	p.working, p.cancel = context.WithCancel(p.stopped)
	return p
}

// command returns the framework's command with our provider, our controller
// and our defaults in it.
func (p *process) command() (*cobra.Command, error) {
	opts, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		return nil, err
	}
	opts.Webhook, opts.WebhookServing = nil, nil
	controllers := map[string]app.ControllerInitFuncConstructor{
		servicelb.Name: {InitContext: app.ControllerInitContext{ClientName: servicelb.Name}, Constructor: p.serviceController},
	}
	maps.Copy(controllers, app.DefaultInitFuncConstructors)
	upstream := controllers[names.ServiceLBController]
	upstream.Constructor = p.upstreamController(upstream.Constructor)
	controllers[names.ServiceLBController] = upstream
	app.ControllersDisabledByDefault.Insert(names.ServiceLBController)
	cmd := app.NewCloudControllerManagerCommand(opts, p.cloud, controllers, names.CCMControllerAliases(), p.flags.sets(), p.stopped.Done())
	cmd.Use = "lodestone-controller"
	cmd.Long = "The Lodestone controller gives Services of type LoadBalancer addresses from the pools of the\n" +
		"configuration and initializes nodes, as a Kubernetes cloud controller manager."
	cmd.SilenceUsage = true // it has hundreds of lines, and hides what is wrong
	cmd.SetFlagErrorFunc(usage.FlagError)
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) (err error) {
		if !cmd.Flags().Changed("version") {
			var api *rest.Config
			api, err = apiclient.Load(opts.Master, opts.Generic.ClientConnection.Kubeconfig)
			err = cmp.Or(p.flags.check(), checkSyncs(opts.ServiceController.ConcurrentServiceSyncs),
				checkCredentials(opts.KubeCloudShared.UseServiceAccountCredentials), err)
			if err == nil {
				err = p.await(api)
			}
		}
		p.ran = err == nil
		return err
	}
	return cmd, applyDefaults(cmd.Flags())
}

// await waits until the API server answers, or the process is to stop. The framework would end the process instead, and the kubelet
// start it anew later and later, at last five minutes after the API server is back.
func (p *process) await(config *rest.Config) error {
	api, err := apiclient.Use(config)
	if err != nil {
		return err
	}
	for logged := ""; ; {
		ctx, cancel := context.WithTimeout(p.stopped, 2*time.Second)
		err := api.Ask(ctx)
		cancel()
		if err == nil || p.stopped.Err() != nil {
			return p.stopped.Err()
		}
		if text := err.Error(); text != logged {
			logged = text
			klog.Background().Error(err, "the API server does not answer, and is waited for")
		}
		select {
		case <-p.stopped.Done():
		case <-time.After(time.Second):
		}
	}
}

// cloud implements app.InitCloudFunc: it builds everything and starts nothing.
func (p *process) cloud(c *config.CompletedConfig) cloudprovider.Interface {
	p.log = slog.New(logr.ToSlogHandler(klog.Background()))
	p.scope = kube.Scope{Classless: p.flags.handleClassless, Classes: p.flags.classes}
	upstream := framework.IsControllerEnabled(names.ServiceLBController, app.ControllersDisabledByDefault,
		c.ComponentConfig.Generic.Controllers)
	if upstream && !p.scope.Classless {
		p.fatal(errors.New("--controllers enables service-lb-controller, which serves only Services without a class, and " +
			"--handle-classless=false excludes these: remove one of the two"))
	}
	err := p.connect(c)
	p.fatal(err)
	objects.Share(c.SharedInformers, p.scope.Covers)
	// Not fenced: Events, which are about the past and change nothing, and the election itself.
	p.events, err = kube.NewRecorder(c.Kubeconfig, "lodestone-controller")
	p.fatal(err)
	p.election, err = newElection(c)
	p.fatal(err)
	c.Kubeconfig.Wrap(p.election.fence.Wrap) // the framework makes the clients of its controllers from it, too
	p.client, err = kubernetes.NewForConfig(rest.AddUserAgent(rest.CopyConfig(c.Kubeconfig), servicelb.Name))
	p.fatal(err)
	p.config = kube.NewConfigWatcher(p.client, kube.ConfigOptions{
		Namespace: p.flags.configNamespace, Name: p.flags.configName, Events: p.events, Log: p.log})
	p.facts = clusterfacts.NewWatcher(clusterfacts.Options{Client: p.client, Namespace: p.flags.configNamespace, Log: p.log})
	p.namespaces, err = kube.NewNamespaces(c.SharedInformers.Core().V1().Namespaces())
	p.fatal(err)
	p.quarantine = quarantinestore.New(p.client, p.flags.configNamespace, p.log)
	p.leases = pools.New(p.log)
	p.leaseEvents, err = leaseevents.New(leaseevents.Options{
		Client: p.client, Namespace: p.flags.configNamespace, Services: c.SharedInformers.Core().V1().Services().Informer(), Events: p.events})
	p.fatal(err)
	p.fatal(p.serveHTTPS(c))
	services := c.SharedInformers.Core().V1().Services()
	p.services, err = servicelb.New(servicelb.Options{
		Scope: p.scope, Services: services, Namespaces: p.namespaces,
		Config: p.config, Facts: p.facts, Quarantine: p.quarantine, Leases: p.leases,
		API: servicelb.RESTAPI{Client: p.client.CoreV1().RESTClient()}, Events: p.events, Upstream: upstream,
		Workers: int(c.ComponentConfig.ServiceController.ConcurrentServiceSyncs), Log: p.log,
	})
	p.fatal(err)
	p.poolStatus = poolstatus.New(poolstatus.Options{
		Client: p.client, Namespace: p.flags.configNamespace, Pools: p.services, Log: p.log})

	by := c.ComponentConfig.Generic.LeaderElection
	cloudprovider.RegisterCloudProvider(provider.Name, func(io.Reader) (cloudprovider.Interface, error) {
		return ledCloud{provider.New(provider.Options{
			Config: p.config, Services: p.services, Client: p.client, Namespace: p.flags.configNamespace,
			Lease: types.NamespacedName{Namespace: by.ResourceNamespace, Name: by.ResourceName}, Initialization: p.flags.initialization,
			ClusterCIDR: c.ComponentConfig.KubeCloudShared.ClusterCIDR, Events: p.events, Log: p.log}), p}, nil
	})
	given := c.ComponentConfig.KubeCloudShared.CloudProvider
	cloud, err := cloudprovider.InitCloudProvider(given.Name, given.CloudConfigFile)
	p.fatal(err)
	return cloud
}

// connect makes clients notice soon that an API server is gone. These are all clients that are
// made later, and that of the informers, which the framework has made already.
func (p *process) connect(c *config.CompletedConfig) (err error) {
	if p.api, err = apiclient.Use(c.Kubeconfig); err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest.AddUserAgent(c.Kubeconfig, "shared-informers"))
	if err != nil {
		return err
	}
	c.VersionedClient = client
	c.SharedInformers = informers.NewSharedInformerFactory(client, c.ComponentConfig.Generic.MinResyncPeriod.Duration)
	return nil
}

// fatal ends the process at once: the framework's init functions return no
// errors.
func (p *process) fatal(err error) {
	if err != nil {
		p.log.Error("ended", "err", err)
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

// serviceController implements app.InitFuncConstructor.
func (p *process) serviceController(app.ControllerInitContext, *config.CompletedConfig, cloudprovider.Interface) app.InitFunc {
	return func(context.Context, framework.ControllerContext) (controller.Interface, bool, error) {
		p.startServices()
		return p.services, true, nil
	}
}

// upstreamController makes the constructor of Kubernetes' own service controller start ours,
// too. Ours does the work for which the cloud provider interface has no call.
func (p *process) upstreamController(construct app.InitFuncConstructor) app.InitFuncConstructor {
	return func(i app.ControllerInitContext, c *config.CompletedConfig, cloud cloudprovider.Interface) app.InitFunc {
		start := construct(i, c, cloud)
		return func(ctx context.Context, f framework.ControllerContext) (controller.Interface, bool, error) {
			p.startServices()
			return start(ctx, f)
		}
	}
}

func (p *process) startServices() {
	p.serve.Do(func() {
		legacyregistry.RawMustRegister(p.services)
		p.startLeading()
	})
}

// startLeading starts what the leader alone does.
func (p *process) startLeading() {
	p.endAfterARestore()
	p.start(p.services.Run)
	p.start(p.config.Keep)
	p.start(p.poolStatus.Run)
}

// endAfterARestore stops the process when etcd is restored from a backup. The next leader reads which addresses each Service
// has, as after any start. This process would take Services that the backup has brought back for new ones.
func (p *process) endAfterARestore() {
	restored := p.api.Rewound()
	p.start(func(ctx context.Context) error {
		select {
		case <-ctx.Done():
		case <-restored:
			p.log.Error("etcd has an older version than before: it was restored from a backup. " +
				"This replica ends, and the next leader reads all anew")
			p.stop()
		}
		return nil
	})
}
