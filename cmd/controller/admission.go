package main

import (
	"net/http"

	"k8s.io/apiserver/pkg/server"

	"github.com/lodestone-lb/lodestone/controller/admission"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// serveAdmission serves the admission webhook for our ConfigMap, in every replica. The webhook
// has a certificate of its own, for the host name by which the API server connects. The API
// server shows no credentials, so anybody may ask. So the answer depends on the document in the
// question alone, and not on what is known of the cluster.
func (p *process) serveAdmission(secure *server.SecureServingInfo, next http.Handler) (http.Handler, error) {
	if !p.flags.admission {
		return next, nil
	}
	keeper, err := admission.NewKeeper(admission.KeeperOptions{
		Client: p.client, Namespace: p.flags.configNamespace, Leads: p.election.leads, Log: p.log})
	if err != nil {
		return nil, err
	}
	secure.SNICerts = append(secure.SNICerts, keeper)
	reviewer := admission.NewReviewer(admission.ReviewerOptions{
		Namespace: p.flags.configNamespace, Name: p.flags.configName, Log: p.log,
		Warnings: func(cfg *config.Config) []string { return clusterfacts.Warnings(cfg, &clusterfacts.Facts{}) }})
	p.start(keeper.Run)
	mux := http.NewServeMux()
	mux.Handle("POST "+admission.Path, reviewer)
	mux.Handle("/", next)
	return mux, nil
}
