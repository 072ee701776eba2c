package main

import (
	"net/http"

	"k8s.io/apiserver/pkg/server"

	"github.com/lodestone-lb/lodestone/controller/admission"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// serveAdmission answers the API server's questions about our ConfigMap, from
// every replica, with a certificate of its own for the name that the API server
// asks for. The API server shows no credentials; who asks is told what is wrong
// with what they sent, and nothing else.
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

// warnings returns what of a configuration makes no sense in this cluster. A
// standby does not know the cluster.
func (p *process) warnings(cfg *config.Config) []string {
	facts, ready := p.facts.Current()
	if !ready {
		return nil
	}
	return clusterfacts.Warnings(cfg, facts)
}
