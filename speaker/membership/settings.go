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

// compareSettings publishes and logs when the document has other settings than those that the speaker has
// started with, apart from those of heartbeats, which have changed by then. Speakers with different settings work
// together: each probes and suspects at its own pace, and watchers know the pace of each heart.
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
