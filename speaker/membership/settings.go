package membership

import (
	"context"

	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// readSettings waits for the first configuration, which names the cluster whose key this
// speaker has, and reports whether there is one before ctx ends. A speaker without one
// owns nothing anyway.
func (t *Task) readSettings(ctx context.Context) (ok bool, err error) {
	t.say("waiting for the configuration")
	for {
		changed := t.options.Config.Changed()
		if c, _ := t.options.Config.Current(); c != nil {
			t.settings, t.clusterID = c.Membership, c.ClusterID
			key, err := t.options.Secret.Of(t.clusterID)
			if err != nil {
				return false, err //nolint:wrapcheck // it says that it is the membership key
			}
			t.ring.set(keys.Ring{key})
			return true, nil
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-changed:
		}
	}
}

// compareSettings tells people when the document has other settings than those
// that the speaker has started with. Speakers with different ones get along:
// each probes and suspects at its own pace.
func (t *Task) compareSettings(ctx context.Context) {
	for {
		changed := t.options.Config.Changed()
		if c, _ := t.options.Config.Current(); c != nil {
			t.tellUnlike(c.Membership != t.settings)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// tellUnlike says whether the document has other settings.
func (t *Task) tellUnlike(unlike bool) {
	text := ""
	if unlike {
		text = "; failover and membership settings have changed: restart the speakers, one after another"
	}
	t.mu.Lock()
	news := t.unlike != text
	if t.unlike = text; news {
		t.changed.Notify()
	}
	t.mu.Unlock()
	if news && unlike {
		t.log.Warn("failover and membership settings have changed and wait for a restart of the speakers",
			"help", "kubectl -n "+t.options.Namespace+" rollout restart daemonset/lodestone-speaker")
	}
}
