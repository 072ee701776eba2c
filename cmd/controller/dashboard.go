package main

import (
	"log/slog"
	"net/http"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	framework "k8s.io/controller-manager/app"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/dashboard"
	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
)

// serveDashboard adds the dashboard to what the secure port serves. Every
// process has one, whether it leads or not: all of it is read from the API.
func (p *process) serveDashboard(mux *mux.PathRecorderMux) {
	if !p.flags.dashboard {
		return
	}
	d := dashboard.New(dashboard.Options{
		Source: func() dashboard.Source {
			return cluster.NewWatcher(p.client, cluster.Place{Namespace: p.flags.configNamespace, ConfigName: p.flags.configName, Scope: p.scope})
		},
		Version: buildinfo.Get().Version, Log: p.log,
	})
	mux.Handle(dashboard.Path, d.Handler())
	mux.HandlePrefix(dashboard.Path+"/", d.Handler())
	p.start(d.Run)
}

// guard has the API server identify and authorize every client, as the framework does.
//
// The framework remembers an answer for ten seconds, and asks again for each other token and
// path. Requests of strangers are limited, so that these questions are, too.
//
// It would also log an error for each request with a token or a certificate that is not valid, and as much of a
// certificate as a stranger likes. Here these are for debugging, and only a refusal by the API server to review tokens,
// which keeps everybody out, is a warning.
func guard(next http.Handler, who *server.AuthenticationInfo, may *server.AuthorizationInfo, log *slog.Logger) http.Handler {
	throttle, authenticate, warning := &debughttp.Throttle{}, who.Authenticator, rate.Sometimes{Interval: time.Minute}
	ofClient := func(err error) bool { return apierrors.ReasonForError(err) == metav1.StatusReasonUnknown }
	quiet := *who
	quiet.Authenticator = authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
		response, ok, err := authenticate.AuthenticateRequest(r)
		if err != nil {
			if err := utilerrors.FilterOut(err, ofClient); err != nil {
				warning.Do(func() { log.Warn("the API server does not review clients' tokens", "err", err) })
			}
			log.Debug("client not authenticated", "err", err)
			return nil, false, nil
		}
		return response, ok, nil
	})
	chain := framework.BuildHandlerChain(throttle.After(next), may, &quiet)
	return dashboard.Challenge(throttle.Before(chain, "/healthz", "/readyz"))
}
