package membership

import "context"

// readSettings waits for the first configuration, which has the clusterID, and reports whether there is
// one before ctx ends. A speaker without a configuration owns nothing anyway.
func (t *Task) readSettings(ctx context.Context) (ok bool, err error) {
	t.joiner.setStatus("waiting for the configuration")
	for {
		changed := t.options.Config.Changed()
		if c, _ := t.options.Config.Current(); c != nil {
			t.settings = c.Membership
			return true, t.rotation.start(c.ClusterID)
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-changed:
		}
	}
}

// compareSettings publishes and logs whether the document has other settings than those that the speaker has
// started with. It ignores the settings of heartbeats, which change while the speaker runs. Speakers with different
// settings work together: each probes and suspects at its own pace, and heartbeats carry their interval.
func (t *Task) compareSettings(ctx context.Context) {
	for {
		changed := t.options.Config.Changed()
		if c, _ := t.options.Config.Current(); c != nil {
			t.joiner.setUnlike(!c.Membership.SameStart(t.settings))
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
