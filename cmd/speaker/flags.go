package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/apiclient"
	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

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
		"file with the key that all speakers share, read again when it changes; empty: the environment variable LODESTONE_MEMBERSHIP_KEY")
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
	log     *slog.Logger
	client  kubernetes.Interface
	api     *apiclient.Transport
	address netip.AddrPort
	secret  keys.Secret
}

func (f *flags) settings() (*settings, error) {
	if f.node == "" {
		return nil, errors.New("no node name: set --node-name or NODE_NAME")
	}
	ip, err := netip.ParseAddr(f.nodeIP)
	if err != nil {
		return nil, fmt.Errorf("--node-ip or NODE_IP is %q, not an address", f.nodeIP)
	}
	s := &settings{address: netip.AddrPortFrom(ip.Unmap(), f.port)}
	if s.log, err = f.logger(); err != nil {
		return nil, err
	}
	if s.secret, err = f.secret(); err != nil {
		return nil, err
	}
	rest, err := clientcmd.BuildConfigFromFlags("", f.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	rest.UserAgent = "lodestone-speaker/" + buildinfo.Get().Version
	rest.ContentType = "application/vnd.kubernetes.protobuf"
	if s.api, err = apiclient.Use(rest); err != nil {
		return nil, err //nolint:wrapcheck // it has what of the configuration is wrong
	}
	if s.client, err = kubernetes.NewForConfig(rest); err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	return s, nil
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
	text := []byte(os.Getenv("LODESTONE_MEMBERSHIP_KEY"))
	if f.membershipKeyFile != "" {
		var err error
		if text, err = os.ReadFile(f.membershipKeyFile); err != nil {
			return keys.Secret{}, fmt.Errorf("read the membership key: %w", err)
		}
	}
	return keys.Parse(text) //nolint:wrapcheck // it names the membership key
}
