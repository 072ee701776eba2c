package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/apiclient"
	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/usage"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// membershipKey is the environment variable that has the key if no file does.
const membershipKey = "LODESTONE_MEMBERSHIP_KEY"

// defaultListen is the port of metrics, status and probes.
const defaultListen = ":9743"

// flags are the command line's; the environment gives some of the defaults.
type flags struct {
	node, nodeIP, namespace, configMap, kubeconfig string
	port                                           uint16
	membershipKeyFile                              string
	listen, certFile, keyFile                      string
	kubeProxyURL                                   string
	handOver, drain                                time.Duration
	vipMetrics                                     int
	scope                                          kube.Scope
	logLevel, logFormat                            string
}

func newFlags() *flags {
	f := &flags{node: os.Getenv("NODE_NAME"), nodeIP: os.Getenv("NODE_IP"), namespace: os.Getenv("POD_NAMESPACE")}
	if f.namespace == "" {
		f.namespace = config.Namespace
	}
	return f
}

func (f *flags) register(set *pflag.FlagSet) {
	set.StringVar(&f.node, "node-name", f.node, "name of this node (environment: NODE_NAME)")
	set.StringVar(&f.nodeIP, "node-ip", f.nodeIP, "address of this node that other speakers reach (environment: NODE_IP)")
	set.StringVar(&f.namespace, "namespace", f.namespace, "namespace of Lodestone's own objects (environment: POD_NAMESPACE)")
	set.StringVar(&f.configMap, "configmap", config.ConfigMapName, "ConfigMap with the configuration")
	set.StringVar(&f.kubeconfig, "kubeconfig", "", "file that has how to reach the API server; empty: as a pod does")
	set.Uint16Var(&f.port, "membership-port", membership.DefaultPort, "port on which speakers reach each other, TCP and UDP")
	set.StringVar(&f.membershipKeyFile, "membership-key-file", "",
		"file with the key that all speakers share, read again when it changes; empty: the environment variable "+membershipKey)
	set.StringVar(&f.listen, "listen", defaultListen, "address of /metrics, /status, /healthz and /readyz, always HTTPS")
	set.StringVar(&f.certFile, "tls-cert-file", "", "certificate of that address, read anew for each connection; empty: self-signed")
	set.StringVar(&f.keyFile, "tls-private-key-file", "", "key of that certificate")
	set.StringVar(&f.kubeProxyURL, "kube-proxy-healthz-url", speaker.KubeProxyURL, "where kube-proxy reports its health; empty: do not ask")
	set.DurationVar(&f.handOver, "hand-over", speaker.DefaultHandOver,
		"how long at most a VIP that moves to another node is answered for here until that node is heard")
	set.DurationVar(&f.drain, "drain", speaker.DefaultDrain,
		"how long routers are asked to prefer other nodes before this one withdraws its routes")
	set.IntVar(&f.vipMetrics, "vip-metrics", speaker.DefaultVIPMetrics,
		"up to how many VIPs that this node owns there is a metric for each; 0: never")
	set.BoolVar(&f.scope.Classless, "handle-classless", true,
		"announce Services that have no spec.loadBalancerClass, as the controller serves them")
	set.StringSliceVar(&f.scope.Classes, "load-balancer-classes", []string{annotation.DefaultClass},
		"values of spec.loadBalancerClass whose Services are announced, those that the controller serves")
	set.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	set.StringVar(&f.logFormat, "log-format", "text", "text or json")
}

// settings are what the flags mean.
type settings struct {
	log              *slog.Logger
	client, reviewer kubernetes.Interface
	api              *apiclient.Transport
	address          netip.AddrPort
	secret           keys.Secret
}

func (f *flags) settings() (*settings, error) {
	if f.node == "" {
		return nil, errors.New("no node name: set --node-name or NODE_NAME")
	}
	ip, err := netip.ParseAddr(f.nodeIP)
	if err != nil {
		return nil, fmt.Errorf("--node-ip or NODE_IP is %q, not an address", f.nodeIP)
	}
	if ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast() {
		return nil, fmt.Errorf("--node-ip or NODE_IP is %q, not an address by which other nodes reach this one", f.nodeIP)
	}
	if err := f.check(); err != nil {
		return nil, err
	}
	s := &settings{address: netip.AddrPortFrom(ip.Unmap(), f.port)}
	if s.log, err = f.logger(); err != nil {
		return nil, err
	}
	if s.secret, err = f.secret(); err != nil {
		return nil, err
	}
	rest, err := apiclient.Load("", f.kubeconfig)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the flag
	}
	rest.UserAgent = "lodestone-speaker/" + buildinfo.Get().Version
	rest.ContentType = "application/vnd.kubernetes.protobuf"
	if s.api, err = apiclient.Use(rest); err != nil {
		return nil, err //nolint:wrapcheck // it has what of the configuration is wrong
	}
	if s.client, err = kubernetes.NewForConfig(rest); err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	rest.QPS = -1 // debughttp bounds what strangers can cause; client-go would have others wait for them
	if s.reviewer, err = kubernetes.NewForConfig(rest); err != nil {
		return nil, fmt.Errorf("make a client for the review of tokens: %w", err)
	}
	return s, nil
}

// check refuses values with which a speaker would work, but otherwise than is meant, or which only a part of it
// would refuse, once the others run.
func (f *flags) check() error {
	_, port, err := net.SplitHostPort(f.listen)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return fmt.Errorf("--listen is %q, not an address and a port, such as :9743, 192.0.2.1:9743 or [2001:db8::1]:9743", f.listen)
	}
	if (f.certFile == "") != (f.keyFile == "") {
		return errors.New("--tls-cert-file and --tls-private-key-file belong together: one of them is not set")
	}
	if proxy, err := url.Parse(f.kubeProxyURL); err != nil || f.kubeProxyURL != "" &&
		(proxy.Host == "" || proxy.Scheme != "http" && proxy.Scheme != "https") {
		return fmt.Errorf("--kube-proxy-healthz-url is %q, not a URL such as %s", f.kubeProxyURL, speaker.KubeProxyURL)
	}
	if f.handOver < 0 || f.drain < 0 || f.vipMetrics < 0 {
		return fmt.Errorf("--hand-over %s, --drain %s, --vip-metrics %d: none of them may be below 0", f.handOver, f.drain, f.vipMetrics)
	}
	return errors.Join(usage.Name("--node-name or NODE_NAME", f.node), usage.Name("--namespace or POD_NAMESPACE", f.namespace),
		usage.Name("--configmap", f.configMap), usage.Classes(f.scope.Classless, f.scope.Classes))
}

func (f *flags) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level is %q, not debug, info, warn or error", f.logLevel)
	}
	options := &slog.HandlerOptions{Level: level}
	var log *slog.Logger
	switch f.logFormat {
	case "text":
		log = slog.New(slog.NewTextHandler(os.Stderr, options))
	case "json":
		log = slog.New(slog.NewJSONHandler(os.Stderr, options))
	default:
		return nil, fmt.Errorf("--log-format is %q, not text or json", f.logFormat)
	}
	klog.SetSlogLogger(log) // client-go logs there
	return log, nil
}

func (f *flags) secret() (keys.Secret, error) {
	from, text := membershipKey, []byte(os.Getenv(membershipKey))
	if f.membershipKeyFile != "" {
		var err error
		if text, err = os.ReadFile(f.membershipKeyFile); err != nil {
			return keys.Secret{}, fmt.Errorf("read the membership key: %w", err)
		}
		from = "--membership-key-file " + f.membershipKeyFile
	}
	secret, err := keys.Parse(text)
	if err != nil {
		return keys.Secret{}, fmt.Errorf("%s: %w", from, err)
	}
	return secret, nil
}
