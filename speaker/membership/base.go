package membership

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// base is what all parts of the Task share.
type base struct {
	options  Options
	settings config.Membership // since Run has read them
	log      *slog.Logger
	metrics  *metrics
	ring     *ring
	list     atomic.Pointer[memberlist.Memberlist] // nil before Run
	changed  notify.Signal                         // see Changed
	// Each of these wakes one loop: the one that sends our metadata, looks for lost
	// speakers, asks those that were lost, and writes our Lease.
	send, rejoin, verify, rewrite chan struct{}
}

// await waits until the condition holds, and reports whether it does before giveUp fires. It checks the
// condition after each change.
func (b *base) await(ctx context.Context, giveUp <-chan time.Time, holds func() bool) bool {
	for {
		changed := b.changed.Next()
		if holds() {
			return true
		}
		select {
		case <-changed:
		case <-giveUp:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// at returns a channel that receives at that time, or never if the time is zero.
func at(due time.Time) <-chan time.Time {
	if due.IsZero() {
		return nil
	}
	return time.After(time.Until(due))
}
