package main

import (
	"github.com/lodestone-lb/lodestone/pkg/debughttp"
	"github.com/lodestone-lb/lodestone/speaker"
	"github.com/lodestone-lb/lodestone/speaker/bfd"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/layer2"
	"github.com/lodestone-lb/lodestone/speaker/limit"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// status is what /status shows.
type status struct {
	speaker.Status
	Layer2 layer2.Status         `json:"layer2"`
	Limit  limit.Status          `json:"limit"`
	BGP    []bgp.Peer            `json:"bgp"`
	BFD    map[string]bfd.Status `json:"bfd"`
	Pods   podroutes.Status      `json:"podRoutes"`
}

// checks are what /readyz shows. Who asks the cluster who may own VIPs has nothing else
// to go by than this: a blind speaker cannot tell.
func checks(from []speaker.Check, blind bool) []debughttp.Check {
	var to []debughttp.Check
	for _, c := range from {
		to = append(to, debughttp.Check{Name: c.Name, OK: c.OK, Message: c.Public()})
	}
	if blind {
		to = append(to, debughttp.Check{Name: "api-server", Message: "it answers other nodes, and not this one: others own its VIPs at layer 2"})
	}
	return to
}
