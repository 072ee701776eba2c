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
// server shows no credentials, so anybody may ask. The answer is about the document in the
// question alone, and reveals nothing else.
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
		Namespace: p.flags.configNamespace, Name: p.flags.configName, Warnings: p.warnings, Log: p.log})
	p.start(keeper.Run)
	mux := http.NewServeMux()
	mux.Handle("POST "+admission.Path, reviewer)
	mux.Handle("/", next)
	return mux, nil
}

// warnings returns warnings about settings that make no sense in this cluster. A standby does
// not know the cluster and has none.
func (p *process) warnings(cfg *config.Config) []string {
	facts, ready := p.facts.Current()
	if !ready {
		return nil
	}
	return clusterfacts.Warnings(cfg, facts)
}
