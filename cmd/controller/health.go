package main

import (
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// checks are the conditions under which this process does its part. The part of a standby is
// to wait.
func (p *process) checks() []diagnose.Condition {
	switch {
	case p.election.over():
		return []diagnose.Condition{{Name: "lease", Message: "lost; this process ends as soon as the API server answers"}}
	case !p.election.leads():
		return []diagnose.Condition{{Name: "lease", OK: true, Message: "standby, another process leads or is about to"}}
	}
	return []diagnose.Condition{{Name: "lease", OK: true, Message: "this process leads"}, p.configured(), p.primed()}
}

// whatIsWrong names where people find the error. The error itself is not shown, because it
// quotes the configuration.
const whatIsWrong = ": the log and the ConfigMap's Events have the reason"

func (p *process) configured() diagnose.Condition {
	check := diagnose.Condition{Name: "configuration"}
	cfg, state := p.config.Current()
	switch {
	case !state.Read:
		check.Message = "not read yet"
	case cfg == nil:
		check.Message = "nothing is allocated until there is a valid one" + whatIsWrong
	case state.Err != nil:
		check.OK, check.Message = true, "the last good one is in force, the latest is not"+whatIsWrong
	default:
		check.OK, check.Message = true, "in force"
	}
	return check
}

func (p *process) primed() diagnose.Condition {
	if notify.Closed(p.services.Primed()) {
		return diagnose.Condition{Name: "services", OK: true, Message: "what Services hold is known"}
	}
	message := "what Services hold is being read; nothing is allocated before"
	if waiting := p.facts.Waiting(); len(waiting) > 0 {
		message += "; still missing: " + strings.Join(waiting, ", ")
	}
	return diagnose.Condition{Name: "services", Message: message}
}
