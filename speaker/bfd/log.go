package bfd

import "time"

// logChanges logs changes of sessions until over is closed. Writing a log can take long, so
// the loop does not do it.
func (t *Task) logChanges(over <-chan struct{}) {
	last := map[string]Status{}
	for {
		changed := t.Changed()
		states := t.States()
		for name, now := range states {
			t.logChange(name, last[name], now)
		}
		last = states
		select {
		case <-over:
			return
		case <-changed:
		}
	}
}

// logChange logs the changes of a session that matter to the operator of a network.
func (t *Task) logChange(name string, before, now Status) {
	log := t.log.With("peer", name, "remote", now.Session.Remote)
	again := before.Discriminator == now.Discriminator
	switch {
	case now.Up() && (!again || before.Transitions != now.Transitions):
		log.Info("BFD session up")
	case again && before.Transitions != now.Transitions:
		detectionTime := before.DetectionTime // a peer that is not Up sends slowly
		if now.Cause == Expired {
			detectionTime = now.DetectionTime
		}
		log.Info("BFD session down", "cause", now.Cause, "detectionTime", detectionTime,
			"silent", time.Since(now.LastReceived).Round(time.Millisecond), "peer_diagnostic", now.RemoteDiagnostic)
	case now.Cause == PeerAdminDown && (!again || before.Cause != PeerAdminDown):
		log.Info("BFD is switched off on the peer")
	}
	if now.Error != "" && (!again || before.Error != now.Error) {
		log.Warn("BFD session in trouble", "err", now.Error)
	}
}
