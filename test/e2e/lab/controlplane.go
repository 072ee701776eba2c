package lab

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/test/e2e/pki"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
)

// certificates are the files the control plane's flags name; the rest are in
// kubeconfigs.
type certificates struct {
	ca, proxyCA       *pki.Authority
	server            pki.Pair // of the API server
	kubeletClient     pki.Pair // as which the API server calls kubelets
	aggregator        pki.Pair // as which it calls extension API servers
	serviceAccountKey string
	kubelets          map[string]pki.Pair
}

// issueIdentities makes every certificate and kubeconfig of the lab.
func (c *Cluster) issueIdentities() error {
	dir := c.path("pki")
	ca, err := pki.NewAuthority(dir, "lab-ca")
	if err != nil {
		return err
	}
	proxyCA, err := pki.NewAuthority(dir, "lab-front-proxy-ca")
	if err != nil {
		return err
	}
	certs := &certificates{ca: ca, proxyCA: proxyCA, serviceAccountKey: filepath.Join(dir, "service-accounts.key")}
	if err := pki.WriteKey(certs.serviceAccountKey); err != nil {
		return err
	}
	if err := c.issueServer(certs); err != nil {
		return err
	}
	if err := c.issueKubelets(certs); err != nil {
		return err
	}
	c.certs = certs
	return c.writeKubeconfigs(ca)
}

func (c *Cluster) issueServer(certs *certificates) (err error) {
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	addresses := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	for _, server := range c.servers {
		addresses = append(addresses, c.ips(server)...)
	}
	for _, cidr := range c.serviceCIDRs() {
		addresses = append(addresses, cidr.Addr().Next()) // of the Service "kubernetes"
	}
	if certs.server, err = certs.ca.Server("apiserver", names, addresses...); err != nil {
		return err
	}
	// Kubelets ask the API server what its own certificate may do.
	if certs.kubeletClient, err = certs.ca.Client("apiserver-kubelet-client", "lab-apiserver", "system:masters"); err != nil {
		return err
	}
	certs.aggregator, err = certs.proxyCA.Client("front-proxy-client", "front-proxy-client")
	return err
}

func (c *Cluster) issueKubelets(certs *certificates) (err error) {
	certs.kubelets = make(map[string]pki.Pair)
	for _, node := range c.nodes {
		if certs.kubelets[node], err = certs.ca.Server("kubelet-serving-"+node, []string{node}, c.ips(node)...); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) writeKubeconfigs(ca *pki.Authority) error {
	type identity struct{ path, name, user, group string }
	identities := []identity{
		{c.Kubeconfig(), "admin", "lab-admin", "system:masters"},
		{c.kubeconfigOf(controllerManager), controllerManager, "system:kube-controller-manager", ""},
		{c.kubeconfigOf(scheduler), scheduler, "system:kube-scheduler", ""},
		{c.kubeconfigOf("kube-proxy"), "kube-proxy", "system:kube-proxy", ""},
	}
	for _, node := range c.nodes {
		identities = append(identities, identity{c.kubeconfigOf("kubelet-" + node), "kubelet-" + node, "system:node:" + node, "system:nodes"})
	}
	for _, id := range identities {
		var groups []string
		if id.group != "" {
			groups = []string{id.group}
		}
		if err := ca.WriteKubeconfig(id.path, c.server(), id.name, id.user, groups...); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) kubeconfigOf(component string) string {
	return c.path("pki", component+".kubeconfig")
}

// server is the API server's address as everything in the lab uses it.
func (c *Cluster) server() string { return c.serverOf(ControlPlane) }

func (c *Cluster) serverOf(host string) string {
	return "https://" + netip.AddrPortFrom(c.ips(host)[0], 6443).String()
}

// startControlPlane starts its four programs and returns when the API server
// is ready for its clients. The controllers must come after that: they end at
// once if the built-in roles are not there yet.
func (c *Cluster) startControlPlane(ctx context.Context, p programs) error {
	if err := c.startAt(ControlPlane, c.etcd(p), c.apiServer(p, ControlPlane)); err != nil {
		return err
	}
	if err := c.WaitAPIServer(ctx); err != nil {
		return err
	}
	for _, server := range c.servers[1:] {
		if err := c.startAt(server, c.apiServer(p, server)); err != nil {
			return err
		}
		if err := c.WaitAPIServerOf(ctx, server); err != nil {
			return err
		}
	}
	return c.startAt(ControlPlane, c.controllerManager(p), c.scheduler(p))
}

// startAt starts programs of Kubernetes on a host. They collect their garbage seldom: labs share few
// processors, and have memory.
func (c *Cluster) startAt(host string, specs ...process.Spec) error {
	for _, spec := range specs {
		spec.Namespace, spec.Env = c.Namespace(host), []string{"GOGC=400"}
		if _, err := c.processes.Start(spec); err != nil {
			return err
		}
	}
	return nil
}

// APIHosts returns the hosts with an API server. The first one is ControlPlane, which has
// etcd and the controllers, too.
func (c *Cluster) APIHosts() []string { return slices.Clone(c.servers) }

// APIServerOf is the name of the API server's process on a host.
func APIServerOf(host string) string {
	if host == ControlPlane {
		return apiServer
	}
	return apiServer + "-" + host
}

// WaitAPIServer waits until the API server is ready.
func (c *Cluster) WaitAPIServer(ctx context.Context) error {
	return c.WaitAPIServerOf(ctx, ControlPlane)
}

// WaitAPIServerOf waits until the API server on the host is ready.
func (c *Cluster) WaitAPIServerOf(ctx context.Context, host string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	config.Host = c.serverOf(host)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	server, err := c.processes.Get(APIServerOf(host))
	if err != nil {
		return err
	}
	err = poll(ctx, 100*time.Millisecond, func() error {
		if err := server.Check(); err != nil {
			return fatalError{err}
		}
		_, err := client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for the API server: %w", err)
	}
	return nil
}

// StopAPIServer ends the API server as a crash would.
func (c *Cluster) StopAPIServer(ctx context.Context) error {
	server, err := c.processes.Get(apiServer)
	if err != nil {
		return err
	}
	return server.Kill(ctx)
}

// StartAPIServer starts it again and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	server, err := c.processes.Get(apiServer)
	if err != nil {
		return err
	}
	if err := server.Restart(); err != nil {
		return err
	}
	return c.WaitAPIServer(ctx)
}

func (c *Cluster) etcd(p programs) process.Spec {
	return process.Spec{Name: etcd, Args: []string{
		p.kubernetes(etcd),
		"--data-dir=" + c.path("etcd"),
		"--listen-client-urls=http://127.0.0.1:2379," + c.etcdURL(),
		"--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380",
		"--unsafe-no-fsync",
		"--log-level=warn",
	}}
}

// etcdURL is how the API servers reach etcd.
func (c *Cluster) etcdURL() string {
	return "http://" + netip.AddrPortFrom(c.ips(ControlPlane)[0], 2379).String()
}

func (c *Cluster) apiServer(p programs, host string) process.Spec {
	return process.Spec{Name: APIServerOf(host), Args: []string{
		p.kubernetes(apiServer),
		"--etcd-servers=" + c.etcdURL(),
		"--bind-address=::",
		"--advertise-address=" + c.ips(host)[0].String(),
		"--service-cluster-ip-range=" + join(c.serviceCIDRs()),
		"--tls-cert-file=" + c.certs.server.Cert,
		"--tls-private-key-file=" + c.certs.server.Key,
		"--client-ca-file=" + c.certs.ca.Cert,
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.certs.serviceAccountKey,
		"--service-account-signing-key-file=" + c.certs.serviceAccountKey,
		"--kubelet-certificate-authority=" + c.certs.ca.Cert,
		"--kubelet-client-certificate=" + c.certs.kubeletClient.Cert,
		"--kubelet-client-key=" + c.certs.kubeletClient.Key,
		// The host of the API server cannot look up node names.
		"--kubelet-preferred-address-types=InternalIP",
		// Without these the ConfigMap extension-apiserver-authentication has no
		// request header section, and delegated authentication stays closed.
		"--requestheader-client-ca-file=" + c.certs.proxyCA.Cert,
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + c.certs.aggregator.Cert,
		"--proxy-client-key-file=" + c.certs.aggregator.Key,
		// No kube-proxy where the API server runs: Services are reached by endpoint.
		"--enable-aggregator-routing=true",
		"--max-requests-inflight=3000",
		"--max-mutating-requests-inflight=1000",
		"--profiling=false",
	}}
}

func (c *Cluster) controllerManager(p programs) process.Spec {
	kubeconfig := c.kubeconfigOf(controllerManager)
	return process.Spec{Name: controllerManager, Args: []string{
		p.kubernetes(controllerManager),
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		// There is no --cloud-provider any more: since v1.31 the cloud's controllers,
		// such as the service controller, do nothing here. They are switched off
		// explicitly all the same.
		"--controllers=*,-service-lb-controller,-node-route-controller,-cloud-node-lifecycle-controller",
		"--use-service-account-credentials=true",
		"--service-account-private-key-file=" + c.certs.serviceAccountKey,
		"--root-ca-file=" + c.certs.ca.Cert,
		"--cluster-signing-cert-file=" + c.certs.ca.Cert,
		"--cluster-signing-key-file=" + c.certs.ca.Key,
		"--leader-elect=false",
		"--kube-api-qps=500",
		"--kube-api-burst=1000",
	}}
}

func (c *Cluster) scheduler(p programs) process.Spec {
	kubeconfig := c.kubeconfigOf(scheduler)
	return process.Spec{Name: scheduler, Args: []string{
		p.kubernetes(scheduler),
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--leader-elect=false",
	}}
}
