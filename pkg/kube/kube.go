// Package kube is Kubernetes for our programs: what a Service asks and holds, the configuration in
// its ConfigMap, namespaces, passwords. It also writes Events, from a client of its own, so that
// they never slow anything else.
//
// The files, from the outside in:
//
//	service.go        what a Service asks and holds: VIPs, leases, limits
//	scope.go          which Services are ours, by their class
//	configwatcher.go  the configuration in force, from its ConfigMap
//	configcopy.go     the copy of the last valid configuration, for a start without a valid one
//	namespaces.go     the labels of namespaces
//	passwords.go      BGP passwords, from Secrets
//	informer.go       an informer that knows whether it has its objects, and why not
//	events.go         Events, each written once
//	reasons.go        the reasons of Events on the ConfigMap
//	eventqueue.go     those that wait, with no object ahead of all others
//	fairqueue.go      a queue in which namespaces take turns
//	metrics.go        how the configuration stands
//	missing.go        what the API server answers that there is not
package kube
