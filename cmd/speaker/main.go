// Command lodestone-speaker makes VIPs reachable: it runs on every node,
// decides with the others which VIPs are its own, and announces them.
//
// The files, from the outside in:
//
//	main.go       the program: its parts, and how they are wired
//	flags.go      flags, environment and the key
//	lifecycle.go  how the parts begin and end
//	status.go     /status and /readyz
//	cleanup.go    removes the routes to pods, which outlive the speaker
package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/usage"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/apihealth"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/direct"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/limit"
	"github.com/lodestone-lb/lodestone/speaker/membership"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
	"github.com/lodestone-lb/lodestone/speaker/nodefacts"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	f := newFlags()
	cmd := &cobra.Command{
		Use:           "lodestone-speaker",
		Short:         "Announce the VIPs that this node owns",
		Version:       buildinfo.Get().String(),
		Args:          usage.Args(0, 0),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), f) },
	}
	f.register(cmd.Flags())
	cmd.SetFlagErrorFunc(usage.FlagError)
	cmd.AddCommand(cleanup())
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "lodestone-speaker:", err)
		os.Exit(1)
	}
}

// run puts the parts together and lets them work until ctx ends.
func run(ctx context.Context, f *flags) error {
	s, err := f.settings()
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	interfaces := netstate.New(netstate.Options{Log: s.log})
	gateways := netstate.NewGatewayWatcher(interfaces)
	config := kube.NewConfigWatcher(s.client, kube.ConfigOptions{Namespace: f.namespace, Name: f.configMap, Log: s.log})
	registry.MustRegister(config)
	members := membership.New(membership.Options{
		Node: f.node, Address: s.address, Secret: s.secret, ReadSecret: f.secret, Config: config, Namespace: f.namespace, Client: s.client,
		Interfaces: interfaces, Log: s.log, Registry: registry,
	})
	proxy := speaker.NewKubeProxy(f.kubeProxyURL, f.node, members, s.log)
	announcer := layer2.New(layer2.Options{Interfaces: interfaces, Members: members, Keys: members.SealKeys,
		Received: netstate.Received, Joined: netstate.Groups, Log: s.log, Registry: registry})
	limiter := limit.New(limit.Options{Log: s.log, Registry: registry})
	director := direct.New(direct.Options{Node: f.node, Log: s.log, Registry: registry, Gateways: func() []netip.Addr {
		addrs, _ := gateways.Gateways()
		return addrs
	}})
	podRoutes := podroutes.New(podroutes.Options{Interfaces: interfaces, Log: s.log, Registry: registry})
	watchdog := bfd.New(bfd.Options{Log: s.log, Registry: registry})
	passwords := kube.NewPasswords(s.client, f.namespace, config, s.log)
	// Routers that keep the routes of a speaker that restarts may have some of
	// the one before.
	router := bgp.New(bgp.Options{Log: s.log, Registry: registry, Passwords: passwords.Password, NextHops: netstate.NextHops,
		Restarting: true})
	detector := speaker.NewDetector(watchdog, router, passwords.Outdated, s.log)
	loop, err := speaker.New(speaker.Options{
		Node: f.node, Client: s.client, Scope: f.scope, Config: config, Members: members, DataPlane: proxy,
		Announcer: announcer, Limiter: limiter, Forwarder: director,
		Router: router, PodRoutes: podRoutes, Passwords: passwords, Detector: detector, Log: s.log, Registry: registry, HandOver: f.handOver,
		Drain: f.drain, VIPMetrics: f.vipMetrics,
	})
	if err != nil {
		return err
	}
	apiHealth := apihealth.New(s.api, members, s.log)
	facts := nodefacts.New(nodefacts.Options{
		Node: f.node, Interfaces: interfaces, Members: members, Status: loop.Status, Log: s.log, ProxyModeURL: nodefacts.ProxyModeURL,
		Forwarding: func() diagnose.Forwarding { return forwarding(director.Status()) },
	})
	reporter := speaker.NewReporter(speaker.ReportOptions{
		Loop: loop, Interfaces: interfaces, Gateways: gateways, Config: config, Conflicts: announcer, Sessions: detector, PodRoutes: podRoutes,
		KubeProxy: proxy, Forwarding: director, Crowd: members.Crowd, Report: members.Report, Log: s.log, Registry: registry,
	})
	server := debughttp.New(debughttp.Options{
		Address: f.listen, CertFile: f.certFile, KeyFile: f.keyFile, Authorizer: debughttp.NewDelegate(s.reviewer), Gatherer: registry,
		Status: func() any {
			return status{loop.Status(), announcer.Status(), limiter.Status(), director.View(), router.Peers(), watchdog.States(),
				podRoutes.Status(), members.Detection()}
		},
		Diagnose: facts, Alive: loop.Alive, Log: s.log,
		Checks: func() []diagnose.Condition { return checks(loop.Checks(), detector.Reached(), apiHealth.Blind()) },
	})
	s.log.Info("starting", "node", f.node, "address", s.address, "version", buildinfo.Get().String())
	address := speaker.AddressWatch{Address: s.address.Addr(), Node: loop}
	return runParts(ctx, loop, address, interfaces, gateways, config, proxy, apiHealth, members, reporter, announcer, limiter, director,
		passwords, podRoutes, router, watchdog, detector, server)
}
