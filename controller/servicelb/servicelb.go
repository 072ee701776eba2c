// Package servicelb gives the Services of type LoadBalancer their addresses.
//
// The way of a Service, file by file:
//
//	controller.go  informers, configuration and facts fill the queue of Services
//	reconcile.go   one Service is brought into step: decide, write, settle
//	request.go     what the Service asks for, by its annotations
//	ledger.go      Ledger.Ensure decides
//	verdict.go     what the Ledger answers
//	object.go      the one PATCH that says so on the Service's object
//
// The Ledger is the truth about who holds what. It lives in memory and is rebuilt at
// start from what the Services say (prime.go, adoption.go). Its parts, which its mutex
// guards:
//
//	holdings.go    what is allocated, and what is being given back
//	waiters.go     who waits for a better answer
//	leasing.go     what is leased from DHCP servers
//	conflicts.go   which addresses other hosts have
//	scope.go       which Services are ours, and what the others show
//
// A PATCH carries the UID and the resourceVersion of the object that the decision was
// made on, so that a late one never lands on another incarnation of the Service. With
// upstream.go, Kubernetes' own service controller may drive the Services.
package servicelb

import corev1 "k8s.io/api/core/v1"

// Name is the controller's name among the controllers of the framework.
const Name = "lodestone-service"

// NameOf is "namespace/name", by which people and the ledger know a Service.
func NameOf(svc *corev1.Service) string { return svc.Namespace + "/" + svc.Name }
