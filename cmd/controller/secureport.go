package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/component-base/metrics/prometheus/slis"
	framework "k8s.io/controller-manager/app"

	"github.com/lodestone-lb/lodestone/pkg/debughttp"
)

const (
	headerTimeout = 5 * time.Second
	idleTimeout   = 90 * time.Second
)

// serveHTTPS takes the secure port over from the framework and serves there what the framework
// would, /readyz and the dashboard. The framework has only /healthz for all checks, so that
// the kubelet would restart a process that waits for the API server.
func (p *process) serveHTTPS(c *config.CompletedConfig) error {
	secure := c.SecureServing
	c.SecureServing = nil
	if secure == nil { // --secure-port=0
		return nil
	}
	mux := framework.NewBaseHandler(&c.ComponentConfig.Generic.Debugging, debughttp.Healthz(p.election.alive))
	mux.Handle("/readyz", debughttp.Readyz(p.checks))
	slis.SLIMetricsWithReset{}.Install(mux)
	p.serveDashboard(mux)
	handler, err := p.serveAdmission(secure, guard(mux, &c.Authentication, &c.Authorization, p.log))
	if err != nil {
		return err
	}
	return serve(p.stopped, secure, handler, p.log)
}

// serve serves the secure port until ctx ends, with certificates that change as the framework's
// do. The framework's own server takes headers of 1 MiB from everybody, and by HTTP/2 hundreds
// of requests on a connection, of 256 KiB each before anybody reads them.
func serve(ctx context.Context, secure *server.SecureServingInfo, handler http.Handler, to *slog.Logger) error {
	config := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, CurvePreferences: secure.CurvePreferences}
	if secure.MinTLSVersion > 0 {
		config.MinVersion = secure.MinTLSVersion
	}
	if len(secure.CipherSuites) > 0 {
		config.CipherSuites = secure.CipherSuites
	}
	if secure.ClientCA != nil { // the authenticator verifies the certificates
		config.ClientAuth = tls.RequestClientCert
	}
	if err := followCertificates(ctx, secure, config); err != nil {
		return err
	}
	s := &http.Server{
		Handler:           handler,
		TLSConfig:         config,
		MaxHeaderBytes:    debughttp.MaxHeader,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		ConnContext:       debughttp.WithConn,
		ErrorLog:          debughttp.ErrorLog(to),
	}
	_, _, err := server.RunServer(s, debughttp.Limit(secure.Listener), 0, ctx.Done())
	return err //nolint:wrapcheck // it is about the listener
}

// followCertificates makes every new connection use the present certificates.
func followCertificates(ctx context.Context, secure *server.SecureServingInfo, config *tls.Config) error {
	current := dynamiccertificates.NewDynamicServingCertificateController(config, secure.ClientCA, secure.Cert, secure.SNICerts, nil)
	var sources []dynamiccertificates.Notifier
	if secure.ClientCA != nil {
		sources = append(sources, secure.ClientCA)
	}
	if secure.Cert != nil {
		sources = append(sources, secure.Cert)
	}
	for _, c := range secure.SNICerts {
		sources = append(sources, c)
	}
	for _, source := range sources {
		source.AddListener(current)
		if files, ok := source.(dynamiccertificates.ControllerRunner); ok {
			if err := files.RunOnce(ctx); err != nil {
				return fmt.Errorf("read certificates: %w", err)
			}
			go files.Run(ctx, 1)
		}
	}
	if err := current.RunOnce(); err != nil {
		return fmt.Errorf("read certificates: %w", err)
	}
	go current.Run(1, ctx.Done())
	config.GetConfigForClient = current.GetConfigForClient
	return nil
}
