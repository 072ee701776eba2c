package leader

import (
	"context"
	"errors"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// These are why the Lease is not given back.
var (
	errKept     = errors.New("the leader lease is kept to its end: writes may be under way")
	errAnothers = errors.New("the leader lease is another replica's")
)

// Lock is the Lease, and notes in the Term what the election does with it. It is for the election's goroutine alone.
type Lock struct {
	resourcelock.Interface
	Term *Term
	// holder is who had the Lease when it was read or written last.
	holder string
}

// Get implements resourcelock.Interface.
func (l *Lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	r, raw, err := l.Interface.Get(ctx)
	if err == nil {
		l.holder = r.HolderIdentity
		// By this text alone the election sees that somebody has written the Lease. It has the time in whole seconds, so that one
		// renewal of two would not be seen, and the lease of another replica would seem to end before it does.
		raw = r.RenewTime.AppendFormat(raw, time.RFC3339Nano)
	}
	return r, raw, err //nolint:wrapcheck // the election looks at it
}

// Create implements resourcelock.Interface.
func (l *Lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.put(ctx, r, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l *Lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.put(ctx, r, l.Interface.Update)
}

// put writes the Lease. The election reads the clock for RenewTime before it asks for anything. Before it gives the Lease back, it
// reads the Lease, and does not look whose it is by then.
func (l *Lock) put(ctx context.Context, r resourcelock.LeaderElectionRecord,
	write func(context.Context, resourcelock.LeaderElectionRecord) error) error {
	ours := r.HolderIdentity == l.Identity()
	switch {
	case ours:
	case !l.Term.GivesBack():
		return errKept
	case l.holder != l.Identity():
		return errAnothers
	}
	if err := write(ctx, r); err != nil {
		return err
	}
	l.holder = r.HolderIdentity
	if ours {
		l.Term.Granted(r.RenewTime.Time)
	}
	return nil
}
