// Package servicelb gives the Services of type LoadBalancer their addresses.
//
// The way of a Service, file by file:
//
//	controller.go    informers, configuration and facts fill the queue of Services
//	order.go         in which order, so that no namespace delays another
//	reconcile.go     one Service is brought into step: decide, write, settle
//	lockedledger.go  the ledger, with its lock, its clock and what it is handed of the cluster
//	ledger/          Ledger.Ensure decides
//	patch.go         the one PATCH that writes the verdict to the Service's object
//	repairs.go       how often what others do to the object is undone
//
// Beside it:
//
//	dhcp.go          leases of DHCP servers and the ledger are kept in step
//	upstream.go      Kubernetes' own service controller may drive the Services
//	events.go        Events, the log and the metrics
//	metrics.go       the metrics
//
// A PATCH carries the UID and the resourceVersion of the object that the decision was
// made on, so that a late one never lands on another incarnation of the Service.
package servicelb

// Name is the controller's name among the controllers of the framework.
const Name = "lodestone-service"
